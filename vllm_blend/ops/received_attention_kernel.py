"""The Triton kernels of ``received_attention``, and their launch."""

# Triton kernels carry no types of Python's:
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl

from vllm_blend.ops.fp8 import TRITON_TYPES, scale_stride
from vllm_blend.ops.paged_products import dot_keys, logit_scales, scale_logits, widen_query
from vllm_blend.ops.received_attention_tiles import MAX_QUERIES, choose_splits, choose_tiles

SUM_KEYS = 256
"""Keys of a program of the last kernel."""


@triton.jit
def _seen_keys(last_keys, num_queries, MAX_QUERIES: tl.constexpr, WINDOW: tl.constexpr):
    """The first key that some query sees, and the one after the last."""
    index = tl.arange(0, MAX_QUERIES)
    last = tl.load(last_keys + index, mask=index < num_queries, other=-1).to(tl.int32)
    end = tl.max(last, axis=0) + 1
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(tl.min(tl.where(last < 0, end, last), axis=0) - WINDOW + 1, 0)
    return begin, end


@triton.jit
def _place(part, num_tiles, NUM_KV_HEADS: tl.constexpr):
    """The layer, KV head and tile of a part."""
    return part // (NUM_KV_HEADS * num_tiles), part // num_tiles % NUM_KV_HEADS, part % num_tiles


@triton.jit
def _cache_of(key_caches, layer, CACHE: tl.constexpr, ALIGNED: tl.constexpr):
    """Where a layer's cache begins."""
    cache = tl.load(key_caches + layer).to(tl.pointer_type(CACHE), bitcast=False)
    if ALIGNED:
        cache = tl.multiple_of(cache, 16)
    return cache


