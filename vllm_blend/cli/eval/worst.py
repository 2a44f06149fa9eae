"""The examples at which a method is farthest from full prefill, to be read.

vllm-blend eval worst .out/wikimqa .out/musique --method hkvd@0.16 --count 5
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_blend.cli.eval.command import command_parser, results_folder
from vllm_blend.cli.eval.runs import Result, read_results


def worst(results: Sequence[Result], method: str, count: int) -> list[tuple[Result, dict[str, Result]]]:
    """The examples of highest KL by ``method``.

    Returns:
        For each the method's result, and all methods' by name.
    """
    found = [r for r in results if r.method == method and r.kl is not None]
    found.sort(key=lambda r: -(r.kl or 0.0))
    return [
        (r, {o.method: o for o in results if (o.task, o.example) == (r.task, r.example)})
        for r in found[:count]
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = command_parser(__doc__, "worst")
    parser.add_argument("folders", type=results_folder, nargs="+", help="of eval run --output")
    parser.add_argument("--method", default="hkvd@0.16")
    parser.add_argument("--count", type=int, default=5, help="examples, over all folders (5)")
    options = parser.parse_args(argv)
    found = [
        (folder, *entry)
        for folder in options.folders  # each for itself: models may have the same examples
        for entry in worst(read_results(folder), options.method, options.count)
    ]
    found.sort(key=lambda entry: -(entry[1].kl or 0.0))
    for folder, result, others in found[: options.count]:
        print(f"\n{folder.name}, {result.task} {result.example}: {result.num_tokens} tokens")
        for name, other in others.items():
            kl = (
                ""
                if other.kl is None
                else f"KL {other.kl:.3f}, at the first token {other.first_kl:.3f}"
            )
            score = "" if other.score is None else f"score {other.score:.2f}"
            print(f"  {name:30} {kl:42} {score:12} {other.answer!r}")
