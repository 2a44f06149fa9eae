"""From results to figures: means with bootstrap intervals, paired with full prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from vllm_blend.cli.eval.methods import split_behind
from vllm_blend.cli.eval.runs import Result

RESAMPLES = 10_000


@dataclass(frozen=True)
class Mean:
    """A mean and its 95% interval, from the bootstrap's percentiles (Efron 1979)."""

    value: float
    low: float
    high: float


def bootstrap(values: Sequence[float], seed: int = 0) -> Mean:
    """The mean of ``values`` and its interval; NaN where there are none."""
    return bootstrap_over([values], seed)


def bootstrap_over(groups: Sequence[Sequence[float]], seed: int = 0) -> Mean:
    """The mean of the groups' means: each group counts the same, and is drawn for itself."""
    mean, drawn = _means_over(groups, seed)
    return _interval(float(mean), drawn)


def bootstrap_gone(groups: Sequence[tuple[Sequence[float], Sequence[float]]], seed: int = 0) -> Mean:
    """The share of a mean that another does not have, both over groups as ``bootstrap_over``'s.

    Args:
        groups: what is left and what was there, example by example; the two are drawn together.
    """
    pairs = [np.stack([np.asarray(values, dtype=float) for values in pair], axis=1) for pair in groups]
    (left, whole), drawn = _means_over(pairs, seed)
    with np.errstate(divide="ignore", invalid="ignore"):
        return _interval(float(1 - np.divide(left, whole)), 1 - drawn[:, 0] / drawn[:, 1])


def _means_over(groups: Sequence[Any], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The mean of the groups' means, and of their draws."""
    random = np.random.default_rng(seed)
    found = [_means(np.asarray(values, dtype=float), random) for values in groups]
    return np.mean([f[0] for f in found], axis=0), np.mean([f[1] for f in found], axis=0)


def _means(data: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The mean over the first dimension, and those of ``RESAMPLES`` draws."""
    if not len(data):
        return np.full(data.shape[1:], np.nan), np.full((RESAMPLES, *data.shape[1:]), np.nan)
    draws = random.integers(0, len(data), (RESAMPLES, len(data)))
    return data.mean(axis=0), data[draws].mean(axis=1)


def _interval(value: float, drawn: np.ndarray) -> Mean:
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Mean(value, float(low), float(high))


@dataclass(frozen=True)
class Summary:
    """One method over the examples of a task.

    Attributes:
        n: examples.
        score: the task's metric; NaN in a run without answers, as ``loss``.
        loss: full prefill's score less this one's, example by example.
        kl: KL(full || method) over the first answer tokens; None where it is not defined.
        recovered: share of full reuse's KL that is gone; None without full reuse, of chunks
            with the same contexts, on the same examples.
        top1: share of those tokens with full prefill's first choice.
        same: share of answers that are full prefill's, token for token.
        ttft: median, seconds; None if any was not measured.
        speedup: median of full prefill's TTFT over this one's; None likewise.
    """

    task: str
    method: str
    n: int
    score: Mean
    loss: Mean
    kl: Mean | None
    recovered: float | None
    top1: float | None
    same: float | None
    ttft: float | None
    speedup: float | None


def summarize(results: Sequence[Result]) -> list[Summary]:
    """A summary for each task and method, in the order in which they first occur."""
    by: dict[tuple[str, str], dict[str, Result]] = {}
    for result in results:
        by.setdefault((result.task, result.method), {})[result.example] = result
    return [
        _summary(task, method, rows, by[task, "full"], by.get((task, reuse_beside(method)), {}))
        for (task, method), rows in by.items()
    ]


def reuse_beside(method: str) -> str:
    """Full reuse of chunks with the contexts that ``method`` gives them."""
    _, behind = split_behind(method)
    return f"reuse:behind={behind}" if behind else "reuse"


def _summary(
    task: str,
    method: str,
    rows: dict[str, Result],
    full: dict[str, Result],
    reuse: dict[str, Result],
) -> Summary:
    kl = [r.kl for r in rows.values() if r.kl is not None]
    top1 = [r.top1 for r in rows.values() if r.top1 is not None]
    same = [r.same for r in rows.values() if r.same is not None]
    losses = [
        score - r.score
        for e, r in rows.items()
        if (score := full[e].score) is not None and r.score is not None
    ]
    recovered = None
    reused = [reuse[e].kl or 0.0 for e in rows if e in reuse]
    if kl and len(reused) == len(kl) and sum(reused) > 0:
        recovered = 1 - sum(kl) / sum(reused)
    ttft = [r.ttft for r in rows.values() if r.ttft]
    speedups = [t / r.ttft for e, r in rows.items() if (t := full[e].ttft) and r.ttft]
    return Summary(
        task=task,
        method=method,
        n=len(rows),
        score=bootstrap([r.score for r in rows.values() if r.score is not None]),
        loss=bootstrap(losses),
        kl=bootstrap(kl) if kl else None,
        recovered=recovered,
        top1=sum(top1) / len(top1) if top1 else None,
        same=sum(same) / len(same) if same else None,
        ttft=median(ttft) if len(ttft) == len(rows) else None,
        speedup=median(speedups) if len(speedups) == len(rows) else None,
    )
