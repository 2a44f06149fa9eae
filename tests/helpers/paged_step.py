"""A step of random requests over a paged cache, what attention over it must give, and a stand-in for
xformers where there is no GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_blend.attention import xformers, xformers_parts
from vllm_blend.attention.base import RowPlaces
from vllm_blend.core.step import BlendStep, StepRequest

STEPS = {
    "fresh": ([40, 7, 1], [40, 7, 1]),
    "decode": ([1, 1, 1], [40, 17, 96]),
    "speculated": ([1, 4, 3], [40, 17, 96]),
    "mixed": ([1, 1, 30, 45, 5, 20], [33, 96, 30, 75, 64, 37]),
    "in no order": ([20, 1, 17, 1, 25], [20, 50, 49, 8, 90]),
}
"""Rows and keys of each request."""


def blocks_of(query_lens: Sequence[int], key_lens: Sequence[int], window: int) -> torch.Tensor:
    """Rows of each request are its last ones: which keys they see, ``[num_rows, num_keys]``."""
    blocks = []
    for rows, keys in zip(query_lens, key_lens, strict=True):
        at = torch.arange(keys - rows, keys)[:, None]
        key = torch.arange(keys)
        seen = key <= at
        blocks.append(seen & (key > at - window) if window else seen)
    return torch.block_diag(*blocks).bool()


def replace_kernel(patch: pytest.MonkeyPatch) -> None:
    """Makes xformers' op dense attention, its masks functions of the numbers of rows and keys that
    tell which keys a row sees, and vLLM's op that writes the cache plain indexing."""

    def attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_bias: Callable[[int, int], torch.Tensor],
        scale: float,
    ) -> torch.Tensor:
        if q.ndim == 5:  # grouped, and K and V of a group are one
            assert q.shape[:1] + q.shape[2:] == k.shape[:1] + k.shape[2:]
            assert k.stride(3) == v.stride(3) == 0
        seen = attn_bias(q.shape[1], k.shape[1])
        scores = torch.einsum("bq...d,bk...d->b...qk", q, k) * scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("b...qk,bk...d->bq...d", weights, v)

    def write(
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *_: Any,
    ) -> None:
        there = slot_mapping >= 0
        slots, rows = slot_mapping[there], there.nonzero().flatten()
        at = slots // key_cache.shape[1], slots % key_cache.shape[1]
        key_cache[at], value_cache[at] = key[rows], value[rows]

    fake = ModuleType("xformers.ops")
    fake.__dict__["memory_efficient_attention"] = attention
    patch.setitem(sys.modules, "xformers", ModuleType("xformers"))
    patch.setitem(sys.modules, "xformers.ops", fake)
    patch.setattr(xformers_parts, "fresh_mask", lambda q, w, _: lambda rows, keys: blocks_of(q, q, w))
    patch.setattr(
        xformers_parts, "gathered_mask", lambda q, k, w, _: lambda rows, keys: blocks_of(q, k, w)
    )
    patch.setattr(
        xformers_parts, "bottom_right_mask", lambda w: lambda rows, keys: blocks_of([rows], [keys], w)
    )
    patch.setattr(xformers.ops, "reshape_and_cache_flash", write)


