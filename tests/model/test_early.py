"""The choice of rows before layer 0, without a model."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from slow_policies import check_rows, slow_static

from vllm_blend.core.kv import StoredKV
from vllm_blend.core.plans import BlendPlan, ChunkSpan, CollectPlan
from vllm_blend.core.settings import EARLY, PLANNED, POLICIES, BlendSettings, num_kept
from vllm_blend.core.static_scores import static_scores
from vllm_blend.core.step import StepRequest
from vllm_blend.model.select import early
from vllm_blend.model.select.early import EarlyCandidates
from vllm_blend.model.select.policies import make_policy

CPU = torch.device("cpu")
PLANNED_NAMES = (*[name for name in POLICIES if name in PLANNED], "random*static")
ASKING_NAMES = ("ahead", "ahead*static")

chunks = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 30), st.booleans(), st.booleans()),
    min_size=1,
    max_size=5,
)
"""Of each chunk: tokens before it that no chunk holds, its own, whether it is exact, and has scores."""


def plan_of(made: list[tuple[int, int, bool, bool]], draw: int = 0, **settings: Any) -> BlendPlan:
    generator = torch.Generator().manual_seed(draw)
    spans, place = [], 0
    for gap, count, exact, scored in made:
        place += gap
        scores = torch.rand(count, generator=generator) + 0.01 if scored else None
        kv = StoredKV(((torch.empty(count, 1, 1), torch.empty(count, 1, 1)),), scores)
        spans.append(ChunkSpan(place, kv, exact=exact))
        place += count
    return BlendPlan(tuple(spans), BlendSettings(**settings))


def windows_of(plan: BlendPlan, question: int, cuts: set[int], row: int = 0) -> list[StepRequest]:
    """The prompt cut into windows before ``cuts``; those that hold chunk tokens."""
    end = plan.spans[-1].end + question
    places = [0, *sorted(cut for cut in cuts if 0 < cut < end), end]
    found = [StepRequest(plan, row, lo, hi - lo, CPU) for lo, hi in pairwise(places)]
    return [request for request in found if request.windows]


def places(request: StepRequest, chosen: torch.Tensor) -> list[int]:
    """Prompt positions of chosen chunk rows."""
    return (request.chunk_rows[chosen] - request.row + request.position).tolist()


@pytest.mark.parametrize("policy", PLANNED_NAMES)
@settings(deadline=None)
@given(
    made=chunks,
    question=st.integers(1, 40),
    cuts=st.sets(st.integers(1, 150), max_size=8),
    ratio=st.floats(0, 1),
    seed=st.integers(0, 99),
    row=st.integers(0, 9),
)
def test_windows_share_the_whole_prompts_choice(
    policy: str,
    made: list[tuple[int, int, bool, bool]],
    question: int,
    cuts: set[int],
    ratio: float,
    seed: int,
    row: int,
) -> None:
    """However a prompt is cut, the same rows are chosen: the policy's best, the ratio's share."""
    options: dict[str, Any] = dict(policy=policy, recomp_ratio=ratio, seed=seed)
    plan = plan_of(made, seed, **options)
    (whole,) = windows_of(plan, question, set(), row)
    chosen = early.choose(whole, None)
    total = sum(count for _, count, _, _ in made)
    view = EarlyCandidates(whole.windows, None, CPU)
    check_rows(chosen.tolist(), policy, view, seed, num_kept(ratio, total))

    expected, found = places(whole, chosen), []
    for request in windows_of(replace(plan), question, cuts, row):
        here = early.choose(request, None)
        assert here.dtype == torch.int64
        assert here.tolist() == sorted(set(here.tolist()))
        found += places(request, here)
    assert found == expected


@pytest.mark.parametrize("policy", ASKING_NAMES)
@settings(deadline=None)
@given(
    made=chunks,
    cuts=st.sets(st.integers(1, 150), max_size=3),
    ratio=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_where_the_question_is_asked_the_window_has_its_share(
    policy: str, made: list[tuple[int, int, bool, bool]], cuts: set[int], ratio: float, seed: int
) -> None:
    """It is where the window holds it, and at most a quarter as many rows of its own as of chunks'; a
    window where it is not has twice the share of the whole prompt's, by scores."""
    options: dict[str, Any] = dict(policy=policy, recomp_ratio=ratio, seed=seed)
    plan = plan_of(made, seed, **options)
    generator = torch.Generator().manual_seed(seed)
    twice = plan_of(made, seed, policy="static", recomp_ratio=max(ratio, min(0.5, 2 * ratio)))
    for request in windows_of(plan, 5, cuts):
        asks = request.end > plan.spans[-1].end and (
            4 * (request.num_rows - request.num_chunk_rows) <= request.num_chunk_rows
        )
        assert request.settings.asks == asks
        if not asks:
            chosen = early.choose(replace(request, plan=plan), None).tolist()
            assert chosen == early.choose(replace(request, plan=twice), None).tolist()
            continue
        received = torch.rand(request.num_chunk_rows, generator=generator)
        chosen = early.choose(request, received).tolist()
        view = EarlyCandidates(request.windows, received, CPU)
        check_rows(chosen, policy, view, seed, num_kept(ratio, request.num_chunk_rows))


