"""Stored KV: K before RoPE and V of consecutive tokens, layer by layer, computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from vllm_blend.core.layers import BlockLayers, LayerKV, NarrowLayers

WIDEST_LOAD = 16
"""Bytes that a GPU loads at once; KV that a kernel reads starts at a multiple of this."""


@dataclass(frozen=True)
class KVShape:
    """What stored KV must look like to fit a model (one tensor-parallel rank of it)."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype

    def of(self, num_tokens: int) -> tuple[int, int, int]:
        return (num_tokens, self.num_kv_heads, self.head_size)


class ChunkLost(RuntimeError):
    """A chunk's KV was promised and cannot be loaded; its tokens must be computed instead."""


@dataclass(frozen=True, eq=False)
class StoredKV:
    """The KV of consecutive tokens, computed once, layer by layer; never written to.

    Attributes:
        layers: K (before RoPE) and V of each layer, ``[num_tokens, num_kv_heads, head_size]``. Where
            they are still being loaded (``store/streaming_layers.py``), ``layers[i]`` waits for layer
            ``i``, or raises ``ChunkLost``; where they are kept in fp8 (``store/fp8.py``), it is
            widened.
        scores: how far each token's K and V move between two contexts (``core/static_scores.py``),
            ``[num_tokens]`` float32 in the host's memory; None: they were computed in one only.
    """

    layers: Sequence[LayerKV]
    scores: torch.Tensor | None = None

    @property
    def described(self) -> Sequence[LayerKV]:
        """The layers' tensors for their shapes, types and devices; what they hold may come later."""
        return getattr(self.layers, "described", self.layers)

    @cached_property
    def num_tokens(self) -> int:  # asked some dozen times a step, and layers are made when asked for
        return self.described[0][0].shape[0]

    @property
    def num_bytes(self) -> int:
        """What it takes as it is kept."""
        if isinstance(self.layers, NarrowLayers):
            return self.layers.num_bytes
        return sum(k.nbytes + v.nbytes for k, v in self.described)

    def has(self, layer: int) -> bool:
        """Whether ``layers[layer]`` is there without a wait."""
        return layer < getattr(self.layers, "arrived", len(self.layers))

    def addresses(self, start: int) -> npt.NDArray[np.int64] | None:
        """Where a GPU finds each layer's K and V of token ``start``, ``[num_layers, 2]`` int64.

        None where they must be copied first: they lie in the host's memory, or scattered, or come late.
        """
        if self.layers is not self.described:
            return None
        k = self.layers[0][0]
        return None if self._first is None else self._first + start * k.stride(0) * k.element_size()

    @cached_property
    def _first(self) -> npt.NDArray[np.int64] | None:
        """The addresses of token 0."""
        layers = self.layers
        if isinstance(layers, BlockLayers):
            first = layers[:1]
            sizes = [stride * layers.block.element_size() for stride in layers.block.stride()[:2]]
            if not _readable(first) or any(size % WIDEST_LOAD for size in sizes):
                return None
            index = np.arange(len(layers))[:, None] * sizes[0] + np.arange(2) * sizes[1]
            return layers.block.data_ptr() + index
        if not _readable(layers):
            return None
        return np.array([[tensor.data_ptr() for tensor in layer] for layer in layers])

    def tokens(self, start: int, end: int) -> StoredKV:
        """The KV of tokens ``[start, end)`` of these; not copied."""
        if (start, end) == (0, self.num_tokens):
            return self
        scores = None if self.scores is None else self.scores[start:end]
        if (part := getattr(self.layers, "tokens", None)) is not None:
            return StoredKV(part(start, end), scores)
        return StoredKV(tuple((k[start:end], v[start:end]) for k, v in self.layers), scores)

    def check(self, shape: KVShape, num_tokens: int, name: str = "old_kvs") -> None:
        """Raises ValueError, naming ``name`` and the shape, if this does not fit."""
        layers = self.described
        if len(layers) != shape.num_layers:
            raise ValueError(f"{name} has {len(layers)} layers; the model has {shape.num_layers}")
        expected = shape.of(num_tokens)
        if isinstance(layers, BlockLayers):
            layers = layers[:1]  # all have its shape and type
        for index, layer in enumerate(layers):
            if len(layer) != 2:
                raise ValueError(f"{name}[{index}] has {len(layer)} entries; expected [K, V]")
            for kind, tensor in zip("KV", layer, strict=True):
                if not isinstance(tensor, torch.Tensor):
                    raise ValueError(
                        f"{kind} of {name}[{index}] is {type(tensor).__name__}; expected a tensor"
                    )
                if tuple(tensor.shape) != expected:
                    raise ValueError(
                        f"{kind} of {name}[{index}] has shape {list(tensor.shape)}; expected "
                        f"[num_tokens, num_kv_heads, head_size] = {list(expected)}"
                    )
                if tensor.dtype != shape.dtype:
                    raise ValueError(
                        f"{kind} of {name}[{index}] is {tensor.dtype}; the model computes in "
                        f"{shape.dtype}"
                    )


def _readable(layers: Sequence[LayerKV]) -> bool:
    """Whether kernels can read all tensors of ``layers`` where they lie, by the widest loads."""
    for tensor in (tensor for layer in layers for tensor in layer):
        if not tensor.is_cuda or not tensor.is_contiguous():
            return False
        row_bytes = tensor.nbytes // max(len(tensor), 1)
        if tensor.data_ptr() % WIDEST_LOAD or row_bytes % WIDEST_LOAD:
            return False
    return True


def concat_kv(kvs: Sequence[LayerKV]) -> LayerKV:
    """K and V of some tokens, then of others; a single pair is not copied."""
    if len(kvs) == 1:
        return kvs[0]
    return torch.cat([k for k, _ in kvs]), torch.cat([v for _, v in kvs])
