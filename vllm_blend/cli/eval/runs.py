"""Runs of an evaluation, as they lie in its folders: one model on one set each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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
            None in a run of batches, where requests wait for each other.
    """

    task: str
    example: str
    method: str
    num_tokens: int
    num_reused: int
    answer: str | None
    score: float | None
    ttft: float | None
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
    dtype: str = "auto"
    prompt_tokens: int | None = None  # about as many in each prompt; None: as the data has them


What = Literal["kl", "lost", "score"]


@dataclass(frozen=True)
class Run:
    """One model on one set.

    Attributes:
        results: of all methods.
        prompt_tokens: that prompts were brought to; None: they are as the set has them.
    """

    model: str
    task: str
    results: Sequence[Result]
    prompt_tokens: int | None = None

    @property
    def label(self) -> str:
        length = f", {self.prompt_tokens} tokens" if self.prompt_tokens else ""
        return f"{self.model}, {self.task}{length}"

    def values(self, method: str, what: What) -> dict[str, float]:
        """By example: KL to full prefill, score, or what is lost of full prefill's score."""
        found = {r.example: r for r in self.results if r.method == method}
        if what == "kl":
            return {e: r.kl for e, r in found.items() if r.kl is not None}
        scores = {e: r.score for e, r in found.items() if r.score is not None}
        if what == "score":
            return scores
        full = self.values("full", "score")
        return {e: full[e] - score for e, score in scores.items() if e in full}


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs in some folders; a folder that holds several tasks is several runs."""
    runs = []
    for folder in folders:
        results, protocol = read_results(folder), protocol_of(folder)
        for task in dict.fromkeys(r.task for r in results):
            own = [r for r in results if r.task == task]
            runs.append(Run(protocol.model, task, own, protocol.prompt_tokens))
    return runs


def lines(runs: Sequence[Run]) -> list[tuple[str, list[int]]]:
    """A line a run, then the means over each model's runs, each set's and all: a label and its runs."""
    found = [(run.label, [index]) for index, run in enumerate(runs)]
    models = list(dict.fromkeys(run.model for run in runs))
    tasks = list(dict.fromkeys(run.task for run in runs))
    groups = [(name, [i for i, run in enumerate(runs) if run.model == name]) for name in models]
    if len(models) > 1:
        if len(tasks) > 1:
            groups += [(name, [i for i, run in enumerate(runs) if run.task == name]) for name in tasks]
        groups.append(("all", list(range(len(runs)))))
    return found + [(f"{name}, mean of {len(own)}", own) for name, own in groups if len(own) > 1]


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


def protocol_of(folder: Path) -> Protocol:
    """What a folder's results are of; if it does not say, the model has the folder's name."""
    path = folder / RUN
    return Protocol(**json.loads(path.read_text())) if path.exists() else Protocol(folder.name)
