"""The policies: which of a request's chunk tokens are recomputed.

A policy scores every candidate, and the highest scores are kept; a product multiplies scores. Names are
those of ``BlendSettings.policy``.
"""

from __future__ import annotations

from functools import reduce
from typing import Any, Protocol

import torch

from vllm_blend.core.settings import BlendSettings, policy_factors
from vllm_blend.model.select.ranking import top_rows


class Candidates(Protocol):
    """A request's chunk tokens that may be recomputed, as any policy may look at them: before layer 0
    (``early.py``) or at a check layer (``check_layer.py``). A score for each, ``[num_candidates]``.

    Attributes:
        attention_ahead: what each gets of the question's attention over the layers that are asked,
            float32; where the question was asked.
        positions: in the prompt, int64.
        place_in_chunk: how many tokens of its own chunk stand before each, int64.
        stale: where recomputing changes anything at all, bool.
        static: scores kept with the chunks, float32.
    """

    @property
    def attention_ahead(self) -> torch.Tensor: ...
    @property
    def positions(self) -> torch.Tensor: ...
    @property
    def place_in_chunk(self) -> torch.Tensor: ...
    @property
    def stale(self) -> torch.Tensor: ...
    @property
    def static(self) -> torch.Tensor: ...


class CheckedCandidates(Candidates, Protocol):
    """The same at a check layer, where all of them were computed so far.

    Attributes:
        v_deviation, k_deviation: squared distance of fresh to stored V and K, float32.
        attention_here: the question's attention at this layer, float32; None: no question.
    """

    @property
    def v_deviation(self) -> torch.Tensor: ...
    @property
    def k_deviation(self) -> torch.Tensor: ...
    @property
    def attention_here(self) -> torch.Tensor | None: ...


class Policy:
    """Scores in, rows out.

    Attributes:
        reads: what it reads at a check layer of those fields of ``CheckedCandidates`` that
            tensor-parallel ranks sum.
    """

    reads: frozenset[str] = frozenset()

    def scores(self, view: Any) -> torch.Tensor:
        """``[num_candidates]`` float32; the highest are kept. A method reads from ``view`` what it
        needs, and must not make the host wait for the device."""
        raise NotImplementedError

    def rows(self, view: Any, count: int) -> torch.Tensor:
        """Indices of the ``count`` candidates to keep, ascending, ``[count]`` int64."""
        return top_rows(self.scores(view), count)


class Static(Policy):
    """Scores kept with the chunks: how far K and V of a token move between two contexts."""

    def scores(self, view: Candidates) -> torch.Tensor:
        return view.static


class HKVD(Policy):
    """Highest KV deviation, by V: ``|V_fresh - V_stored|^2`` (CacheBlend, arXiv 2405.16444, 4.3)."""

    reads = frozenset({"v_deviation"})

    def scores(self, view: CheckedCandidates) -> torch.Tensor:
        return view.v_deviation


class HKVDByK(Policy):
    """The same by K: ``|K_fresh - K_stored|^2``."""

    reads = frozenset({"k_deviation"})

    def scores(self, view: CheckedCandidates) -> torch.Tensor:
        return view.k_deviation


class HKVDByBoth(Policy):
    """The sum of both, each as a share of its mean: K's numbers are far larger than V's."""

    reads = frozenset({"v_deviation", "k_deviation"})

    def scores(self, view: CheckedCandidates) -> torch.Tensor:
        return share(view.v_deviation) + share(view.k_deviation)


class Random(Policy):
    """The same tokens for the same seed and positions, on any device."""

    reads = frozenset({"stale"})

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def scores(self, view: Candidates) -> torch.Tensor:
        return only_stale(view, hashed(view.positions, self.seed))


class ChunkHeads(Policy):
    """The first tokens of each chunk, as many of each (LegoLink of EPIC, arXiv 2410.15332)."""

    reads = frozenset({"stale"})

    def scores(self, view: Candidates) -> torch.Tensor:
        return only_stale(view, -view.place_in_chunk.float())


class QuestionHere(Policy):
    """Tokens that the question attends to most at the check layer."""

    reads = frozenset({"attention_here", "stale"})

    def scores(self, view: CheckedCandidates) -> torch.Tensor:
        attention = view.attention_here
        return view.v_deviation if attention is None else only_stale(view, attention)


class QuestionAhead(Policy):
    """Tokens that the question attends to most over all layers (after ProphetKV)."""

    reads = frozenset({"stale"})

    def scores(self, view: Candidates) -> torch.Tensor:
        return only_stale(view, view.attention_ahead)


class Product(Policy):
    """Product of two scores, e.g. how far a token is off times how much the question asks of it."""

    def __init__(self, one: Policy, two: Policy) -> None:
        self.one, self.two = one, two
        self.reads = one.reads | two.reads

    def scores(self, view: Any) -> torch.Tensor:
        one, two = self.one.scores(view), self.two.scores(view)
        return one.clamp(min=0) * two.clamp(min=0)


def make_policy(settings: BlendSettings) -> Policy:
    """The policy that ``settings`` name."""
    policies: dict[str, Policy] = {
        "static": Static(),
        "hkvd": HKVD(),
        "hkvd_k": HKVDByK(),
        "hkvd_kv": HKVDByBoth(),
        "random": Random(settings.seed),
        "heads": ChunkHeads(),
        "query": QuestionHere(),
        "ahead": QuestionAhead(),
    }
    return reduce(Product, (policies[name] for name in policy_factors(settings.policy)))


def choose_rows(settings: BlendSettings, view: CheckedCandidates, count: int) -> torch.Tensor:
    """Indices of the ``count`` candidates that go on, by the settings' policy, ascending."""
    return make_policy(settings).rows(view, count)


def share(scores: torch.Tensor) -> torch.Tensor:
    """Scores as a share of their mean."""
    return scores / scores.mean().clamp(min=torch.finfo(scores.dtype).tiny)


def only_stale(view: Candidates, scores: torch.Tensor) -> torch.Tensor:
    """Puts tokens whose stored KV is right already behind all others."""
    return scores.masked_fill(~view.stale, -torch.inf)


def hashed(positions: torch.Tensor, seed: int) -> torch.Tensor:
    """A number in [0, 1) for each position, ``[num_positions]`` float32: a mixing of integer bits."""
    start = (seed * 0x3779B97F4A7C15 + 0x2545F4914F6CDD1D + 2**63) % 2**64 - 2**63  # as int64 wraps
    x = positions.long() + start
    for shift, factor in ((30, 0x3F58476D1CE4E5B9), (27, 0x14D049BB133111EB)):
        x = (x ^ (x >> shift)) * factor
    return ((x >> 20) & 0xFFFFFF).float() / 2**24
