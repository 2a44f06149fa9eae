"""Blend attention on FLASH_ATTN: fuse into the paged cache, then attend at explicit positions.

With FlashAttention 3 most of the work stays in its kernel: each tile of kept rows is a request of its
own that sees, without a mask, the keys up to the tile's first position; ``sparse_attention_rest`` adds
the few keys between that and each row's own position. Where FlashAttention 3 is not there, or a
sliding window makes the mask two-sided, ``sparse_attention`` does it all.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl, FlashAttentionMetadata

from vllm_blend.attention.base import Fusion
from vllm_blend.core import BlendPlan, BlendStep
from vllm_blend.ops import shift_scatter
from vllm_blend.ops import sparse_attention as sparse


@dataclass
class FlashAttentionBlendMetadata(FlashAttentionMetadata):
    """Stock metadata for the kept rows, their positions, and the layer's fusion.

    Attributes:
        positions: last key that each kept row sees, ``[num_actual_tokens]``.
        tiles: the rows as requests without masks; None where FlashAttention 3 cannot help.
    """

    positions: torch.Tensor | None = None
    tiles: sparse.VirtualRequests | None = None
    fusion: Fusion | None = None


class FlashAttentionBlendImpl(FlashAttentionImpl):
    """FlashAttention that fuses stored KV into the paged cache before it attends."""

    rotary_emb: Any

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
        fusion = getattr(attn_metadata, "fusion", None)
        if fusion is None:
            return super().forward(
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
        assert isinstance(attn_metadata, FlashAttentionBlendMetadata)
        with fusion.clock.stage("fuse"):
            self.fuse(layer, kv_cache, fusion)
        self.attend(query, kv_cache, attn_metadata, output)
        return output

    def fuse(self, layer: Any, kv_cache: torch.Tensor, fusion: Fusion) -> None:
        """Writes stored K, rotated to its place, and V to the slots that no fresh row takes."""
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

    def attend(
        self,
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
        tiles = metadata.tiles
        if tiles is None:
            window = self.sliding_window[0] + 1  # (-1, -1) is none
            shape = sparse.choose_tiles(query, self.num_kv_heads)
            caches = (key_cache, value_cache)
            sparse.launch(query, *caches, *place, output, self.scale, window, shape)
            return
        _, lse = flash_attn_varlen_func(
            q=query,
            k=key_cache,
            v=value_cache,
            out=output,
            cu_seqlens_q=tiles.query_start_loc,
            max_seqlen_q=tiles.block_q,
            seqused_k=tiles.seq_lens,
            max_seqlen_k=metadata.max_seq_len,
            softmax_scale=self.scale,
            causal=False,
            block_table=tiles.block_table,
            num_splits=1,
            return_softmax_lse=True,
            fa_version=3,
        )
        shape = sparse.rest_tiles(metadata.max_seq_len)
        sparse.launch(query, key_cache, value_cache, *place, output, self.scale, 0, shape, lse)

    def caches(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``, tokens before heads."""
        if getattr(self, "_viewed", None) is not kv_cache:  # views cost the host 10 us a layer
            self._viewed = kv_cache
            self._views = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        key_cache, value_cache = self._views
        return key_cache, value_cache

    @staticmethod
    def metadata(
        attn: Any, stock: FlashAttentionMetadata, step: BlendStep, rows: torch.Tensor
    ) -> FlashAttentionBlendMetadata:
        impl = attn.impl
        num_rows = rows.numel()
        # all of this runs on the device: the host must not wait for it
        starts = stock.query_start_loc.long()
        query_start_loc = torch.searchsorted(rows, starts)
        request = torch.bucketize(rows, starts[1:], right=True)
        positions = stock.seq_lens[request] - (starts[request + 1] - rows)
        for blended in step.requests:
            plan = blended.plan
            if isinstance(plan, BlendPlan) and plan.settings.mask == "bottom_right":
                index = torch.arange(num_rows, device=rows.device)
                shifted = stock.seq_lens[request] - (query_start_loc[request + 1] - index)
                inside = (rows >= blended.row) & (rows < blended.row + blended.num_rows)
                positions = torch.where(inside, shifted, positions)
        query_start_loc = query_start_loc.to(torch.int32)
        tiles = None
        if impl.vllm_flash_attn_version == 3 and impl.sliding_window[0] < 0:
            tiles = sparse.virtual_requests(
                positions,
                query_start_loc,
                stock.block_table,
                group=impl.num_queries_per_kv,
                max_seq_len=stock.max_seq_len,
            )
        values = {f.name: getattr(stock, f.name) for f in fields(FlashAttentionMetadata)}
        values |= dict(
            num_actual_tokens=num_rows,
            query_start_loc=query_start_loc,
            slot_mapping=stock.slot_mapping[rows],
            scheduler_metadata=None,  # made for all rows
            positions=positions,
            tiles=tiles,
        )
        return FlashAttentionBlendMetadata(**values)