@triton.jit
def _load_rows(
    query,
    last_keys,
    num_queries,
    kv_head,
    tile,
    q_stride_row,
    q_stride_head,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Rows of a tile, ``[BLOCK_M, BLOCK_D]``, and of each its head and its last key, ``[BLOCK_M]``.

    The last key is -1 where there is no query.
    """
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    index = row // GROUP
    head = kv_head * GROUP + row % GROUP
    dim = tl.arange(0, BLOCK_D)
    last = tl.load(last_keys + index, mask=index < num_queries, other=-1).to(tl.int32)
    at = index.to(tl.int64)[:, None] * q_stride_row + head[:, None] * q_stride_head + dim[None, :]
    q = tl.load(query + at, mask=(last >= 0)[:, None] & (dim < HEAD_SIZE)[None, :], other=0.0)
    return widen_query(q), head, last


@triton.jit
def _scores(
    q,
    last,
    key_cache,
    block_table,
    start,
    end,
    kv_head,
    kc_stride_block,
    kc_stride_slot,
    kc_stride_head,
    cap_scale,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``dot_keys`` of the keys ``[start, start + BLOCK_N)``, -inf where a row does not see them."""
    s = dot_keys(
        q, key_cache, block_table, start, end, kv_head, kc_stride_block, kc_stride_slot,
        kc_stride_head, BLOCK_N, BLOCK_SIZE, HEAD_SIZE, BLOCK_D, True, PRECISION,
        cap_scale, SOFTCAP,
    )  # fmt: skip
    n = start + tl.arange(0, BLOCK_N)
    seen = n[None, :] <= last[:, None]
    if WINDOW > 0:
        seen &= n[None, :] > last[:, None] - WINDOW
    return tl.where(seen, s, float("-inf"))


# what changes from call to call is not compiled in
@triton.jit(
    do_not_specialize=["num_queries", "num_tiles"],
    do_not_specialize_on_alignment=["key_caches", "block_table", "last_keys", "q_scale", "k_scale"],
)
def _lse_kernel(
    query,  # [num_layers, num_queries, num_heads, head_size]
    key_caches,  # [num_layers], addresses of [num_blocks, block_size, num_kv_heads, head_size]
    block_table,  # [max_num_blocks]
    last_keys,  # [num_queries]
    lse,  # [num_layers * num_kv_heads * num_tiles, SPLITS, BLOCK_M], base 2
    q_scale,  # [num_layers, 1 or num_kv_heads]; only with QUERY_STRIDE >= 0
    k_scale,  # the same, only with QUANTIZED
    scale_log2,  # logit_scales(scale, softcap)
    cap_scale,
    num_queries,
    num_tiles,
    q_stride_layer,
    q_stride_row,
    q_stride_head,
    kc_stride_block,
    kc_stride_slot,
    kc_stride_head,
    MAX_QUERIES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    SOFTCAP: tl.constexpr,  # whether there is one
    CACHE: tl.constexpr,  # type of the caches
    ALIGNED: tl.constexpr,  # whether they begin at multiples of 16 bytes
    QUANTIZED: tl.constexpr,  # whether they are in e4m3
    QUERY_STRIDE: tl.constexpr,  # -1: queries are not
    SCALE_STRIDE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``lse[part, split, m] = log2(sum over the split's keys of exp(logit))``; -inf: no keys.

    Grid: ``(SPLITS, num_layers * num_kv_heads * num_tiles)``. A part is BLOCK_M rows of a KV head of a
    layer: row ``m`` of the head's ``num_queries * GROUP`` is query ``m // GROUP``, head ``m % GROUP``.
    A split is every SPLITS-th BLOCK_N keys of those that some query sees.
    """
    split, part = tl.program_id(0), tl.program_id(1)
    layer, kv_head, tile = _place(part, num_tiles, NUM_KV_HEADS)
    key_cache = _cache_of(key_caches, layer, CACHE, ALIGNED)
    q, _head, last = _load_rows(
        query + layer.to(tl.int64) * q_stride_layer, last_keys, num_queries, kv_head, tile,
        q_stride_row, q_stride_head, GROUP, HEAD_SIZE, BLOCK_M, BLOCK_D,
    )  # fmt: skip
    if QUANTIZED:
        q_scale += layer * max(1, QUERY_STRIDE * NUM_KV_HEADS)
        k_scale += layer * max(1, SCALE_STRIDE * NUM_KV_HEADS)
        scale_log2, cap_scale = scale_logits(
            scale_log2, cap_scale, q_scale, k_scale, kv_head, QUERY_STRIDE, SCALE_STRIDE, SOFTCAP
        )
    begin, end = _seen_keys(last_keys, num_queries, MAX_QUERIES, WINDOW)
    m = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    begin = begin // BLOCK_N * BLOCK_N
    for start in range(begin + split * BLOCK_N, end, SPLITS * BLOCK_N):
        s = _scores(
            q, last, key_cache, block_table, start, end, kv_head, kc_stride_block, kc_stride_slot,
            kc_stride_head, cap_scale, HEAD_SIZE, BLOCK_SIZE, WINDOW, SOFTCAP, BLOCK_N, BLOCK_D,
            PRECISION,
        )  # fmt: skip
        m_new = tl.maximum(m, tl.max(s, axis=1) * scale_log2)
        # a row that has seen no key yet keeps -inf; subtract 0 there, not -inf from -inf
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.math.exp2(s * scale_log2 - shift[:, None])
        total = total * tl.math.exp2(m - shift) + tl.sum(p, axis=1)
        m = m_new
    at = (part * SPLITS + split) * BLOCK_M + tl.arange(0, BLOCK_M)
    # a row without a query gets a finite number, so that its exponentials are 0, not NaN
    tl.store(lse + at, tl.where(last < 0, 0.0, m + tl.math.log2(total)))


@triton.jit(
    do_not_specialize=["num_queries", "num_tiles", "max_num_keys"],
    do_not_specialize_on_alignment=["key_caches", "block_table", "last_keys", "q_scale", "k_scale"],
)
def _received_kernel(
    query,  # [num_layers, num_queries, num_heads, head_size]
    key_caches,  # [num_layers], addresses of [num_blocks, block_size, num_kv_heads, head_size]
    block_table,  # [max_num_blocks]
    last_keys,  # [num_queries]
    lse,  # [num_layers * num_kv_heads * num_tiles, SPLITS, BLOCK_M], base 2
    received,  # [num_layers * num_kv_heads * num_tiles, max_num_keys]
    sinks,  # [num_layers, num_heads]; only with HAS_SINKS
    q_scale,  # [num_layers, 1 or num_kv_heads]; only with QUERY_STRIDE >= 0
    k_scale,  # the same, only with QUANTIZED
    scale_log2,  # logit_scales(scale, softcap)
    cap_scale,
    num_queries,
    num_tiles,
    max_num_keys,
    q_stride_layer,
    q_stride_row,
    q_stride_head,
    kc_stride_block,
    kc_stride_slot,
    kc_stride_head,
    MAX_QUERIES: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    SOFTCAP: tl.constexpr,  # whether there is one
    HAS_SINKS: tl.constexpr,
    CACHE: tl.constexpr,  # type of the caches
    ALIGNED: tl.constexpr,  # whether they begin at multiples of 16 bytes
    QUANTIZED: tl.constexpr,  # whether they are in e4m3
    QUERY_STRIDE: tl.constexpr,  # -1: queries are not
    SCALE_STRIDE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``received[part, n] = sum over the part's rows of exp(logit[n]) / (sum(exp(logit)) + sink)``.

    ``sink`` stands for its exponential, or 0. Grid, parts and splits are ``_lse_kernel``'s; all keys
    that any query sees are written.
    """
    split, part = tl.program_id(0), tl.program_id(1)
    layer, kv_head, tile = _place(part, num_tiles, NUM_KV_HEADS)
    key_cache = _cache_of(key_caches, layer, CACHE, ALIGNED)
    q, head, last = _load_rows(
        query + layer.to(tl.int64) * q_stride_layer, last_keys, num_queries, kv_head, tile,
        q_stride_row, q_stride_head, GROUP, HEAD_SIZE, BLOCK_M, BLOCK_D,
    )  # fmt: skip
    if QUANTIZED:
        q_scale += layer * max(1, QUERY_STRIDE * NUM_KV_HEADS)
        k_scale += layer * max(1, SCALE_STRIDE * NUM_KV_HEADS)
        scale_log2, cap_scale = scale_logits(
            scale_log2, cap_scale, q_scale, k_scale, kv_head, QUERY_STRIDE, SCALE_STRIDE, SOFTCAP
        )
    begin, end = _seen_keys(last_keys, num_queries, MAX_QUERIES, WINDOW)
    at = (part * SPLITS + tl.arange(0, SPLITS))[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    of_splits = tl.load(lse + at)
    m = tl.max(of_splits, axis=0)
    if HAS_SINKS:
        sink = tl.load(sinks + layer * NUM_KV_HEADS * GROUP + head).to(tl.float32) * 1.4426950408889634
        m = tl.maximum(m, sink)
    total = tl.sum(tl.math.exp2(of_splits - m[None, :]), axis=0)
    if HAS_SINKS:
        total += tl.math.exp2(sink - m)
    row_lse = m + tl.math.log2(total)
    to = received + part.to(tl.int64) * max_num_keys
    begin = begin // BLOCK_N * BLOCK_N
    for start in range(begin + split * BLOCK_N, end, SPLITS * BLOCK_N):
        s = _scores(
            q, last, key_cache, block_table, start, end, kv_head, kc_stride_block, kc_stride_slot,
            kc_stride_head, cap_scale, HEAD_SIZE, BLOCK_SIZE, WINDOW, SOFTCAP, BLOCK_N, BLOCK_D,
            PRECISION,
        )  # fmt: skip
        p = tl.math.exp2(s * scale_log2 - row_lse[:, None])
        n = start + tl.arange(0, BLOCK_N)
        tl.store(to + n, tl.sum(p, axis=0), mask=n < end)


@triton.jit(
    do_not_specialize=["num_queries", "num_parts", "max_num_keys"],
    do_not_specialize_on_alignment=["last_keys", "scores"],
)
def _sum_kernel(
    received,  # [num_parts, max_num_keys]
    last_keys,  # [num_queries]
    scores,  # [max_num_keys]
    num_queries,
    num_parts,
    max_num_keys,
    MAX_QUERIES: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    BLOCK_N: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,  # in flight together
):
    """``scores[n] += sum over parts of received[part, n]``.

    Grid: ``(cdiv(max_num_keys, BLOCK_N),)``; a program whose keys no query sees returns.
    """
    begin, end = _seen_keys(last_keys, num_queries, MAX_QUERIES, WINDOW)
    start = tl.program_id(0) * BLOCK_N
    if (start >= end) | (start + BLOCK_N <= begin):
        return
    n = start + tl.arange(0, BLOCK_N)
    seen = (n >= begin) & (n < end)
    total = tl.zeros([BLOCK_N], dtype=tl.float32)
    for first in range(0, num_parts, BLOCK_PARTS):
        part = first + tl.arange(0, BLOCK_PARTS)
        at = part.to(tl.int64)[:, None] * max_num_keys + n[None, :]
        mask = (part < num_parts)[:, None] & seen[None, :]
        total += tl.sum(tl.load(received + at, mask=mask, other=0.0), axis=0)
    before = tl.load(scores + n, mask=seen, other=0.0)
    tl.store(scores + n, before + total, mask=seen)


@lru_cache(maxsize=64)
def _addresses(caches: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Where layers' caches are, on the device: the same in all steps."""
    addresses = torch.tensor(caches, dtype=torch.int64, device="cpu")
    if device.type == "cpu":
        return addresses
    return addresses.pin_memory().to(device)


def launch(
    query: torch.Tensor,
    key_caches: Sequence[torch.Tensor],
    block_table: torch.Tensor,
    last_keys: torch.Tensor,
    scores: torch.Tensor,
    *,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
) -> None:
    """Launches the kernels; arguments as ``received_attention``'s, unchecked, none of them empty."""
    num_layers, num_queries, num_heads, head_size = query.shape
    key_cache = key_caches[0]
    block_size, num_kv_heads = key_cache.shape[1:3]
    caches = tuple(cache.data_ptr() for cache in key_caches)
    max_num_keys = scores.shape[0]
    group = num_heads // num_kv_heads
    tiles = choose_tiles(query, group)
    most_parts = num_layers * num_kv_heads * triton.cdiv(MAX_QUERIES * group, tiles.block_m)
    splits = choose_splits(query.device, most_parts)
    num_tiles = triton.cdiv(num_queries * group, tiles.block_m)
    num_parts = num_layers * num_kv_heads * num_tiles
    lse = torch.empty(num_parts, splits, tiles.block_m, dtype=torch.float32, device=query.device)
    received = torch.empty(num_parts, max_num_keys, dtype=torch.float32, device=query.device)
    place = (query, _addresses(caches, query.device), block_table, last_keys, lse)
    scales = (lse if one is None else one for one in (q_scale, k_scale))
    numbers = (*scales, *logit_scales(scale, softcap), num_queries, num_tiles)
    strides = (*query.stride()[:3], *key_cache.stride()[:3])
    constants = dict(
        MAX_QUERIES=MAX_QUERIES,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_SIZE=head_size,
        BLOCK_SIZE=block_size,
        WINDOW=sliding_window,
        SOFTCAP=softcap > 0,
        CACHE=TRITON_TYPES[key_cache.dtype],
        ALIGNED=all(address % 16 == 0 for address in caches),
        QUANTIZED=k_scale is not None,
        QUERY_STRIDE=-1 if q_scale is None else scale_stride(q_scale[0]),
        SCALE_STRIDE=0 if k_scale is None else scale_stride(k_scale[0]),
        SPLITS=splits,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_D=max(16, triton.next_power_of_2(head_size)),
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    grid = (splits, num_parts)
    _lse_kernel[grid](*place, *numbers, *strides, **constants)
    _received_kernel[grid](
        *place,
        received,
        received if sinks is None else sinks,
        *numbers,
        max_num_keys,
        *strides,
        HAS_SINKS=sinks is not None,
        **constants,
    )
    _sum_kernel[(triton.cdiv(max_num_keys, SUM_KEYS),)](
        received,
        last_keys,
        scores,
        num_queries,
        num_parts,
        max_num_keys,
        MAX_QUERIES=MAX_QUERIES,
        WINDOW=sliding_window,
        BLOCK_N=SUM_KEYS,
        BLOCK_PARTS=8,
        num_warps=4,
    )
