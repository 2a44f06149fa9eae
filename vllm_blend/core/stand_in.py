"""A text that stands in for the passages before a chunk, where none is given."""

from __future__ import annotations

from importlib.resources import files


def text() -> str:
    return files("vllm_blend.core").joinpath("stand_in.txt").read_text(encoding="utf-8")
