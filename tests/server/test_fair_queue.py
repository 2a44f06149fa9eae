"""The queue of chunks that tenants share."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from vllm_blend.core.plans import ChunkIds
from vllm_blend.server.chunks.chunk_registry import chunk_key
from vllm_blend.server.chunks.fair_queue import MIN_TOKENS, FairQueue


def chunk_of(tenant: str, number: int, size: int = 20) -> ChunkIds:
    return ChunkIds(tenant, tuple(range(1000 * number, 1000 * number + size)))


def add(queue: FairQueue, tenant: str, number: int, size: int = 20) -> list[bytes]:
    chunk = chunk_of(tenant, number, size)
    return queue.add(chunk_key(chunk), chunk)


def test_one_of_each_tenant_in_turn() -> None:
    queue = FairQueue(100 * MIN_TOKENS)
    for number in range(50):
        add(queue, "many", number)
    for number in range(2):
        add(queue, "few", number)
    order = [queue.pop()[1] for _ in range(6)]
    assert [chunk.tenant for chunk in order] == ["many", "few", "many", "few", "many", "many"]
    assert [c.token_ids[0] for c in order if c.tenant == "many"] == [0, 1000, 2000, 3000]


def test_a_full_queue_makes_room_for_those_with_less() -> None:
    queue = FairQueue(8 * MIN_TOKENS)
    assert [add(queue, "many", number) for number in range(8)] == [[]] * 8
    assert add(queue, "many", 8) == [chunk_key(chunk_of("many", 8))]  # refused
    newest = [chunk_key(chunk_of("many", number)) for number in (7, 6, 5, 4)]
    assert [add(queue, "few", number) for number in range(4)] == [[key] for key in newest]
    assert add(queue, "few", 4) == [chunk_key(chunk_of("few", 4))]  # each has its half
    assert add(queue, "long", 0, 9 * MIN_TOKENS) == [chunk_key(chunk_of("long", 0, 9 * MIN_TOKENS))]


def test_a_chunk_that_is_in_it_already_takes_no_more_room() -> None:
    queue = FairQueue(2 * MIN_TOKENS)
    assert [add(queue, "one", 0) for _ in range(3)] == [[]] * 3
    assert (len(queue), queue.num_tokens) == (1, MIN_TOKENS)
    queue.pop()
    assert (len(queue), queue.num_tokens, add(queue, "one", 1)) == (0, 0, [])


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.integers(1, 3000)), max_size=60),
    st.data(),
)
def test_what_is_in_it_adds_up(adds: list[tuple[str, int, int]], data: st.DataObject) -> None:
    queue = FairQueue(10 * MIN_TOKENS)
    there: dict[bytes, ChunkIds] = {}
    for tenant, number, size in adds:
        chunk = chunk_of(tenant, number, size)
        key = chunk_key(chunk)
        if key not in queue:
            there[key] = chunk
            for gone in queue.add(key, chunk):
                del there[gone]
        if there and data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(there)))
            queue.remove(gone)
            del there[gone]
        assert len(queue) == len(there)
        assert queue.num_tokens == sum(max(MIN_TOKENS, len(c.token_ids)) for c in there.values())
        assert queue.num_tokens <= queue.max_tokens
    tenants = Counter(queue.pop()[1].tenant for _ in range(len(there)))
    assert tenants == Counter(chunk.tenant for chunk in there.values())
    assert queue.first() is None
