"""Scores: kept with a chunk in every tier, added when they become known later, never lost to a put."""

from __future__ import annotations

import itertools
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from chunks import MODEL, make_key, make_kv, same
from hypothesis import given, settings
from hypothesis import strategies as st
from old_record import old_record
from tiers import FakeTier

from vllm_blend.core.kv import StoredKV
from vllm_blend.store import ChunkStore, DiskTier, gpu
from vllm_blend.store.keys import ChunkKey
from vllm_blend.store.record import Layout, Record, Rejected
from vllm_blend.store.streaming_layers import StreamingKV
from vllm_blend.store.tier import Source, Tier

BUDGET = 1 << 30
KEYS = [make_key(), make_key(1, num_tokens=500)]
"""Records of the first have one size with scores and without, those of the second have two."""

PLAIN, SCORED = make_kv(KEYS[1]), make_kv(KEYS[1], scored=True)
KEY = KEYS[1]
OTHER = StoredKV(PLAIN.layers, torch.ones(KEY.num_tokens))


@pytest.fixture(params=["memory", "disk", "page cache", "redis", "s3"])
def make_tier(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], Tier]]:
    """Makes tiers over one place, as several processes do."""
    made: list[Any] = []
    if request.param == "memory":
        made.append(FakeTier())

        def make() -> Tier:
            return made[0]
    elif request.param == "redis":
        pytest.importorskip("redis")
        from vllm_blend.store.redis_tier import RedisTier

        server = request.getfixturevalue("redis_server")

        def make() -> Tier:
            return RedisTier(server.url, BUDGET)
    elif request.param == "s3":
        boto3 = pytest.importorskip("boto3")
        from vllm_blend.store.s3_tier import S3Tier

        endpoint, name = request.getfixturevalue("s3_endpoint"), f"scores-{uuid.uuid4()}"
        for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(variable, "test")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket=name)

        def make() -> Tier:
            tier = S3Tier(name, BUDGET, endpoint_url=endpoint)
            made.append(tier)
            assert tier.wait_listed()
            return tier
    else:

        def make() -> Tier:
            return DiskTier(tmp_path, BUDGET, direct=request.param == "disk")

    yield make
    for tier in made:
        tier.close()


@pytest.fixture
def tier(make_tier: Callable[[], Tier]) -> Tier:
    return make_tier()


@pytest.fixture
def store(tier: Tier) -> Iterator[ChunkStore]:
    with ChunkStore([tier], host_bytes=1 << 22) as store:
        yield store


def bytes_in(tier: Tier, key: ChunkKey = KEY) -> bytes:
    source = tier.open(key)
    assert source is not None
    data = bytearray(source.num_bytes)
    assert source.read(0, memoryview(data)) == len(data)
    source.close()
    return bytes(data)


def written(kv: StoredKV, key: ChunkKey = KEY) -> bytes:
    return b"".join(Record.of(key, kv).parts)


def loaded(store: ChunkStore, key: ChunkKey = KEY, layerwise: bool = False) -> StoredKV | None:
    """What the slow tier has."""
    assert store.flush()  # no load is about to end
    store.discard(key)
    return store.get(key, layerwise=layerwise)


@pytest.mark.parametrize("storage", ["auto", "fp8"])
@pytest.mark.parametrize("scored", [True, False])
def test_a_chunk_comes_back_with_its_scores(store: ChunkStore, scored: bool, storage: str) -> None:
    for ids in (key.token_ids for key in KEYS):
        key = replace(MODEL, storage=storage).chunk(ids)
        kv = make_kv(key, scored)
        assert store.put(key, kv)
        found = [store.get(key), store.peek(key)]
        assert store.flush()
        found += [store.get(key), store.peek(key), loaded(store, key), store.get(key)]
        found += [loaded(store, key, layerwise=True)]
        for one in found:
            assert one is not None and (one.scores is not None) == scored
            if kv.scores is not None and one.scores is not None:
                assert torch.equal(one.scores, kv.scores) and one.scores.device.type == "cpu"
            if storage == "auto":
                assert same(one, kv)


@pytest.mark.parametrize("key", KEYS)
def test_records_of_version_1_are_served(
    tier: Tier, make_tier: Callable[[], Tier], key: ChunkKey
) -> None:
    kv = make_kv(key)
    data = old_record(key, kv)
    tier.write(Record(key, kv, (memoryview(data),)))
    for layerwise in (False, True):
        with ChunkStore([make_tier()], host_bytes=1 << 22) as store:
            assert same(store.get(key, layerwise=layerwise), kv)
            assert store.flush()
            assert not [name for name in store.stats() if name.startswith(("misses", "rejected"))]
            assert bytes_in(tier, key) == data
            if isinstance(tier, FakeTier):
                tier.close = lambda: None  # type: ignore[method-assign]


