"""What blend attention on GPUs shares: the paged cache's views, the fuse, the kept rows' positions."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch

from vllm_blend.attention.base import BlendAttention, Fusion, StoredSegments
from vllm_blend.ops import segment_scatter, shift_scatter
from vllm_blend.ops.fp8 import FP8
from vllm_blend.ops.received_attention import run as received_attention
from vllm_blend.ops.segment_scatter import SegmentTables

NUM_PROGRAMS = 132
"""Of a launch that fuses segments: one for each multiprocessor of a large GPU."""


class Asked(NamedTuple):
    """Queries of a layer, and all that their attention depends on.

    Attributes:
        query: ``[num_queries, num_heads, head_size * itemsize]`` uint8.
        dtype: theirs.
        table: blocks of the requests, ``[num_reqs, max_num_blocks]`` int32.
        options: numbers of ``received_attention``.
        of_layer: its tensors, for one layer.
    """

    query: torch.Tensor
    dtype: torch.dtype
    key_cache: torch.Tensor
    table: torch.Tensor
    options: dict[str, Any]
    of_layer: dict[str, torch.Tensor]

    @property
    def kind(self) -> Hashable:
        """Layers of a kind are received together."""
        cache = self.key_cache
        tensors = sorted((name, value.shape) for name, value in self.of_layer.items())
        return (
            *(self.query.shape, self.dtype, cache.shape, cache.stride(), cache.dtype),
            *(self.table.data_ptr(), *self.options.items(), *tensors),
        )


class Received:
    """What layers were asked, and give all at once: launches are what takes the host's time."""

    def __init__(self, asked: Sequence[Asked]) -> None:
        kinds: dict[Hashable, list[Asked]] = {}
        for one in asked:
            kinds.setdefault(one.kind, []).append(one)
        self._kinds = [
            (
                torch.stack([one.query for one in alike]).view(alike[0].dtype),
                [one.key_cache for one in alike],
                alike[0].table,
                alike[0].options
                | {name: _rows([one.of_layer[name] for one in alike]) for name in alike[0].of_layer},
            )
            for alike in kinds.values()
        ]

    def add_to(
        self, scores: torch.Tensor, queries: slice, request: int, last_keys: torch.Tensor
    ) -> None:
        """Adds what a request's keys get.

        Args:
            scores, last_keys: ``ops/received_attention.py``'s.
            queries: the request's, of those that each layer was asked for.
            request: which one of the step's.
        """
        for query, key_caches, table, options in self._kinds:
            place = (table[request], last_keys, scores)
            received_attention(query[:, queries], key_caches, *place, **options)


def _rows(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """A row a layer."""
    return torch.stack([value.reshape(-1) for value in values])


class PagedFuse(BlendAttention):
    """Mixin for an ``AttentionImpl`` whose cache is
    ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``, in any physical order; of the model's
    type, or bytes that are e4m3."""

    head_size: int
    scale: float
    kv_cache_dtype: str
    fuses_segments = True

    def fuse(self, layer: Any, kv_cache: torch.Tensor, fusion: Fusion) -> torch.Tensor | None:
        if fusion.old_kv is None:
            return None
        key_cache, value_cache = self.caches(kv_cache)
        assert self.blend is not None
        rotation = self.blend.rotation
        if isinstance(fusion.old_kv, StoredSegments):
            segments = fusion.old_kv
            self.fuse_segments(layer, kv_cache, segments.tables, segments.layer, segments.slot_mapping)
            return None
        k, v = fusion.old_kv
        shift_scatter.launch(
            k,
            v,
            fusion.positions,
            fusion.slot_mapping,
            rotation.table,
            key_cache,
            value_cache,
            rotation.is_neox_style,
            **self.scales(layer),
        )
        return None

    def fuse_segments(
        self,
        layer: Any,
        kv_cache: torch.Tensor,
        tables: SegmentTables,
        index: int,
        slot_mapping: torch.Tensor,
    ) -> None:
        """The same for ``StoredSegments``, of the tables' layer ``index``: what is launched depends on
        addresses alone."""
        key_cache, value_cache = self.caches(kv_cache)
        assert self.blend is not None
        rotation = self.blend.rotation
        segment_scatter.launch(
            tables.addresses[index],
            tables.segments,
            tables.totals[index],
            slot_mapping,
            rotation.table,
            key_cache,
            value_cache,
            rotation.is_neox_style,
            NUM_PROGRAMS,
            layer.dtype,
            **self.scales(layer),
        )

    def asked(self, layer: Any, query: torch.Tensor, rows: torch.Tensor, table: torch.Tensor) -> Asked:
        """Some queries of a layer, for ``Received``.

        Args:
            query: ``[num_rows, num_heads, head_size]``.
            rows: which of them, ``[num_queries]``.
            table: blocks of the requests, ``[num_reqs, max_num_blocks]`` int32.
        """
        key_cache, _ = self.caches(layer.kv_cache)
        scales = self.scales(layer)
        scales.pop("v_scale", None)
        if query.dtype == FP8:
            scales["q_scale"] = layer._q_scale
        # bytes: index_select need not know their type
        return Asked(
            query.view(torch.uint8).index_select(0, rows),
            query.dtype,
            key_cache,
            table,
            dict(
                scale=self.scale,
                sliding_window=layer.sliding_window or 0,
                softcap=getattr(self, "logits_soft_cap", None) or 0.0,
            ),
            scales | {"sinks": sinks}
            if (sinks := getattr(self, "sinks", None)) is not None
            else scales,
        )

    def scales(self, layer: Any) -> dict[str, torch.Tensor]:
        """Those of a layer's K and V where its cache is in e4m3, else none."""
        if not self.kv_cache_dtype.startswith("fp8"):
            return {}
        return {"k_scale": layer._k_scale, "v_scale": layer._v_scale}

    def caches(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, each ``[num_blocks, block_size, num_kv_heads, head_size]``."""
        if getattr(self, "_viewed", None) is not kv_cache:  # views cost the host 10 us a layer
            self._viewed = kv_cache
            if self.kv_cache_dtype.startswith("fp8"):
                kv_cache = kv_cache.view(FP8)
            self._views = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        key_cache, value_cache = self._views
        return key_cache, value_cache
