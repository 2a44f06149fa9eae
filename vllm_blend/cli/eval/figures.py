"""Figures of a diagnosis and of a run, as PNG in base64: nothing is fetched when they are shown."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_blend.cli.eval.diagnose import Diagnosis
from vllm_blend.cli.eval.methods import blend_settings
from vllm_blend.cli.eval.stats import Summary, summarize

if TYPE_CHECKING:
    from vllm_blend.cli.eval.runs import Run


def draw(fill: Callable[[Any], None], width: float = 7.5, height: float = 3.2) -> str:
    """A ``data:`` address of what ``fill`` draws on a matplotlib axes; sizes in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    fill(axes)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=120)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def deviation_map(found: Diagnosis) -> str:
    """Deviation by token and layer; white lines part the chunks."""

    def fill(axes: Any) -> None:
        top = float(np.percentile(found.deviation[1:], 99)) or 1.0
        image = axes.imshow(found.deviation, aspect="auto", vmin=0, vmax=top, cmap="magma")
        for end in np.flatnonzero(np.diff(found.chunk)):
            axes.axvline(end + 0.5, color="white", linewidth=0.6)
        axes.set(xlabel="chunk token", ylabel="layer")
        axes.figure.colorbar(image, ax=axes, label="deviation of V")

    return draw(fill, height=3.6)


def deviation_cdf(found: Diagnosis) -> str:
    """Share of tokens below a deviation, for five layers (the paper's Figure 7)."""

    def fill(axes: Any) -> None:
        num_layers, num_tokens = found.deviation.shape
        share = np.arange(1, num_tokens + 1) / num_tokens
        for layer in np.unique(np.linspace(1, num_layers - 1, 5).astype(int)):
            axes.plot(np.sort(found.deviation[layer]), share, label=f"layer {layer}")
        axes.set(xlabel="deviation of V", ylabel="share of tokens", ylim=(0, 1))
        axes.legend()

    return draw(fill)


def rank_correlation(found: Diagnosis) -> str:
    """Spearman's rank correlation of each layer and the next (the paper's Figure 8)."""

    def fill(axes: Any) -> None:
        values = found.rank_correlation()
        axes.bar(np.arange(1, len(values) + 1), values, color="#4c78a8")
        axes.set(xlabel="layer and the next", ylabel="Spearman's rho", ylim=(min(0, values.min()), 1))

    return draw(fill)


def attention_deviation(found: dict[str, Diagnosis]) -> str:
    """Attention deviation against the ratio, by policy (the paper's Figure 6)."""

    def fill(axes: Any) -> None:
        for policy, diagnosis in found.items():
            ratios = sorted(diagnosis.attention)
            values = [diagnosis.attention[ratio] for ratio in ratios]
            axes.plot(ratios, values, marker="o", label=policy)
        axes.set(xlabel="recompute ratio", ylabel="attention deviation", ylim=(0, None))
        axes.legend()

    return draw(fill)


def kl_by_ratio(summaries: Sequence[Summary], task: str) -> str:
    """KL to full prefill against the ratio, a line a policy."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for summary in summaries:
        settings = blend_settings(summary.method)
        if summary.task == task and summary.kl and settings and ":" not in summary.method:
            place = lines.setdefault(settings.policy, [])
            place.append((settings.recomp_ratio, summary.kl.value))

    def fill(axes: Any) -> None:
        for policy, points in lines.items():
            ratios, kl = zip(*sorted(points), strict=True)
            axes.plot(ratios, kl, marker="o", label=policy)
        axes.set(xlabel="recompute ratio", ylabel="KL to full prefill", ylim=(0, None))
        axes.legend(ncols=2, fontsize=8)

    return draw(fill, height=3.8)


def kl_of_runs(runs: Sequence[Run], policies: Sequence[str], path: Path) -> None:
    """KL to full prefill against the ratio, with its interval: a row a model, a column a set."""
    import matplotlib
    from matplotlib.figure import Figure

    # words as text, and the same bytes each time
    matplotlib.rcParams.update({"svg.hashsalt": "vllm_blend", "svg.fonttype": "none"})
    models, tasks = ([*dict.fromkeys(getattr(r, of) for r in runs)] for of in ("model", "task"))
    figure = Figure(figsize=(2.6 * len(tasks), 2.1 * len(models)), layout="constrained")
    grid = figure.subplots(len(models), len(tasks), squeeze=False, sharex=True)
    for run in runs:
        axes = grid[models.index(run.model)][tasks.index(run.task)]
        found = {s.method: s.kl for s in summarize(run.results) if s.kl}
        for policy in policies:
            ratios = {
                0.0 if method == "reuse" else float(method.split("@")[1]): kl
                for method, kl in found.items()
                if method == "reuse" or re.fullmatch(re.escape(policy) + r"@[\d.]+", method)
            }
            x = sorted(ratio for ratio in ratios if ratio < 1)
            axes.plot(x, [ratios[r].value for r in x], marker=".", label=policy)
            axes.fill_between(x, [ratios[r].low for r in x], [ratios[r].high for r in x], alpha=0.2)
        axes.set(ylim=(0, None))
        axes.set_title(run.label, fontsize=8)
        axes.tick_params(labelsize=8)
        axes.locator_params(nbins=4)
    grid[0][0].legend(fontsize=8)
    figure.supxlabel("recompute ratio", fontsize=9)
    figure.supylabel("KL to full prefill", fontsize=9)
    figure.savefig(path, dpi=100, metadata={"Date": None} if path.suffix == ".svg" else None)


def ttft_bars(summaries: Sequence[Summary], task: str) -> str:
    """Median time to first token of each method, all of which have one."""
    rows = [summary for summary in summaries if summary.task == task][::-1]

    def fill(axes: Any) -> None:
        axes.barh([row.method for row in rows], [row.ttft for row in rows], color="#72b7b2")
        axes.set(xlabel="median TTFT, seconds")
        axes.tick_params(axis="y", labelsize=8)

    return draw(fill, height=1 + 0.2 * len(rows))
