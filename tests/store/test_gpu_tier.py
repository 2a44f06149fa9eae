"""Chunks in the GPU's memory; where there is no GPU, the host's memory stands for it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from chunks import SHAPE, make_key, make_kv, same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_blend.store import ChunkStore, DiskTier, ModelKey, gpu, open_store
from vllm_blend.store.record import PAGE, Layout
from vllm_blend.store.store import IN_MEMORY

BYTES = -(-Layout.of(make_key()).payload_bytes // PAGE) * PAGE


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "DELAY_S", 0.0)


def store(gpu_chunks: int, host_chunks: int = 8, **other: Any) -> ChunkStore:
    return ChunkStore(host_bytes=host_chunks * BYTES, gpu_bytes=gpu_chunks * BYTES, **other)


def use(store: ChunkStore, seed: int) -> None:
    """One request; what it leaves to do is done when this returns."""
    assert same(store.get(make_key(seed)), make_kv(make_key(seed)))
    assert store.flush()


def test_what_was_found_in_host_memory_is_found_on_the_gpu_next() -> None:
    key = make_key()
    with store(2) as chunks:
        chunks.put(key, make_kv(key))
        assert chunks.flush()
        assert chunks.locate(key) == "host"
        first = chunks.get(key)
        assert chunks.flush()
        assert chunks.locate(key) == "gpu"
        assert set(IN_MEMORY) == {"gpu", "host"}
        second = chunks.get(key)
        assert same(second, make_kv(key))
        assert first is not None and second is not None
        assert first.layers[0][0].data_ptr() != second.layers[0][0].data_ptr()
        assert chunks.get(key) is second  # not copied again
        stats = chunks.stats()
        assert (stats["hits.host"], stats["hits.gpu"], stats["writes.gpu"]) == (1, 2, 1)
        assert (stats["entries.gpu"], stats["bytes.gpu"]) == (1, BYTES)


def test_the_least_recently_used_leave() -> None:
    with store(3) as chunks:
        for seed in range(4):
            chunks.put(make_key(seed), make_kv(make_key(seed)))
        assert chunks.flush()
        for seed in (0, 1, 2):
            use(chunks, seed)
        use(chunks, 0)
        use(chunks, 3)  # in the place of 1
        assert [chunks.locate(make_key(seed)) for seed in range(4)] == ["gpu", "host", "gpu", "gpu"]
        assert chunks.stats()["bytes.gpu"] == 3 * BYTES


def test_what_is_in_use_stays_as_it_is() -> None:
    with store(1) as chunks:
        for seed in range(2):
            chunks.put(make_key(seed), make_kv(make_key(seed)))
        assert chunks.flush()
        use(chunks, 0)
        held = chunks.get(make_key(0))
        assert held is not None
        part = held.tokens(3, 9).layers[2][1]  # a view of a view
        del held
        use(chunks, 1)
        assert chunks.stats()["full.gpu"] == 1
        assert chunks.locate(make_key(1)) == "host"
        assert torch.equal(part.cpu(), make_kv(make_key(0)).layers[2][1][3:9])
        del part
        use(chunks, 1)
        assert chunks.locate(make_key(1)) == "gpu"
        assert chunks.stats()["evictions.gpu"] == 1


def test_a_request_does_not_wait_for_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    awake, stock = threading.Event(), gpu.GpuTier.copy_in
    monkeypatch.setattr(gpu.GpuTier, "copy_in", lambda *args: awake.wait(60) and stock(*args))
    key = make_key()
    with store(1) as chunks:
        chunks.put(key, make_kv(key))
        assert chunks.flush()
        for _ in range(3):  # copied once
            assert same(chunks.get(key), make_kv(key))
        assert not chunks.flush(0.05)
        awake.set()
        assert chunks.flush()
        assert chunks.stats()["writes.gpu"] == 1
        assert chunks.get(key) is not None
        assert chunks.stats()["hits.gpu"] == 1


def test_it_outlives_host_memory_and_is_discarded_with_it(tmp_path: Path) -> None:
    with ChunkStore([DiskTier(tmp_path, 1 << 30)], host_bytes=BYTES, gpu_bytes=2 * BYTES) as chunks:
        for seed in range(2):
            chunks.put(make_key(seed), make_kv(make_key(seed)))
            assert chunks.flush()
            use(chunks, seed)
        assert chunks.stats()["entries.host"] == 1
        use(chunks, 0)
        assert chunks.stats()["hits.gpu"] == 1
        chunks.discard(make_key(0))
        assert chunks.locate(make_key(0)) == "disk"
        use(chunks, 0)
        assert chunks.stats()["hits.disk"] == 1


def test_fp8_is_widened_there() -> None:
    key = make_key(0, 20, ModelKey("w", "{}", SHAPE, storage="fp8"))
    with store(1, storage="fp8") as chunks:
        chunks.put(key, make_kv(key))
        assert chunks.flush()
        first = chunks.get(key)
        assert first is not None and chunks.flush()
        second = chunks.get(key)
        assert chunks.stats()["hits.gpu"] == 1
        assert same(second, first)
        assert second is not None and second.described[0][0].device == second.layers[0][0].device


def test_the_request_itself_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "DELAY_S", 0.2)
    with store(1) as chunks:
        chunks.put(make_key(), make_kv(make_key()))
        assert chunks.flush()
        start = time.monotonic()
        use(chunks, 0)
        assert time.monotonic() - start >= 0.2
        assert chunks.stats()["writes.gpu"] == 1


def test_a_chunk_larger_than_all_is_left_out() -> None:
    key = make_key(0, 200)
    with store(1, host_chunks=20) as chunks:
        chunks.put(key, make_kv(key))
        assert chunks.flush()
        assert same(chunks.get(key), make_kv(key))
        assert chunks.flush()
        assert chunks.stats()["full.gpu"] == 1


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 3)), max_size=40))
def test_any_order_of_use(steps: list[tuple[int, int]]) -> None:
    """Chunks of several sizes; some stay in use for a while."""
    keys = [make_key(seed, 10 + 25 * (seed % 4)) for seed in range(8)]
    held: list[Any] = []
    with ChunkStore(host_bytes=40 * BYTES, gpu_bytes=6 * BYTES + 100) as chunks:
        for seed, keep in steps:
            kv = chunks.get(keys[seed])
            if kv is None:
                chunks.put(keys[seed], make_kv(keys[seed]))
            else:
                assert same(kv, make_kv(keys[seed]))
                held = [*held, (kv, seed)][-keep:] if keep else []
            assert chunks.flush()
            assert chunks.stats()["bytes.gpu"] <= 6 * BYTES + 100
            for kv, number in held:
                assert same(kv, make_kv(keys[number]))


def test_by_plain_values() -> None:
    with open_store({"host_gb": 1e-3, "gpu_gb": 1e-3}) as chunks:
        assert chunks.stats()["bytes.gpu"] == 0
    with open_store({"host_gb": 1e-3}) as chunks:
        assert "bytes.gpu" not in chunks.stats()
        assert chunks.nearest(make_key()) is None
    with pytest.raises(ValueError, match="gpu_gb of store is -1"):
        open_store({"host_gb": 1e-3, "gpu_gb": -1})
