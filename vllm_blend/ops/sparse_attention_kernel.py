"""The Triton kernel of ``sparse_attention``, and its launch."""

# Triton kernels carry no types of Python's:
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from vllm_blend.ops.fp8 import scale_stride
from vllm_blend.ops.paged_products import (
    accumulate,
    dot_keys,
    logit_scales,
    scale_logits,
    values,
    widen_query,
)
from vllm_blend.ops.sparse_attention_tiles import Tiles, prefix_rows


# what changes from step to step is not compiled in
@triton.jit(
    do_not_specialize=["num_reqs", "num_tiles", "lse_stride"],
    do_not_specialize_on_alignment=[
        *("positions", "query_start_loc", "block_table", "prefix_lse"),
        *("q_scale", "k_scale", "v_scale"),
    ],
)
def _sparse_attention_kernel(
    query,  # [num_rows, num_heads, head_size]
    key_cache,  # [num_blocks, block_size, num_kv_heads, head_size]
    value_cache,  # [num_blocks, block_size, num_kv_heads, head_size]
    positions,  # [num_rows]
    query_start_loc,  # [num_reqs + 1]
    block_table,  # [num_reqs, max_num_blocks]
    out,  # [num_rows, num_heads, head_size]
    prefix_lse,  # [num_heads, num_rows], natural log; only with PREFIX_Q
    sinks,  # [num_heads]; only with HAS_SINKS
    q_scale,  # [1] or [num_kv_heads]; only with QUERY_STRIDE >= 0
    k_scale,  # the same, only with QUANTIZED
    v_scale,
    scale_log2,  # logit_scales(scale, softcap)
    cap_scale,
    num_reqs,
    num_tiles,
    q_stride_row,
    q_stride_head,
    kc_stride_block,
    kc_stride_slot,
    kc_stride_head,
    vc_stride_block,
    vc_stride_slot,
    vc_stride_head,
    bt_stride,
    out_stride_row,
    out_stride_head,
    lse_stride,
    GROUP: tl.constexpr,  # query heads of a KV head
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,  # rows of a tile: BLOCK_M // GROUP
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEADS_ABREAST: tl.constexpr,
    PREFIX_Q: tl.constexpr,  # 0: none
    SOFTCAP: tl.constexpr,  # whether there is one
    HAS_SINKS: tl.constexpr,
    QUANTIZED: tl.constexpr,  # whether the caches are in e4m3
    QUERY_STRIDE: tl.constexpr,  # -1: queries are not
    SCALE_STRIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Flash attention with the mask ``key position <= query position``.

    Grid: ``(num_tiles * num_kv_heads,)`` with ``num_tiles = num_rows // BLOCK_Q + num_reqs``, which
    bounds the tiles of any split of the rows over requests, so the host need not know the split; a
    program without a tile returns. Later tiles see more keys and start first; HEADS_ABREAST KV heads
    run side by side, few enough that their keys stay in the L2 cache.

    A tile is BLOCK_Q consecutive rows of one request with all GROUP heads of a KV head:
    row ``m`` of the matrix is query ``m // GROUP``, head ``m % GROUP``. Keys fall into three ranges:
    seen by some rows (the window's edge), by all rows, and again by some (between the tile's first and
    last position); only the first and the third are masked. Keys past the last position are not read.

    With PREFIX_Q, a multiple of BLOCK_Q, ``out`` holds the attention of ``virtual_requests`` with
    PREFIX_Q rows, and ``prefix_lse`` the log of the sum of its exponentials. The kernel goes on from
    there, and leaves rows as they are that have all their keys. ``out`` knows of no sinks: a sink joins
    the total once, at the end.

    With QUANTIZED products are of what lies in the cache, widened; the scales of queries and K are part
    of the logits' scale, and V's of the result.
    """
    TYPE: tl.constexpr = out.dtype.element_ty
    # --- which tile ---
    pid = tl.program_id(0)
    per_heads = num_tiles * HEADS_ABREAST
    kv_head = (pid // per_heads) * HEADS_ABREAST + pid % HEADS_ABREAST
    tile = num_tiles - 1 - (pid % per_heads) // HEADS_ABREAST
    # the last request whose first tile (row // BLOCK_Q + request) is not after `tile`
    low, high = 0, num_reqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) // BLOCK_Q + middle <= tile:
            low = middle + 1
        else:
            high = middle
    request = low - 1
    first_row = tl.load(query_start_loc + request)
    last_row = tl.load(query_start_loc + request + 1)
    request_row = first_row
    first_row += (tile - (first_row // BLOCK_Q + request)) * BLOCK_Q
    if first_row >= last_row:
        return

    # --- queries ---
    m_index = tl.arange(0, BLOCK_M)
    row = first_row + m_index // GROUP
    head = kv_head * GROUP + m_index % GROUP
    dim = tl.arange(0, BLOCK_D)
    valid = (row < last_row) & (m_index < BLOCK_Q * GROUP)
    position = tl.load(positions + row, mask=valid, other=-1).to(tl.int32)
    last = tl.max(position, axis=0)
    position = tl.where(valid, position, last)  # idle lanes must not loosen the bounds
    first = tl.min(position, axis=0)
    at = row.to(tl.int64)[:, None] * q_stride_row + head[:, None] * q_stride_head + dim[None, :]
    lane_mask = valid[:, None] & (dim < HEAD_SIZE)[None, :]
    q = widen_query(tl.load(query + at, mask=lane_mask, other=0.0))
    if QUANTIZED:
        scale_log2, cap_scale = scale_logits(
            scale_log2, cap_scale, q_scale, k_scale, kv_head, QUERY_STRIDE, SCALE_STRIDE, SOFTCAP
        )
        of_values = tl.load(v_scale + kv_head * SCALE_STRIDE)
    block_ids = block_table + tl.cast(request, tl.int64) * bt_stride

    # --- ranges of keys: [begin, full_begin) some, [full_begin, full_end) all, [full_end, end) some ---
    end = last + 1
    begin = 0
    full_begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        full_begin = (tl.maximum(last - WINDOW + 1, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    full_end = (first + 1) // BLOCK_N * BLOCK_N
    full_end = tl.maximum(full_end, full_begin)
    full_begin = tl.minimum(full_begin, (end + BLOCK_N - 1) // BLOCK_N * BLOCK_N)
    full_end = tl.minimum(full_end, (end + BLOCK_N - 1) // BLOCK_N * BLOCK_N)

    out_at = row.to(tl.int64)[:, None] * out_stride_row + head[:, None] * out_stride_head
    out_at += dim[None, :]
    if PREFIX_Q > 0:
        prefix_row = first_row - (first_row - request_row) % PREFIX_Q
        # the last key of each row that is in `out`
        known = tl.load(positions + prefix_row).to(tl.int32) + row - prefix_row
        if not HAS_SINKS:
            missing = tl.max(tl.where(valid, position - known, 0), axis=0)
            if missing == 0:
                return
        full_end = tl.min(known, axis=0) + 1
        acc = tl.load(out + out_at, mask=lane_mask, other=0.0).to(tl.float32)
        if QUANTIZED:
            acc = acc / of_values
        lse = tl.load(prefix_lse + head.to(tl.int64) * lse_stride + row, mask=valid, other=0.0)
        m = lse * 1.4426950408889634
        total = tl.full([BLOCK_M], 1.0, dtype=tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
        m = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)

    if WINDOW > 0:
        for start in range(begin, full_begin, BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            s = dot_keys(
                q, key_cache, block_ids, start, end, kv_head, kc_stride_block, kc_stride_slot,
                kc_stride_head, BLOCK_N, BLOCK_SIZE, HEAD_SIZE, BLOCK_D, True, PRECISION,
                cap_scale, SOFTCAP,
            )  # fmt: skip
            seen = n[None, :] <= position[:, None]
            seen &= n[None, :] > position[:, None] - WINDOW
            s = tl.where(seen, s, float("-inf"))
            v = values(
                value_cache, block_ids, start, end, kv_head, vc_stride_block, vc_stride_slot,
                vc_stride_head, BLOCK_N, BLOCK_SIZE, HEAD_SIZE, BLOCK_D, True,
            )  # fmt: skip
            acc, m, total = accumulate(s, v, acc, m, total, scale_log2, PRECISION, True, TYPE)

    if PREFIX_Q == 0:
        for start in range(full_begin, full_end, BLOCK_N):
            s = dot_keys(
                q, key_cache, block_ids, start, end, kv_head, kc_stride_block, kc_stride_slot,
                kc_stride_head, BLOCK_N, BLOCK_SIZE, HEAD_SIZE, BLOCK_D, False, PRECISION,
                cap_scale, SOFTCAP,
            )  # fmt: skip
            v = values(
                value_cache, block_ids, start, end, kv_head, vc_stride_block, vc_stride_slot,
                vc_stride_head, BLOCK_N, BLOCK_SIZE, HEAD_SIZE, BLOCK_D, False,
            )  # fmt: skip
            acc, m, total = accumulate(s, v, acc, m, total, scale_log2, PRECISION, WINDOW > 0, TYPE)

    for start in range(full_end, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        s = dot_keys(
            q, key_cache, block_ids, start, end, kv_head, kc_stride_block, kc_stride_slot,
            kc_stride_head, BLOCK_N, BLOCK_SIZE, HEAD_SIZE, BLOCK_D, True, PRECISION,
            cap_scale, SOFTCAP,
        )  # fmt: skip
        seen = n[None, :] <= position[:, None]
        if PREFIX_Q > 0:
            seen &= n[None, :] > known[:, None]
        if WINDOW > 0:
            seen &= n[None, :] > position[:, None] - WINDOW
        s = tl.where(seen, s, float("-inf"))
        v = values(
            value_cache, block_ids, start, end, kv_head, vc_stride_block, vc_stride_slot,
            vc_stride_head, BLOCK_N, BLOCK_SIZE, HEAD_SIZE, BLOCK_D, True,
        )  # fmt: skip
        acc, m, total = accumulate(s, v, acc, m, total, scale_log2, PRECISION, True, TYPE)

    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        m_new = tl.maximum(m, sink)
        alpha = tl.math.exp2(m - m_new)
        total = total * alpha + tl.math.exp2(sink - m_new)
        acc = acc * alpha[:, None]
    acc = acc / total[:, None]
    if QUANTIZED:
        acc = acc * of_values
    tl.store(out + out_at, acc.to(out.dtype.element_ty), mask=lane_mask)


def launch(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    sliding_window: int,
    tiles: Tiles,
    prefix_lse: torch.Tensor | None = None,
    *,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> Any:
    """Launches the kernel with these tiles; arguments as ``sparse_attention``'s, unchecked.

    With ``prefix_lse`` (``[num_heads, num_rows]`` fp32), ``out`` and it hold the attention of
    ``virtual_requests`` without sinks, and the kernel adds the keys that those leave out, and sinks.
    """
    num_rows, num_heads, head_size = query.shape
    num_kv_heads = key_cache.shape[2]
    num_reqs = query_start_loc.shape[0] - 1
    group = num_heads // num_kv_heads
    block_m, block_q = max(tiles.block_m, triton.next_power_of_2(group)), tiles.block_q(group)
    num_tiles = num_rows // block_q + num_reqs
    return _sparse_attention_kernel[(num_tiles * num_kv_heads,)](
        query,
        key_cache,
        value_cache,
        positions,
        query_start_loc,
        block_table,
        out,
        out if prefix_lse is None else prefix_lse,
        out if sinks is None else sinks,
        *(out if scale is None else scale for scale in (q_scale, k_scale, v_scale)),
        *logit_scales(scale, softcap),
        num_reqs,
        num_tiles,
        query.stride(0),
        query.stride(1),
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_table.stride(0),
        out.stride(0),
        out.stride(1),
        0 if prefix_lse is None else prefix_lse.stride(0),
        GROUP=group,
        HEAD_SIZE=head_size,
        BLOCK_SIZE=key_cache.shape[1],
        WINDOW=sliding_window,
        BLOCK_M=block_m,
        BLOCK_Q=block_q,
        BLOCK_N=tiles.block_n,
        BLOCK_D=max(16, triton.next_power_of_2(head_size)),
        HEADS_ABREAST=tiles.heads_abreast,
        PREFIX_Q=0 if prefix_lse is None else prefix_rows(group),
        SOFTCAP=softcap > 0,
        HAS_SINKS=sinks is not None,
        QUANTIZED=k_scale is not None,
        QUERY_STRIDE=-1 if q_scale is None else scale_stride(q_scale),
        SCALE_STRIDE=scale_stride(k_scale),
        PRECISION="ieee" if out.dtype == torch.float32 else "tf32",
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
