"""Runs methods on examples, one prompt at a time; each result is a line of JSON at once.

A run is paired: every method gets the same token ids as full prefill, and is compared with it on the
answer that full prefill gives. A run that was stopped goes on where it was: what has a line is not run
again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from vllm_blend.eval import asking
from vllm_blend.eval.data import Example
from vllm_blend.eval.methods import blend_settings
from vllm_blend.eval.metrics import score
from vllm_blend.eval.tasks import Task
from vllm_blend.quality import Forced, agreement, forced_logits, kl_divergence

if TYPE_CHECKING:
    from vllm_blend.blender import Blender

RESULTS, RUN = "results.jsonl", "run.json"


@dataclass(frozen=True)
class Result:
    """One method on one example; None where a number is not defined for the method.

    Attributes:
        task, example, method: their names.
        num_tokens, num_reused: of the prompt; reused ones have stored KV.
        answer: the text, without white space around it.
        score: by the task's metric, 0 to 1; None in a run without answers.
        kl: KL(full || method), mean over the first tokens of full prefill's answer, in nats.
        first_kl: the same at the first of them alone.
        top1: share of those tokens at which the first choice is full prefill's.
        same: whether the answer is full prefill's, token for token; None likewise.
        ttft: seconds from request to first token; MapReduce and MapRerank count the chunks' answers.
    """

    task: str
    example: str
    method: str
    num_tokens: int
    num_reused: int
    answer: str | None
    score: float | None
    ttft: float
    same: bool | None
    kl: float | None = None
    first_kl: float | None = None
    top1: float | None = None


@dataclass(frozen=True)
class Protocol:
    """What must be the same for results to stand in one table; kept in ``run.json``."""

    model: str
    chunk_tokens: int = 512
    kl_tokens: int = 16
    max_passages: int | None = None
    answers: bool = True  # False: only what teacher forcing tells, in half the time


class Runner:
    """Methods on examples of one engine.

    Args:
        blender: with ``chat=False`` for tasks with worked examples.
        protocol: of the run.
        folder: where results go; made if it is not there.

    Raises:
        ValueError: if the folder holds results of another protocol; names both.
    """

    def __init__(self, blender: Blender, protocol: Protocol, folder: Path) -> None:
        self.blender, self.protocol, self.folder = blender, protocol, folder
        folder.mkdir(parents=True, exist_ok=True)
        found = folder / RUN
        if found.exists() and json.loads(found.read_text()) != asdict(protocol):
            raise ValueError(
                f"{folder} holds results of {found.read_text().strip()}, not of "
                f"{json.dumps(asdict(protocol))}; give another folder"
            )
        found.write_text(json.dumps(asdict(protocol)) + "\n")
        self.results = read_results(folder)

    def run(self, task: Task, examples: Iterable[Example], methods: Sequence[str]) -> list[Result]:
        """Results of ``methods`` (and ``full``) on ``examples``, those found in the folder included."""
        for method in methods:
            blend_settings(method)  # refuses an unknown one before the first is run
        names = list(dict.fromkeys(["full", *methods]))
        done = {(r.task, r.example, r.method) for r in self.results}
        work = []
        for example in examples:
            missing = [m for m in names if (task.name, example.id, m) not in done]
            if missing:
                work.append((example, missing))
        with (self.folder / RESULTS).open("a") as file, tqdm(work, unit="example") as bar:
            for example, missing in bar:
                bar.set_description(f"{task.name} {example.id}"[:40])
                for result in self.example(task, example, missing):
                    self.results.append(result)
                    file.write(json.dumps(asdict(result)) + "\n")
                    file.flush()
        return [r for r in self.results if r.task == task.name and r.method in names]

    def example(self, task: Task, example: Example, methods: Sequence[str]) -> Iterable[Result]:
        """One example by each method; its chunks' KV is dropped afterwards."""
        tokenizer = self.blender.tokenizer
        ids = task.chunks(tokenizer, example, self.protocol.chunk_tokens)
        chunks = self.blender.chunks(ids)
        prompt = self.blender.prompt(chunks, task.ask(example))
        asker = asking.Asker(self.blender, task, example, chunks, prompt)
        try:
            full = asker.generate(None)
            forced = full.token_ids[: self.protocol.kl_tokens]
            exact = forced_logits(self.blender, prompt, forced, blend=False)
            for method in methods:
                yield self._result(method, task, example, asker, full, exact)
        finally:
            for chunk in chunks:
                self.blender.forget(chunk)

    def _result(
        self,
        method: str,
        task: Task,
        example: Example,
        asker: asking.Asker,
        full: asking.Answer,
        exact: Forced,
    ) -> Result:
        settings = blend_settings(method)
        numbers: dict[str, float] = {}
        answer: asking.Answer | None = full
        ttft = full.ttft
        if method == "full":
            numbers = dict(kl=0.0, first_kl=0.0, top1=1.0)
        elif settings is None:
            answer = asker.by(method)
            ttft = answer.ttft
        else:
            forced = full.token_ids[: self.protocol.kl_tokens]
            blended = forced_logits(self.blender, asker.prompt, forced, settings=settings)
            ttft = blended.ttft
            numbers = dict(
                kl=kl_divergence(exact.logits, blended.logits),
                first_kl=kl_divergence(exact.logits[:1], blended.logits[:1]),
                top1=agreement(exact.logits, blended.logits),
            )
            if not self.protocol.answers:
                answer = None
            elif numbers["top1"] < 1 or len(forced) < len(full.token_ids):
                answer = asker.generate(settings)  # else it is full prefill's: greedy choices agree
        return Result(
            task=task.name,
            example=example.id,
            method=method,
            num_tokens=len(asker.prompt.token_ids),
            num_reused=asker.prompt.num_reused if settings else 0,
            answer=None if answer is None else answer.text,
            score=None if answer is None else score(task.metric, answer.text, example.answers),
            ttft=ttft,
            same=None if answer is None else answer.token_ids == full.token_ids,
            **numbers,
        )


def read_results(folder: Path) -> list[Result]:
    """Results found in a folder; a last line that was cut off is left out."""
    path = folder / RESULTS
    if not path.exists():
        return []
    text = path.read_text()
    if text and not text.endswith("\n"):
        text = text[: text.rfind("\n") + 1]
        path.write_text(text)
    rows: list[Any] = [json.loads(line) for line in text.splitlines()]
    return [Result(**row) for row in rows]
