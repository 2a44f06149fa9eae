"""Answers to examples: by full prefill, by blending, from the prefix cache, from chunks apart.

Each function takes many prompts and runs them together; times to the first token mean something for one
alone.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from vllm_blend.cli.eval.data import Example
from vllm_blend.cli.eval.tasks import Task

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

    from vllm_blend.api.blender import Blender
    from vllm_blend.api.prompts import BlendPrompt, Chunk
    from vllm_blend.core.settings import BlendSettings

T = TypeVar("T")


@dataclass(frozen=True)
class Answer:
    """Greedy token ids, their text, and the seconds to the first of them."""

    token_ids: tuple[int, ...]
    text: str
    ttft: float


@dataclass(frozen=True)
class Asker:
    """One example's prompt.

    Attributes:
        blender: with the engine.
        task, example: what is asked.
        chunks: the prompt's.
        prompt: of these chunks after the task's header.
    """

    blender: Blender
    task: Task
    example: Example
    chunks: Sequence[Chunk]
    prompt: BlendPrompt

    def params(self) -> SamplingParams:
        """Of an answer."""
        from vllm import SamplingParams

        stop = list(self.task.stop) or None
        return SamplingParams(max_tokens=self.task.max_tokens, temperature=0, stop=stop)

    def behind_head(self, chunk: Sequence[int]) -> list[int]:
        """Token ids of the head, one chunk and the question."""
        ask = self.blender.tokenizer.encode(self.task.ask(self.example), add_special_tokens=False)
        return [*self._before, *chunk, *ask, *self.blender.frame.tail]

    def first_chunk(self) -> list[int]:
        """Token ids of the head and the first chunk, where each stands in the prompt."""
        return self.prompt.token_ids[: self.prompt.spans[-len(self.chunks)].end]

    @property
    def _before(self) -> list[int]:
        return self.prompt.token_ids[: self.prompt.spans[-len(self.chunks)].start]


@dataclass(frozen=True)
class Mapped:
    """Answers from each chunk of an example alone.

    Attributes:
        answers, logprobs: the mean log-probability of each answer's tokens.
        seconds: until all were there.
    """

    answers: tuple[Answer, ...]
    logprobs: tuple[float, ...]
    seconds: float

    def best(self) -> Answer:
        """MapRerank: the answer that the model is surest of."""
        index = max(range(len(self.answers)), key=lambda i: self.logprobs[i])
        answer = self.answers[index]
        return Answer(answer.token_ids, answer.text, self.seconds)


def ask_prefixed(askers: Sequence[Asker]) -> list[Answer]:
    """By full prefill when the blocks of the head and the first chunk are in the prefix cache."""
    from vllm import SamplingParams

    salts = [uuid.uuid4().hex for _ in askers]
    once = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    run(askers, [asker.first_chunk() for asker in askers], once, salts)
    return [answer_of(o) for o in run(askers, [a.prompt.token_ids for a in askers], salts=salts)]


def ask_each_chunk(askers: Sequence[Asker]) -> list[Mapped]:
    """From each chunk alone."""
    start = time.perf_counter()
    each = [(asker, asker.behind_head(chunk.token_ids)) for asker in askers for chunk in asker.chunks]
    params = askers[0].params()
    params.logprobs = 1
    outputs = iter(run([asker for asker, _ in each], [ids for _, ids in each], params))
    seconds = time.perf_counter() - start
    found = []
    for asker in askers:
        own = [next(outputs) for _ in asker.chunks]
        done = [output.outputs[0] for output in own]
        logprobs = [float(c.cumulative_logprob or 0) / max(len(c.token_ids), 1) for c in done]
        found.append(Mapped(tuple(map(answer_of, own)), tuple(logprobs), seconds))
    return found


def ask_reduced(askers: Sequence[Asker], mapped: Sequence[Mapped]) -> list[Answer]:
    """MapReduce: from the answers from each chunk."""
    prompts = []
    for asker, each in zip(askers, mapped, strict=True):
        parts = "\n".join(dict.fromkeys(answer.text for answer in each.answers if answer.text))
        ids = asker.blender.tokenizer.encode(parts or "-", add_special_tokens=False)
        prompts.append(asker.behind_head(ids))
    answers = map(answer_of, run(askers, prompts))
    return [
        Answer(a.token_ids, a.text, each.seconds + a.ttft)
        for a, each in zip(answers, mapped, strict=True)
    ]


def ask_blended(blended: Sequence[tuple[Asker, BlendSettings]]) -> list[Answer]:
    """By blending."""
    answers: list[Answer] = []
    for batch in batches(blended, lambda pair: pair[0]):
        blender = batch[0][0].blender
        outputs = blender.generate(
            [asker.prompt for asker, _ in batch],
            batch[0][0].params(),
            settings=[settings for _, settings in batch],
        )
        answers += map(answer_of, outputs)
    return answers


def run(
    askers: Sequence[Asker],
    prompts: Sequence[list[int]],
    params: SamplingParams | None = None,
    salts: Sequence[str] | None = None,
) -> list[RequestOutput]:
    """Stock requests of one task; without ``salts`` none finds another's blocks in the prefix cache."""
    salts = salts or [uuid.uuid4().hex for _ in prompts]
    tokens: list[Any] = [
        {"prompt_token_ids": ids, "cache_salt": salt} for ids, salt in zip(prompts, salts, strict=True)
    ]
    llm = askers[0].blender.llm
    return llm.generate(tokens, params or askers[0].params(), use_tqdm=False)


def batches(items: Sequence[T], asker_of: Callable[[T], Asker]) -> Iterator[list[T]]:
    """Parts of ``items``, in order, that the engine has room for at once.

    A prompt that is prefilled in parts, or again, would have its tokens chosen in each part, and
    again. So a part's prompts and answers fit the KV cache, and, where the engine may cut prompts, its
    step.
    """
    if not items:
        return
    config = asker_of(items[0]).blender.llm.llm_engine.vllm_config
    block = config.cache_config.block_size
    room = (config.cache_config.num_gpu_blocks or 0) - 1  # vLLM keeps one to itself
    step = config.scheduler_config.max_num_batched_tokens
    if not config.scheduler_config.enable_chunked_prefill:
        step = room * block
    batch: list[T] = []
    tokens = blocks = 0
    for item in items:
        asker = asker_of(item)
        length = len(asker.prompt.token_ids)
        needed = -(-(length + asker.task.max_tokens) // block) + 1
        if batch and (tokens + length > step or blocks + needed > room):
            yield batch
            batch, tokens, blocks = [], 0, 0
        batch.append(item)
        tokens, blocks = tokens + length, blocks + needed
    yield batch


def answer_of(output: RequestOutput) -> Answer:
    """The first completion of a request."""
    done = output.outputs[0]
    metrics: Any = output.metrics
    ttft = metrics.first_token_latency if metrics else float("nan")
    return Answer(tuple(done.token_ids), done.text.strip(), ttft)
