"""Static scores: how far each token's K and V move between two contexts of its chunk."""

from __future__ import annotations

import torch

from vllm_blend.core import StoredKV
from vllm_blend.ranks import summed

SCORING_TOKENS = 512
"""Of a text of our own that chunks are computed behind for their scores, where there is no stand-in."""


def movement(one: StoredKV, other: StoredKV) -> torch.Tensor:
    """Scores of a chunk's tokens, ``[num_tokens]`` float32 on the host: over all layers, the squared
    distance of K (before RoPE) and of V, each as a share of its mean square.

    Args:
        one, other: KV of the same tokens, computed in two contexts. Tensor-parallel ranks bring their
            heads, and get the same scores.
    """
    moved, size = [], []
    for pair, other_pair in zip(one.layers, other.layers, strict=True):
        for x, y in zip(pair, other_pair, strict=True):
            there = y.to(x.device).float()
            moved.append((x.float() - there).square().sum((1, 2)))
            size.append(there.square().sum())
    parts = summed(torch.cat([torch.stack(moved), torch.stack(size)[:, None]], dim=1))
    moved_by, squares = parts[:, :-1], parts[:, -1:]
    mean = (squares / moved_by.shape[1]).clamp(min=torch.finfo(torch.float32).tiny)
    return (moved_by / mean).sum(0).cpu()
