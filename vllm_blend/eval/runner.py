"""Runs methods on examples; once an example is done, each method's result is a line of JSON.

A run is paired: every method gets the same token ids as full prefill, and is compared with it on the
answer that full prefill gives. A run that was stopped goes on where it was: what has a line is not run
again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from vllm_blend.eval import asking
from vllm_blend.eval.data import Example
from vllm_blend.eval.methods import BEHIND, blend_settings, split_behind
from vllm_blend.eval.metrics import score
from vllm_blend.eval.tasks import Task
from vllm_blend.quality import Forced, agreement, forced_logits, kl_divergence

if TYPE_CHECKING:
    from vllm_blend.blender import Blender
    from vllm_blend.settings import BlendSettings

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
    max_tokens: int | None = None  # of an answer; None: the task's
    passage_tokens: int | None = None  # a longer passage loses its end


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
        askers: dict[str | None, asking.Asker] = {}
        try:
            askers[None] = self._asker(task, example, None)
            full = askers[None].full()
            forced = full.token_ids[: self.protocol.kl_tokens]
            exact = forced_logits(self.blender, askers[None].prompt, forced, blend=False)
            found: list[tuple[Result, asking.Answer | None]] = []
            pending: dict[int, tuple[asking.Asker, BlendSettings]] = {}
            for method in methods:
                name, behind = split_behind(method)
                if behind not in askers:
                    askers[behind] = self._asker(task, example, behind)
                found.append(self._compared(method, task, example, askers[behind], full, exact))
                settings = blend_settings(name)
                if self.protocol.answers and settings is not None and found[-1][1] is None:
                    pending[len(found) - 1] = (askers[behind], settings)
            answers = asking.ask_blended([*pending.values()])
            for index, blended in zip(pending, answers, strict=True):
                found[index] = found[index][0], blended
            for result, answer in found:
                yield result if answer is None else _answered(result, answer, full, task, example)
        finally:
            for asker in askers.values():
                for chunk in asker.chunks:
                    self.blender.forget(chunk)

    def _asker(self, task: Task, example: Example, behind: str | None) -> asking.Asker:
        """The same prompt each time, of chunks computed behind its head or something else."""
        tokenizer = self.blender.tokenizer
        head: str | list[int] = task.header if behind is None else BEHIND[behind]
        if behind == "bos":
            head = [bos_id(tokenizer)]
        protocol = self.protocol
        ids = task.chunks(tokenizer, example, protocol.chunk_tokens, protocol.passage_tokens)
        chunks = self.blender.chunks(ids, head=head)
        prompt = self.blender.prompt(chunks, task.ask(example), head=task.header)
        return asking.Asker(self.blender, task, example, chunks, prompt)

    def _compared(
        self,
        method: str,
        task: Task,
        example: Example,
        asker: asking.Asker,
        full: asking.Answer,
        exact: Forced,
    ) -> tuple[Result, asking.Answer | None]:
        """A method without its answer, and the answer where it is known already."""
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
            known = numbers["top1"] == 1 and len(forced) == len(full.token_ids)
            answer = full if known and self.protocol.answers else None
        result = Result(
            task=task.name,
            example=example.id,
            method=method,
            num_tokens=len(asker.prompt.token_ids),
            num_reused=asker.prompt.num_reused if settings else 0,
            answer=None,
            score=None,
            ttft=ttft,
            same=None,
            **numbers,
        )
        return result, answer


def _answered(
    result: Result, answer: asking.Answer, full: asking.Answer, task: Task, example: Example
) -> Result:
    """The result with an answer and its score."""
    return replace(
        result,
        answer=answer.text,
        score=score(task.metric, answer.text, example.answers),
        same=answer.token_ids == full.token_ids,
    )


def bos_id(tokenizer: Any) -> int:
    """What a text begins with in training: BOS, or EOS where there is none.

    Raises:
        ValueError: if the tokenizer has neither.
    """
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise ValueError("the tokenizer has neither BOS nor EOS")


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
