"""Paged caches for the tests, laid out as vLLM lays them out."""

from __future__ import annotations

import torch


def paged_cache(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    device: torch.device,
    heads_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random K and V caches ``[num_blocks, block_size, num_kv_heads, head_size]``, as views.

    vLLM keeps K and V side by side; memory has a block's heads or its slots first.
    """
    if heads_first:
        size = (num_blocks, num_kv_heads, block_size, 2 * head_size)
        both = torch.randn(size, device=device).to(dtype).transpose(1, 2)
    else:
        size = (num_blocks, block_size, num_kv_heads, 2 * head_size)
        both = torch.randn(size, device=device).to(dtype)
    k, v = both.split(head_size, dim=-1)
    return k, v


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """``|result - expected| / |expected|``, NaN counted as infinite."""
    error = float((result.double() - expected.double()).norm() / expected.double().norm())
    return error if error == error else float("inf")
