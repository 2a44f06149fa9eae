"""Two methods beside each other, over all the tasks of some runs.

python -m vllm_blend.eval.compare .out/cut .out/wikimqa --methods ahead@0.08 hkvd@0.16
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from vllm_blend.eval.runner import Result, read_results
from vllm_blend.eval.stats import Mean, bootstrap
from vllm_blend.eval.tables import interval


def difference(
    results: Sequence[Result], one: str, two: str, what: Literal["kl", "score"] = "kl"
) -> tuple[int, Mean]:
    """KL to full prefill (or score) of method ``one`` less that of ``two``, on the examples both have.

    Returns:
        The number of examples, and the mean with its interval; KL below 0: ``one`` is nearer.
    """
    found: dict[str, dict[tuple[str, str], float]] = {one: {}, two: {}}
    for result in results:
        value: float | None = getattr(result, what)
        if result.method in found and value is not None:
            found[result.method][result.task, result.example] = value
    both = found[one].keys() & found[two].keys()
    return len(both), bootstrap([found[one][key] - found[two][key] for key in sorted(both)])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--methods", nargs=2, required=True, metavar=("ONE", "TWO"))
    options = parser.parse_args(argv)
    one, two = options.methods
    print(f"| `{one}` less `{two}` | n | KL | score |\n|---|---|---|---|")
    for folder in options.folders:
        results = read_results(folder)
        count, kl = difference(results, one, two)
        _, score = difference(results, one, two, "score")
        print(f"| {folder.name} | {count} | {interval(kl, 4)} | {interval(score)} |")


if __name__ == "__main__":
    main()
