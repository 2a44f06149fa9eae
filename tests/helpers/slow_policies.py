"""The policies once more, in plain Python: what candidates score, and whether rows are the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from vllm_blend.core.plans import ChunkSpan
from vllm_blend.core.static_scores import HALF_PLACE
from vllm_blend.model.select.policies import hashed


def slow_static(windows: Sequence[tuple[ChunkSpan, int, int]]) -> list[float]:
    """The scores of the windows' tokens; of those without, the prior with the mean of the others."""
    found: list[float | None] = []
    prior: list[float] = []
    for span, start, end in windows:
        for at in range(start - span.start, end - span.start):
            prior.append(1 / (1 + at / HALF_PLACE))
            if span.exact:
                found.append(0.0)
            elif span.kv.scores is None:
                found.append(None)
            else:
                found.append(float(span.kv.scores[at]))
    exact = [span.exact for span, start, end in windows for _ in range(start, end)]
    known = [s for s, e in zip(found, exact, strict=True) if s is not None and not e]
    mean = sum(known) / len(known) if known else 1.0
    guesses = [p for s, p in zip(found, prior, strict=True) if s is None]
    scale = mean * len(guesses) / sum(guesses) if guesses else 0.0
    return [p * scale if s is None else s for s, p in zip(found, prior, strict=True)]


def slow_scores(policy: str, view: Any, seed: int) -> list[float]:
    """What each candidate of a view scores by a policy without a sum."""
    if "*" in policy:
        one, _, rest = policy.partition("*")
        pairs = zip(slow_scores(one, view, seed), slow_scores(rest, view, seed), strict=True)
        return [max(a, 0.0) * max(b, 0.0) for a, b in pairs]
    if policy == "hkvd":
        return list(view.v_deviation.tolist())
    if policy == "hkvd_k":
        return list(view.k_deviation.tolist())
    if policy == "hkvd_kv":
        v, k = view.v_deviation.tolist(), view.k_deviation.tolist()
        return [a / (sum(v) / len(v)) + b / (sum(k) / len(k)) for a, b in zip(v, k, strict=True)]
    if policy == "static":
        return list(view.static.tolist())
    if policy in ("query", "ahead"):
        asked = view.attention_here if policy == "query" else view.attention_ahead
        if asked is None:
            return list(view.v_deviation.tolist())
        plain = asked.tolist()
    elif policy == "random":
        plain = hashed(view.positions, seed).tolist()
    else:
        assert policy == "heads"
        plain = [-float(place) for place in view.place_in_chunk.tolist()]
    return [score if s else -math.inf for score, s in zip(plain, view.stale.tolist(), strict=True)]


def slow_points_nowhere(view: Any) -> bool:
    """Whether one candidate in fifty, or the root of their number if that is less, gets more than
    half of the question's attention."""
    pairs = zip(view.attention_ahead.tolist(), view.stale.tolist(), strict=True)
    got = sorted((score if s else 0.0 for score, s in pairs), reverse=True)
    return sum(got[: min(-(-len(got) // 50), math.ceil(len(got) ** 0.5))]) > sum(got) / 2


def check_rows(rows: list[int], policy: str, view: Any, seed: int, count: int) -> None:
    """Fails unless ``rows`` are ``count`` candidates of a view, ascending, and a policy's best."""
    assert rows == sorted(set(rows)) and len(rows) == count
    scores = slow_scores(policy, view, seed)  # ties may fall either way, so compare scores
    assert sorted((scores[i] for i in rows), reverse=True) == pytest.approx(
        sorted(scores, reverse=True)[:count], rel=1e-5
    )
