"""The store over tiers whose failures are staged: right KV or a counted miss, and nobody waits."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from chunks import SHAPE, make_key, make_kv, same
from tiers import FakeTier

from vllm_blend.core.kv import StoredKV
from vllm_blend.store import ChunkLost, ChunkStore, DiskTier, load
from vllm_blend.store.keys import ChunkKey
from vllm_blend.store.record import Layout, Record
from vllm_blend.store.streaming_layers import StreamingKV

KEY = make_key()
LAYOUT = Layout.of(KEY)
SIZE = -(-LAYOUT.payload_bytes // 4096) * 4096


def place(tier: FakeTier, key: ChunkKey) -> bytearray:
    """Puts a chunk into a slow tier, past the store."""
    tier.records[key.digest] = bytearray(b"".join(Record.of(key, make_kv(key)).parts))
    return tier.records[key.digest]


@pytest.fixture
def tier() -> FakeTier:
    return FakeTier()


@pytest.fixture
def store(tier: FakeTier) -> Iterator[ChunkStore]:
    with ChunkStore([tier], host_bytes=8 * SIZE, timeout_s=60) as store:
        yield store


def test_put_then_get(store: ChunkStore, tier: FakeTier) -> None:
    assert store.get(KEY) is None
    assert not store.contains(KEY)
    assert store.put(KEY, make_kv(KEY))
    assert same(store.get(KEY), make_kv(KEY))  # before or after it was taken in
    assert store.flush()
    assert same(store.get(KEY), make_kv(KEY))
    assert bytes(tier.records[KEY.digest]) == b"".join(Record.of(KEY, make_kv(KEY)).parts)
    assert store.put(KEY, make_kv(KEY))  # there already
    stats = store.stats()
    assert stats["misses.absent"] == 1
    assert stats["hits.host"] == 2
    assert stats["puts"] == stats["writes.fake"] == 1
    assert stats["bytes_written.fake"] == LAYOUT.num_bytes
    with pytest.raises(ValueError, match="kv has 2 layers; the model has 3"):
        store.put(make_key(1), StoredKV(make_kv(KEY).layers[:2]))


def test_a_slow_tier_s_chunk_is_verified_and_kept(store: ChunkStore, tier: FakeTier) -> None:
    place(tier, KEY)
    first = store.get(KEY)
    assert type(first) is StoredKV
    assert same(first, make_kv(KEY))
    assert same(store.get(KEY), make_kv(KEY))
    assert tier.opened == 1
    stats = store.stats()
    assert (stats["hits.fake"], stats["hits.host"]) == (1, 1)
    assert stats["bytes_read.fake"] == LAYOUT.payload_bytes
    assert store.lanes[0].load_time.measured


def test_every_layer_of_a_layerwise_load_can_be_used_when_it_is_there(
    store: ChunkStore, tier: FakeTier
) -> None:
    place(tier, KEY)
    tier.gate = threading.Semaphore(1)  # the preamble
    kv = store.get(KEY, layerwise=True)
    assert isinstance(kv, StreamingKV)
    kv.check(SHAPE, KEY.num_tokens)
    for layer, expected in enumerate(make_kv(KEY).layers):
        assert kv.layers.arrived == layer
        tier.gate.release()
        k, v = kv.layers[layer]
        assert (k == expected[0]).all() and (v == expected[1]).all()
    assert same(store.get(KEY), make_kv(KEY))
    assert store.stats()["hits.host"] == 1


@pytest.mark.parametrize("layer", [0, 2])
def test_a_corrupt_layer_is_a_miss_and_the_record_is_removed(
    store: ChunkStore, tier: FakeTier, layer: int
) -> None:
    place(tier, KEY)[LAYOUT.offset(layer) + 5] ^= 1
    assert store.get(KEY) is None
    assert KEY.digest not in tier.records
    assert store.get(KEY) is None
    stats = store.stats()
    assert stats["rejected.fake.corrupt"] == 1
    assert stats["misses.corrupt"] == stats["misses.absent"] == 1
    gc.collect()
    assert store.stats()["bytes.host"] == 0


def test_a_layer_is_read_while_the_one_before_it_is_checked(
    store: ChunkStore, tier: FakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And they arrive in order, however long a check takes."""
    place(tier, KEY)
    asked = [threading.Event() for _ in range(LAYOUT.num_layers)]
    stock = load.checksum

    def read(offset: int) -> None:
        if offset >= LAYOUT.preamble_bytes:
            asked[(offset - LAYOUT.preamble_bytes) // LAYOUT.layer_bytes].set()

    def checksum(key: ChunkKey, layer: int, *parts: memoryview) -> bytes:
        assert asked[min(layer + 1, len(asked) - 1)].wait(10), "the next layer was not read"
        if layer == 0:
            time.sleep(0.2)
            assert kv is None or kv.layers.arrived == 0
        return stock(key, layer, *parts)

    kv = None
    tier.on_read = read
    monkeypatch.setattr(load, "checksum", checksum)
    kv = store.get(KEY, layerwise=True)
    assert isinstance(kv, StreamingKV)
    assert same(kv, make_kv(KEY))


def test_what_comes_behind_a_corrupt_layer_does_not_arrive(store: ChunkStore, tier: FakeTier) -> None:
    data = place(tier, KEY)
    data[LAYOUT.offset(1)] ^= 1
    kv = store.get(KEY, layerwise=True)
    assert isinstance(kv, StreamingKV)
    assert store.flush()
    assert kv.layers.arrived == 1
    assert store.stats()["rejected.fake.corrupt"] == 1
    assert KEY.digest not in tier.records


def test_a_layerwise_load_that_turns_out_corrupt_says_so(store: ChunkStore, tier: FakeTier) -> None:
    place(tier, KEY)[LAYOUT.offset(1)] ^= 1
    kv = store.get(KEY, layerwise=True)
    assert kv is not None
    assert (kv.layers[0][0] == make_kv(KEY).layers[0][0]).all()
    with pytest.raises(ChunkLost, match="corrupt"):
        kv.layers[1]
    assert store.get(KEY) is None


def test_what_one_tier_lost_the_next_one_has(tier: FakeTier) -> None:
    second = FakeTier("second")
    with ChunkStore([tier, second], host_bytes=8 * SIZE) as store:
        place(tier, KEY)[LAYOUT.offset(1)] ^= 1
        place(second, KEY)
        offsets: list[int] = []
        second.on_read = offsets.append
        assert same(store.get(KEY), make_kv(KEY))
        assert offsets == [0, LAYOUT.offset(1), LAYOUT.offset(2)]  # layer 0 was good
        assert store.flush()
        assert bytes(tier.records[KEY.digest]) == bytes(second.records[KEY.digest])  # promoted
        assert second.written == []
        assert store.stats()["hits.second"] == 1


def test_concurrent_misses_are_one_load(store: ChunkStore, tier: FakeTier) -> None:
    place(tier, KEY)
    tier.gate = threading.Semaphore(0)
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(store.get, KEY) for _ in range(8)]
        while not tier.opened:
            pass
        for _ in range(4):
            tier.gate.release()
        assert all(same(future.result(60), make_kv(KEY)) for future in futures)
    assert tier.opened == 1