class Step:
    """Requests with random K and V in a paged cache, their blocks in no order.

    Attributes:
        query, key, value: of the step's rows, then of padding that nothing may read.
        kv_cache: ``[num_blocks, num_kv_heads, BLOCK_SIZE, 2 * head_size]``.
    """

    BLOCK_SIZE: ClassVar[int] = 16
    PADDING: ClassVar[int] = 3

    def __init__(
        self,
        query_lens: list[int],
        seq_lens: list[int],
        heads: tuple[int, int],
        head_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        torch.manual_seed(sum(seq_lens))
        self.query_lens, self.seq_lens = query_lens, seq_lens
        self.num_heads, self.num_kv_heads = heads
        self.head_size = head_size
        num_reqs, most = len(seq_lens), -(-max(seq_lens) // self.BLOCK_SIZE)
        table = torch.randperm(num_reqs * most).view(num_reqs, most).to(torch.int32)
        cache_shape = (num_reqs * most, self.num_kv_heads, self.BLOCK_SIZE, 2 * head_size)
        cache = torch.full(cache_shape, 1e4, dtype=dtype)
        self.starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
        num_rows = int(self.starts[-1])
        self.kvs, key, value, slots = [], [], [], []
        for index, (rows, keys) in enumerate(zip(query_lens, seq_lens, strict=True)):
            k, v = torch.randn(2, keys, self.num_kv_heads, head_size).to(dtype)
            self.kvs.append((k, v))
            key.append(k[keys - rows :])
            value.append(v[keys - rows :])
            at = torch.arange(keys)
            block, offset = table[index, at // self.BLOCK_SIZE].long(), at % self.BLOCK_SIZE
            cache[block, :, offset] = torch.cat([k, v], -1)
            slots.append((block * self.BLOCK_SIZE + offset)[keys - rows :])
        pad = torch.full((self.PADDING, self.num_kv_heads, head_size), 1e4, dtype=dtype)
        query = torch.randn(num_rows + self.PADDING, self.num_heads, head_size)
        self.query = query.to(device, dtype)
        self.key, self.value = torch.cat([*key, pad]).to(device), torch.cat([*value, pad]).to(device)
        self.kv_cache = cache.to(device)
        lens = torch.tensor(seq_lens, dtype=torch.int32)
        self.common = CommonAttentionMetadata(
            query_start_loc=self.starts.to(device),
            query_start_loc_cpu=self.starts,
            seq_lens=lens.to(device),
            num_reqs=num_reqs,
            num_actual_tokens=num_rows,
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
            block_table_tensor=table.to(device),
            slot_mapping=torch.cat(slots).to(device),
            seq_lens_cpu_upper_bound=lens,
        )

    def build(self) -> xformers.XFormersMetadata:
        builder = object.__new__(xformers.XFormersMetadataBuilder)
        builder.short = xformers.SHORT
        return builder.build(0, self.common)

    def places(self, requests: list[StepRequest], rows: torch.Tensor) -> RowPlaces:
        """``rows`` of the step, in which ``requests`` blend, as a blend's frame describes them."""
        device = self.query.device
        return RowPlaces(
            BlendStep(requests, self.starts.tolist(), "auto"),
            rows.to(device),
            self.last()[rows.cpu()].to(device),
            torch.searchsorted(rows.cpu(), self.starts.long()).to(device, torch.int32),
        )

    def impl(self, window: int) -> xformers.XFormersImpl:
        heads, kv_heads, scale = self.num_heads, self.num_kv_heads, self.head_size**-0.5
        window_or_none = window or None
        return xformers.XFormersImpl(
            heads, self.head_size, scale, kv_heads, sliding_window=window_or_none
        )

    def attend(
        self,
        impl: xformers.XFormersImpl,
        metadata: xformers.XFormersMetadata,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The backend's output of all rows, padding too, or of ``rows``; 7 where it wrote nothing."""
        inputs: list[Any] = [self.query, self.key, self.value]
        if rows is not None:
            inputs = [tensor[rows] for tensor in inputs]
        output = torch.full_like(inputs[0], 7.0)
        impl.forward(None, *inputs, self.kv_cache, metadata, output)
        return output

    def last(self) -> torch.Tensor:
        """Position of each row."""
        lens = zip(self.query_lens, self.seq_lens, strict=True)
        return torch.cat([torch.arange(keys - rows, keys) for rows, keys in lens])

    def expected(
        self, rows: torch.Tensor, last: torch.Tensor, window: int, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Dense attention of these rows up to these positions, ``[num_rows, num_heads, head_size]``."""
        request = torch.bucketize(rows, self.starts[1:], right=True)
        query = self.query.cpu().to(dtype)
        out = []
        for row, index, position in zip(rows, request.tolist(), last.tolist(), strict=True):
            first = max(0, position - window + 1) if window else 0
            k, v = (t[first : position + 1].to(dtype) for t in self.kvs[index])
            q = query[row].view(self.num_kv_heads, -1, self.head_size)
            weights = (torch.einsum("hgd,khd->hgk", q, k) * self.head_size**-0.5).softmax(-1)
            out.append(torch.einsum("hgk,khd->hgd", weights, v).flatten(0, 1))
        return torch.stack(out)
