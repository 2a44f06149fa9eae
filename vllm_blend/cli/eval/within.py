"""Speed at a stated loss: the fastest method of each run that loses no more of the score than that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan
from statistics import median

from vllm_blend.cli.eval.methods import blend_settings, split_behind
from vllm_blend.cli.eval.runs import Run
from vllm_blend.cli.eval.stats import Mean, bootstrap, bootstrap_gone
from vllm_blend.cli.eval.tables import number, percents, table


def within_table(runs: Sequence[Run], losses: Sequence[float], times: Sequence[Run] = ()) -> str:
    """A row a run: full prefill's score, and the fastest method within each of ``losses``.

    Args:
        losses: shares of full prefill's mean score.
        times: runs that measured TTFT, for the runs that did not: of the same model, and of prompts
            as long.
    """
    rows = []
    for run in runs:
        scores = run.values("full", "score")
        each = losses_of(run)
        speeds = speedups_of(run, times)
        cells = [_cell(each, speeds, loss) for loss in losses]
        rows.append([run.label, str(len(scores)), number(bootstrap([*scores.values()]).value), *cells])
    heads = [f"at most {loss:.0%} lost" for loss in losses]
    return table(["", "n", "full prefill's score", *heads], rows)


def losses_of(run: Run) -> dict[str, Mean]:
    """By method that blends: the share of full prefill's mean score that it loses."""
    full = run.values("full", "score")
    found = {}
    for method in dict.fromkeys(r.method for r in run.results):
        if blend_settings(method) is not None:
            scores = run.values(method, "score")
            pairs = [scores[example] for example in scores], [full[example] for example in scores]
            found[method] = bootstrap_gone([pairs])
    return found


def speedups_of(run: Run, times: Sequence[Run]) -> dict[str, float]:
    """By method, without what its chunks are computed after: the median of full prefill's TTFT over its
    own. NaN where it was not measured."""
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
    """The fastest within ``bound``, with what it loses; of methods that were not timed none is."""
    timed = {method: speeds.get(split_behind(method)[0], nan) for method in losses}
    good = [method for method in losses if losses[method].value <= bound and timed[method] > 0]
    if not good:
        return "none"
    best = max(good, key=lambda method: timed[method])
    return f"{timed[best]:.1f}x, `{split_behind(best)[0]}` ({percents(losses[best])})"
