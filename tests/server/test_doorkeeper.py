"""New chunks are kept, but where nothing that was kept comes back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from vllm_blend.core.plans import ChunkIds
from vllm_blend.server.chunks.chunk_contexts import Contexts
from vllm_blend.server.chunks.chunk_registry import ChunkRegistry
from vllm_blend.server.chunks.doorkeeper import LEAST, Doorkeeper
from vllm_blend.server.internal.background_prefill import BackgroundPrefill
from vllm_blend.server.request import BlendRequest
from vllm_blend.server.scheduler.lookup import Found, Lookup

SIZE = 20
HELD = 100
"""Chunks that memory holds."""


def text(number: int) -> tuple[int, ...]:
    """Of a chunk."""
    return tuple(range(SIZE * number, SIZE * (number + 1)))


class Server:
    """What a scheduler knows of chunks; what it lets requests keep is there at once."""

    def __init__(self, fetches: Any = None) -> None:
        self.chunks = ChunkRegistry(HELD * SIZE)
        self.background = BackgroundPrefill(self.chunks, 10**6, 1.0, lambda name, *_: name)
        contexts = Contexts((1,), (1,), harvest=True)
        self.lookup = Lookup(self.chunks, self.background, fetches, contexts, 16, 8192)

    def ask(self, *numbers: int, tenant: str = "a", auto: bool = False, keep: bool = False) -> Found:
        """A prompt of these chunks."""
        tokens = (0, *(token for number in numbers for token in text(number)), 0)
        starts = range(1, len(tokens) - 1, SIZE)
        spans = () if auto else tuple((start, start + SIZE) for start in starts)
        found = self.lookup(tenant, tokens, BlendRequest(spans=spans, auto=auto, keep=keep))
        for plan in found.harvest:
            assert plan.key is not None
            self.chunks.commit(plan.key)
        return found

    def kept(self, *numbers: int, **options: Any) -> int:
        return len(self.ask(*numbers, **options).harvest)


def test_what_comes_a_second_time_is_kept_once_nothing_else_comes_back() -> None:
    server = Server()
    turned = 2 * HELD  # memory filled, and dropped
    assert all(server.kept(number) for number in range(turned))
    assert [server.kept(turned + number) for number in range(50)] == [0] * 50
    assert server.background.num_waiting == 0  # nor are they computed by themselves
    assert server.chunks.num_evicted == HELD
    found = server.ask(turned + 7)
    assert (len(found.harvest), found.missed) == (1, 1)
    assert len(server.ask(turned + 7).spans) == 1
    assert server.kept(9999) == 1  # something comes back, so new ones are kept


def test_reuse_keeps_memory_open() -> None:
    server = Server()
    server.ask(0)
    for number in range(1, 4 * HELD):
        found = server.ask(number, 0)
        assert (len(found.spans), len(found.harvest)) == (1, 1)


def test_a_reused_chunk_opens_it_again() -> None:
    server = Server()
    for number in range(2 * HELD):
        server.ask(number)
    assert server.kept(5000) == 0
    assert len(server.ask(2 * HELD - 1).spans) == 1
    assert server.kept(5001) == 1


def test_what_a_request_wants_kept_is_kept() -> None:
    """As of ``vllm-blend warm``, which asks once."""
    server = Server()
    for number in range(2 * HELD):
        server.ask(number)
    assert server.kept(5000) == 0
    found = server.ask(5001, 5002)
    assert found.left == found.missed == 2
    assert "kept when they come again" in found.why_not(BlendRequest(), 16)
    assert server.kept(5003, 5004, keep=True) == 2
    assert server.kept(5005) == 0
    assert len(server.ask(5003).spans) == 1


def test_text_that_is_learned_opens_it_again() -> None:
    server = Server()
    for number in range(2 * HELD):
        server.ask(number)
    later = 1000
    assert server.kept(*range(later, later + 20), auto=True) == 0  # nothing is marked
    found = server.ask(5, *range(later, later + 20), auto=True)
    assert sum(len(plan.chunk.token_ids) for plan in found.harvest if plan.chunk) == 20 * SIZE
    assert server.kept(5001) == 1


def test_a_tenant_is_measured_by_its_own_chunks() -> None:
    server = Server()
    for number in range(4 * HELD):
        server.ask(number)
    assert server.kept(5000) == 0
    assert server.kept(5000, tenant="b") == 1
    assert server.kept(5001) == 0


def test_a_tenant_that_is_forgotten_leaves_nothing() -> None:
    server = Server()
    for number in range(2 * HELD):
        server.ask(number)
        server.ask(number, tenant="b")
    assert server.kept(5000) == server.kept(5000, tenant="b") == 0
    server.lookup.forget_tenant("a")
    assert {tenant for tenant, _ in server.lookup._doorkeeper._seen} == {"b"}
    assert server.kept(5000) == 0 and server.kept(5000, tenant="b") == 1


def test_small_memory_is_not_closed_by_a_few_chunks() -> None:
    chunks = ChunkRegistry(2 * SIZE)
    door, kept = Doorkeeper(chunks), 0
    for number in range(LEAST + 10):
        chunk = ChunkIds("a", text(number))
        if door.admits(chunk):
            kept += 1
            assert (key := chunks.reserve(chunk)) is not None
            chunks.commit(key)
    assert kept == LEAST + 2


def test_where_a_store_may_have_it_a_chunk_is_asked_for() -> None:
    asked: list[ChunkIds] = []
    server = Server(SimpleNamespace(ask=lambda chunk, *_: asked.append(chunk)))
    for number in range(3 * HELD):
        assert server.kept(number) == 1
    assert not asked  # they are kept, and written from there


@given(st.lists(st.integers(0, 400), max_size=600))
def test_what_comes_twice_running_is_kept(numbers: list[int]) -> None:
    chunks = ChunkRegistry(2 * SIZE)
    door = Doorkeeper(chunks)
    for number in range(LEAST + 2):
        assert (key := chunks.reserve(ChunkIds("a", text(1000 + number)))) is not None
        chunks.commit(key)
    for number in numbers:
        door.admits(ChunkIds("a", text(number)))
        assert door.admits(ChunkIds("a", text(number), context=(5,)))  # after whatever it came
