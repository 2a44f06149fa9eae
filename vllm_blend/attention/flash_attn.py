"""Blend attention on FLASH_ATTN: fuse into the paged cache, then attend at explicit positions.

With FlashAttention 3 most of the work stays in its kernel: each tile of kept rows is a request of its
own, as if its rows stood one behind the other from the first one's position on. The few keys between
that and each row's own position are added by ``sparse_attention_rest``, and the sinks. Rows that do
stand so, as a question's or those of a chunk that is computed whole, get the bits that stock FLASH_ATTN
gives them where there are no sinks. ``sparse_attention`` does it all where FlashAttention 3 is not
there, and with a sliding window, of which each row of a tile has another left edge.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, fields
from typing import Any

import torch
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl, FlashAttentionMetadata

from vllm_blend.attention.base import ComputedRows, RowPlaces, last_keys
from vllm_blend.attention.paged import PagedFuse
from vllm_blend.compat.cuda import flash_attention_3
from vllm_blend.ops import sparse_attention_kernel as sparse
from vllm_blend.ops import sparse_attention_tiles as tiling
from vllm_blend.ops.fp8 import FP8


@dataclass
class FlashAttentionBlendMetadata(FlashAttentionMetadata):
    """Stock metadata for the kept rows, and their positions.

    Attributes:
        positions: last key that each kept row sees, ``[num_actual_tokens]``.
        tiles: the rows as requests; None where FlashAttention 3 cannot help.
    """

    positions: torch.Tensor | None = None
    tiles: tiling.VirtualRequests | None = None
    active: ComputedRows | None = None


class FlashAttentionBlendImpl(FlashAttentionImpl, PagedFuse):  # stock first: it changes class in place
    """FlashAttention that fuses stored KV into the paged cache before it attends."""

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not isinstance(attn_metadata, FlashAttentionBlendMetadata):
            found = super().forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
            # what is kept is kept while the GPU attends
            self.join(layer, query, key, value, attn_metadata)
            return found
        self.join(layer, query, key, value, attn_metadata)
        self.attend(layer, query, kv_cache, attn_metadata, output)
        return output

    def attend(
        self,
        layer: Any,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: FlashAttentionBlendMetadata,
        output: torch.Tensor,
    ) -> None:
        """Attention of the kept rows over the fused cache, into ``output``."""
        assert metadata.positions is not None
        num_rows = metadata.num_actual_tokens
        if query.shape[0] != num_rows:
            query, output = query[:num_rows], output[:num_rows]
        key_cache, value_cache = self.caches(kv_cache)
        place = (metadata.positions, metadata.query_start_loc, metadata.block_table)
        tiles, softcap, sinks = metadata.tiles, self.logits_soft_cap, self.sinks
        scales = self.scales(layer)
        if query.dtype == FP8:  # vLLM's layer has quantized it
            scales["q_scale"] = layer._q_scale
        if tiles is None:
            window = self.sliding_window[0] + 1  # (-1, -1) is none
            shape = tiling.choose_tiles(query, self.num_kv_heads)
            caches = (key_cache, value_cache)
            sparse.launch(
                query,
                *caches,
                *place,
                output,
                self.scale,
                window,
                shape,
                softcap=softcap,
                sinks=sinks,
                **scales,
            )
            return
        max_seq_len = metadata.block_table.shape[1] * key_cache.shape[1]  # a bound is enough
        lse = flash_attention_3(
            query,
            key_cache,
            value_cache,
            output,
            tiles,
            max_seq_len,
            self.scale,
            softcap,
            tuple(scales.get(name) for name in ("q_scale", "k_scale", "v_scale")),
        )
        sparse.launch(
            query,
            key_cache,
            value_cache,
            *place,
            output,
            self.scale,
            0,
            tiling.rest_tiles(),
            lse,
            softcap=softcap,
            sinks=sinks,
            **scales,
        )

    @staticmethod
    def metadata(
        attn: Any, stock: FlashAttentionMetadata, places: RowPlaces
    ) -> FlashAttentionBlendMetadata:
        impl = attn.impl
        positions = last_keys(stock, places)
        values = {f.name: getattr(stock, f.name) for f in fields(FlashAttentionMetadata)}
        values |= dict(
            num_actual_tokens=places.rows.numel(),
            slot_mapping=None,  # the forward context's serves
            scheduler_metadata=None,  # made for all rows
        )
        metadata = FlashAttentionBlendMetadata(**values)
        return impl.at(metadata, positions, places.query_start_loc, stock.block_table)

    def at(
        self,
        metadata: FlashAttentionBlendMetadata,
        positions: torch.Tensor,
        query_start_loc: torch.Tensor,
        block_table: torch.Tensor,
    ) -> FlashAttentionBlendMetadata:
        """The metadata for other rows: last key of each, first row and blocks of each request."""
        tiles = None
        if self.vllm_flash_attn_version == 3 and self.sliding_window[0] < 0:
            tiles = tiling.virtual_requests(
                positions, query_start_loc, block_table, group=self.num_queries_per_kv
            )
        metadata = copy(metadata)
        metadata.num_actual_tokens = positions.shape[0]
        metadata.positions, metadata.tiles = positions, tiles
        metadata.query_start_loc, metadata.block_table = query_start_loc, block_table
        return metadata