@pytest.mark.parametrize("key", KEYS)
def test_scores_that_become_known_later_are_added(
    store: ChunkStore, tier: Tier, key: ChunkKey, make_tier: Callable[[], Tier]
) -> None:
    plain, scored = make_kv(key), make_kv(key, scored=True)
    store.put(key, plain)
    assert store.flush()
    assert bytes_in(tier, key) == written(plain, key)
    before = store.get(key)
    assert store.put(key, scored)
    assert same(store.get(key), scored) and same(store.peek(key), scored)  # at once
    assert store.flush()
    assert same(store.get(key), scored) and same(store.peek(key), scored)
    assert same(before, plain)
    assert bytes_in(tier, key) == written(scored, key)
    stats = store.stats()
    assert (stats["puts"], stats[f"writes.{tier.name}"], stats[f"entries.{tier.name}"]) == (2, 2, 1)
    assert tier.usage() == make_tier().usage() or tier.name == "redis"  # which knows when it was asked
    for again in (plain, scored, StoredKV(plain.layers, torch.ones(key.num_tokens))):
        assert store.put(key, again)  # nothing new
        assert store.flush()
        assert store.stats()["puts"] == 2
        assert same(store.get(key), scored)
    assert same(loaded(store, key), scored)


def test_they_are_added_to_what_another_process_wrote(tier: Tier, store: ChunkStore) -> None:
    tier.write(Record.of(KEY, PLAIN))
    store.put(KEY, SCORED)  # it is not in this one's memory
    assert store.flush()
    assert bytes_in(tier) == written(SCORED)


def test_a_put_without_scores_never_removes_them(
    make_tier: Callable[[], Tier], tier: Tier, store: ChunkStore
) -> None:
    early = make_tier()  # on S3 it has not listed what follows
    tier.write(Record.of(KEY, SCORED))
    for other in (tier, early, make_tier()):
        for kv in (PLAIN, OTHER):
            other.write(Record.of(KEY, kv))
            assert bytes_in(tier) == written(SCORED)
    store.put(KEY, PLAIN)
    assert store.flush()
    assert same(loaded(store), SCORED)


def replaced_while_it_is_read(tier: Tier) -> tuple[Source, bytearray]:
    tier.write(Record.of(KEY, PLAIN))
    source = tier.open(KEY)
    assert source is not None
    data = bytearray(source.num_bytes)
    layout = Layout.of(KEY)
    assert source.read(0, memoryview(data)[: layout.offset(1)]) == layout.offset(1)
    tier.write(Record.of(KEY, SCORED))
    return source, data


def test_a_record_that_is_replaced_while_it_is_read_stays_whole_or_is_gone(tier: Tier) -> None:
    """And the new one is never taken for a corrupt one, which would be removed."""
    source, data = replaced_while_it_is_read(tier)
    start = Layout.of(KEY).offset(1)
    if tier.name == "redis":
        with pytest.raises(Rejected, match="gone"):
            source.read(start, memoryview(data)[start:])
    else:
        assert source.read(start, memoryview(data)[start:]) == len(data) - start
        assert bytes(data) == written(PLAIN)
    if tier.name == "s3":
        with pytest.raises(Rejected, match="gone"):
            source.read(start, memoryview(data)[start:])  # a jump: asked for again
    source.close()
    assert bytes_in(tier) == written(SCORED)