@settings(deadline=None)
@given(made=chunks, seed=st.integers(0, 99), share=st.floats(0.05, 0.95))
def test_a_question_points_nowhere_where_few_tokens_get_most(
    made: list[tuple[int, int, bool, bool]], seed: int, share: float
) -> None:
    """What is exact does not count: it is never recomputed."""
    (request,) = windows_of(plan_of(made, seed, policy="ahead"), 3, set())
    exact = torch.tensor([e for _, count, e, _ in made for _ in range(count)])
    few = math.ceil(0.02 * len(exact))
    others = int((~exact).sum()) - few
    assume(others > 0 and abs(share - 0.5) > 0.01 and share / few > 2 * (1 - share) / others)
    received = torch.where(exact, 100.0, (1 - share) / max(others, 1))
    order = torch.randperm(others + few, generator=torch.Generator().manual_seed(seed))
    received[(~exact).nonzero().flatten()[order[:few]]] = share / few
    assert bool(early.points_nowhere(request, received)) == (share > 0.5)


@pytest.mark.parametrize("num_tokens, few", [(60, 2), (2500, 50), (2501, 51), (10_000, 100)])
def test_how_many_tokens_are_few(num_tokens: int, few: int) -> None:
    """One in fifty of a short prompt's; of a long one's no more than the square root."""
    (request,) = windows_of(plan_of([(3, num_tokens, False, True)], 0, policy="ahead"), 3, set())
    for most in (few, few + 1):
        received = torch.zeros(num_tokens)
        received[:most] = 1 / most
        received[most:] = 0.99 / (num_tokens - most)
        assert bool(early.points_nowhere(request, received)) == (most == few)


@settings(deadline=None)
@given(made=chunks, ratio=st.floats(0, 1), seed=st.integers(0, 99))
def test_where_the_question_points_nowhere_twice_as_many_are_chosen(
    made: list[tuple[int, int, bool, bool]], ratio: float, seed: int
) -> None:
    (request,) = windows_of(plan_of(made, seed, policy="ahead*static", recomp_ratio=ratio), 3, set())
    assume(request.settings.asks)
    received = torch.rand(request.num_chunk_rows, generator=torch.Generator().manual_seed(seed))
    once, more = (early.choose(request, received, nowhere).tolist() for nowhere in (False, True))
    assert len(more) == num_kept(max(ratio, min(0.5, 2 * ratio)), request.num_chunk_rows)
    view = EarlyCandidates(request.windows, received, CPU)
    scores = make_policy(request.settings).scores(view).tolist()
    # by score: of tokens with the same one, as all that are exact have, either may be chosen
    assert Counter(scores[index] for index in once) <= Counter(scores[index] for index in more)
    none = torch.zeros(request.num_chunk_rows)
    assert not early.points_nowhere(request, none)


