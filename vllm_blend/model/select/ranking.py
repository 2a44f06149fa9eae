"""From scores to rows: how far stored V is off, how many rows to keep, which those are."""

from __future__ import annotations

import torch


def deviation(fresh: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """Squared L2 distance of fresh to stored K or V, per token, in fp32.

    Args:
        fresh: ``[num_tokens, num_kv_heads, head_size]``.
        stored: the same shape.

    Returns:
        ``[num_tokens]`` float32.
    """
    if fresh.is_cuda:
        from vllm_blend.ops import deviation as kernel  # needs Triton

        return kernel.deviation(fresh, stored)
    return (fresh.float() - stored.float()).square().sum(dim=(1, 2))


def top_rows(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the ``count`` highest scores, ascending, ``[count]`` int64."""
    return torch.topk(scores, min(count, scores.numel()), sorted=False).indices.sort().values
