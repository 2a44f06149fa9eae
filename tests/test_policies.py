"""Policies against slow oracles: plain Python, and the attention of a transformers model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import Engine, make_engine, relative_error, run
from hypothesis import given
from hypothesis import strategies as st

from vllm_blend.core import BlendPlan, ChunkSpan, StoredKV
from vllm_blend.models import loop
from vllm_blend.select import View, choose_rows, num_kept
from vllm_blend.select.asked import MAX_ASKED, Asked
from vllm_blend.select.policies import hashed, make_policy
from vllm_blend.settings import POLICIES, BlendSettings

MIXTURES = ("heads+hkvd", "query*hkvd", "query+hkvd", "ahead*hkvd", "ahead+hkvd", "heads+ahead*hkvd")
NAMES = (*POLICIES, *MIXTURES)
LENGTHS = (61, 5, 130, 19)
QUESTION = 9


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def engine(request: pytest.FixtureRequest, tiny: Any) -> Iterator[Engine]:
    with make_engine(tiny(request.param)) as engine:
        yield engine


@pytest.fixture(scope="module")
def prompt(engine: Engine) -> list[int]:
    return engine.ids(sum(LENGTHS) + QUESTION, seed=5)


def spans_of(kv: Any) -> tuple[ChunkSpan, ...]:
    """Spans of LENGTHS over the KV of a whole prompt."""
    starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    return tuple(
        ChunkSpan(start, StoredKV(tuple((k[start : start + n], v[start : start + n]) for k, v in kv)))
        for start, n in zip(starts, LENGTHS, strict=True)
    )


def alone(engine: Engine, prompt: list[int]) -> Any:
    """Each chunk's KV, computed without the others, joined."""
    starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    return engine.stored([prompt[s : s + n] for s, n in zip(starts, LENGTHS, strict=True)])


@pytest.fixture
def views(monkeypatch: pytest.MonkeyPatch) -> list[View]:
    """What the policies of the test's requests looked at."""
    seen: list[View] = []

    def look(view: View, count: int) -> torch.Tensor:
        rows = choose_rows(view, count)
        # the frame moves on after the choice: ask now
        view.here, view.ahead = view.attention_here, view.attention_ahead  # type: ignore[attr-defined]
        for name in ("v_deviation", "k_deviation", "stale", "place_in_chunk", "positions"):
            getattr(view, name)
        seen.append(view)
        return rows

    monkeypatch.setattr(loop, "choose_rows", look)
    return seen


