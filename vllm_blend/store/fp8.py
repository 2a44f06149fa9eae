"""KV kept in eight bits: float8_e4m3fn with a scale for each token and head, widened where it is read.

A layer's bytes: K's scales, V's scales (float32 ``[num_tokens, num_kv_heads, 1]``), K and V in fp8.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_blend.core.kv import KVShape
from vllm_blend.core.layers import LayerKV, NarrowLayers, widen

DTYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(DTYPE).max
SMALLEST_SCALE = 1e-30
"""Zeros have some scale, too."""


def quantize(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales ``[num_tokens, num_kv_heads, 1]``, and the fp8 of K or V, ``[num_tokens, ...]``."""
    wide = tensor.float()
    scale = (wide.abs().amax(-1, keepdim=True) / LARGEST).clamp_(min=SMALLEST_SCALE)
    return scale, (wide / scale).clamp_(-LARGEST, LARGEST).to(DTYPE)


class Fp8Layers(NarrowLayers):
    """A chunk's layers over a block of memory; ``layers[i]`` is widened at every call.

    Args:
        memory: all layers, uint8 ``[num_layers * layer_bytes]``.
        part: the tokens ``[start, end)`` of it that these are; None: all.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        shape: KVShape,
        num_tokens: int,
        part: tuple[int, int] | None = None,
    ) -> None:
        self._memory = memory.view(shape.num_layers, -1)
        self._shape = shape
        self._size = shape.of(num_tokens)
        self._part = (0, num_tokens) if part is None else part

    def __len__(self) -> int:
        return self._shape.num_layers

    def layer(self, index: int) -> LayerKV:
        k_scale, v_scale, k, v = self.parts(index)
        wide_k, wide_v = torch.empty((2, *k.shape), dtype=self._shape.dtype, device=k.device)
        return widen(k, k_scale, wide_k), widen(v, v_scale, wide_v)

    @property
    def described(self) -> Sequence[LayerKV]:
        """Shapes and type of what ``layers[i]`` gives, without memory."""
        start, end = self._part
        size = self._shape.of(end - start)
        one = torch.empty(1, dtype=self._shape.dtype, device=self._memory.device).expand(size)
        return ((one, one),) * len(self)

    @property
    def num_bytes(self) -> int:
        start, end = self._part
        return self._memory.nbytes * (end - start) // self._size[0]

    def tokens(self, start: int, end: int) -> Fp8Layers:
        first = self._part[0]
        return Fp8Layers(self._memory, self._shape, self._size[0], (first + start, first + end))

    def blocks(self) -> tuple[torch.Tensor, torch.Tensor]:
        memory, scales = self._memory, scale_bytes(self._size)
        small = memory[:, : 2 * scales].view(torch.float32).view(-1, 2, *self._size[:2], 1)
        large = memory[:, 2 * scales :].view(DTYPE).view(-1, 2, *self._size)
        tokens = slice(*self._part)
        return small[:, :, tokens], large[:, :, tokens]

    def write(self, index: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Keeps a layer; on a GPU it is narrowed there."""
        for target, source in zip(self.parts(index), narrow(k, v), strict=True):
            target.copy_(source)


def narrow(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Scales of K and of V, then K and V."""
    (k_scale, k_values), (v_scale, v_values) = quantize(k), quantize(v)
    return k_scale, v_scale, k_values, v_values


def scale_bytes(size: Sequence[int]) -> int:
    """Of K's or V's scales."""
    return 4 * size[0] * size[1]
