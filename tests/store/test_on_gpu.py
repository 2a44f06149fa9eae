"""The store's GPU memory, on a GPU."""

from __future__ import annotations

import pytest
import torch
from chunks import MODEL, SHAPE, make_key, make_kv

from vllm_blend.store import ChunkStore, ModelKey
from vllm_blend.store.arena import Arena
from vllm_blend.store.record import PAGE, Layout

pytestmark = pytest.mark.gpu


def test_an_extent_is_in_use_while_a_view_of_it_lives() -> None:
    arena = Arena(3 * PAGE, device=torch.device("cuda"))
    extent = arena.allocate(2 * PAGE)
    assert extent is not None and not extent.in_use
    part = arena.tensor(extent, 5000)[100:200]
    assert part.is_cuda and extent.in_use
    arena.free(extent)
    assert arena.allocate(2 * PAGE) is None
    del part
    assert arena.allocate(2 * PAGE) is not None


def test_chunks_are_copied_and_can_be_read_in_place() -> None:
    shape = type(SHAPE)(3, 2, 64, torch.bfloat16)
    key = make_key(0, 99, ModelKey(MODEL.weights, MODEL.rope, shape))
    size = Layout.of(key).payload_bytes + PAGE
    with ChunkStore(host_bytes=size, gpu_bytes=size) as chunks:
        chunks.put(key, make_kv(key))
        assert chunks.flush()
        host = chunks.get(key)
        assert chunks.flush()
        kv = chunks.get(key)
        assert host is not None and kv is not None
        assert not host.layers[0][0].is_cuda and kv.layers[0][0].is_cuda
        for there, here in zip(kv.layers, host.layers, strict=True):
            assert all(torch.equal(a.cpu(), b) for a, b in zip(there, here, strict=True))
        addresses = kv.addresses(0)
        assert addresses is not None
        assert addresses[2, 1] == kv.layers[2][1].data_ptr()