def question_attention(folder: Path, ids: list[int], asked: int = QUESTION) -> list[torch.Tensor]:
    """Of a full prefill, by layer: what each token gets of the attention of the ``asked`` last ones."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        found = model(torch.tensor([ids]), output_attentions=True).attentions
    return [layer[0, :, -asked:].sum((0, 1)) for layer in found]


def test_the_views_scores_are_those_of_a_full_prefill(
    engine: Engine, prompt: list[int], views: list[View]
) -> None:
    exact = engine.collect(prompt)
    run(engine, [prompt], [BlendPlan(spans_of(exact))], max_tokens=1)
    (view,) = views
    expected = [layer[: sum(LENGTHS)] for layer in question_attention(engine.folder, prompt)]
    assert relative_error(view.here, expected[1]) < 1e-4  # type: ignore[attr-defined]
    assert relative_error(view.ahead, sum(expected[1:])) < 1e-4  # type: ignore[attr-defined, arg-type]
    assert not view.stale.any()


def test_tokens_that_no_chunk_holds_are_seen_too(engine: Engine, views: list[View]) -> None:
    """A head, text between chunks, and a question of more tokens than are asked."""
    ids = engine.ids(130, seed=7)
    exact = engine.collect(ids)
    places = ((5, 40), (43, 70))
    spans = tuple(
        ChunkSpan(start, StoredKV(tuple((k[start:end], v[start:end]) for k, v in exact)))
        for start, end in places
    )
    for layer in engine.model.layers:  # what other requests left in the cache
        layer.self_attn.attn.kv_cache.normal_(0, 50)
    run(engine, [ids], [BlendPlan(spans, BlendSettings(policy="ahead"))], max_tokens=1)
    (view,) = views
    expected = [
        torch.cat([layer[start:end] for start, end in places])
        for layer in question_attention(engine.folder, ids, MAX_ASKED)
    ]
    assert relative_error(view.here, expected[1]) < 1e-4  # type: ignore[attr-defined]
    assert relative_error(view.ahead, sum(expected[1:])) < 1e-4  # type: ignore[attr-defined, arg-type]


@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_the_last_rows_are_asked_in_their_requests_blocks(num_rows: int) -> None:
    """The third of four requests has rows, as in a frame for it alone."""
    counts, num_asked = [0, 0, num_rows, 0], min(num_rows, 4)
    metadata = SimpleNamespace(
        query_start_loc=torch.tensor([0, *counts]).cumsum(0).int(),
        block_table=torch.arange(4 * 3).view(4, 3).int(),
    )
    positions = torch.arange(100, 100 + 2 * num_rows, 2)
    frame: Any = SimpleNamespace(
        rows=torch.arange(7, 7 + num_rows),
        positions=positions,
        share_tables=lambda attns: True,
        describe=lambda attn: metadata,
    )
    cache = torch.zeros(9, 16, 2, 8)
    impl = SimpleNamespace(caches=lambda kv_cache: (kv_cache, kv_cache))
    attns = [SimpleNamespace(impl=impl, kv_cache=cache, sliding_window=None)] * 2
    asked = Asked.on_paged_cache(frame, attns, num_asked)
    assert asked is not None
    assert asked.blocks.tolist() == [6, 7, 8]
    assert asked.received.tolist() == [0.0] * 48
    assert asked.rows[:num_asked].tolist() == list(range(num_rows - num_asked, num_rows))
    assert asked.rows.max() < num_rows and len(asked.rows) == MAX_ASKED
    assert asked.last_keys.tolist() == positions[-num_asked:].tolist() + [-1] * (MAX_ASKED - num_asked)
    frame.share_tables = lambda attns: False
    assert Asked.on_paged_cache(frame, attns, num_asked) is None
    frame.share_tables = lambda attns: True
    attns[0].sliding_window = 64
    assert Asked.on_paged_cache(frame, attns, num_asked) is None


def test_deviations_and_places(engine: Engine, prompt: list[int], views: list[View]) -> None:
    apart, whole = alone(engine, prompt), engine.collect(prompt)
    run(engine, [prompt], [BlendPlan(spans_of(apart))], max_tokens=1)
    (view,) = views
    for kind, found in enumerate((view.k_deviation, view.v_deviation)):
        expected = (apart[1][kind] - whole[1][kind][: sum(LENGTHS)]).square().sum((1, 2))
        assert relative_error(found, expected) < 1e-3
    assert view.place_in_chunk.tolist() == [i for n in LENGTHS for i in range(n)]
    assert view.positions.tolist() == list(range(sum(LENGTHS)))
    assert view.stale.tolist() == [False] * LENGTHS[0] + [True] * sum(LENGTHS[1:])


@pytest.mark.parametrize("policy", NAMES)
def test_exact_kv_reproduces_full_prefill(engine: Engine, prompt: list[int], policy: str) -> None:
    plan = BlendPlan(spans_of(engine.collect(prompt)), BlendSettings(policy=policy))
    assert run(engine, [prompt], [plan]) == run(engine, [prompt], [None])
    assert len(engine.flags["imp_indices"]) == int(0.16 * sum(LENGTHS)) + QUESTION


@pytest.mark.parametrize("policy", NAMES)
def test_stored_kv_and_neighbours_in_a_batch_do_not_notice(
    engine: Engine, prompt: list[int], policy: str
) -> None:
    apart = alone(engine, prompt)
    before = [[tensor.clone() for tensor in layer] for layer in apart]
    plan = BlendPlan(spans_of(apart), BlendSettings(policy=policy))
    other = BlendPlan(spans_of(apart), BlendSettings(recomp_ratio=0.5))
    single = [run(engine, [prompt], [p])[0] for p in (plan, other, None)]
    assert run(engine, [prompt] * 3, [plan, other, None]) == single
    for layer, copy in zip(apart, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(layer, copy, strict=True))


@pytest.mark.parametrize("gradual", [False, True])
def test_a_pass_ahead_leaves_nothing_but_the_choice(
    engine: Engine, prompt: list[int], monkeypatch: pytest.MonkeyPatch, gradual: bool
) -> None:
    """The same rows, chosen without that pass, give the same answer."""
    spans = spans_of(alone(engine, prompt))
    options: dict[str, Any] = {}
    if gradual:
        options = dict(check_layers=(1, 3), recomp_ratios=(0.5, 0.2))
    plain = BlendPlan(spans, BlendSettings(recomp_ratio=0.4))
    chosen: list[torch.Tensor] = []
    with monkeypatch.context() as patch:
        patch.setattr(loop, "choose_rows", lambda *a: chosen.append(choose_rows(*a)) or chosen[-1])
        plan = BlendPlan(spans, BlendSettings(policy="ahead", **options))
        with_pass = logits_of(engine, prompt, plan)
        beside = run(engine, [prompt, prompt], [plan, plain])
    rows = iter(chosen)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "choose_rows", lambda view, count: next(rows))
        without = logits_of(engine, prompt, BlendPlan(spans, BlendSettings(**options)))
    assert relative_error(with_pass, without) < 1e-5
    assert beside == [run(engine, [prompt], [p])[0] for p in (plan, plain)]


def logits_of(engine: Engine, ids: list[int], plan: BlendPlan) -> torch.Tensor:
    """Logits of eight greedy tokens, ``[8, vocab_size]``."""
    found: list[torch.Tensor] = []
    stock = engine.outer.compute_logits
    engine.outer.compute_logits = lambda *args: found.append(stock(*args).clone()) or found[-1]
    try:
        run(engine, [ids], [plan])
    finally:
        del engine.outer.compute_logits
    return torch.cat(found)


@pytest.mark.parametrize("policy", ["query", "ahead*hkvd", "heads+hkvd"])
def test_windows_without_the_question(engine: Engine, prompt: list[int], policy: str) -> None:
    plan = BlendPlan(spans_of(engine.collect(prompt)), BlendSettings(policy=policy))
    gradual = BlendSettings(policy=policy, check_layers=(1, 3), recomp_ratios=(0.5, 0.2))
    expected = run(engine, [prompt], [None])
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    before = scheduler.max_num_scheduled_tokens
    scheduler.max_num_scheduled_tokens = 64
    try:
        assert run(engine, [prompt], [plan]) == expected
    finally:
        scheduler.max_num_scheduled_tokens = before
    assert run(engine, [prompt], [BlendPlan(plan.spans, gradual)]) == expected


def fake_view(seed: int, lengths: list[int], exact_first: bool) -> Any:
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    places = [i for n in lengths for i in range(n)]
    stale = [not (exact_first and index < lengths[0]) for index in range(total)]
    scores = {
        name: torch.rand(total, generator=generator)
        for name in ("v_deviation", "k_deviation", "attention_here", "attention_ahead")
    }
    return SimpleNamespace(
        positions=torch.arange(total) + 3,
        place_in_chunk=torch.tensor(places),
        stale=torch.tensor(stale),
        **scores,
    )


def slow_scores(name: str, view: Any, seed: int) -> list[float]:
    v, k, stale = (x.tolist() for x in (view.v_deviation, view.k_deviation, view.stale))
    asked = view.attention_here if name.startswith("query") else view.attention_ahead
    if name == "hkvd":
        return list(v)
    if name == "hkvd_k":
        return list(k)
    if name == "hkvd_kv":
        return [a / (sum(v) / len(v)) + b / (sum(k) / len(k)) for a, b in zip(v, k, strict=True)]
    plain = {
        "random": hashed(view.positions, seed).tolist(),
        "heads": [-float(place) for place in view.place_in_chunk.tolist()],
    }.get(name, asked.tolist())
    if name.endswith("*hkvd"):
        return [a * b * s for a, b, s in zip(plain, v, stale, strict=True)]
    return [score if s else float("-inf") for score, s in zip(plain, stale, strict=True)]


@pytest.mark.parametrize("name", NAMES)
@given(
    seed=st.integers(0, 99),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    exact_first=st.booleans(),
    ratio=st.floats(0, 1),
)
def test_rows_are_those_of_plain_python(
    name: str, seed: int, lengths: list[int], exact_first: bool, ratio: float
) -> None:
    view = fake_view(seed, lengths, exact_first)
    settings = BlendSettings(policy=name, seed=seed, first_share=0.4)
    count = num_kept(ratio, sum(lengths))
    rows = make_policy(settings).rows(view, count).tolist()
    assert rows == sorted(set(rows)) and len(rows) == count

    first, _, rest = name.partition("+")
    scores = slow_scores(first, view, seed)
    part = int(0.4 * count) if rest else count
    if rest:  # what the first did not take, the second fills by its own order
        inside = [scores[i] for i in rows]
        assert (
            sum(s >= sorted(scores, reverse=True)[part - 1] for s in inside) >= part if part else True
        )
        others = slow_scores(rest, view, seed)
        worst = sorted(others[i] for i in rows)[part:] if part < count else []
        left_out = [others[i] for i in range(len(others)) if i not in rows]
        assert not worst or not left_out or worst[0] >= max(left_out)
    else:  # ties may fall either way, so compare scores
        assert sorted((scores[i] for i in rows), reverse=True) == pytest.approx(
            sorted(scores, reverse=True)[:count], rel=1e-5
        )


def test_random_rows_depend_on_the_seed_and_are_spread() -> None:
    positions = torch.arange(10_000)
    one, two = hashed(positions, 0), hashed(positions, 1)
    assert torch.equal(one, hashed(positions, 0))
    assert (one == two).float().mean() < 0.01
    assert float(one.min()) >= 0 and float(one.max()) < 1
    counts = torch.histc(one, 10, 0, 1)
    assert counts.min() > 850 and counts.max() < 1150
    assert abs(float(torch.corrcoef(torch.stack([one, two]))[0, 1])) < 0.05


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(policy="best"), "policy is 'best'; allowed: hkvd, hkvd_k"),
        (dict(policy=3), "policy is 3; allowed: hkvd, hkvd_k"),
        (dict(policy="ahead*"), "policy is 'ahead\\*'; allowed: .*products"),
        (dict(policy="heads+ahead+hkvd"), "allowed: .*one sum"),
        (dict(policy="heads*hkvd"), "heads is an order without scores"),
        (dict(first_share=1.5), "first_share is 1.5; allowed: 0 to 1"),
        (dict(seed=-1), "seed is -1; expected a whole number from 0"),
    ],
)
def test_settings_refuse_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlendSettings(**settings)
