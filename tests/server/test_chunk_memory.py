"""Chunks' KV in one block of memory; without a GPU the block is not page-locked."""

from __future__ import annotations

import ctypes
import mmap
import platform
import random
import re
from types import SimpleNamespace

import psutil
import pytest
import torch

from vllm_blend.core.kv import KVShape, StoredKV
from vllm_blend.core.layers import BlockLayers
from vllm_blend.model.kv_loader import joined
from vllm_blend.server.worker.chunk_memory import ChunkMemory
from vllm_blend.server.worker.collected import HostCopies, HostRows
from vllm_blend.store import arena
from vllm_blend.store.arena import LEFT_FREE, TOUCHED_AT_ONCE

MADV_DONTNEED = 4
LINUX = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def chunk(num_tokens: int, seed: int, device: str) -> StoredKV:
    generator = torch.Generator().manual_seed(seed)

    def one() -> torch.Tensor:
        return torch.randn(num_tokens, 2, 16, generator=generator).half().to(device)

    return StoredKV(tuple((one(), one()) for _ in range(3)))


def copied(memory: ChunkMemory, key: bytes, kv: StoredKV) -> StoredKV:
    """A copy in ``memory``, as it is made of what is collected."""
    device = kv.layers[0][0].device
    copies = HostCopies(device) if device.type == "cuda" else None
    rows = HostRows(memory.reserve(key, KVShape(3, 2, 16, torch.half), kv.num_tokens), copies)
    for index, layer in enumerate(kv.layers):
        both = torch.stack(layer)
        for first in range(0, kv.num_tokens if copies is None else 0, 7):
            rows.write(index, first, *both[:, first : first + 7].clone())
        if copies is not None:
            parts = []
            for first in range(0, kv.num_tokens, 7):
                part = both[:, first : first + 7]
                found = rows.copied(first, part.shape[1])
                assert found is not None and found[0] is copies
                parts.append((found[1], first))
            copies.prepared(parts)(index, both)
    if copies is not None:
        copies.end().synchronize()
    return rows.kv()


def same(one: StoredKV, two: StoredKV) -> bool:
    return all(
        torch.equal(a.cpu(), b.cpu())
        for pair in zip(one.layers, two.layers, strict=True)
        for a, b in zip(*pair, strict=True)
    )


def test_what_is_kept_and_held_is_not_overwritten(device: str) -> None:
    """Chunks come and go at random; some are held by requests beyond that, in part."""
    choose = random.Random(0)
    memory = ChunkMemory(64 << 10)
    kept: dict[bytes, tuple[StoredKV, StoredKV]] = {}
    held: list[tuple[StoredKV, StoredKV]] = []
    overflows = 0
    for turn in range(300):
        key = b"%d" % choose.randrange(12)
        source = chunk(choose.randint(1, 40), turn, device)
        copy = copied(memory, key, source)
        assert all(t.device.type == "cpu" and t.is_contiguous() for pair in copy.layers for t in pair)
        overflows += key not in memory._extents
        kept[key] = source, copy
        if choose.random() < 0.3:
            held.append((source.tokens(0, 1), copy.tokens(0, 1)))
        if choose.random() < 0.5:
            gone = choose.choice(sorted(kept))
            del kept[gone]
            memory.free(gone)
        held = held[-3:]
        assert all(same(*pair) for pair in [*kept.values(), *held])
    assert 0 < overflows < 150  # the block was full at times, and used again and again
    for key in [*kept, b"never seen"]:
        memory.free(key)
    del kept, held, copy
    memory._arena.collect()
    assert memory._arena.free_bytes == memory._arena.size


