"""Stored K, rotated to its new position, and V into their slots of the paged cache."""

# Triton kernels carry no types of Python's:
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_blend.ops.fp8 import cache_types, check_scales, quantize_oracle, scale_stride, to_e4m3
from vllm_blend.ops.library import (
    FLOATS,
    INTS,
    check,
    check_inner_stride,
    check_rotary_dim,
    register,
    use_cuda,
    use_triton,
)


def shift_scatter(
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    is_neox_style: bool = True,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Writes rotated K and V to the paged cache; reads stored KV once and leaves it as it is.

    Args:
        k: K before RoPE, ``[num_tokens, num_kv_heads, head_size]``.
        v: V, the same shape and type.
        positions: new position of each token, ``[num_tokens]``.
        slot_mapping: its slot, ``block * block_size + offset``, ``[num_tokens]``; -1: not written.
        cos_sin_cache: the rotary module's, ``[max_position, rotary_dim]``: cosines, then sines.
        key_cache, value_cache: ``[num_blocks, block_size, num_kv_heads, head_size]``, any strides but
            a contiguous last dimension.
        is_neox_style: pairs are ``(d, d + rotary_dim / 2)``; else (GPT-J) ``(2 d, 2 d + 1)``.
        k_scale, v_scale: of caches in e4m3, ``[1]`` or ``[num_kv_heads]`` float32.

    Raises:
        ValueError: names the argument that does not fit.
    """
    check("k", k, ("num_tokens", "num_kv_heads", "head_size"), FLOATS, k)
    num_tokens, num_heads, head_size = k.shape
    check("v", v, k.shape, (k.dtype,), k)
    check("positions", positions, (num_tokens,), INTS, k)
    check("slot_mapping", slot_mapping, (num_tokens,), INTS, k)
    check("cos_sin_cache", cos_sin_cache, ("max_position", "rotary_dim"), FLOATS, k)
    cache_shape = ("num_blocks", "block_size", num_heads, head_size)
    types = cache_types(k.dtype, k_scale)
    check("key_cache", key_cache, cache_shape, types, k)
    check("value_cache", value_cache, tuple(key_cache.shape), types, k)
    check_scales(num_heads, k, k_scale=k_scale, v_scale=v_scale)
    check_rotary_dim(cos_sin_cache, head_size)
    for name, tensor in (
        ("k", k),
        ("v", v),
        ("cos_sin_cache", cos_sin_cache),
        ("key_cache", key_cache),
        ("value_cache", value_cache),
    ):
        check_inner_stride(name, tensor)
    caches = (key_cache, value_cache)
    torch.ops.vllm_blend.shift_scatter(
        k, v, positions, slot_mapping, cos_sin_cache, *caches, is_neox_style, k_scale, v_scale
    )


def rotate_oracle(
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    is_neox_style: bool,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """K at its positions, computed in ``dtype``: ``[num_tokens, num_kv_heads, head_size]``."""
    cos, sin = cos_sin_cache[positions.long()].to(dtype).unsqueeze(1).chunk(2, dim=-1)
    rotary_dim = cos_sin_cache.shape[1]
    x = k.to(dtype)
    if is_neox_style:
        x1, x2 = x[..., :rotary_dim].chunk(2, dim=-1)
        rotated = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)
    else:
        x1, x2 = x[..., :rotary_dim:2], x[..., 1:rotary_dim:2]
        rotated = torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).flatten(-2)
    return torch.cat((rotated, x[..., rotary_dim:]), dim=-1)


def shift_scatter_oracle(
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    is_neox_style: bool = True,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """The same in plain PyTorch; caches may be fp32 to see the exact result."""
    there = slot_mapping >= 0
    block_size = key_cache.shape[1]
    block, offset = slot_mapping[there] // block_size, slot_mapping[there] % block_size
    rotated = rotate_oracle(k, positions, cos_sin_cache, is_neox_style)
    if k_scale is not None and v_scale is not None:
        rotated, v = quantize_oracle(rotated.to(k.dtype), k_scale), quantize_oracle(v, v_scale)
    key_cache[block, offset] = rotated[there].to(key_cache.dtype)
    value_cache[block, offset] = v[there].to(value_cache.dtype)


# what changes from step to step is not compiled in
@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["positions", "slot_mapping"],
)
def _shift_scatter_kernel(
    k,  # [num_tokens, num_kv_heads, head_size]
    v,  # [num_tokens, num_kv_heads, head_size]
    positions,  # [num_tokens]
    slot_mapping,  # [num_tokens]
    cos_sin_cache,  # [max_position, ROTARY_DIM]
    k_scale,  # [1] or [num_kv_heads]; only with QUANTIZED
    v_scale,
    key_cache,  # [num_blocks, block_size, num_kv_heads, head_size]
    value_cache,  # [num_blocks, block_size, num_kv_heads, head_size]
    num_tokens,
    num_heads,
    k_stride_token,
    k_stride_head,
    v_stride_token,
    v_stride_head,
    cos_stride,
    kc_stride_block,
    kc_stride_slot,
    kc_stride_head,
    vc_stride_block,
    vc_stride_slot,
    vc_stride_head,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    IS_NEOX: tl.constexpr,
    BLOCK_T: tl.constexpr,
    HEADS: tl.constexpr,  # heads of a program; power of two
    BLOCK_HALF: tl.constexpr,  # power of two, at least ROTARY_DIM / 2
    BLOCK_PASS: tl.constexpr,  # power of two, at least HEAD_SIZE - ROTARY_DIM; 0 where that is 0
    BLOCK_D: tl.constexpr,  # power of two, at least HEAD_SIZE
    QUANTIZED: tl.constexpr,  # whether the caches are in e4m3
    SCALE_STRIDE: tl.constexpr,
):
    """``key_cache[slot] = rope(k, position)``, ``value_cache[slot] = v`` where ``slot >= 0``.

    Grid: ``(cdiv(num_tokens, BLOCK_T), cdiv(num_kv_heads, HEADS))``. A program's rows are its pairs of
    token and head; all of their K and V is asked for before any of it is used. K goes through as two
    halves ``x1, x2`` of pairs: ``x1 cos - x2 sin``, ``x2 cos + x1 sin``, in fp32. V and dims from
    ROTARY_DIM on are moved as they are. With QUANTIZED both are divided by their scales, K rounded to
    its own type before.
    """
    row = tl.arange(0, BLOCK_T * HEADS)
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + row // HEADS
    head = tl.program_id(1) * HEADS + row % HEADS
    slot = tl.load(slot_mapping + token, mask=token < num_tokens, other=-1).to(tl.int64)
    there = (slot >= 0) & (head < num_heads)
    position = tl.load(positions + token, mask=there, other=0).to(tl.int64)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    k_row = (k + token * k_stride_token + head * k_stride_head)[:, None]
    v_row = (v + token * v_stride_token + head * v_stride_head)[:, None]
    kc_row = key_cache + block * kc_stride_block + offset * kc_stride_slot + head * kc_stride_head
    vc_row = value_cache + block * vc_stride_block + offset * vc_stride_slot + head * vc_stride_head
    kc_row, vc_row = kc_row[:, None], vc_row[:, None]
    stored = k.dtype.element_ty

    # V goes in halves too: in K's layout, so that one load of the slots serves both
    low = tl.arange(0, BLOCK_D // 2)[None, :]
    high = low + BLOCK_D // 2
    low_mask, high_mask = there[:, None] & (low < HEAD_SIZE), there[:, None] & (high < HEAD_SIZE)
    half = tl.arange(0, BLOCK_HALF)[None, :]
    half_mask = there[:, None] & (half < ROTARY_DIM // 2)
    pair = tl.arange(0, 2 * BLOCK_HALF)[None, :]
    pair_mask = there[:, None] & (pair < ROTARY_DIM)
    rest = ROTARY_DIM + tl.arange(0, max(BLOCK_PASS, 1))[None, :]
    rest_mask = there[:, None] & (rest < HEAD_SIZE)

    v1 = tl.load(v_row + low, mask=low_mask)
    v2 = tl.load(v_row + high, mask=high_mask)
    if BLOCK_PASS > 0:
        passed = tl.load(k_row + rest, mask=rest_mask)
    if IS_NEOX:
        x1 = tl.load(k_row + half, mask=half_mask)
        x2 = tl.load(k_row + half + ROTARY_DIM // 2, mask=half_mask)
    else:
        x = tl.load(k_row + pair, mask=pair_mask)
    angle = cos_sin_cache + position[:, None] * cos_stride + half
    cos = tl.load(angle, mask=half_mask, other=0.0).to(tl.float32)
    sin = tl.load(angle + ROTARY_DIM // 2, mask=half_mask, other=0.0).to(tl.float32)

    if QUANTIZED:
        ks = tl.load(k_scale + head * SCALE_STRIDE, mask=there, other=1.0)[:, None]
        vs = tl.load(v_scale + head * SCALE_STRIDE, mask=there, other=1.0)[:, None]
        v1, v2 = to_e4m3(v1, vs), to_e4m3(v2, vs)
        if BLOCK_PASS > 0:
            passed = to_e4m3(passed, ks)
    tl.store(vc_row + low, v1, mask=low_mask)
    tl.store(vc_row + high, v2, mask=high_mask)
    if BLOCK_PASS > 0:
        tl.store(kc_row + rest, passed, mask=rest_mask)
    if IS_NEOX:
        x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
        y1, y2 = (x1 * cos - x2 * sin).to(stored), (x2 * cos + x1 * sin).to(stored)
        if QUANTIZED:
            y1, y2 = to_e4m3(y1, ks), to_e4m3(y2, ks)
        tl.store(kc_row + half, y1, mask=half_mask)
        tl.store(kc_row + half + ROTARY_DIM // 2, y2, mask=half_mask)
    else:
        x1, x2 = tl.split(tl.reshape(x.to(tl.float32), [BLOCK_T * HEADS, BLOCK_HALF, 2]))
        y = tl.join(x1 * cos - x2 * sin, x2 * cos + x1 * sin)
        y = tl.reshape(y, [BLOCK_T * HEADS, 2 * BLOCK_HALF]).to(stored)
        if QUANTIZED:
            y = to_e4m3(y, ks)
        tl.store(kc_row + pair, y, mask=pair_mask)


def launch(
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    is_neox_style: bool,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """``shift_scatter`` without checks, for callers that made the tensors themselves."""
    num_tokens, num_heads, head_size = k.shape
    if num_tokens == 0:
        return
    if use_cuda(k) and k_scale is None:
        torch.ops.vllm_blend_C.shift_scatter.default(
            k, v, positions, slot_mapping, cos_sin_cache, key_cache, value_cache, is_neox_style
        )
        return
    if not use_triton(k):
        caches = (key_cache, value_cache)
        shift_scatter_oracle(
            k, v, positions, slot_mapping, cos_sin_cache, *caches, is_neox_style, k_scale, v_scale
        )
        return
    rotary_dim = cos_sin_cache.shape[1]
    heads = min(ROWS, triton.next_power_of_2(num_heads))
    block_t = ROWS // heads
    grid = (triton.cdiv(num_tokens, block_t), triton.cdiv(num_heads, heads))
    _shift_scatter_kernel[grid](
        k,
        v,
        positions,
        slot_mapping,
        cos_sin_cache,
        k if k_scale is None else k_scale,
        v if v_scale is None else v_scale,
        key_cache,
        value_cache,
        num_tokens,
        num_heads,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        cos_sin_cache.stride(0),
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        BLOCK_SIZE=key_cache.shape[1],
        HEAD_SIZE=head_size,
        ROTARY_DIM=rotary_dim,
        IS_NEOX=is_neox_style,
        BLOCK_T=block_t,
        HEADS=heads,
        BLOCK_HALF=triton.next_power_of_2(rotary_dim // 2),
        BLOCK_PASS=triton.next_power_of_2(head_size - rotary_dim) if head_size > rotary_dim else 0,
        BLOCK_D=triton.next_power_of_2(head_size),
        QUANTIZED=k_scale is not None,
        SCALE_STRIDE=scale_stride(k_scale),
        num_warps=NUM_WARPS,
    )


ROWS, NUM_WARPS = 16, 4
"""Pairs of token and head of a program, and its warps. On an H100 8 to 64 rows and 1 to 8 warps are
within 5% of these, but for more than 16 rows a warp."""

register(
    "shift_scatter(Tensor k, Tensor v, Tensor positions, Tensor slot_mapping, "
    "Tensor cos_sin_cache, Tensor(a!) key_cache, Tensor(b!) value_cache, bool is_neox_style, "
    "Tensor? k_scale=None, Tensor? v_scale=None) -> ()",
    launch,
)
