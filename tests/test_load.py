"""Stored KV stays until the GPU has read it; without a GPU, with streams and events that say so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllm_blend.core import BlendPlan, BlendStep, ChunkSpan, StepRequest, StoredKV
from vllm_blend.models import load
from vllm_blend.settings import BlendSettings
from vllm_blend.store.arena import PAGE, Arena


class Event:
    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed


class Stream:
    """The step's; the other one copies stored KV ahead."""

    def __init__(self) -> None:
        self.waits_for: list[Any] = []
        self.events: list[Event] = []

    def wait_stream(self, other: Any) -> None:
        self.waits_for.append(other)

    def record_event(self) -> Event:
        assert self.waits_for, "copies may still be under way"
        self.events.append(Event())
        return self.events[-1]


def test_memory_of_an_aborted_request_is_not_given_away_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream, device = Stream(), torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(load, "_copy_stream", lambda device: "copies")
    in_flight, arena = load.InFlight(), Arena(2 * PAGE, pinned=False)
    extents = []
    for _ in range(2):
        extent = arena.allocate(PAGE)
        assert extent is not None
        tensor = arena.tensor(extent, 2 * 4 * 8).view(torch.float32).view(2, 2, 4)
        plan = BlendPlan((ChunkSpan(1, StoredKV(((tensor, tensor),))),), BlendSettings())
        in_flight.hold(BlendStep([StepRequest(plan, 0, 0, 3, device)], 3, "auto"), device)
        extents.append(extent)
    del tensor, plan
    for extent in extents:
        arena.free(extent)
    assert arena.allocate(PAGE) is None
    in_flight.release()
    assert arena.allocate(PAGE) is None
    stream.events[0].passed = True
    in_flight.release()
    assert arena.allocate(PAGE) is not None
    assert arena.allocate(PAGE) is None
    assert stream.waits_for == ["copies"] * 2
