"""What is captured ahead, and what a capture that fails leaves; torch's graphs are stood in for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_blend.models.graph import ROW_STEP, AfterCheckGraphs, Shape

SHAPE = Shape(range(1, 3), ROW_STEP, 8, 8, 0)


class Captures:
    """Stands for ``torch.cuda``: like torch's, a capture that fails leaves its stream current."""

    def __init__(self, patch: pytest.MonkeyPatch, most_rows: int) -> None:
        self.stream, self.most_rows = "main", most_rows
        self.shape = SHAPE
        for name in ("Stream", "CUDAGraph", "graph_pool_handle"):
            patch.setattr(torch.cuda, name, lambda: object())
        patch.setattr(torch.cuda, "graph", lambda *args, **options: self)
        patch.setattr(torch.cuda, "current_stream", lambda: self.stream)
        patch.setattr(torch.cuda, "set_stream", lambda stream: setattr(self, "stream", stream))
        patch.setattr(AfterCheckGraphs, "_run_layers", self.run)

    def run(self, inputs: Any, shape: Shape, *_: Any) -> None:
        assert self.stream == "main" or shape == self.shape
        self.shape = shape

    def __enter__(self) -> None:
        self.stream = "capture"

    def __exit__(self, *_: object) -> None:
        if self.shape.num_rows > self.most_rows:
            raise torch.cuda.OutOfMemoryError("no memory")
        self.stream = "main"


@pytest.mark.parametrize("most_rows", [0, 3 * ROW_STEP, 8 * ROW_STEP])
def test_what_there_is_room_for_is_captured(monkeypatch: pytest.MonkeyPatch, most_rows: int) -> None:
    cuda = Captures(monkeypatch, most_rows)
    graphs = AfterCheckGraphs([], 5 * ROW_STEP, 100, ahead=True)
    tensor = SimpleNamespace(fill_=lambda _: None, zero_=lambda: None, fill=lambda *_: None)
    inputs: Any = SimpleNamespace(slots=tensor, query_start_loc=tensor, stored=tensor)
    context: Any = None
    graphs._capture_ahead(inputs, SHAPE, None, context)
    rows = range(ROW_STEP, min(most_rows, 5 * ROW_STEP) + 1, ROW_STEP)
    assert {(s.num_rows, s.num_reqs) for s in graphs._graphs} == {(n, r) for n in rows for r in (8, 64)}
    assert graphs._max_rows >= most_rows
    assert (graphs._max_rows == most_rows) == (most_rows < 5 * ROW_STEP)
    assert cuda.stream == "main"
