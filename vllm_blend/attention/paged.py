"""What blend attention on GPUs shares: the paged cache's views, the fuse, the kept rows' positions."""

from __future__ import annotations

from typing import Any

import torch

from vllm_blend.attention.base import BlendAttention, Fusion, StoredSegments
from vllm_blend.ops import segment_scatter, shift_scatter
from vllm_blend.ops.segment_scatter import SegmentTables

NUM_PROGRAMS = 132
"""Of a launch that fuses segments: one for each multiprocessor of a large GPU."""


class PagedFuse(BlendAttention):
    """Mixin for an ``AttentionImpl`` whose cache is
    ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``, in any physical order."""

    head_size: int
    fuses_segments = True

    def fuse(self, layer: Any, kv_cache: torch.Tensor, fusion: Fusion) -> torch.Tensor | None:
        if fusion.old_kv is None:
            return None
        key_cache, value_cache = self.caches(kv_cache)
        assert self.blend is not None
        rotation = self.blend.rotation
        if isinstance(fusion.old_kv, StoredSegments):
            segments = fusion.old_kv
            self.fuse_segments(kv_cache, segments.tables, segments.layer, segments.slot_mapping)
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
        )
        return None

    def fuse_segments(
        self, kv_cache: torch.Tensor, tables: SegmentTables, layer: int, slot_mapping: torch.Tensor
    ) -> None:
        """The same for ``StoredSegments``: what is launched depends on addresses alone."""
        key_cache, value_cache = self.caches(kv_cache)
        assert self.blend is not None
        rotation = self.blend.rotation
        segment_scatter.launch(
            tables.addresses[layer],
            tables.segments,
            tables.totals[layer],
            slot_mapping,
            rotation.table,
            key_cache,
            value_cache,
            rotation.is_neox_style,
            NUM_PROGRAMS,
        )

    def caches(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, each ``[num_blocks, block_size, num_kv_heads, head_size]``."""
        if getattr(self, "_viewed", None) is not kv_cache:  # views cost the host 10 us a layer
            self._viewed = kv_cache
            self._views = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        key_cache, value_cache = self._views
        return key_cache, value_cache
