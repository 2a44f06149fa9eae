"""``python -m vllm_blend.eval COMMAND``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module

COMMANDS = {
    "run": "methods on a data set, paired with full prefill",
    "tune": "the smallest ratio, and the policy, for a stated quality",
    "across": "tables over many runs",
    "compare": "two methods, example by example",
    "worst": "the examples at which a method is farthest from full prefill",
    "report": "one self-contained HTML page",
}
"""Each is a module of that name, with a ``main`` that takes the arguments after it."""


def main(argv: Sequence[str] | None = None) -> None:
    lines = [f"  {name:8} {text}" for name, text in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="python -m vllm_blend.eval",
        usage="%(prog)s COMMAND ...",
        description="\n".join(["commands (COMMAND --help says more):", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    import_module(f"vllm_blend.eval.{options.command}").main(options.arguments)


if __name__ == "__main__":
    main()