def test_with_an_eighth_more_nearly_all_chunks_find_room_in_one_piece() -> None:
    """Sixty chunks of 900 to 1,250 units, the oldest of which leave for others."""
    choose = random.Random(0)
    budget = 60 * 1250 * 192
    sizes: dict[int, tuple[int, torch.Tensor]] = {}
    for share, most in ((8, None), (9, 0.03)):
        memory, apart = ChunkMemory(budget * share // 8), 0
        sizes.clear()
        for turn in range(1500):
            num_tokens = choose.randint(900, 1250)
            while sum(size for size, _ in sizes.values()) + num_tokens * 192 > budget:
                gone = choose.choice([*sizes][:15])
                del sizes[gone]
                memory.free(b"%d" % gone)
            room = memory.reserve(b"%d" % turn, KVShape(3, 2, 8, torch.half), num_tokens)
            sizes[turn] = room.nbytes, room
            apart += b"%d" % turn not in memory._extents
        assert apart > 100 if most is None else apart < most * 1500


def share_backed(memory: ChunkMemory) -> float:
    """Of the block's pages, those that Linux has given: nothing else in the process counts."""
    block = memory._arena._bytes[: memory._arena.size]
    pages = (ctypes.c_ubyte * (block.nbytes // mmap.PAGESIZE))()
    address, size = ctypes.c_void_p(block.ctypes.data), ctypes.c_size_t(block.nbytes)
    assert ctypes.CDLL(None).mincore(address, size, pages) == 0
    return sum(page & 1 for page in pages) / len(pages)


@pytest.mark.skipif(LINUX < (5, 14), reason="Linux before 5.14 backs no memory that is not used")
def test_memory_is_there_before_it_is_used() -> None:
    """What lies in it stays."""
    memory = ChunkMemory(5 * TOUCHED_AT_ONCE // 2, pinned=False)
    assert share_backed(memory) == 1
    kept = copied(memory, b"a", source := chunk(33, 1, "cpu"))
    assert memory._arena.touch() and same(kept, source)


def test_of_little_memory_none_is_taken_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 5 * TOUCHED_AT_ONCE // 2
    little = SimpleNamespace(available=size + LEFT_FREE - 1)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: little)
    stock = arena.Arena.touch

    def touch(new: arena.Arena) -> bool:
        assert new._bytes is not None  # it may have been another's, who has used it
        assert arena._advise(new._bytes[: new.size], MADV_DONTNEED)
        return stock(new)

    with monkeypatch.context() as patch:
        patch.setattr(arena.Arena, "touch", touch)
        memory = ChunkMemory(size, pinned=False)
    assert share_backed(memory) < 0.1
    assert not memory._arena.touch()


@pytest.mark.parametrize("on_gpu", [True, False])
def test_addresses_are_the_tensors_own(monkeypatch: pytest.MonkeyPatch, on_gpu: bool) -> None:
    whole = copied(ChunkMemory(1 << 20), b"a", chunk(33, 1, "cpu"))
    monkeypatch.setattr(torch.Tensor, "is_cuda", on_gpu)
    for part in (slice(None), slice(3, 20)):
        kv = whole.tokens(*part.indices(33)[:2])
        for one in (kv, StoredKV(tuple(kv.layers))):
            found = one.addresses(2)
            assert (found is not None) == on_gpu
            if found is not None:
                assert found.tolist() == [[k[2:].data_ptr(), v[2:].data_ptr()] for k, v in kv.layers]
    shifted = torch.zeros(4, 2, 33, 2, 17, dtype=torch.half)  # rows of 68 bytes
    assert StoredKV(BlockLayers(shifted)).addresses(0) is None


@pytest.mark.gpu
def test_a_gpu_can_copy_it_while_the_host_goes_on() -> None:
    memory = ChunkMemory(1 << 20)
    source = chunk(33, 1, "cuda")
    copy = copied(memory, b"a", source)
    assert all(t.is_pinned() for pair in copy.layers for t in pair)
    assert copy.addresses(0) is None  # no kernel reads it where it lies
    for k, v in copy.layers:
        both = joined(k, v)
        assert both is not None and both.is_pinned()
    assert same(source, copy)


def test_no_room_at_all(device: str) -> None:
    memory = ChunkMemory(0)
    source = chunk(5, 1, device)
    assert same(copied(memory, b"a", source), source)