def test_a_load_that_meets_a_new_record_does_not_remove_it(
    tier: Tier, store: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier.write(Record.of(KEY, PLAIN))
    stock = tier.open

    def replaced(key: ChunkKey) -> Any:
        monkeypatch.undo()
        source = stock(key)
        tier.write(Record.of(KEY, SCORED))
        return source

    monkeypatch.setattr(tier, "open", replaced)
    first = store.get(KEY)
    assert (first is None) == (tier.name == "redis")
    assert same(loaded(store), SCORED)
    rejected = {name: n for name, n in store.stats().items() if name.startswith("rejected")}
    assert rejected == ({"rejected.redis.gone": 1} if tier.name == "redis" else {})


def test_a_file_replaced_between_its_two_openings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, stock = DiskTier(tmp_path, BUDGET), os.open
    tier.write(Record.of(KEY, PLAIN))

    def opened(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            monkeypatch.undo()
            tier.write(Record.of(KEY, SCORED))
        return stock(path, flags, *rest)

    with ChunkStore([tier], host_bytes=1 << 22) as store:
        monkeypatch.setattr(os, "open", opened)
        assert same(store.get(KEY), PLAIN)
        assert same(loaded(store), SCORED)
        assert not [name for name in store.stats() if name.startswith("rejected")]


def test_two_processes_that_write_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has scores is done while the other, without, is still writing."""
    one, two = DiskTier(tmp_path, BUDGET), DiskTier(tmp_path, BUDGET)
    two._numbers = itertools.count(9)  # as another process's files have other names

    def fsync(file: int) -> None:
        monkeypatch.undo()
        two.write(Record.of(KEY, SCORED))

    monkeypatch.setattr(os, "fsync", fsync)
    one.write(Record.of(KEY, PLAIN))
    assert bytes_in(one) == written(SCORED)
    assert not list(tmp_path.rglob("*.tmp"))
    assert one.usage() == two.usage()  # it was read


def test_room_is_counted_for_what_is_there(tmp_path: Path) -> None:
    size = len(written(SCORED)) + 8192
    one, two = DiskTier(tmp_path, size), DiskTier(tmp_path, size)
    for kv in (PLAIN, SCORED):
        one.write(Record.of(KEY, kv))
        assert bytes_in(two) == bytes_in(one) == written(kv)
        assert one.usage() == two.usage() == DiskTier(tmp_path, size).usage()


@pytest.fixture
def slow() -> FakeTier:
    return FakeTier()


def test_scores_while_their_chunk_waits_to_be_taken_in(slow: FakeTier) -> None:
    with ChunkStore([slow], host_bytes=1 << 22) as store:
        hold = threading.Event()
        store._intake.submit(lambda: (hold.wait(60), None)[1], 0)
        store.put(KEY, PLAIN)
        assert same(store.get(KEY), PLAIN)
        for kv in (SCORED, PLAIN, OTHER):
            assert store.put(KEY, kv)
            assert same(store.get(KEY), SCORED)
        hold.set()
        assert store.flush()
        assert store._pending == {}
        assert same(store.get(KEY), SCORED)
        assert slow.records[KEY.digest] == written(SCORED)
        assert store.stats()["puts"] == 2


def test_an_update_for_which_there_is_no_room_is_dropped_and_can_be_tried_again(
    slow: FakeTier,
) -> None:
    with ChunkStore([slow], host_bytes=1 << 22, write_behind_bytes=PLAIN.num_bytes) as store:
        hold = threading.Event()
        store._intake.submit(lambda: (hold.wait(60), None)[1], 0)
        assert store.put(KEY, PLAIN)
        assert not store.put(KEY, SCORED)
        assert same(store.get(KEY), PLAIN)
        hold.set()
        assert store.flush()
        assert store._pending == {}
        assert store.stats()["puts_dropped"] == 1
        assert store.put(KEY, SCORED)
        assert store.flush()
        assert slow.records[KEY.digest] == written(SCORED)


def test_scores_put_during_a_load_survive_its_end(slow: FakeTier) -> None:
    slow.write(Record.of(KEY, PLAIN))
    with ChunkStore([slow], host_bytes=1 << 22, timeout_s=60) as store:
        slow.gate = threading.Semaphore(1)
        late = store.get(KEY, layerwise=True)
        assert isinstance(late, StreamingKV) and late.scores is None
        assert store.put(KEY, late)  # the store's own
        assert "puts" not in store.stats()
        store.put(KEY, SCORED)
        assert store._intake.flush(60)
        slow.gate.release(100)
        assert store.flush()
        assert same(late, PLAIN)
        assert same(store.get(KEY), SCORED)
        assert slow.records[KEY.digest] == written(SCORED)


def test_scores_are_there_before_layer_0(slow: FakeTier) -> None:
    slow.write(Record.of(KEY, SCORED))
    with ChunkStore([slow], host_bytes=1 << 22, timeout_s=60) as store:
        slow.gate = threading.Semaphore(1)  # the preamble
        late = store.get(KEY, layerwise=True)
        assert isinstance(late, StreamingKV) and late.layers.arrived == 0
        assert late.scores is not None and SCORED.scores is not None
        assert torch.equal(late.scores, SCORED.scores)
        slow.gate.release(100)
        assert same(late, SCORED)


def test_damaged_scores_are_a_miss(slow: FakeTier) -> None:
    slow.write(Record.of(KEY, SCORED))
    at = len(Layout.of(KEY, scored=True).head) + len(KEY.id_bytes)
    slow.records[KEY.digest][at] ^= 1
    with ChunkStore([slow], host_bytes=1 << 22) as store:
        assert store.get(KEY, layerwise=True) is None
        assert store.stats()["rejected.fake.corrupt"] == 1
        assert KEY.digest not in slow.records


@pytest.mark.parametrize("first, second", [(PLAIN, SCORED), (SCORED, PLAIN)])
def test_a_load_that_goes_on_in_a_tier_with_the_other_version(
    slow: FakeTier, first: StoredKV, second: StoredKV
) -> None:
    other = FakeTier("other")
    slow.write(Record.of(KEY, first))
    other.write(Record.of(KEY, second))
    slow.records[KEY.digest][Layout.of(KEY, first.scores is not None).offset(1)] ^= 1
    with ChunkStore([slow, other], host_bytes=1 << 22) as store:
        assert same(store.get(KEY), first)
        assert store.flush()
        assert same(store.get(KEY), SCORED)
        assert slow.records[KEY.digest] == written(SCORED)  # promoted


def test_a_chunk_that_leaves_host_memory_takes_its_scores_along(slow: FakeTier) -> None:
    with ChunkStore([slow], host_bytes=3 * PLAIN.num_bytes) as store:
        store.put(KEY, SCORED)
        assert store.flush()
        slow.records.clear()
        for seed in range(5, 12):
            store.put(make_key(seed, 500), make_kv(make_key(seed, 500)))
            assert store.flush()
        assert not store._host.contains(KEY)
        assert slow.records[KEY.digest] == written(SCORED)


@pytest.fixture
def both_memories(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChunkStore]:
    monkeypatch.setattr(gpu, "DELAY_S", 0.0)
    with ChunkStore(host_bytes=1 << 22, gpu_bytes=1 << 22) as store:
        yield store


@pytest.mark.parametrize("when", ["before", "while", "after"])
def test_scores_and_the_gpu_s_memory(
    both_memories: ChunkStore, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known before the chunk is copied there, while it is, and after."""
    store = both_memories
    store.put(KEY, PLAIN)
    assert store.flush() and store._gpu is not None
    if when == "before":
        store.put(KEY, SCORED)
        assert store.flush()
    stock = store._gpu.copy_in

    def copy_in(key: ChunkKey, memory: torch.Tensor) -> bool:
        if when == "while":
            store.put(KEY, SCORED)
            assert store._intake.flush(60)
        return stock(key, memory)

    monkeypatch.setattr(store._gpu, "copy_in", copy_in)
    assert store.get(KEY) is not None
    assert store.flush()
    assert store.locate(KEY) == "gpu"
    if when == "after":
        assert same(store.nearest(KEY), PLAIN)
        store.put(KEY, SCORED)
        assert store.flush()
    assert same(store.nearest(KEY), SCORED) and same(store.get(KEY), SCORED)
    assert store.stats()["hits.gpu"] >= 2


def test_scores_of_another_shape_are_refused(both_memories: ChunkStore) -> None:
    with pytest.raises(ValueError, match="scores of kv are torch.float32 .3. on cpu; expected"):
        both_memories.put(KEY, StoredKV(PLAIN.layers, torch.zeros(3)))


@pytest.mark.parametrize("later", [False, True])
def test_scores_do_not_change_with_what_was_put(both_memories: ChunkStore, later: bool) -> None:
    scores = torch.zeros(KEY.num_tokens)
    if later:
        both_memories.put(KEY, PLAIN)
        assert both_memories.flush()
    both_memories.put(KEY, StoredKV(PLAIN.layers, scores))
    assert both_memories.flush()
    scores += 1
    found = both_memories.get(KEY)
    assert found is not None and found.scores is not None and not found.scores.any()


STEPS = st.lists(
    st.tuples(
        st.integers(0, 2), st.sampled_from(["plain", "scored", "get", "late", "forget", "flush"])
    ),
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_any_order_of_puts_and_loads(steps: list[tuple[int, str]]) -> None:
    """Once a chunk's scores are put, its record has them for good; scores that come are right."""
    keys = [make_key(seed, num_tokens=10 + 245 * seed) for seed in range(3)]
    tier, known = FakeTier(), set()
    with ChunkStore([tier], host_bytes=1 << 22) as store:
        for number, step in [*steps, (0, "flush")]:
            key = keys[number]
            if step in ("plain", "scored"):
                assert store.put(key, make_kv(key, step == "scored"))
                if step == "scored":
                    known.add(number)
            elif step in ("get", "late"):
                found = store.get(key, layerwise=step == "late")
                if found is not None:
                    assert same(found, make_kv(key, found.scores is not None))
                    assert found.scores is None or number in known
            elif step == "forget":
                store.discard(key)
            else:
                assert store.flush()
                for one, other in enumerate(keys):
                    if other.digest in tier.records:
                        expected = written(make_kv(other, one in known), other)
                        assert tier.records[other.digest] == expected
                    else:
                        assert one not in known