@pytest.mark.parametrize("policy", (*PLANNED_NAMES, *ASKING_NAMES))
@settings(deadline=None)
@given(made=chunks, ratio=st.floats(0, 1), seed=st.integers(0, 99))
def test_exact_tokens_come_last(
    policy: str, made: list[tuple[int, int, bool, bool]], ratio: float, seed: int
) -> None:
    plan = plan_of(made, seed, policy=policy, recomp_ratio=ratio, seed=seed)
    exact = [e for _, count, e, _ in made for _ in range(count)]
    (request,) = windows_of(plan, 3, set())
    count = num_kept(request.settings.last_ratio, len(exact))
    assume(any(exact) and count <= exact.count(False))
    received = None
    if request.settings.asks:  # most of all to what is exact
        received = torch.rand(len(exact)) + 0.01 + 5 * torch.tensor(exact)
    chosen = early.choose(request, received).tolist()
    assert len(chosen) == count
    assert not any(exact[index] for index in chosen)


@settings(deadline=None)
@given(made=chunks, seed=st.integers(0, 99), cuts=st.sets(st.integers(1, 150), max_size=4))
def test_what_a_view_shows(made: list[tuple[int, int, bool, bool]], seed: int, cuts: set[int]) -> None:
    for request in windows_of(plan_of(made, seed), 4, cuts):
        view = EarlyCandidates(request.windows, None, CPU)
        tokens = [(span, at) for span, start, end in request.windows for at in range(start, end)]
        assert view.positions.tolist() == [at for _, at in tokens]
        assert view.place_in_chunk.tolist() == [at - span.start for span, at in tokens]
        assert view.stale.tolist() == [not span.exact for span, _ in tokens]
        torch.testing.assert_close(view.static, torch.tensor(slow_static(request.windows)))


def test_tokens_without_scores_count_as_the_mean_and_the_first_ones_more() -> None:
    def span(start: int, count: int, scores: float | None, exact: bool = False) -> ChunkSpan:
        kv = torch.empty(count, 1, 1)
        told = None if scores is None else torch.full((count,), scores)
        return ChunkSpan(start, StoredKV(((kv, kv),), told), exact=exact)

    spans = [span(0, 8, 9.0, exact=True), span(8, 40, None), span(48, 10, 0.5), span(58, 20, 2.0)]
    scores = static_scores([(s, s.start, s.end) for s in spans])
    assert scores[:8].tolist() == [0.0] * 8  # whatever is kept with it: it does not move here
    guess = scores[8:48]
    assert float(guess.mean()) == pytest.approx((10 * 0.5 + 20 * 2.0) / 30)
    assert bool((guess.diff() < 0).all())
    assert float(guess[0] / guess[12]) == pytest.approx(2)
    assert scores[48:].tolist() == [0.5] * 10 + [2.0] * 20
    alone = static_scores([(spans[1], 8, 48)])
    assert float(alone.mean()) == pytest.approx(1) and bool((alone.diff() < 0).all())


def test_the_choice_is_made_once_for_all_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of([(0, 40, False, True), (2, 30, False, False)], policy="static", recomp_ratio=0.3)
    made: list[int] = []
    stock = early.make_policy
    monkeypatch.setattr(early, "make_policy", lambda settings: made.append(1) or stock(settings))
    for request in windows_of(plan, 5, {10, 20, 33, 50}):
        early.choose(request, None)
    assert made == [1]
    early.choose(windows_of(replace(plan), 5, set())[0], None)  # another request's
    assert made == [1, 1]


def test_of_a_collected_prefix_nothing_is_chosen() -> None:
    kv = StoredKV(((torch.empty(20, 1, 1), torch.empty(20, 1, 1)),))
    request = StepRequest(CollectPlan(start=20, prefix=kv), 0, 0, 30, CPU)
    chosen = early.choose(request, None)
    assert chosen.dtype == torch.int64 and not chosen.numel()


def test_which_policies_choose_early() -> None:
    def early_one(policy: str) -> bool:
        return BlendSettings(policy=policy).early

    assert all(map(early_one, (*PLANNED_NAMES, *ASKING_NAMES)))
    for policy in set(POLICIES) - EARLY:
        assert not early_one(policy)
        assert not early_one(f"ahead*{policy}")
    assert BlendSettings(policy="ahead*static").asks
    assert not BlendSettings(policy="random*static").asks
