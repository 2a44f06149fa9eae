"""Two methods beside each other, over all the tasks of some runs.

python -m vllm_blend.eval.compare .out/cut .out/wikimqa --methods ahead@0.08 hkvd@0.16
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from vllm_blend.eval.runner import Result, read_results
from vllm_blend.eval.stats import Mean, bootstrap
from vllm_blend.eval.tables import interval


def difference(results: Sequence[Result], one: str, two: str) -> tuple[int, Mean]:
    """KL to full prefill of method ``one`` less that of ``two``, on the examples that both have.

    Returns:
        The number of examples, and the mean with its interval; below 0 ``one`` is nearer.
    """
    kl: dict[str, dict[tuple[str, str], float]] = {one: {}, two: {}}
    for result in results:
        if result.method in kl and result.kl is not None:
            kl[result.method][result.task, result.example] = result.kl
    both = kl[one].keys() & kl[two].keys()
    return len(both), bootstrap([kl[one][key] - kl[two][key] for key in sorted(both)])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--methods", nargs=2, required=True, metavar=("ONE", "TWO"))
    options = parser.parse_args(argv)
    one, two = options.methods
    print(f"| run | n | KL of `{one}` less `{two}` |\n|---|---|---|")
    for folder in options.folders:
        count, mean = difference(read_results(folder), one, two)
        print(f"| {folder.name} | {count} | {interval(mean, 4)} |")


if __name__ == "__main__":
    main()
