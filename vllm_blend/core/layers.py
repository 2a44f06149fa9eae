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
