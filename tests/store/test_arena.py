"""The arena: what is in use is never touched, and room is never lost to pieces."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from vllm_blend.store.arena import Arena, Extent, cheapest_window
from vllm_blend.store.record import PAGE

PAGES = 40


def filled(arena: Arena, num_bytes: int, value: int) -> tuple[Extent, torch.Tensor] | None:
    extent = arena.allocate(num_bytes)
    if extent is None:
        return None
    tensor = arena.tensor(extent, num_bytes)
    tensor.fill_(value)
    return extent, tensor


class Machine(RuleBasedStateMachine):
    """Extents of random sizes; some are held, some given back; contents must stay."""

    @initialize()
    def begin(self) -> None:
        self.arena = Arena(PAGES * PAGE)
        self.idle: list[tuple[Extent, int, int]] = []  # extent, bytes, value
        self.held: list[tuple[Extent, torch.Tensor, int]] = []
        self.leaving: list[tuple[torch.Tensor, int, int]] = []  # given back, but held; pages
        self.value = 0

    @rule(num_bytes=st.integers(1, 9 * PAGE), hold=st.integers(0, 3))
    def allocate(self, num_bytes: int, hold: int) -> None:
        self.value = self.value % 250 + 1
        pages = -(-num_bytes // PAGE)
        room = self.arena.free_bytes // PAGE
        made = filled(self.arena, num_bytes, self.value)
        if made is None:
            # without anything in use there is always room while there are free bytes
            assert room < pages or self.held or self.leaving
            return
        extent, tensor = made
        if hold == 0:
            self.held.append((extent, tensor[num_bytes // 2 :], self.value))  # a view suffices
        else:
            self.idle.append((extent, num_bytes, self.value))

    @rule(index=st.integers(0, 100))
    def free_idle(self, index: int) -> None:
        if self.idle:
            self.arena.free(self.idle.pop(index % len(self.idle))[0])

    @rule(index=st.integers(0, 100))
    def free_held(self, index: int) -> None:
        if self.held:
            extent, tensor, value = self.held.pop(index % len(self.held))
            self.arena.free(extent)
            self.leaving.append((tensor, value, extent.size))

    @rule()
    def let_go(self) -> None:
        self.leaving.clear()

    @invariant()
    def contents_stay(self) -> None:
        for extent, num_bytes, value in self.idle:
            assert (self.arena.tensor(extent, num_bytes) == value).all()
        for _, tensor, value in self.held:
            assert (tensor == value).all()
        for tensor, value, _ in self.leaving:
            assert (tensor == value).all()

    @invariant()
    def every_page_is_counted_once(self) -> None:
        extents = self.arena._extents
        spans = [(e.offset, e.end) for e in extents]
        spans += [(at, at + size) for at, size in self.arena._hole_at.items()]
        spans.sort()
        assert spans[0][0] == 0
        assert spans[-1][1] == self.arena.size
        assert all(a[1] == b[0] for a, b in zip(spans, spans[1:], strict=False))
        assert self.arena.free_bytes == sum(self.arena._hole_at.values())


TestArena = Machine.TestCase
TestArena.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_pieces_are_joined_by_the_cheapest_moves() -> None:
    arena = Arena(10 * PAGE)
    extents = [filled(arena, PAGE, value)[0] for value in range(10)]  # type: ignore[index]
    gc.collect()
    for gap in (1, 6, 8):
        arena.free(extents[gap])
    assert arena.allocate(2 * PAGE) is not None
    assert arena.moved_bytes == PAGE  # the one between 6 and 8
    assert extents[7].offset == 6 * PAGE
    for value in (0, 2, 3, 4, 5, 7, 9):
        assert (arena.tensor(extents[value], PAGE) == value).all()


def test_what_is_in_use_stays_where_it_is() -> None:
    arena = Arena(3 * PAGE)
    made = [filled(arena, PAGE, value) for value in range(3)]
    assert made[1] is not None
    _, held = made[1]
    for one in (made[0], made[2]):
        assert one is not None
        arena.free(one[0])
    made.clear()
    del one
    assert arena.allocate(2 * PAGE) is None
    assert arena.free_bytes == 2 * PAGE
    assert (held == 1).all()
    del held
    gc.collect()
    assert arena.allocate(2 * PAGE) is not None


def test_an_arena_of_nothing() -> None:
    arena = Arena(100)
    assert arena.size == 0
    assert arena.allocate(1) is None


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.booleans()), max_size=8),
    st.integers(1, 12),
)
def test_the_cheapest_window_is_the_cheapest(parts: list[tuple[int, int, bool]], size: int) -> None:
    """Against trying every window."""
    extents: list[Any] = []
    at = 0
    for gap, length, in_use in parts:
        extent = Extent(at + gap, length)
        extent.__class__ = type("E", (Extent,), {"in_use": in_use})
        extents.append(extent)
        at = extent.end
    end = at + 2
    costs = []
    for first in range(len(extents) + 1):
        for last in range(first, len(extents) + 1):
            inside = extents[first:last]
            start = extents[first - 1].end if first else 0
            stop = extents[last].offset if last < len(extents) else end
            moved = sum(e.size for e in inside)
            if not any(e.in_use for e in inside) and stop - start - moved >= size:
                costs.append(moved)
    window = cheapest_window(extents, end, size)
    if window is None:
        assert not costs
    else:
        assert sum(e.size for e in extents[slice(*window)]) == min(costs)


@pytest.mark.gpu
def test_the_arena_is_pinned_where_there_is_a_gpu() -> None:
    arena = Arena(PAGE)
    extent = arena.allocate(PAGE)
    assert extent is not None
    assert arena.tensor(extent, PAGE).is_pinned()


def test_it_is_host_memory_whatever_is_the_default() -> None:
    """vLLM makes models, and with them a server's store, with the GPU as torch's default device."""
    with torch.device("meta"):
        arena = Arena(PAGE)
    extent = arena.allocate(PAGE)
    assert extent is not None
    assert arena.tensor(extent, 5).device.type == "cpu"
