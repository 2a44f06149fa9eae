"""The Triton kernels of ``received_attention``, their tiles and launch."""

# Triton kernels carry no types of Python's:
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_blend.ops.library import INTERPRETED
from vllm_blend.ops.sparse_attention_kernel import LOG2E, Tiles, dot_keys

MAX_QUERIES = 32
"""Queries of a call: each program looks through all of ``last_keys`` for the number of keys."""

SUM_KEYS = 256
"""Keys of a program of the last kernel."""


@triton.jit
def _count_keys(last_keys, num_queries, MAX_QUERIES: tl.constexpr):
    """Keys that some query sees."""
    index = tl.arange(0, MAX_QUERIES)
    last = tl.load(last_keys + index, mask=index < num_queries, other=-1)
    return tl.max(last, axis=0).to(tl.int32) + 1


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
    """Rows of a tile, ``[BLOCK_M, BLOCK_D]``, and the last key of each, ``[BLOCK_M]``; -1: no query."""
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    index = row // GROUP
    head = kv_head * GROUP + row % GROUP
    dim = tl.arange(0, BLOCK_D)
    last = tl.load(last_keys + index, mask=index < num_queries, other=-1).to(tl.int32)
    at = index.to(tl.int64)[:, None] * q_stride_row + head[:, None] * q_stride_head + dim[None, :]
    q = tl.load(query + at, mask=(last >= 0)[:, None] & (dim < HEAD_SIZE)[None, :], other=0.0)
    return q, last


# what changes from call to call is not compiled in
@triton.jit(
    do_not_specialize=["num_queries", "num_tiles"],
    do_not_specialize_on_alignment=["block_table", "last_keys"],
)
def _lse_kernel(
    query,  # [num_queries, num_heads, head_size]
    key_cache,  # [num_blocks, block_size, num_kv_heads, head_size]
    block_table,  # [max_num_blocks]
    last_keys,  # [num_queries]
    lse,  # [num_kv_heads * num_tiles, SPLITS, BLOCK_M], base 2
    scale_log2,  # scale * log2(e)
    num_queries,
    num_tiles,
    q_stride_row,
    q_stride_head,
    kc_stride_block,
    kc_stride_slot,
    kc_stride_head,
    MAX_QUERIES: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``lse[part, split, m] = log2(sum over the split's keys of exp(scale * q k))``; -inf: no keys.

    Grid: ``(SPLITS, num_kv_heads * num_tiles)``. A part is BLOCK_M rows of a KV head: row ``m`` of the
    head's ``num_queries * GROUP`` is query ``m // GROUP``, head ``m % GROUP``. A split is every
    SPLITS-th BLOCK_N keys.
    """
    split, part = tl.program_id(0), tl.program_id(1)
    kv_head = part // num_tiles
    q, last = _load_rows(
        query, last_keys, num_queries, kv_head, part % num_tiles, q_stride_row, q_stride_head,
        GROUP, HEAD_SIZE, BLOCK_M, BLOCK_D,
    )  # fmt: skip
    num_keys = _count_keys(last_keys, num_queries, MAX_QUERIES)
    m = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    for start in range(split * BLOCK_N, num_keys, SPLITS * BLOCK_N):
        s = dot_keys(
            q, key_cache, block_table, start, num_keys, kv_head, kc_stride_block, kc_stride_slot,
            kc_stride_head, BLOCK_N, BLOCK_SIZE, HEAD_SIZE, BLOCK_D, True, PRECISION,
        )  # fmt: skip
        n = start + tl.arange(0, BLOCK_N)
        s = tl.where(n[None, :] <= last[:, None], s, float("-inf"))
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
    do_not_specialize_on_alignment=["block_table", "last_keys"],
)
def _received_kernel(
    query,  # [num_queries, num_heads, head_size]
    key_cache,  # [num_blocks, block_size, num_kv_heads, head_size]
    block_table,  # [max_num_blocks]
    last_keys,  # [num_queries]
    lse,  # [num_kv_heads * num_tiles, SPLITS, BLOCK_M], base 2
    received,  # [num_kv_heads * num_tiles, max_num_keys]
    scale_log2,  # scale * log2(e)
    num_queries,
    num_tiles,
    max_num_keys,
    q_stride_row,
    q_stride_head,
    kc_stride_block,
    kc_stride_slot,
    kc_stride_head,
    MAX_QUERIES: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``received[part, n] = sum over the part's rows of exp(scale * q k[n]) / sum(exp(scale * q k))``.

    Grid, parts and splits as ``_lse_kernel``'s; all keys that any query sees are written.
    """
    split, part = tl.program_id(0), tl.program_id(1)
    kv_head = part // num_tiles
    q, last = _load_rows(
        query, last_keys, num_queries, kv_head, part % num_tiles, q_stride_row, q_stride_head,
        GROUP, HEAD_SIZE, BLOCK_M, BLOCK_D,
    )  # fmt: skip
    num_keys = _count_keys(last_keys, num_queries, MAX_QUERIES)
    at = (part * SPLITS + tl.arange(0, SPLITS))[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    of_splits = tl.load(lse + at)
    m = tl.max(of_splits, axis=0)
    row_lse = m + tl.math.log2(tl.sum(tl.math.exp2(of_splits - m[None, :]), axis=0))
    to = received + part.to(tl.int64) * max_num_keys
    for start in range(split * BLOCK_N, num_keys, SPLITS * BLOCK_N):
        s = dot_keys(
            q, key_cache, block_table, start, num_keys, kv_head, kc_stride_block, kc_stride_slot,
            kc_stride_head, BLOCK_N, BLOCK_SIZE, HEAD_SIZE, BLOCK_D, True, PRECISION,
        )  # fmt: skip
        n = start + tl.arange(0, BLOCK_N)
        s = tl.where(n[None, :] <= last[:, None], s, float("-inf"))
        p = tl.math.exp2(s * scale_log2 - row_lse[:, None])
        tl.store(to + n, tl.sum(p, axis=0), mask=n < num_keys)


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
    BLOCK_N: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,  # in flight together
):
    """``scores[n] += sum over parts of received[part, n]``.

    Grid: ``(cdiv(max_num_keys, BLOCK_N),)``; a program whose keys no query sees returns.
    """
    num_keys = _count_keys(last_keys, num_queries, MAX_QUERIES)
    start = tl.program_id(0) * BLOCK_N
    if start >= num_keys:
        return
    n = start + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N], dtype=tl.float32)
    for first in range(0, num_parts, BLOCK_PARTS):
        part = first + tl.arange(0, BLOCK_PARTS)
        at = part.to(tl.int64)[:, None] * max_num_keys + n[None, :]
        mask = (part < num_parts)[:, None] & (n < num_keys)[None, :]
        total += tl.sum(tl.load(received + at, mask=mask, other=0.0), axis=0)
    before = tl.load(scores + n, mask=n < num_keys, other=0.0)
    tl.store(scores + n, before + total, mask=n < num_keys)


