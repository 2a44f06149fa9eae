"""The evaluation's commands, as ``vllm-blend eval`` calls them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module


def main(arguments: Sequence[str]) -> None:
    import_module(f"vllm_blend.cli.eval.{arguments[0]}").main(arguments[1:])
