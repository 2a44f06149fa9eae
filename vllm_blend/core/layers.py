"""A chunk's layers that are made when they are asked for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import overload

import torch

LayerKV = tuple[torch.Tensor, torch.Tensor]
"""K before RoPE and V of one layer, each ``[num_tokens, num_kv_heads, head_size]``."""


class LazyLayers(Sequence[LayerKV]):
    """Layers as ``layer`` makes them."""

    @abstractmethod
    def layer(self, index: int) -> LayerKV:
        """One of them, ``0 <= index < len(self)``."""

    @overload
    def __getitem__(self, index: int) -> LayerKV: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[LayerKV]: ...
    def __getitem__(self, index: int | slice) -> LayerKV | Sequence[LayerKV]:
        found = range(len(self))[index]
        return self.layer(found) if isinstance(found, int) else tuple(self.layer(i) for i in found)


class BlockLayers(LazyLayers):
    """Layers of one tensor, ``[num_layers, 2, num_tokens, num_kv_heads, head_size]``, K before V.

    A request looks up some hundred layers of its chunks; to make views of all of them takes longer than
    all else that the lookup does.
    """

    def __init__(self, block: torch.Tensor) -> None:
        self.block = block

    def __len__(self) -> int:
        return self.block.shape[0]

    def layer(self, index: int) -> LayerKV:
        k, v = self.block[index].unbind(0)
        return k, v

    def tokens(self, start: int, end: int) -> BlockLayers:
        """Those of tokens ``[start, end)``; not copied."""
        return BlockLayers(self.block[:, :, start:end])


def widen(values: torch.Tensor, scales: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Writes what is kept in fewer bits to ``target``: the product in fp32, rounded once."""
    return torch.mul(values.to(target.dtype), scales, out=target)


class NarrowLayers(LazyLayers):
    """Layers that are kept in fewer bits than the model computes in; ``layers[i]`` is widened at every
    call, where it lies."""

    @abstractmethod
    def blocks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All layers as they are kept: scales ``[num_layers, 2, num_tokens, num_kv_heads, 1]``, and
        values ``[..., head_size]``; K's before V's. K is its values in fp32 times its scales."""

    def parts(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Those of a layer: scales of K and of V, then K and V."""
        scales, values = self.blocks()
        (k_scale, v_scale), (k, v) = scales[index], values[index]
        return k_scale, v_scale, k, v

    @abstractmethod
    def tokens(self, start: int, end: int) -> NarrowLayers:
        """Those of tokens ``[start, end)``; neither copied nor widened."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """What they take as they are kept."""
