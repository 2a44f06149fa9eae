"""KV kept in eight bits, with a scale for each token and head, in the model's type."""

# Triton kernels carry no types of Python's:
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, check-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_blend.core.layers import widen as widen_oracle
from vllm_blend.ops.fp8 import FP8
from vllm_blend.ops.library import FLOATS, check, use_triton

BLOCK = 4096
"""Values of a program."""


def widen(values: torch.Tensor, scales: torch.Tensor, target: torch.Tensor) -> None:
    """Writes values times their scales to ``target``: the product in fp32, rounded once.

    Args:
        values: float8_e4m3fn ``[num_tokens, num_kv_heads, head_size]``.
        scales: float32 ``[num_tokens, num_kv_heads, 1]``.
        target: float16, bfloat16 or float32, shaped like ``values``.

    All three are contiguous.

    Raises:
        ValueError: names the argument that does not fit.
    """
    check("values", values, ("num_tokens", "num_kv_heads", "head_size"), (FP8,), target)
    check("scales", scales, (*values.shape[:2], 1), (torch.float32,), target)
    check("target", target, values.shape, FLOATS)
    for name, tensor in (("values", values), ("scales", scales), ("target", target)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {list(tensor.stride())}; it must be contiguous")
    if not use_triton(target):
        widen_oracle(values, scales, target)
    elif values.numel():
        launch(values, scales, target)


def launch(values: torch.Tensor, scales: torch.Tensor, target: torch.Tensor) -> None:
    """The kernel, on a GPU or in Triton's interpreter."""
    num_rows, head_size = scales.numel(), values.shape[-1]
    block_d = triton.next_power_of_2(head_size)
    rows = max(1, BLOCK // block_d)
    _widen_kernel[(triton.cdiv(num_rows, rows),)](
        values.view(torch.uint8),
        scales,
        target,
        num_rows,
        HEAD_SIZE=head_size,
        ROWS=rows,
        BLOCK_D=block_d,
    )


@triton.jit(do_not_specialize=["num_rows"])  # it changes from step to step
def _widen_kernel(
    values,  # [num_rows, HEAD_SIZE], the bytes of e4m3
    scales,  # [num_rows]
    target,  # [num_rows, HEAD_SIZE]
    num_rows,
    HEAD_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,  # power of two, at least HEAD_SIZE
):
    """A row is a token's head. Grid: ``(ceil(num_rows / ROWS),)``.

    Bytes are widened by hand, since GPUs before compute capability 8.9 have no such type: their sign,
    exponent and mantissa are put where those of an fp32 stand, whose exponent counts from 120 less.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK_D)
    is_row = row < num_rows
    is_there = is_row[:, None]
    if BLOCK_D > HEAD_SIZE:
        is_there = is_there & (at < HEAD_SIZE)[None, :]
    place = row[:, None] * HEAD_SIZE + at[None, :]
    bits = tl.load(values + place, is_there, other=0).to(tl.int32)
    scale = tl.load(scales + row, is_row, other=0.0)[:, None]
    x = ((bits & 127) << 20 | (bits & 128) << 24).to(tl.float32, bitcast=True)
    x = x * 1.329227995784916e36 * scale  # 2^120
    x = tl.where((bits & 127) == 127, float("nan"), x)
    tl.store(target + place, x.to(target.dtype.element_ty), is_there)
