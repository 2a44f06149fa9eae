"""What is captured ahead, and what a capture that fails leaves; torch's graphs are stood in for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_blend.models.graph import MAX_GRAPHS, ROW_STEPS, AfterCheckGraphs, Shape

SHAPE = Shape(range(1, 3), ROW_STEPS[0], 8, 8, 0)


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


@pytest.mark.parametrize("most_rows", [0, ROW_STEPS[2], ROW_STEPS[-2], ROW_STEPS[-1]])
def test_what_there_is_room_for_is_captured(monkeypatch: pytest.MonkeyPatch, most_rows: int) -> None:
    cuda = Captures(monkeypatch, most_rows)
    longest = ROW_STEPS[-3] - 1
    graphs = AfterCheckGraphs([], longest, 100, ahead=True)
    tensor = SimpleNamespace(fill_=lambda _: None, zero_=lambda: None, fill=lambda *_: None)
    inputs: Any = SimpleNamespace(slots=tensor, query_start_loc=tensor, stored=tensor)
    context: Any = None
    graphs._capture_ahead(inputs, SHAPE, None, context)
    rows = [n for n in ROW_STEPS if n <= min(most_rows, longest + 1)]
    assert {(s.num_rows, s.num_reqs) for s in graphs._graphs} == {(n, r) for n in rows for r in (8, 64)}
    assert graphs._max_rows == (most_rows if most_rows < longest else ROW_STEPS[-1])
    assert len(ROW_STEPS) * 2 <= MAX_GRAPHS
    assert cuda.stream == "main"
