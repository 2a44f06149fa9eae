"""Answers to one example: by full prefill, by blending, from the prefix cache, from chunks apart."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from vllm_blend.eval.data import Example
from vllm_blend.eval.tasks import Task

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

    from vllm_blend.blender import Blender, BlendPrompt, Chunk
    from vllm_blend.settings import BlendSettings


@dataclass(frozen=True)
class Answer:
    """Greedy token ids, their text, and the seconds to the first of them."""

    token_ids: tuple[int, ...]
    text: str
    ttft: float


class Asker:
    """Asks one example's question in several ways.

    Args:
        blender: with the engine.
        task, example: what is asked.
        chunks: the prompt's.
        prompt: of these chunks behind the task's header.
    """

    def __init__(
        self,
        blender: Blender,
        task: Task,
        example: Example,
        chunks: Sequence[Chunk],
        prompt: BlendPrompt,
    ) -> None:
        self.blender, self.task, self.example = blender, task, example
        self.chunks, self.prompt = chunks, prompt
        self._first = prompt.spans[-len(chunks)]

    def full(self) -> Answer:
        """By full prefill."""
        return self._ask([self.prompt.token_ids])[0]

    def by(self, method: str) -> Answer:
        """By a method that does not blend; see ``methods.py``."""
        if method == "prefix":
            return self._behind_prefix()
        start = time.perf_counter()
        answers, logprobs = self._each_chunk()
        if method == "maprerank":
            best = max(range(len(answers)), key=lambda i: logprobs[i])
            return Answer(answers[best].token_ids, answers[best].text, time.perf_counter() - start)
        assert method == "mapreduce", method
        mapped = time.perf_counter() - start
        parts = "\n".join(dict.fromkeys(answer.text for answer in answers if answer.text))
        ids = self.blender.tokenizer.encode(parts or "-", add_special_tokens=False)
        reduced = self._ask([self._plain(ids)])[0]
        return Answer(reduced.token_ids, reduced.text, mapped + reduced.ttft)

    def _behind_prefix(self) -> Answer:
        """Full prefill when the blocks of the head and the first chunk are in the prefix cache."""
        from vllm import SamplingParams

        salt = uuid.uuid4().hex
        end = self._first.end
        once = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
        self._run([self.prompt.token_ids[:end]], once, salt)
        return answer_of(self._run([self.prompt.token_ids], self.params(), salt)[0])

    def _each_chunk(self) -> tuple[list[Answer], list[float]]:
        """Answers from each chunk alone, and the mean log-probability of each one's tokens."""
        params = self.params()
        params.logprobs = 1
        outputs = self._run([self._plain(c.token_ids) for c in self.chunks], params)
        completions = [output.outputs[0] for output in outputs]
        logprobs = [float(c.cumulative_logprob or 0) / max(len(c.token_ids), 1) for c in completions]
        return [answer_of(output) for output in outputs], logprobs

    def _plain(self, chunk: Sequence[int]) -> list[int]:
        """Token ids of the head, one chunk and the question."""
        head = self.prompt.token_ids[: self._first.start]
        ask = self.blender.tokenizer.encode(self.task.ask(self.example), add_special_tokens=False)
        return [*head, *chunk, *ask, *self.blender.frame.tail]

    def params(self) -> SamplingParams:
        from vllm import SamplingParams

        stop = list(self.task.stop) or None
        return SamplingParams(max_tokens=self.task.max_tokens, temperature=0, stop=stop)

    def _ask(self, prompts: Sequence[list[int]]) -> list[Answer]:
        return [answer_of(output) for output in self._run(prompts, self.params())]

    def _run(
        self, prompts: Sequence[list[int]], params: SamplingParams, salt: str | None = None
    ) -> list[RequestOutput]:
        """Stock requests; without ``salt`` none finds another's blocks in the prefix cache."""
        tokens: list[Any] = [
            {"prompt_token_ids": ids, "cache_salt": salt or uuid.uuid4().hex} for ids in prompts
        ]
        return self.blender.llm.generate(tokens, params, use_tqdm=False)


def ask_blended(blended: Sequence[tuple[Asker, BlendSettings]]) -> list[Answer]:
    """Answers of one engine and task, several prompts a batch; how long they took means nothing.

    No batch has more tokens than the engine prefills in a step: a prompt that is prefilled in parts
    would have its tokens chosen in each part.
    """
    answers: list[Answer] = []
    while batch := list(blended[len(answers) :]):
        blender = batch[0][0].blender
        budget = blender.llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
        sizes = accumulate(len(asker.prompt.token_ids) for asker, _ in batch)
        batch = batch[: max(1, sum(size <= budget for size in sizes))]
        outputs = blender.generate(
            [asker.prompt for asker, _ in batch],
            batch[0][0].params(),
            settings=[settings for _, settings in batch],
        )
        answers += map(answer_of, outputs)
    return answers


def answer_of(output: RequestOutput) -> Answer:
    """The first completion of a request."""
    done = output.outputs[0]
    metrics: Any = output.metrics
    ttft = metrics.first_token_latency if metrics else float("nan")
    return Answer(tuple(done.token_ids), done.text.strip(), ttft)