def test_get_many_loads_at_the_same_time(store: ChunkStore, tier: FakeTier) -> None:
    keys = [make_key(i) for i in range(3)]
    for key in keys:
        place(tier, key)
    met = threading.Barrier(3, timeout=60)
    tier.on_read = lambda offset: None if offset else (met.wait(), None)[1]
    store.prefetch(keys[:1])
    found = store.get_many([*keys, make_key(9)])
    assert all(same(kv, make_kv(key)) for kv, key in zip(found, keys, strict=False))
    assert found[3] is None


def test_a_tier_that_is_down_is_left_alone_for_a_while(store: ChunkStore, tier: FakeTier) -> None:
    place(tier, KEY)
    tier.failing = True
    for _ in range(5):
        assert store.get(KEY) is None
    assert tier.opened == 1  # asked once; then it was paused
    stats = store.stats()
    assert stats["failures.fake.read.down"] == 1
    assert stats["skipped.fake"] == 4
    assert stats["misses.unavailable"] == 5
    tier.failing = False
    store.lanes[0]._reads.worked()  # the pause is over
    assert same(store.get(KEY), make_kv(KEY))


def test_writing_never_waits_for_a_slow_tier(tier: FakeTier) -> None:
    tier.gate = threading.Semaphore(0)
    keys = [make_key(i) for i in range(6)]
    limit = 2 * LAYOUT.num_bytes
    with ChunkStore([tier], host_bytes=8 * SIZE, write_behind_bytes=limit) as store:
        for key in keys:
            store.put(key, make_kv(key))
            store._intake.flush(60)
        stats = store.stats()
        assert all(same(store.get(key), make_kv(key)) for key in keys)  # from host memory
        tier.gate.release(10)
        assert store.flush()
        dropped = store.stats()["writes_dropped.fake"]
        assert stats["entries.host"] == 6
        assert dropped >= 3
        assert len(tier.records) == 6 - dropped


