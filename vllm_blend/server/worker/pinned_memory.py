"""Host memory that a GPU copies from while the host goes on, for a server's chunks."""

from __future__ import annotations

import torch

from vllm_blend.core.kv import StoredKV
from vllm_blend.core.layers import BlockLayers
from vllm_blend.core.plans import ChunkKey
from vllm_blend.store.arena import Arena, Extent


class PinnedMemory:
    """Chunks' KV in one block of page-locked memory, reserved at once.

    (torch's own pinned memory comes in powers of two, which for chunks is up to twice what they need.)

    Args:
        num_bytes: of the block.
        pinned: False: plain memory; None: page-locked where there is a GPU.
    """

    def __init__(self, num_bytes: int, pinned: bool | None = None) -> None:
        self._arena = Arena(num_bytes, pinned)
        self._extents: dict[ChunkKey, Extent] = {}

    def copy(self, key: ChunkKey, kv: StoredKV) -> StoredKV:
        """A copy of ``kv``, there when this returns; in memory of its own if no room is left.

        Its scores, in host memory already, are not copied.
        """
        self.free(key)
        extent = self._arena.allocate(kv.num_bytes)
        if extent is None:
            pin = kv.layers[0][0].is_cuda
            memory = torch.empty(kv.num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pin)
        else:
            self._extents[key] = extent
            memory = self._arena.tensor(extent, kv.num_bytes)
        k, _ = kv.layers[0]
        block = memory.view(k.dtype).view(len(kv.layers), 2, *k.shape)
        for place, layer in zip(block, kv.layers, strict=True):
            for part, tensor in zip(place, layer, strict=True):
                part.copy_(tensor, non_blocking=True)
        if k.is_cuda:
            torch.cuda.current_stream().synchronize()
        return StoredKV(BlockLayers(block), kv.scores)

    def free(self, key: ChunkKey) -> None:
        """Gives a chunk's memory back, once nobody holds its KV; one that is not here is no error."""
        if (extent := self._extents.pop(key, None)) is not None:
            self._arena.free(extent)
