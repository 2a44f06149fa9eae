"""Blend attention on CPU_ATTN: our kernel for rows at any positions, or the stock one on runs of rows.

Our kernel (``cpu_kernel.py``) serves float32. The stock kernel aligns its causal mask to the last query
and key of a request. A run of consecutive kept rows, given as a request of its own whose keys end with
the run, therefore gets exact positions; the block table row is repeated for each run.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadata

from vllm_blend.attention import cpu_kernel
from vllm_blend.attention.base import (
    BlendAttention,
    ComputedRows,
    Fusion,
    RowPlaces,
    consecutive_runs,
    last_keys,
)
from vllm_blend.core.plans import BlendPlan
from vllm_blend.core.step import BlendStep


@dataclass
class CPUBlendMetadata(CPUAttentionMetadata):
    """Stock metadata whose requests are runs of kept rows.

    Attributes:
        tiles: the rows for our kernel; None: the stock one runs.
    """

    active: ComputedRows | None = None
    tiles: cpu_kernel.Tiles | None = None


class CPUBlendImpl(CPUAttentionBackendImpl, BlendAttention):  # stock first: it changes class in place
    """CPU attention that fuses stored KV into the paged cache before it attends."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        *rest: Any,
        **more: Any,
    ) -> torch.Tensor:
        self.join(layer, query, key, value, attn_metadata)
        tiles = getattr(attn_metadata, "tiles", None)
        if tiles is None:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *rest, **more
            )
        cpu_kernel.attend(
            query.view(len(query), self.num_heads, self.head_size),
            kv_cache,
            tiles,
            output.view(len(output), self.num_heads, self.head_size),
            self.scale,
            max(self.sliding_window, 0),
            self.logits_soft_cap or 0.0,
            None if self.sinks is None else self.sinks.float(),
        )
        return output

    def has_kernel(self, layer: Any) -> bool:
        """Whether our kernel serves this layer."""
        if self._has_kernel is None:
            self._has_kernel = cpu_kernel.why_not(self, layer) is None
        return self._has_kernel

    _has_kernel: bool | None = None

    def fuse(self, layer: Any, kv_cache: torch.Tensor, fusion: Fusion) -> torch.Tensor | None:
        if fusion.old_kv is None:
            return None
        assert isinstance(fusion.old_kv, tuple)  # segments are for GPUs
        k, v = fusion.old_kv
        assert self.blend is not None
        rotation = self.blend.rotation
        if not rotation.is_none:
            # the stock op rotates in place, and stored KV must not change
            flat = k.flatten(1) if fusion.copied else k.flatten(1).clone()
            table, style = rotation.table, rotation.is_neox_style
            ops.rotary_embedding(fusion.positions, flat, None, self.head_size, table, style)
            k = flat.view_as(k)
        self.do_kv_cache_update(layer, k, v, kv_cache, fusion.slot_mapping)
        return k

    def cached_keys(self, layer: Any, block_table: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """K of a request's first tokens, as it was written to the paged cache.

        Args:
            block_table: the request's, ``[num_blocks]``.

        Returns:
            ``[num_tokens, num_kv_heads, head_size]``.
        """
        block_size = layer.kv_cache.shape[2]
        blocks = block_table[: -(-num_tokens // block_size)].long()
        keys = _keys(self._typed(layer.kv_cache))[blocks].flatten(2)[..., self._order(layer)]
        keys = keys.transpose(1, 2).flatten(0, 1)[:num_tokens]
        return keys.to(layer.dtype) * layer._k_scale_float if self.is_fp8_kv_cache else keys

    def _order(self, layer: Any) -> torch.Tensor:
        """Where in a head's block each K is, ``[block_size, head_size]``: the kernel's own order, which
        differs by processor, is what it makes of numbered values."""
        _, _, block_size, width = layer.kv_cache.shape
        if self._orders.get(block_size) is None:
            scratch = layer.kv_cache.new_zeros(1, 1, block_size, width)
            numbers = torch.arange(block_size * width // 2)
            # bfloat16 holds whole numbers up to 256, fp8 with two bits of mantissa up to 8
            base, dtype = (8, layer.dtype) if self.is_fp8_kv_cache else (128, scratch.dtype)
            scale = layer._k_scale_float if self.is_fp8_kv_cache else 1.0
            found, place = torch.zeros_like(numbers), 1
            while place < len(numbers):
                digits = (numbers // place % base).view(block_size, 1, -1).to(dtype) * scale
                self.do_kv_cache_update(layer, digits, digits, scratch, torch.arange(block_size))
                found += _keys(self._typed(scratch)).flatten().float().round().long() * place
                place *= base
            self._orders[block_size] = torch.empty_like(numbers).index_copy_(0, found, numbers)
        return self._orders[block_size].view(block_size, -1)

    def _typed(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """A paged cache in the type that its bytes are of."""
        if not self.is_fp8_kv_cache:
            return kv_cache
        is_e5m2 = self.kv_cache_dtype == "fp8_e5m2"
        return kv_cache.view(torch.float8_e5m2 if is_e5m2 else torch.float8_e4m3fn)

    @cached_property
    def _orders(self) -> dict[int, torch.Tensor]:
        return {}

    @staticmethod
    def metadata(attn: Any, stock: CPUAttentionMetadata, places: RowPlaces) -> CPUBlendMetadata:
        step, rows, impl = places.step, places.rows, attn.impl
        values = {field.name: getattr(stock, field.name) for field in fields(CPUAttentionMetadata)}
        values |= dict(num_actual_tokens=rows.numel(), slot_mapping=stock.slot_mapping[rows])
        if impl.has_kernel(attn):
            tiles = cpu_kernel.make_tiles(
                last_keys(stock, places),
                places.query_start_loc,
                stock.block_table,
                impl.num_queries_per_kv,
            )
            return CPUBlendMetadata(**(values | dict(scheduler_metadata=None)), tiles=tiles)
        breaks = stock.query_start_loc[:-1].long()
        first, length = virtual_requests(step, rows, breaks)
        last = rows[first + length - 1]
        index = torch.bucketize(last, breaks, right=True) - 1  # request of each run
        seq_lens = stock.seq_lens[index] - (stock.query_start_loc[index + 1] - 1 - last)
        query_start_loc = torch.cat([first, first.new_tensor([rows.numel()])]).to(torch.int32)
        seq_lens = seq_lens.to(torch.int32)
        values |= dict(
            max_query_len=int(length.max()),
            query_start_loc=query_start_loc,
            max_seq_len=int(seq_lens.max()),
            seq_lens=seq_lens,
            block_table=stock.block_table[index],
            scheduler_metadata=ops.cpu_attn_get_scheduler_metadata(
                num_reqs=first.numel(),
                num_heads=impl.num_heads,
                num_kv_heads=impl.num_kv_heads,
                head_dim=impl.head_size,
                seq_lens=seq_lens,
                dtype=attn.dtype,
                query_start_loc=query_start_loc,
                causal=stock.causal,
                sliding_window_size=impl.sliding_window,
                isa=attn.isa,
                enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
                kv_cache_dtype=impl.kv_cache_dtype,
            ),
        )
        return CPUBlendMetadata(**values)


def _keys(kv_cache: torch.Tensor) -> torch.Tensor:
    """The half of a paged cache that holds K, ``[num_blocks, num_kv_heads, block_size, head_size]``."""
    num_blocks, num_kv_heads, block_size, _ = kv_cache.shape
    return kv_cache.view(num_blocks, num_kv_heads, 2 * block_size, -1).chunk(2, dim=2)[0]


def virtual_requests(
    step: BlendStep, rows: torch.Tensor, breaks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs of ``rows`` to attend as requests of their own: first index and length of each.

    Requests in ``mask="bottom_right"`` stay one run, which is what that mask means.
    """
    first, length = consecutive_runs(rows, breaks)
    for request in step.requests:
        if isinstance(request.plan, BlendPlan) and request.plan.settings.mask == "bottom_right":
            starts = rows[first]
            own = (starts >= request.row) & (starts < request.row + request.num_rows)
            later = own & (own.cumsum(0) > 1)  # a frame for another request's rows alone has none
            first = first[~later]
            length = torch.diff(first, append=first.new_tensor([rows.numel()]))
    return first, length
