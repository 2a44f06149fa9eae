"""Static scores: how far each token's K and V move between two contexts of its chunk."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_blend.core.kv import StoredKV
from vllm_blend.core.plans import ChunkSpan
from vllm_blend.core.tensor_parallel import all_reduce_sum

SCORING_TOKENS = 512
"""Of a text of our own that chunks are computed after for their scores, where there is no stand-in."""


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
    parts = all_reduce_sum(torch.cat([torch.stack(moved), torch.stack(size)[:, None]], dim=1))
    moved_by, squares = parts[:, :-1], parts[:, -1:]
    mean = (squares / moved_by.shape[1]).clamp(min=torch.finfo(torch.float32).tiny)
    return (moved_by / mean).sum(0).cpu()


Window = tuple[ChunkSpan, int, int]
"""Of a span: the prompt positions ``[start, end)`` that are looked at."""

HALF_PLACE = 12.0
"""Of a token without scores: how many tokens into its chunk it counts half of the first one. K and V of
a chunk's first tokens move most, since most of what stands before them is missing."""


def static_scores(windows: Sequence[Window]) -> torch.Tensor:
    """The scores of the windows' tokens (``StoredKV.scores``), ``[num_tokens]`` float32, on the host.

    A token whose KV is exact here has 0. One without scores counts as the mean of those that have
    them, more at the beginning of its chunk and less after it.
    """
    parts = []
    known = []
    for span, start, end in windows:
        kept = span.kv.scores
        if span.exact:
            parts.append(torch.zeros(end - start))
        elif kept is not None:
            parts.append(kept[start - span.start : end - span.start].float().cpu())
            known.append(parts[-1])
        else:
            place = torch.arange(start - span.start, end - span.start)
            parts.append(-1 / (1 + place / HALF_PLACE))  # negative: to be scaled
    scores = torch.cat(parts)
    guessed = scores < 0
    if bool(guessed.any()):
        mean = torch.cat(known).mean() if known else torch.tensor(1.0)
        guess = scores[guessed]
        scores[guessed] = guess / guess.mean() * mean
    return scores