def test_what_is_purged_is_found_nowhere_also_while_it_is_written(tier: FakeTier) -> None:
    tier.gate = threading.Semaphore(0)
    other, below = make_key(1), make_key(2)
    with ChunkStore([tier], host_bytes=8 * SIZE) as store:
        for key in (KEY, other):
            store.put(key, make_kv(key))
        held = store.get(KEY)
        place(tier, below)
        for key in (KEY, below):
            store.purge(key)
            assert store.get(key) is None and not store.contains(key)
        assert same(held, make_kv(KEY))  # who uses it goes on
        tier.gate.release(10)
        assert store.flush() and store.flush()
        assert list(tier.records) == [other.digest]
        assert same(store.get(other), make_kv(other))
        store.put(KEY, make_kv(KEY))
        assert store.flush() and same(store.get(KEY), make_kv(KEY)) and KEY.digest in tier.records


def test_more_than_may_wait_is_dropped_not_waited_for(tier: FakeTier) -> None:
    num_bytes = make_kv(KEY).num_bytes
    with ChunkStore([tier], host_bytes=8 * SIZE, write_behind_bytes=num_bytes) as store:
        hold = threading.Event()
        store._intake.submit(lambda: (hold.wait(60), None)[1], 1)
        answers = [store.put(make_key(i), make_kv(make_key(i))) for i in range(3)]
        hold.set()
        assert answers == [False] * 3
        assert store.stats()["puts_dropped"] == 3
        assert store.get(make_key(0)) is None
        assert store.flush()
        assert store.put(KEY, make_kv(KEY))


def test_failed_writes_are_counted_and_paused(store: ChunkStore, tier: FakeTier) -> None:
    tier.failing = True
    for i in range(4):
        store.put(make_key(i), make_kv(make_key(i)))
    assert store.flush()
    stats = store.stats()
    assert stats["failures.fake.write.down"] == 1
    assert stats["writes_dropped.fake"] == 3
    assert all(same(store.get(make_key(i)), make_kv(make_key(i))) for i in range(4))


def test_a_chunk_that_leaves_host_memory_goes_to_the_next_tier(
    store: ChunkStore, tier: FakeTier
) -> None:
    keys = [make_key(i) for i in range(9)]
    for key in keys[:8]:
        store.put(key, make_kv(key))
    assert store.flush()
    tier.records.clear()  # as if it had evicted them
    store.put(keys[8], make_kv(keys[8]))
    assert store.flush()
    kept = [store._host.contains(key) for key in keys]
    assert kept.count(True) == 8
    assert all(key.digest in tier.records for key in keys[:4])  # written before they may go
    assert all(same(store.get(key), make_kv(key)) for key in keys if key.digest in tier.records)


