"""Paged caches in eight bits (e4m3): a value is what lies there times a scale, of all heads or of each.

It is rounded as vLLM's ``reshape_and_cache_flash`` rounds it.
"""

# Triton kernels carry no types of Python's:
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_blend.ops.library import check

FP8 = torch.float8_e4m3fn

LARGEST = 448.0
"""What e4m3 holds; larger values become this."""

TRITON_TYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    FP8: tl.float8e4nv,
}


@triton.jit
def to_e4m3(x, scale):
    """``x / scale``, rounded to the nearest, halves to even, and to at most 448 (LARGEST).

    The sum with a number 2^20 times larger rounds it, so that the cast has nothing left to round: the
    cast of Triton's interpreter rounds otherwise than a GPU's.
    """
    x = tl.div_rn(x.to(tl.float32), scale)
    bits = x.to(tl.int32, bitcast=True)
    size = tl.abs(x)
    size = tl.where(size > 448.0, 448.0, size)
    power = (size.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    # 3 bits behind the first one, or steps of 2^-9
    large = tl.maximum(power, 0.015625) * 1572864.0
    size = (size + large) - large
    signed = size.to(tl.int32, bitcast=True) | (bits & -0x80000000)
    return signed.to(tl.float32, bitcast=True).to(tl.float8e4nv)


def quantize_oracle(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The same in plain PyTorch.

    Args:
        x: ``[num_tokens, num_kv_heads, head_size]``.
        scale: of all heads, or of each, ``[num_kv_heads]``.
    """
    return (x.float() / scale.float().view(-1, 1)).clamp(-LARGEST, LARGEST).to(FP8)


def widen_oracle(x: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """What a tensor ``[..., num_heads, head_size]`` stands for, in ``dtype``; without a scale: itself.

    Args:
        scale: of all heads, or of each of the KV heads that share the ``num_heads``.
    """
    wide = x.to(dtype)
    if scale is None:
        return wide
    of_heads = scale.to(dtype).reshape(-1).repeat_interleave(x.shape[-2] // scale.numel())
    return wide * of_heads.view(-1, 1)


def scale_stride(scale: torch.Tensor | None) -> int:
    """From a KV head's scale to the next one's."""
    return int(scale is not None and scale.numel() > 1)


def cache_types(dtype: torch.dtype, k_scale: torch.Tensor | None) -> tuple[torch.dtype, ...]:
    """Allowed types of a cache of values in ``dtype``."""
    return (dtype,) if k_scale is None else (FP8,)


def check_scales(num_kv_heads: int, like: torch.Tensor, **scales: torch.Tensor | None) -> None:
    """Raises ValueError, naming the argument, unless each is None or fits."""
    for name, scale in scales.items():
        if scale is None:
            continue
        if scale.numel() not in (1, num_kv_heads):
            raise ValueError(
                f"{name} has {scale.numel()} values; expected 1, or {num_kv_heads}: one a KV head"
            )
        check(name, scale.reshape(-1), (scale.numel(),), (torch.float32,), like)
        if not scale.is_contiguous():
            raise ValueError(f"{name} has strides {list(scale.stride())}; it must be contiguous")
    if "v_scale" in scales and (scales["k_scale"] is None) != (scales["v_scale"] is None):
        raise ValueError("k_scale or v_scale is None; a cache in e4m3 has both, another neither")
