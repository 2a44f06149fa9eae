"""What blend attention on GPUs shares: the paged cache's views, the fuse, the kept rows' positions."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from vllm_blend.attention.base import Fusion, StoredSegments
from vllm_blend.core import BlendPlan, BlendStep
from vllm_blend.ops import shift_scatter

NUM_PROGRAMS = 132
"""Of a launch that fuses segments: one for each multiprocessor of a large GPU."""


class PagedFuse:
    """Mixin for an ``AttentionImpl`` whose cache is
    ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``, in any physical order."""

    rotary_emb: Any
    head_size: int
    do_kv_cache_update: Any

    def fuse(self, layer: Any, kv_cache: torch.Tensor, fusion: Fusion) -> None:
        """Writes stored K, rotated to its place, and V to the slots that no fresh row takes."""
        if fusion.old_kv is None:
            return
        if isinstance(fusion.old_kv, StoredSegments):
            self.fuse_segments(kv_cache, fusion.old_kv)
            return
        k, v = fusion.old_kv
        rotary = self.rotary_emb
        if type(rotary).forward_cuda is not RotaryEmbedding.forward_cuda:
            # a module with rules of its own: let it rotate, in place, a copy of stored K
            rotated, _ = rotary(fusion.positions, k.flatten(1).clone())
            self.do_kv_cache_update(layer, rotated.view_as(k), v, kv_cache, fusion.slot_mapping)
            return
        key_cache, value_cache = self.caches(kv_cache)
        shift_scatter.launch(
            k,
            v,
            fusion.positions,
            fusion.slot_mapping,
            rotary._match_cos_sin_cache_dtype(k),  # as its forward_cuda does for fresh rows
            key_cache,
            value_cache,
            rotary.is_neox_style,
        )

    @property
    def fuses_segments(self) -> bool:
        """Whether stored KV may come as segments."""
        return type(self.rotary_emb).forward_cuda is RotaryEmbedding.forward_cuda

    def fuse_segments(self, kv_cache: torch.Tensor, stored: StoredSegments) -> None:
        """``fuse``, reading stored KV where it lies."""
        key_cache, value_cache = self.caches(kv_cache)
        torch.ops.vllm_blend.segment_scatter(
            stored.tables.addresses[stored.layer],
            stored.tables.segments,
            stored.tables.totals,
            stored.slot_mapping,
            self.rotary_emb._match_cos_sin_cache_dtype(key_cache),
            key_cache,
            value_cache,
            self.rotary_emb.is_neox_style,
            NUM_PROGRAMS,
        )

    def caches(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, each ``[num_blocks, block_size, num_kv_heads, head_size]``."""
        if getattr(self, "_viewed", None) is not kv_cache:  # views cost the host 10 us a layer
            self._viewed = kv_cache
            self._views = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        key_cache, value_cache = self._views
        return key_cache, value_cache


def kept_rows(stock: Any, step: BlendStep, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the kept rows stand; runs on the device, and the host does not wait for it.

    Args:
        stock: a backend's metadata of the step: ``query_start_loc`` and ``seq_lens`` of all rows.
        step: the step's requests.
        rows: kept rows of the step, ascending, ``[num_rows]``.

    Returns:
        The last key that each kept row sees, ``[num_rows]``, and the first kept row of each request,
        then ``num_rows``, ``[num_reqs + 1]`` int32.
    """
    starts = stock.query_start_loc.long()
    query_start_loc = torch.searchsorted(rows, starts)
    request = torch.bucketize(rows, starts[1:], right=True)
    positions = stock.seq_lens[request] - (starts[request + 1] - rows)
    for blended in step.requests:
        plan = blended.plan
        if isinstance(plan, BlendPlan) and plan.settings.mask == "bottom_right":
            index = torch.arange(rows.numel(), device=rows.device)
            shifted = stock.seq_lens[request] - (query_start_loc[request + 1] - index)
            inside = (rows >= blended.row) & (rows < blended.row + blended.num_rows)
            positions = torch.where(inside, shifted, positions)
    return positions, query_start_loc.to(torch.int32)