def choose_tiles(query: torch.Tensor, group: int) -> Tiles:
    """Tiles for this launch, where a KV head has ``group`` query heads.

    They do not depend on the number of queries: that would compile the kernels for each.
    """
    block_m = triton.next_power_of_2(MAX_QUERIES * group)
    if INTERPRETED:
        return Tiles(block_m=min(64, block_m), block_n=32, num_warps=4, num_stages=1)
    if query.element_size() == 4 or query.shape[2] > 128:
        return Tiles(block_m=min(64, block_m), block_n=32, num_warps=4, num_stages=2)
    return Tiles(block_m=min(128, block_m), block_n=64, num_warps=4, num_stages=3)


def choose_splits(device: torch.device, num_parts: int) -> int:
    """Programs of a part, a power of two: so many that two programs share a multiprocessor."""
    if INTERPRETED:
        return 2
    num_programs = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    return 1 << min(6, max(1, num_programs // num_parts).bit_length() - 1)


def launch(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    last_keys: torch.Tensor,
    scores: torch.Tensor,
    *,
    scale: float,
) -> None:
    """Launches the kernels; arguments as ``received_attention``'s, unchecked, none of them empty."""
    num_queries, num_heads, head_size = query.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    max_num_keys = scores.shape[0]
    group = num_heads // num_kv_heads
    tiles = choose_tiles(query, group)
    splits = choose_splits(query.device, num_kv_heads * triton.cdiv(MAX_QUERIES * group, tiles.block_m))
    num_tiles = triton.cdiv(num_queries * group, tiles.block_m)
    num_parts = num_kv_heads * num_tiles
    lse = torch.empty(num_parts, splits, tiles.block_m, dtype=torch.float32, device=query.device)
    received = torch.empty(num_parts, max_num_keys, dtype=torch.float32, device=query.device)
    place = (query, key_cache, block_table, last_keys, lse)
    strides = (query.stride(0), query.stride(1), *key_cache.stride()[:3])
    constants = dict(
        MAX_QUERIES=MAX_QUERIES,
        GROUP=group,
        HEAD_SIZE=head_size,
        BLOCK_SIZE=block_size,
        SPLITS=splits,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_D=max(16, triton.next_power_of_2(head_size)),
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    grid = (splits, num_parts)
    _lse_kernel[grid](*place, scale * LOG2E, num_queries, num_tiles, *strides, **constants)
    _received_kernel[grid](
        *place, received, scale * LOG2E, num_queries, num_tiles, max_num_keys, *strides, **constants
    )
    _sum_kernel[(triton.cdiv(max_num_keys, SUM_KEYS),)](
        received,
        last_keys,
        scores,
        num_queries,
        num_parts,
        max_num_keys,
        MAX_QUERIES=MAX_QUERIES,
        BLOCK_N=SUM_KEYS,
        BLOCK_PARTS=8,
        num_warps=4,
    )
