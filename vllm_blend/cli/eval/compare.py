"""Two methods beside each other, example by example, over the tasks of some runs.

vllm-blend eval compare .out/cut .out/wikimqa --methods ahead@0.08 hkvd@0.16
vllm-blend eval compare .out/* --methods ahead@0.08 hkvd@0.16 ahead@0.16 hkvd@0.16 --what kl
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

from vllm_blend.cli.eval.across import grid
from vllm_blend.cli.eval.command import command_parser, results_folder
from vllm_blend.cli.eval.runs import Run, read_runs


def differences(one: str, two: str, what: Literal["kl", "score"], run: Run) -> dict[str, float]:
    """By example: KL to full prefill (or score) of method ``one`` less that of ``two``; KL below 0:
    ``one`` is nearer."""
    left, right = run.values(one, what), run.values(two, what)
    return {example: left[example] - right[example] for example in left if example in right}


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_parser(__doc__, "compare")
    parser.add_argument("folders", type=results_folder, nargs="+", help="of eval run --output")
    parser.add_argument("--methods", nargs="+", required=True, metavar="ONE TWO", help="pairs")
    parser.add_argument("--what", nargs="+", choices=("kl", "score"), default=["kl", "score"])
    options = parser.parse_args(argv)
    if len(options.methods) % 2:
        parser.error(f"--methods has {len(options.methods)} names; give pairs")
    pairs = list(zip(options.methods[::2], options.methods[1::2], strict=True))
    columns = {
        f"{what}: `{one}` less `{two}`": partial(differences, one, two, what)
        for what in options.what
        for one, two in pairs
    }
    print(grid(read_runs(options.folders), columns), end="")
