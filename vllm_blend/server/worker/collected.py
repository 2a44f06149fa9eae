"""Where a chunk's K and V go while they are computed: on a GPU no layer of them stays behind.

A layer's rows are copied to host memory as attention hands them over, so the GPU holds a step's rows of
one layer, for as long as it takes to launch their copy. What is computed for scores alone is compared
with what is stored, and not kept at all.
"""

from __future__ import annotations

import torch

from vllm_blend.core.kv import KVShape, StoredKV
from vllm_blend.core.layers import BlockLayers
from vllm_blend.core.static_scores import apart


class HostRows:
    """K and V of all layers, in host memory.

    Args:
        block: ``[num_layers, 2, num_tokens, num_kv_heads, head_size]``.
    """

    def __init__(self, block: torch.Tensor) -> None:
        self._block = block
        self._device: torch.device | None = None

    def write(self, layer: int, first: int, k: torch.Tensor, v: torch.Tensor) -> None:
        for place, rows in zip(self._block[layer], (k, v), strict=True):
            place[first : first + len(rows)].copy_(rows, non_blocking=True)
        self._device = k.device

    def kv(self) -> StoredKV:
        """All of it; waits for the copies."""
        if self._device is not None and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return StoredKV(BlockLayers(self._block))


class Distances:
    """How far K and V of each token are from those that are stored (``core/static_scores.py``).

    Args:
        base: what is stored.
        device: of the K and V that come.
    """

    def __init__(self, base: StoredKV, shape: KVShape, device: torch.device) -> None:
        self._base = base
        size = shape.num_layers, 2, 2, base.num_tokens
        self._parts = torch.zeros(size, dtype=torch.float32, device=device)

    def write(self, layer: int, first: int, k: torch.Tensor, v: torch.Tensor) -> None:
        for stored, rows, parts in zip(
            self._base.layers[layer], (k, v), self._parts[layer], strict=True
        ):
            end = first + len(rows)
            moved, squares = apart(stored[first:end].to(rows.device, non_blocking=True), rows)
            parts[0, first:end], parts[1, first:end] = moved, squares

    def sums(self) -> torch.Tensor:
        """``[2 * num_layers, num_tokens + 1]`` float32 on the host, as ``distances`` gives them."""
        moved, squares = self._parts.flatten(0, 1).unbind(1)
        return torch.cat([moved, squares.sum(1, keepdim=True)], dim=1).cpu()
