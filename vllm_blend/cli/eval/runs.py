"""Runs of an evaluation, as they lie in its folders: one model on one set each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vllm_blend.cli.eval.runner import Result, protocol_of, read_results

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
