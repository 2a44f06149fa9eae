"""What attention kernels over the paged cache share: keys by blocks, products with K and V, softmax."""

# Triton kernels carry no types of Python's:
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = 1.4426950408889634


def logit_scales(scale: float, softcap: float) -> tuple[float, float]:
    """``scale_log2`` and ``cap_scale`` of the kernels; a ``softcap`` of 0 is none.

    What ``dot_keys`` returns, times ``scale_log2``, is the logit in base 2: ``q k^T * scale``, or with
    a soft cap ``softcap * tanh(x)``, where ``x = q k^T * scale / softcap`` and
    ``e^2x = 2^(q k^T * cap_scale)``.
    """
    if not softcap:
        return scale * LOG2E, 0.0
    return softcap * LOG2E, 2 * LOG2E * scale / softcap


@triton.jit
def _keys(
    block_ids,  # row of the block table
    n,  # [BLOCK_N] key positions
    limit,
    kv_head,
    stride_block,
    stride_slot,
    stride_head,
    BLOCK_SIZE: tl.constexpr,
    MASK: tl.constexpr,
):
    """Offsets of the keys ``n`` in a cache, ``[BLOCK_N]`` int64."""
    if MASK:
        block = tl.load(block_ids + n // BLOCK_SIZE, mask=n < limit, other=0)
    else:
        block = tl.load(block_ids + n // BLOCK_SIZE)
    return block.to(tl.int64) * stride_block + (n % BLOCK_SIZE) * stride_slot + kv_head * stride_head


@triton.jit
def widen_query(q):
    """A query in e4m3 in a type that products are exact in; others as they are."""
    if q.dtype.is_fp8():
        return q.to(tl.float16)
    else:
        return q


@triton.jit
def scale_logits(
    scale_log2,
    cap_scale,
    q_scale,
    k_scale,
    kv_head,
    QUERY_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """``scale_log2`` and ``cap_scale`` of ``q`` and ``k`` that wait for their scales."""
    scale = tl.load(k_scale + kv_head * SCALE_STRIDE)
    if QUERY_STRIDE >= 0:
        scale *= tl.load(q_scale + kv_head * QUERY_STRIDE)
    if SOFTCAP:
        return scale_log2, cap_scale * scale
    else:
        return scale_log2 * scale, cap_scale


@triton.jit
def dot_keys(
    q,
    key_cache,
    block_ids,
    start,
    limit,
    kv_head,
    kc_stride_block,
    kc_stride_slot,
    kc_stride_head,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASK: tl.constexpr,
    PRECISION: tl.constexpr,
    cap_scale,
    SOFTCAP: tl.constexpr,
):
    """``q k^T`` for the keys ``[start, start + BLOCK_N)``, ``[BLOCK_M, BLOCK_N]`` fp32.

    With SOFTCAP ``tanh(q k^T * scale / softcap)``; ``cap_scale`` is that of ``logit_scales``.
    """
    n = start + tl.arange(0, BLOCK_N)
    dim = tl.arange(0, BLOCK_D)
    at = _keys(
        block_ids, n, limit, kv_head, kc_stride_block, kc_stride_slot, kc_stride_head,
        BLOCK_SIZE, MASK,
    )  # fmt: skip
    pointers = key_cache + at[None, :] + dim[:, None]
    if MASK or BLOCK_D != HEAD_SIZE:
        k = tl.load(pointers, mask=(n < limit)[None, :] & (dim < HEAD_SIZE)[:, None], other=0.0)
    else:
        k = tl.load(pointers)
    s = tl.dot(q, k.to(q.dtype), input_precision=PRECISION)  # e4m3 fits in q's type
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (1 + e^2x), which is right at both ends; off by some 2^-23
        s = 1.0 - 2.0 / (1.0 + tl.math.exp2(s * cap_scale))
    return s


@triton.jit
def values(
    value_cache,
    block_ids,
    start,
    limit,
    kv_head,
    vc_stride_block,
    vc_stride_slot,
    vc_stride_head,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASK: tl.constexpr,
):
    """V of the keys ``[start, start + BLOCK_N)``, ``[BLOCK_N, BLOCK_D]``."""
    n = start + tl.arange(0, BLOCK_N)
    dim = tl.arange(0, BLOCK_D)
    at = _keys(
        block_ids, n, limit, kv_head, vc_stride_block, vc_stride_slot, vc_stride_head,
        BLOCK_SIZE, MASK,
    )  # fmt: skip
    pointers = value_cache + at[:, None] + dim[None, :]
    if MASK or BLOCK_D != HEAD_SIZE:
        return tl.load(pointers, mask=(n < limit)[:, None] & (dim < HEAD_SIZE)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def accumulate(
    s,
    v,
    acc,
    m,
    total,
    scale_log2,
    PRECISION: tl.constexpr,
    MASK: tl.constexpr,
    TYPE: tl.constexpr,  # of the product with V
):
    """One step of the online softmax, in base 2."""
    m_new = tl.maximum(m, tl.max(s, axis=1) * scale_log2)
    if MASK:  # noqa: SIM108
        # a row that has seen no key yet keeps -inf; subtract 0 there, not -inf from -inf
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    else:
        shift = m_new
    p = tl.math.exp2(s * scale_log2 - shift[:, None])
    alpha = tl.math.exp2(m - shift)
    total = total * alpha + tl.sum(p, axis=1)
    acc = acc * alpha[:, None]
    acc = tl.dot(p.to(TYPE), v.to(TYPE), acc, input_precision=PRECISION)
    return acc, m_new, total
