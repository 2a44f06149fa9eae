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
    return scores_of(all_reduce_sum(distances(one, other)))


def distances(one: StoredKV, other: StoredKV) -> torch.Tensor:
    """What this rank's heads bring to the scores: of each layer's K and V the squared distance of each
    token, then the squares of all, ``[2 * num_layers, num_tokens + 1]`` float32 on the host."""
    parts = []
    for pair, other_pair in zip(one.layers, other.layers, strict=True):
        for x, y in zip(pair, other_pair, strict=True):
            moved, squares = apart(x.to(y.device), y)
            parts.append(torch.cat([moved, squares.sum()[None]]))
    return torch.stack(parts).cpu()


def apart(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each token the squared distance of ``x`` to ``y``, and the square of ``y``, ``[num_tokens]``
    float32."""
    there = y.float()
    return (x.float() - there).square().sum((1, 2)), there.square().sum((1, 2))


def scores_of(parts: torch.Tensor) -> torch.Tensor:
    """Scores, ``[num_tokens]`` float32, of the sum of a stage's ranks' ``distances``. Those of all
    layers are the sum of the stages'."""
    moved_by, squares = parts[:, :-1], parts[:, -1:]
    mean = (squares / moved_by.shape[1]).clamp(min=torch.finfo(torch.float32).tiny)
    return (moved_by / mean).sum(0)


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
    has_guesses = False
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
            has_guesses = True
    scores = torch.cat(parts)
    if has_guesses:
        guessed = scores < 0
        mean = torch.cat(known).mean() if known else torch.tensor(1.0)
        guess = scores[guessed]
        scores[guessed] = guess / guess.mean() * mean
    return scores