def test_without_room_in_host_memory_loads_still_work(tier: FakeTier) -> None:
    with ChunkStore([tier], host_bytes=0) as store:
        store.put(KEY, make_kv(KEY))
        assert store.flush()
        for _ in range(2):
            assert same(store.get(KEY), make_kv(KEY))
            assert store.flush()
        assert store.stats()["overflows.host"] == 3
        assert store.stats()["hits.fake"] == 2


def test_an_unexpected_error_in_a_tier_is_a_miss(store: ChunkStore, tier: FakeTier) -> None:
    place(tier, KEY)

    def crash(offset: int) -> None:
        raise ZeroDivisionError

    tier.on_read = crash
    assert store.get(KEY) is None
    tier.on_read = lambda offset: None if offset != LAYOUT.offset(1) else crash(offset)
    kv = store.get(KEY, layerwise=True)
    assert kv is not None
    with pytest.raises(ChunkLost):
        kv.layers[2]
    del kv
    assert store.flush()
    assert store.stats()["bytes.host"] == 0, "its memory is given back"
    tier.on_read = lambda offset: None
    assert same(store.get(KEY), make_kv(KEY))


def test_a_hanging_tier_is_a_miss_after_the_timeout(tier: FakeTier) -> None:
    place(tier, KEY)
    tier.gate = threading.Semaphore(0)
    with ChunkStore([tier], host_bytes=8 * SIZE, timeout_s=0.05) as store:
        assert store.get(KEY) is None
        assert store.stats()["misses.unavailable"] == 1
        tier.gate.release(10)


def test_closing_ends_loads_that_are_waited_for(tier: FakeTier) -> None:
    place(tier, KEY)
    tier.gate = threading.Semaphore(2)  # preamble and layer 0
    store = ChunkStore([tier], host_bytes=8 * SIZE)
    kv = store.get(KEY, layerwise=True)
    assert kv is not None and kv.layers[0]
    closing = threading.Thread(target=store.close)
    closing.start()
    while not store._loads._closed:
        pass
    tier.gate.release(10)
    with pytest.raises(ChunkLost):
        kv.layers[2]
    closing.join(60)
    assert not closing.is_alive()
    assert store.get(KEY) is None


def test_kv_in_use_is_never_overwritten(store: ChunkStore) -> None:
    """Many threads put and get more chunks than there is room for; each checks what it holds."""
    keys = [make_key(i, num_tokens=10 + i % 17) for i in range(40)]
    expected = {key.digest: make_kv(key) for key in keys}

    def work(seed: int) -> int:
        hits = 0
        held: list[tuple[ChunkKey, StoredKV]] = []
        for step in range(150):
            key = keys[(step * (seed + 3) + seed) % len(keys)]
            kv = store.get(key)
            if kv is None:
                store.put(key, expected[key.digest])
                continue
            hits += 1
            held = [*held[-3:], (key, kv)]
            assert all(same(kv, expected[key.digest]) for key, kv in held)
        return hits

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(work, range(4))) > 0
    gc.collect()
    assert store.flush()
    assert store.stats()["evictions.host"] > 0


def test_the_next_store_finds_the_first_one_s_chunks_on_disk(tmp_path: Path) -> None:
    keys = [make_key(i) for i in range(3)]
    with ChunkStore([DiskTier(tmp_path, 1 << 30)], host_bytes=8 * SIZE) as store:
        for key in keys:
            store.put(key, make_kv(key))
    with ChunkStore([DiskTier(tmp_path, 1 << 30)], host_bytes=8 * SIZE) as store:
        assert all(store.contains(key) for key in keys)
        assert all(same(kv, make_kv(key)) for kv, key in zip(store.get_many(keys), keys, strict=True))
        assert store.get(make_key(0, salt="another tenant")) is None
        assert store.stats()["hits.disk"] == 3


def test_a_store_that_is_only_dropped_still_ends(tier: FakeTier) -> None:
    store = ChunkStore([tier], host_bytes=8 * SIZE)
    threads = [store._intake._thread, store.lanes[0].writer._thread]
    store.put(KEY, make_kv(KEY))
    store.flush()
    del store
    gc.collect()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert KEY.digest in tier.records
