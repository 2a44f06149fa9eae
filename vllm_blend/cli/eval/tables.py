"""Summaries as Markdown and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from math import isnan
from pathlib import Path

from vllm_blend.cli.eval.methods import blend_settings
from vllm_blend.cli.eval.stats import Mean, Summary

HEADER = (
    "task", "method", "n", "score", "loss to full", "KL to full", "recovered", "top-1",
    "same answer", "TTFT", "speedup",
)  # fmt: skip


def markdown(summaries: Sequence[Summary]) -> str:
    """A table; means with their 95% interval in brackets."""
    return table(HEADER, [row(summary) for summary in summaries])


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells as a Markdown table."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def grid(summaries: Sequence[Summary], task: str) -> str:
    """KL by policy and ratio, with the share of full reuse's KL that is gone; "" without two ratios."""
    cells: dict[str, dict[float, str]] = {}
    for summary in summaries:
        settings = blend_settings(summary.method)
        if summary.task == task and summary.kl and "@" in summary.method and settings:
            policy = summary.method.replace(f"@{settings.recomp_ratio:g}", "")
            text = f"{summary.kl.value:.4f} ({percent(summary.recovered)})"
            cells.setdefault(policy, {})[settings.recomp_ratio] = text
    ratios = sorted({ratio for line in cells.values() for ratio in line})
    if len(ratios) < 2:
        return ""
    rows = [[f"`{policy}`", *(line.get(r, "") for r in ratios)] for policy, line in cells.items()]
    return table([f"{task}: KL to full", *(f"{ratio:.0%}" for ratio in ratios)], rows)


def row(summary: Summary) -> list[str]:
    """A summary as the cells of HEADER."""
    return [
        summary.task,
        f"`{summary.method}`",
        str(summary.n),
        number(summary.score.value),
        interval(summary.loss),
        interval(summary.kl, 4),
        percent(summary.recovered),
        percent(summary.top1),
        percent(summary.same),
        "-" if summary.ttft is None else f"{summary.ttft:.2f} s",
        "-" if summary.speedup is None else f"{summary.speedup:.2f}x",
    ]


def number(value: float) -> str:
    """Three digits; "-" where there is nothing."""
    return "-" if isnan(value) else f"{value:.3f}"


def interval(mean: Mean | None, digits: int = 3) -> str:
    """``value [low, high]``; "-" where there is nothing."""
    if mean is None or isnan(mean.value):
        return "-"
    return f"{mean.value:.{digits}f} [{mean.low:.{digits}f}, {mean.high:.{digits}f}]"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def percents(mean: Mean, digits: int = 0) -> str:
    """``value [low, high]`` of a share; no interval where a draw has nothing to take a share of."""
    if isnan(mean.low):
        return f"{mean.value:.{digits}%} [too few]"
    return f"{mean.value:.{digits}%} [{mean.low:.{digits}%}, {mean.high:.{digits}%}]"


def write_tables(summaries: Sequence[Summary], folder: Path) -> str:
    """Writes ``summary.json`` and ``summary.md`` into ``folder``; returns the Markdown."""
    tasks = dict.fromkeys(summary.task for summary in summaries)
    text = "\n".join(filter(None, [markdown(summaries), *(grid(summaries, task) for task in tasks)]))
    (folder / "summary.md").write_text(text)
    (folder / "summary.json").write_text(json.dumps([asdict(s) for s in summaries], indent=1) + "\n")
    return text
