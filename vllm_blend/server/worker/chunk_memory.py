"""Host memory for a server's chunks, reserved at once; a GPU copies from it while the host goes on."""

from __future__ import annotations

from math import prod

import torch

from vllm_blend.core.kv import KVShape
from vllm_blend.core.plans import ChunkKey
from vllm_blend.store.arena import Arena, Extent, use_huge_pages


class ChunkMemory:
    """Chunks' KV in one block of memory, page-locked where there is a GPU.

    (torch's own pinned memory comes in powers of two, which for chunks is up to twice what they need.)

    Args:
        num_bytes: of the block.
        pinned: False: plain memory; None: page-locked where there is a GPU.
    """

    def __init__(self, num_bytes: int, pinned: bool | None = None) -> None:
        self._arena = Arena(num_bytes, pinned)
        self._arena.touch()
        self._extents: dict[ChunkKey, Extent] = {}

    def reserve(self, key: ChunkKey, shape: KVShape, num_tokens: int) -> torch.Tensor:
        """Room for a chunk, ``[num_layers, 2, num_tokens, num_kv_heads, head_size]``; memory of its own
        if none is left."""
        self.free(key)
        size = shape.num_layers, 2, *shape.of(num_tokens)
        num_bytes = prod(size) * shape.dtype.itemsize
        extent = self._arena.allocate(num_bytes)
        if extent is None:
            pin = torch.cuda.is_available()
            memory = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pin)
            if not pin:
                use_huge_pages(memory.numpy())
        else:
            self._extents[key] = extent
            memory = self._arena.tensor(extent, num_bytes)
        return memory.view(shape.dtype).view(size)

    def free(self, key: ChunkKey) -> None:
        """Gives a chunk's memory back, once nobody holds its KV; one that is not here is no error."""
        if (extent := self._extents.pop(key, None)) is not None:
            self._arena.free(extent)
