"""Chunks whose last layers are still to come when the step that reuses them begins."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from asking import answer, outputs, prompt_of, report, scheduler
from chunks import make_key, make_kv
from engines import Engine
from test_tiers import FIELD, disk, flush, server

from vllm_blend.core.kv import KVShape
from vllm_blend.core.plans import ChunkIds
from vllm_blend.core.settings import BlendSettings
from vllm_blend.model.blending import Blending
from vllm_blend.server.scheduler.tier_fetches import rows_beside
from vllm_blend.server.worker import tier_io
from vllm_blend.server.worker.tier_io import TierIO
from vllm_blend.store import DiskTier, ModelKey
from vllm_blend.store.streaming_layers import StreamingKV, StreamingLayers
from vllm_blend.store.tier import TierError

CHUNK = ChunkIds("", tuple(range(50)), (1,))


class LastLayers:
    """Reads of records whose last layers come once a step that blends has begun.

    Args:
        comes: "whole", "damaged", or "never".
    """

    def __init__(self, patch: pytest.MonkeyPatch, comes: str) -> None:
        self.begun, self.in_time = threading.Event(), True
        stock_open, stock_blend = DiskTier.open, Blending._blend

        def opened(tier: Any, key: Any) -> Any:
            source = stock_open(tier, key)
            if source is None:
                return None

            def read(offset: int, into: memoryview) -> int:
                count = source.read(offset, into)
                if offset + len(into) == source.num_bytes:
                    self.in_time &= self.begun.wait(20)
                    if comes == "never":
                        raise TierError("gone", "the disk went away")
                    into[-1] ^= comes == "damaged"
                return count

            return SimpleNamespace(num_bytes=source.num_bytes, read=read, close=source.close)

        def blend(*args: Any) -> Any:
            self.begun.set()
            return stock_blend(*args)

        patch.setattr(DiskTier, "open", opened)
        patch.setattr(Blending, "_blend", blend)
        patch.setattr(tier_io, "SHORT", 0.0)  # a tiny model's loads are short


@pytest.fixture(scope="module")
def folder(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the chunks of ``asked``."""
    found = tmp_path_factory.mktemp("chunks")
    with server(tiny, disk(found)) as engine:
        outputs(engine, *asked(engine))
        flush(engine)
    assert len(list(found.rglob("*.safetensors"))) == 3
    return found


def asked(engine: Engine) -> tuple[list[list[int]], list[Any]]:
    prompt, spans = prompt_of(engine, [701, 702, 703])
    return [prompt], [FIELD | {"spans": spans, "policy": "static"}]


@contextmanager
def reading(tiny: Any, folder: Path, comes: str) -> Iterator[tuple[Engine, LastLayers]]:
    """An engine that knows how fast it is, on a disk of which ``comes`` tells."""
    with pytest.MonkeyPatch.context() as patch, server(tiny, disk(folder)) as engine:
        scheduler(engine).blend_fetches._token_seconds = 1.0
        yield engine, LastLayers(patch, comes)


def test_a_step_begins_before_the_last_layers_have_come(tiny: Any, folder: Path) -> None:
    with reading(tiny, folder, "whole") as (engine, last):
        (first,) = outputs(engine, *asked(engine))
        assert last.begun.is_set() and last.in_time
        told = report(first)
        assert (told["reused_tokens"], told["loaded_chunks"], told["missed_chunks"]) == (300, 3, 0)
        flush(engine)
        scheduler(engine).reset_prefix_cache()
        (again,) = outputs(engine, *asked(engine))
        assert (report(again)["reused_tokens"], report(again)["loaded_chunks"]) == (300, 0)
        assert answer(first) == answer(again)
        chunks = engine.model.blending.chunks
        assert not any(isinstance(kv, StreamingKV) for kv in chunks._chunks.values())
        assert not chunks.tiers._late and engine.model.blending.guard.is_open


