"""Speed at a stated loss: the fastest method of each run that loses no more of the score than that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median

from vllm_blend.cli.eval.methods import blend_settings, split_behind
from vllm_blend.cli.eval.runs import Run, lines
from vllm_blend.cli.eval.stats import Mean, bootstrap_gone, bootstrap_over
from vllm_blend.cli.eval.tables import number, percents, table


def within_table(runs: Sequence[Run], losses: Sequence[float], times: Sequence[Run] = ()) -> str:
    """A row a run, and for means over runs: full prefill's score, and the fastest method within each of
    ``losses``.

    Args:
        losses: shares of full prefill's mean score.
        times: runs that measured TTFT, for the runs that did not: of the same model, and of prompts
            as long.
    """
    rows = []
    for label, own in lines(runs):
        group = [runs[index] for index in own]
        scores = [[*run.values("full", "score").values()] for run in group]
        each, speeds = losses_of(group), speedups_of(group, times)
        cells = [_cell(each, speeds, loss) for loss in losses]
        n = str(len(scores[0])) if len(group) == 1 else ""
        rows.append([label, n, number(bootstrap_over(scores).value), *cells])
    heads = [f"at most {loss:.0%} lost" for loss in losses]
    return table(["", "n", "full prefill's score", *heads], rows)


def losses_of(runs: Sequence[Run]) -> dict[str, Mean]:
    """By method that blends in all runs: the share of full prefill's mean score that it loses."""
    found = {}
    for method in dict.fromkeys(r.method for r in runs[0].results):
        scores = [(run.values(method, "score"), run.values("full", "score")) for run in runs]
        if blend_settings(method) is not None and all(own for own, _ in scores):
            pairs = [([*own.values()], [full[example] for example in own]) for own, full in scores]
            found[method] = bootstrap_gone(pairs)
    return found


def speedups_of(runs: Sequence[Run], times: Sequence[Run]) -> dict[str, float]:
    """By method that was timed in all of the runs, without what its chunks are computed after: the
    median of full prefill's TTFT over its own, and the mean of that over the runs."""
    each = [_speedups(run, times) for run in runs]
    return {m: fmean(one[m] for one in each) for m in each[0] if all(m in one for one in each)}


def _speedups(run: Run, times: Sequence[Run]) -> dict[str, float]:
    alike = [r for r in times if (r.model, r.prompt_tokens) == (run.model, run.prompt_tokens)]
    found: dict[str, list[float]] = {}
    for one in (run, *alike):
        full = {r.example: r.ttft for r in one.results if r.method == "full"}
        for result in one.results:
            if result.ttft and (whole := full.get(result.example)):
                found.setdefault(split_behind(result.method)[0], []).append(whole / result.ttft)
        if found:
            break
    return {method: median(values) for method, values in found.items()}


def _cell(losses: Mapping[str, Mean], speeds: Mapping[str, float], bound: float) -> str:
    """The fastest within ``bound``, with what it loses."""
    good = {method: split_behind(method)[0] for method, loss in losses.items() if loss.value <= bound}
    timed = [method for method, name in good.items() if name in speeds]
    if not timed:
        return "not timed" if good else "none"
    best = max(timed, key=lambda method: speeds[good[method]])
    return f"{speeds[good[best]]:.1f}x, `{good[best]}` ({percents(losses[best])})"
