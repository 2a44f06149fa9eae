"""Chunks in the GPU's own memory: those that were used lately need not cross PCIe again."""

from __future__ import annotations

import torch

from vllm_blend.store.host import HostTier
from vllm_blend.store.keys import ChunkKey

DELAY_S = 0.5
"""A chunk that was found in host memory is copied so much later, since the prefill of its request reads
it over the same PCIe."""


class GpuTier(HostTier):
    """Copies of chunks in host memory, in one block of the GPU's memory that is taken at once.

    What it hands out stays valid as long as any tensor of it lives; whoever lets a GPU read it keeps
    one until that is done (``model/kv_loader.py``; to wait here for the whole GPU would break the
    capture of a CUDA graph). The least recently used chunk that is not in use makes room; where
    all are, a chunk is not copied.

    Args:
        budget_bytes: of the block.
        device: None: the current GPU, or where there is none, the host.
    """

    def __init__(self, budget_bytes: int, device: torch.device | None = None) -> None:
        if device is None:
            device = torch.device("cpu")
            if torch.cuda.is_available():
                device = torch.device("cuda", torch.cuda.current_device())
        super().__init__(budget_bytes, pinned=False, device=device)
        self.name = "gpu"
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy_in(self, key: ChunkKey, memory: torch.Tensor) -> bool:
        """Keeps a chunk; returns once it is there, so not for a thread that serves.

        Args:
            memory: its bytes, as host memory has them.

        Returns:
            False if there is no room.
        """
        slot = self._reserve(key)
        if slot is None:
            return False
        if self._stream is None:
            slot.memory.copy_(memory)
        else:
            with torch.cuda.stream(self._stream):
                slot.memory.copy_(memory, non_blocking=True)
            self._stream.synchronize()
        self.publish(slot)
        return True
