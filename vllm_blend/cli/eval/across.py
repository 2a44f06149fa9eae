"""Tables over many runs: models, sets and methods beside each other.

vllm-blend eval across methods .out/*            # a table a run: each method's numbers
vllm-blend eval across kl .out/* --methods reuse hkvd@0.16 ahead@0.16
vllm-blend eval across lost .out/* --methods hkvd@0.16 ahead@0.16
vllm-blend eval across share .out/* --methods hkvd@0.16 ahead@0.16
vllm-blend eval across recovered .out/* --methods hkvd@0.16 --of reuse
vllm-blend eval across within .out/* --losses 0.01 0.02 --times .out/timed
vllm-blend eval across plot .out/* --policies hkvd ahead --output kl.svg

``lost`` is in points of the score, ``share`` in percent of full prefill's mean score. ``within`` is
speed at a stated loss: the fastest method that loses no more of full prefill's mean score than that.
``--times`` are runs one request at a time, for runs in batches, which measure no TTFT. Intervals are
95%, by bootstrap over the examples; methods in one table are on the same examples. A mean over runs (a
model's, a set's, all) gives each run the same weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from vllm_blend.cli.eval.command import command_parser, results_folder
from vllm_blend.cli.eval.runs import Run, What, lines, read_runs
from vllm_blend.cli.eval.stats import Mean, bootstrap_gone, bootstrap_over, summarize
from vllm_blend.cli.eval.tables import interval, number, percent, percents, table
from vllm_blend.cli.eval.within import losses_of, within_table

Column = Callable[[Run], Mapping[str, float]]
WHATS = ("methods", "kl", "lost", "share", "recovered", "within", "plot")


def common(run: Run, columns: Sequence[Column]) -> list[list[float]]:
    """Each column's values on the examples that all columns have."""
    found = [column(run) for column in columns]
    keys = [key for key in found[0] if all(key in values for values in found)]
    return [[values[key] for key in keys] for values in found]


def grid(runs: Sequence[Run], columns: Mapping[str, Column], digits: int = 3) -> str:
    """``lines`` with a cell a column."""
    data = [common(run, list(columns.values())) for run in runs]
    rows: list[list[str]] = []
    for label, own in lines(runs):
        n = str(len(data[own[0]][0])) if len(own) == 1 else ""
        cells = [_cell(groups, digits) for groups in zip(*(data[i] for i in own), strict=True)]
        rows.append([label, n, *cells])
    return table(["", "n", *columns], rows)


def _cell(groups: Sequence[Sequence[float]], digits: int) -> str:
    return interval(bootstrap_over(groups), digits)


def heading(run: Run) -> str:
    """Of its table: what was run, and how long its prompts are on average."""
    tokens = sum(r.num_tokens for r in run.results) / len(run.results)
    return f"### {run.label}, {tokens:.0f} tokens"


def methods_table(run: Run, methods: Sequence[str] = ()) -> str:
    """Each method's numbers on one run."""
    rows = []
    for s in summarize(run.results):
        if not methods or s.method in methods:
            agreed = [percent(s.top1), percent(s.same)]
            scores = [number(s.score.value), interval(s.loss)]
            rows.append([f"`{s.method}`", str(s.n), interval(s.kl), *agreed, *scores])
    return table(["", "n", "KL to full", "top-1", "same answer", "score", "lost of it"], rows)


def recovered(runs: Sequence[Run], method: str, of: str) -> tuple[Mean, Mean, Mean]:
    """What ``method`` takes back of what ``of`` loses, in the means over ``runs``.

    Returns:
        The score that ``of`` loses; the shares of that, and of its KL, that ``method`` does not lose.
    """

    def pairs(what: What) -> list[tuple[list[float], list[float]]]:
        columns = [_values(method, what), _values(of, what)]
        return [(left, whole) for left, whole in (common(run, columns) for run in runs)]

    lost = pairs("lost")
    return (
        bootstrap_over([whole for _, whole in lost]),
        bootstrap_gone(lost),
        bootstrap_gone(pairs("kl")),
    )


def recovered_table(runs: Sequence[Run], methods: Sequence[str], of: str) -> str:
    """``lines`` of ``recovered``; the share of the score only where the loss is beyond 0."""
    rows = []
    for label, own in lines(runs):
        found = [recovered([runs[i] for i in own], method, of) for method in methods]
        lost = found[0][0]
        cells = [percents(kl) for _, _, kl in found]
        cells += [percents(share) if lost.low > 0 else "" for _, share, _ in found]
        rows.append([label, interval(lost), *cells])
    heads = [f"KL gone: `{method}`" for method in methods]
    heads += [f"score: `{method}`" for method in methods]
    return table(["", f"lost by `{of}`", *heads], rows)


def shares_table(runs: Sequence[Run], methods: Sequence[str]) -> str:
    """``lines`` of ``losses_of``: a cell a method, "-" for one that is not in all of the runs."""
    rows = []
    for label, own in lines(runs):
        losses = losses_of([runs[index] for index in own])
        rows.append([label, *(percents(losses[m], 1) if m in losses else "-" for m in methods)])
    return table(["", *(f"`{method}`" for method in methods)], rows)


def _values(method: str, what: What) -> Column:
    return lambda run: run.values(method, what)


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_parser(__doc__, "across")
    parser.add_argument("what", choices=WHATS)
    parser.add_argument("folders", type=results_folder, nargs="+", help="of eval run --output")
    parser.add_argument("--methods", nargs="+", default=[], metavar="NAME", help="columns, or rows")
    parser.add_argument("--of", default="reuse", help="recovered: the method that loses (reuse)")
    parser.add_argument("--losses", type=float, nargs="+", default=[0.01, 0.02], help="within: shares")
    parser.add_argument(
        "--times", type=results_folder, nargs="+", default=[], help="within: runs that measured TTFT"
    )
    parser.add_argument("--policies", nargs="+", default=["hkvd", "ahead"], help="plot: a line each")
    parser.add_argument("--output", type=Path, default=Path("kl.svg"), help="plot: .svg or .png")
    options = parser.parse_args(argv)
    runs, methods = read_runs(options.folders), options.methods
    if options.what in ("kl", "lost", "share", "recovered") and not methods:
        parser.error(f"{options.what}: give --methods")
    if options.what == "methods":
        print("\n".join(f"{heading(run)}\n\n{methods_table(run, methods)}" for run in runs), end="")
    elif options.what == "share":
        print(shares_table(runs, methods), end="")
    elif options.what == "recovered":
        print(recovered_table(runs, methods, options.of), end="")
    elif options.what == "within":
        print(within_table(runs, options.losses, read_runs(options.times)), end="")
    elif options.what == "plot":
        from vllm_blend.cli.eval.figures import kl_of_runs

        kl_of_runs(runs, options.policies, options.output)
    else:
        print(grid(runs, {f"`{m}`": _values(m, options.what) for m in methods}), end="")