@pytest.mark.parametrize("comes, reason", [("damaged", "corrupt"), ("never", "unavailable")])
def test_what_does_not_come_is_a_full_prefill(tiny: Any, folder: Path, comes: str, reason: str) -> None:
    """However often: blending stays on, and nobody reuses what is lost."""
    with reading(tiny, folder, comes) as (engine, last):
        (prompt,), _ = asked(engine)
        (full,) = outputs(engine, [prompt], [None])
        for _ in range(5):
            scheduler(engine).reset_prefix_cache()
            last.begun.clear()
            (found,) = outputs(engine, *asked(engine))
            assert answer(found) == answer(full)
            assert report(found)["reused_tokens"] == 0
            if not last.begun.is_set():
                break  # it was not to be had at once
        assert last.in_time and engine.model.blending.guard.is_open
        tiers = engine.model.blending.chunks.tiers
        assert tiers.store.stats()[f"misses.{reason}"] >= 3
        flush(engine)
        scheduler(engine).reset_prefix_cache()
        (later,) = outputs(engine, *asked(engine))  # computed meanwhile
        assert report(later)["reused_tokens"] == 300


def fetching(overlap: float, layers: int = 4) -> tuple[TierIO, StreamingLayers]:
    """A chunk's fetch that has found it; no layer is there yet."""
    key = make_key()
    late = StreamingLayers(make_kv(key).layers, "x", 60)
    lost: list[Any] = []
    store: Any = SimpleNamespace(get=lambda key, layerwise: StreamingKV(late), lose=lost.append)
    tiers = TierIO(store, ModelKey("weights", "rope", KVShape(1, 1, 8, torch.float32)))
    tiers.fetch(b"a", CHUNK, overlap)
    tiers._fetches[b"a"].result(60)
    return tiers, late


def test_a_fetch_ends_when_what_is_left_may_overlap() -> None:
    tiers, late = fetching(overlap=1e6)
    late._began_at -= 1e6  # layers take long
    late.arrive()
    assert tiers.fetched() == {}  # one layer says little
    late.arrive()
    (kv,) = tiers.fetched().values()
    assert isinstance(kv, StreamingKV) and kv.layers is late
    assert tiers.fetched() == {} and tiers.take_lost() == {} and tiers.settled() == {}
    late.arrive()
    assert tiers.fetched() == {}
    (whole,) = tiers.settled().values()
    assert not isinstance(whole, StreamingKV) and whole.num_tokens == kv.num_tokens
    assert tiers.settled() == {} and tiers.take_lost() == {}


def test_a_fetch_that_may_not_overlap_waits_for_all_layers() -> None:
    tiers, late = fetching(overlap=1e-9)
    for _ in range(len(late)):
        assert tiers.fetched() == {}
        late.arrive()
    (kv,) = tiers.fetched().values()
    assert kv is not None and kv.layers[0]


@pytest.mark.parametrize("found", [False, True], ids=["before it is told", "after it"])
def test_a_load_that_ends_early_is_lost(found: bool) -> None:
    tiers, late = fetching(overlap=1e6)
    late._began_at -= 1e6
    if found:
        late.arrive(), late.arrive()
        assert tiers.fetched()
    late.lose("disk: corrupt")
    assert tiers.fetched() == ({} if found else {b"a": None})
    assert list(tiers.take_lost()) == [b"a"] * found
    assert tiers.take_lost() == {} and tiers.settled() == {} and not tiers._names


def test_a_dropped_chunk_is_not_told_of() -> None:
    tiers, late = fetching(overlap=1e6)
    late._began_at -= 1e6
    late.arrive(), late.arrive()
    assert tiers.fetched()
    tiers.forget(b"a")
    late.arrive()
    assert tiers.fetched() == {} and tiers.settled() == {} and tiers.take_lost() == {}


def test_the_rows_beside_a_load() -> None:
    """Those that the step computes; of a policy that asks first the question's alone."""
    static = BlendSettings(policy="static", recomp_ratio=0.1)
    asks = BlendSettings(policy="ahead*static", recomp_ratio=0.1)
    assert rows_beside(static, 1100, 1000) == 100 + 100
    assert rows_beside(asks, 1100, 1000) == 100
    assert rows_beside(asks, 2000, 1000) == 1000 + 200  # so many new tokens that it is not asked
