"""Answers to one example: by full prefill, by blending, from the prefix cache, from chunks apart."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
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
        chunks: the prompt's, the task's header first if it has one.
        prompt: of these chunks.
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

    def generate(self, settings: BlendSettings | None) -> Answer:
        """Blended with ``settings``, or by full prefill."""
        if settings is None:
            return self._ask([self.prompt.token_ids])[0]
        output = self.blender.generate(self.prompt, self._params(), settings=settings)
        return answer_of(output)

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
        reduced = self._ask([self._plain([list(ids)])])[0]
        return Answer(reduced.token_ids, reduced.text, mapped + reduced.ttft)

    def _behind_prefix(self) -> Answer:
        """Full prefill when the first chunk's blocks are in the prefix cache."""
        from vllm import SamplingParams

        salt = uuid.uuid4().hex
        end = next((s.end for s in self.prompt.spans if s.end > len(self.blender.frame.head)), 1)
        once = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
        self._run([self.prompt.token_ids[:end]], once, salt)
        return answer_of(self._run([self.prompt.token_ids], self._params(), salt)[0])

    def _each_chunk(self) -> tuple[list[Answer], list[float]]:
        """Answers from each chunk alone, and the mean log-probability of each one's tokens."""
        params = self._params()
        params.logprobs = 1
        passages = self.chunks[1:] if self.task.header else self.chunks
        outputs = self._run([self._plain([list(c.token_ids)]) for c in passages], params)
        completions = [output.outputs[0] for output in outputs]
        logprobs = [float(c.cumulative_logprob or 0) / max(len(c.token_ids), 1) for c in completions]
        return [answer_of(output) for output in outputs], logprobs

    def _plain(self, chunks: Sequence[list[int]]) -> list[int]:
        """Token ids of head, the task's header, these chunks and the question."""
        tokenizer, frame = self.blender.tokenizer, self.blender.frame
        ids = list(frame.head)
        if self.task.header:
            ids += self.chunks[0].token_ids
        for chunk in chunks:
            ids += chunk
        ask = self.task.ask(self.example)
        return [*ids, *tokenizer.encode(ask, add_special_tokens=False), *frame.tail]

    def _params(self) -> SamplingParams:
        from vllm import SamplingParams

        stop = list(self.task.stop) or None
        return SamplingParams(max_tokens=self.task.max_tokens, temperature=0, stop=stop)

    def _ask(self, prompts: Sequence[list[int]]) -> list[Answer]:
        return [answer_of(output) for output in self._run(prompts, self._params())]

    def _run(
        self, prompts: Sequence[list[int]], params: SamplingParams, salt: str | None = None
    ) -> list[RequestOutput]:
        """Stock requests; without ``salt`` none finds another's blocks in the prefix cache."""
        tokens: list[Any] = [
            {"prompt_token_ids": ids, "cache_salt": salt or uuid.uuid4().hex} for ids in prompts
        ]
        return self.blender.llm.generate(tokens, params, use_tqdm=False)


def answer_of(output: RequestOutput) -> Answer:
    """The first completion of a request."""
    done = output.outputs[0]
    metrics: Any = output.metrics
    ttft = metrics.first_token_latency if metrics else float("nan")
    return Answer(tuple(done.token_ids), done.text.strip(), ttft)
