"""The Triton kernel of ``segment_scatter``."""

# Triton kernels carry no types of Python's:
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

from vllm_blend.ops.fp8 import to_e4m3


# where a step's tables begin is not compiled in
@triton.jit(do_not_specialize_on_alignment=["addresses", "segments", "totals", "slot_mapping"])
def segment_scatter_kernel(
    addresses,  # [num_segments_max, 2]
    segments,  # [num_segments_max, 4]
    totals,  # [2]
    slot_mapping,  # [num_rows_max]
    cos_sin_cache,  # [max_position, ROTARY_DIM]
    k_scale,  # [1] or [num_kv_heads]; only with QUANTIZED
    v_scale,
    key_cache,  # [num_blocks, block_size, num_kv_heads, head_size]
    value_cache,  # [num_blocks, block_size, num_kv_heads, head_size]
    cos_stride,
    kc_stride_block,
    kc_stride_slot,
    kc_stride_head,
    vc_stride_block,
    vc_stride_slot,
    vc_stride_head,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    IS_NEOX: tl.constexpr,
    UNIT_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,  # heads in flight; power of two
    BLOCK_HALF: tl.constexpr,  # power of two, at least ROTARY_DIM / 2
    BLOCK_PASS: tl.constexpr,  # power of two, at least HEAD_SIZE - ROTARY_DIM; 0 where that is 0
    BLOCK_D: tl.constexpr,  # power of two, at least HEAD_SIZE
    LOG_SEGMENTS: tl.constexpr,  # steps of the search for a unit's segment
    STORED: tl.constexpr,  # type of the segments' K and V
    QUANTIZED: tl.constexpr,  # whether the caches are in e4m3
    SCALE_STRIDE: tl.constexpr,
):
    """``key_cache[slot] = rope(k, position)``, ``value_cache[slot] = v`` where ``slot >= 0``.

    With QUANTIZED both are divided by their scales, K rounded to its own type before: as vLLM's layers
    do, whose rotation ends in that type.

    Grid: ``(num_programs,)``, each taking every num_programs-th unit: UNIT_TOKENS consecutive tokens
    of one segment. A unit's rows are its pairs of token and head. All of its K and V (HEADS heads at a
    time) is asked for before any of it is used, since each request may take PCIe's microseconds. K
    goes through as two halves ``x1, x2`` of pairs: ``x1 cos - x2 sin``, ``x2 cos + x1 sin``, in fp32.
    """
    num_segments, num_units = tl.load(totals), tl.load(totals + 1)
    row = tl.arange(0, UNIT_TOKENS * HEADS)
    half = tl.arange(0, BLOCK_HALF)
    pair = tl.arange(0, 2 * BLOCK_HALF)
    # V goes in halves too: in K's layout, so that one load of the slots serves both
    low_dim = tl.arange(0, BLOCK_D // 2)
    high_dim = low_dim + BLOCK_D // 2
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        # the last segment whose first unit is not behind this one; empty ones come before it
        low, high = num_segments * 0, num_segments
        for _ in tl.static_range(LOG_SEGMENTS):
            middle = (low + high) // 2
            first = tl.load(segments + middle * 4 + 3)
            open = high - low > 1
            low = tl.where(open & (first <= unit), middle, low)
            high = tl.where(open & (first > unit), middle, high)
        count, first_position = tl.load(segments + low * 4), tl.load(segments + low * 4 + 1)
        first_row, first_unit = tl.load(segments + low * 4 + 2), tl.load(segments + low * 4 + 3)
        k = tl.load(addresses + low * 2).to(tl.pointer_type(STORED), bitcast=False)
        v = tl.load(addresses + low * 2 + 1).to(tl.pointer_type(STORED), bitcast=False)
        k, v = tl.multiple_of(k, 16), tl.multiple_of(v, 16)

        token = (unit - first_unit) * UNIT_TOKENS + row // HEADS
        slot = tl.load(slot_mapping + first_row + token, mask=token < count, other=-1)
        position = (first_position + token).to(tl.int64)
        angle = cos_sin_cache + position[:, None] * cos_stride + half[None, :]
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        kc_row = key_cache + block * kc_stride_block + offset * kc_stride_slot
        vc_row = value_cache + block * vc_stride_block + offset * vc_stride_slot

        for first_head in tl.static_range(0, NUM_HEADS, HEADS):
            head = first_head + row % HEADS
            there = (slot >= 0) & (head < NUM_HEADS)
            start = (token.to(tl.int64) * NUM_HEADS + head)[:, None] * HEAD_SIZE
            target = (kc_row + head * kc_stride_head)[:, None]
            if QUANTIZED:
                ks = tl.load(k_scale + head * SCALE_STRIDE, mask=there, other=1.0)[:, None]
                vs = tl.load(v_scale + head * SCALE_STRIDE, mask=there, other=1.0)[:, None]
            half_mask = there[:, None] & (half < ROTARY_DIM // 2)[None, :]
            pair_mask = there[:, None] & (pair < ROTARY_DIM)[None, :]
            rest = ROTARY_DIM + tl.arange(0, max(BLOCK_PASS, 1))
            rest_mask = there[:, None] & (rest < HEAD_SIZE)[None, :]
            low_mask = there[:, None] & (low_dim < HEAD_SIZE)[None, :]
            high_mask = there[:, None] & (high_dim < HEAD_SIZE)[None, :]
            v1 = tl.load(v + start + low_dim[None, :], mask=low_mask)
            v2 = tl.load(v + start + high_dim[None, :], mask=high_mask)
            if BLOCK_PASS > 0:
                passed = tl.load(k + start + rest[None, :], mask=rest_mask)
            tl.debug_barrier()  # else ptxas moves these loads behind K's arithmetic
            if IS_NEOX:
                x1 = tl.load(k + start + half[None, :], mask=half_mask)
                x2 = tl.load(k + start + half[None, :] + ROTARY_DIM // 2, mask=half_mask)
            else:
                x = tl.load(k + start + pair[None, :], mask=pair_mask)
            cos = tl.load(angle, mask=half_mask, other=0.0).to(tl.float32)
            sin = tl.load(angle + ROTARY_DIM // 2, mask=half_mask, other=0.0).to(tl.float32)

            if IS_NEOX:
                x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
                y1, y2 = (x1 * cos - x2 * sin).to(STORED), (x2 * cos + x1 * sin).to(STORED)
                if QUANTIZED:
                    y1, y2 = to_e4m3(y1, ks), to_e4m3(y2, ks)
                tl.store(target + half[None, :], y1, mask=half_mask)
                tl.store(target + half[None, :] + ROTARY_DIM // 2, y2, mask=half_mask)
            else:
                x = tl.reshape(x.to(tl.float32), [UNIT_TOKENS * HEADS, BLOCK_HALF, 2])
                x1, x2 = tl.split(x)
                x = tl.join(x1 * cos - x2 * sin, x2 * cos + x1 * sin)
                x = tl.reshape(x, [UNIT_TOKENS * HEADS, 2 * BLOCK_HALF]).to(STORED)
                if QUANTIZED:
                    x = to_e4m3(x, ks)
                tl.store(target + pair[None, :], x, mask=pair_mask)
            if QUANTIZED:
                v1, v2 = to_e4m3(v1, vs), to_e4m3(v2, vs)
                if BLOCK_PASS > 0:
                    passed = to_e4m3(passed, ks)
            if BLOCK_PASS > 0:
                tl.store(target + rest[None, :], passed, mask=rest_mask)
            target = (vc_row + head * vc_stride_head)[:, None]
            tl.store(target + low_dim[None, :], v1, mask=low_mask)
            tl.store(target + high_dim[None, :], v2, mask=high_mask)
