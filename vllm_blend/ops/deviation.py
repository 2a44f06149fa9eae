"""Squared L2 distance of fresh to stored V, per token: what HKVD selection ranks tokens by."""

# Triton kernels carry no types of Python's:
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_blend.ops.library import FLOATS, check, check_inner_stride, register, use_cuda, use_triton


def deviation(fresh: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """Squared L2 distance of two tensors, per token, summed in fp32.

    Args:
        fresh: ``[num_tokens, num_kv_heads, head_size]``; any stride between tokens and heads.
        stored: the same shape and type.

    Returns:
        ``[num_tokens]`` float32.

    Raises:
        ValueError: names the argument that does not fit.
    """
    check("fresh", fresh, ("num_tokens", "num_kv_heads", "head_size"), FLOATS, fresh)
    check("stored", stored, fresh.shape, (fresh.dtype,), fresh)
    check_inner_stride("fresh", fresh)
    check_inner_stride("stored", stored)
    out = torch.empty(fresh.shape[0], dtype=torch.float32, device=fresh.device)
    torch.ops.vllm_blend.deviation(fresh, stored, out)
    return out


def deviation_oracle(fresh: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """The same in plain PyTorch."""
    return (fresh.float() - stored.float()).square().sum(dim=(1, 2))


@triton.jit(do_not_specialize=["num_tokens"])  # it changes from step to step
def _deviation_kernel(
    fresh,  # [num_tokens, num_kv_heads, head_size]
    stored,  # [num_tokens, num_kv_heads, head_size]
    out,  # [num_tokens]
    num_tokens,
    fresh_stride_token,
    fresh_stride_head,
    stored_stride_token,
    stored_stride_head,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """``out[t] = sum over heads h and dims d of (fresh[t, h, d] - stored[t, h, d]) ** 2``.

    Grid: ``(cdiv(num_tokens, BLOCK_T),)``; a program sums all heads of BLOCK_T tokens.
    """
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    dim = tl.arange(0, BLOCK_D)
    mask = (token < num_tokens)[:, None] & (dim < HEAD_SIZE)[None, :]
    total = tl.zeros([BLOCK_T, BLOCK_D], dtype=tl.float32)
    for head in tl.static_range(NUM_HEADS):
        a = token[:, None] * fresh_stride_token + head * fresh_stride_head + dim[None, :]
        b = token[:, None] * stored_stride_token + head * stored_stride_head + dim[None, :]
        x = tl.load(fresh + a, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(stored + b, mask=mask, other=0.0).to(tl.float32)
        total += (x - y) * (x - y)
    tl.store(out + token, tl.sum(total, axis=1), mask=token < num_tokens)


def _run(fresh: torch.Tensor, stored: torch.Tensor, out: torch.Tensor) -> None:
    num_tokens, num_heads, head_size = fresh.shape
    if num_tokens == 0:
        return
    if use_cuda(fresh):
        torch.ops.vllm_blend_C.deviation.default(fresh, stored, out)
        return
    if not use_triton(fresh):
        out.copy_(deviation_oracle(fresh, stored))
        return
    block_t = 8
    _deviation_kernel[(triton.cdiv(num_tokens, block_t),)](
        fresh,
        stored,
        out,
        num_tokens,
        fresh.stride(0),
        fresh.stride(1),
        stored.stride(0),
        stored.stride(1),
        NUM_HEADS=num_heads,
        HEAD_SIZE=head_size,
        BLOCK_T=block_t,
        BLOCK_D=triton.next_power_of_2(head_size),
        num_warps=4,
    )


register("deviation(Tensor fresh, Tensor stored, Tensor(a!) out) -> ()", _run)
