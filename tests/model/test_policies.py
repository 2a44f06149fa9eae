"""Policies on engines, against slow oracles: plain Python, and a transformers model's attention."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import Engine, make_engine, relative_error, run
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from slow_policies import check_rows, slow_static

from vllm_blend.core.kv import StoredKV
from vllm_blend.core.plans import BlendPlan, ChunkSpan
from vllm_blend.core.settings import POLICIES, BlendSettings, asked_layers, num_kept
from vllm_blend.core.step import MAX_ASKED, StepRequest
from vllm_blend.model import loop
from vllm_blend.model.select import CheckLayerCandidates, choose_rows, early
from vllm_blend.model.select.early import EarlyCandidates
from vllm_blend.model.select.policies import hashed, make_policy

MIXTURES = (
    *("query*hkvd", "ahead*hkvd"),
    *("static*hkvd", "ahead*static"),
)
NAMES = (*POLICIES, *MIXTURES)
LENGTHS = (61, 5, 130, 19)
TOTAL = sum(LENGTHS)
QUESTION = 9


def asked(layers: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Those whose attention counts."""
    return [layers[index] for index in asked_layers(len(layers))]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def engine(request: pytest.FixtureRequest, tiny: Any) -> Iterator[Engine]:
    with make_engine(tiny(request.param)) as engine:
        yield engine


@pytest.fixture(scope="module")
def prompt(engine: Engine) -> list[int]:
    return engine.ids(TOTAL + QUESTION, seed=5)


def starts() -> list[int]:
    return [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]


def spans_of(kv: Any) -> tuple[ChunkSpan, ...]:
    """Spans of LENGTHS over the KV of a whole prompt."""
    return tuple(
        ChunkSpan(start, StoredKV(tuple((k[start : start + n], v[start : start + n]) for k, v in kv)))
        for start, n in zip(starts(), LENGTHS, strict=True)
    )


def scored(spans: Sequence[ChunkSpan], without: Sequence[int] = ()) -> tuple[ChunkSpan, ...]:
    """The same spans with made-up scores, but for those ``without``."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for index, span in enumerate(spans):
        scores = torch.rand(span.kv.num_tokens, generator=generator) + 0.01
        kv = replace(span.kv, scores=None if index in without else scores)
        found.append(replace(span, kv=kv))
    return tuple(found)


def chosen_by(policy: str, **settings: Any) -> BlendSettings:
    return BlendSettings(policy=policy, **({"recomp_ratio": 0.16} | settings))


def alone(engine: Engine, prompt: list[int]) -> Any:
    """Each chunk's KV, computed without the others, joined."""
    return engine.stored([prompt[s : s + n] for s, n in zip(starts(), LENGTHS, strict=True)])


def kept(engine: Engine) -> list[int]:
    """Chunk tokens that the last blend recomputed, where the chunks come first."""
    found = engine.flags["imp_indices"].tolist()
    assert found[-QUESTION:] == list(range(TOTAL, TOTAL + QUESTION))
    return found[:-QUESTION]


# --- what policies look at -----------------------------------------------------------------------


@pytest.fixture
def views(monkeypatch: pytest.MonkeyPatch) -> list[CheckLayerCandidates]:
    """What the policies of the test's requests looked at in the layer loop."""
    seen: list[CheckLayerCandidates] = []

    def look(settings: BlendSettings, view: CheckLayerCandidates, count: int) -> torch.Tensor:
        rows = choose_rows(settings, view, count)
        # the frame moves on after the choice: ask now
        view.here = view.attention_here  # type: ignore[attr-defined]
        asks = settings.asks
        view.ahead = view.attention_ahead if asks else None  # type: ignore[attr-defined]
        for name in ("v_deviation", "k_deviation", "stale", "place_in_chunk", "positions", "static"):
            getattr(view, name)
        seen.append(view)
        return rows

    monkeypatch.setattr(loop, "choose_rows", look)
    return seen


@dataclass
class Choice:
    """One before layer 0."""

    request: StepRequest
    received: torch.Tensor | None
    rows: torch.Tensor


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> list[Choice]:
    """The choices of the test's requests before layer 0."""
    seen: list[Choice] = []
    stock = early.choose

    def look(
        request: StepRequest, received: torch.Tensor | None, nowhere: bool = False
    ) -> torch.Tensor:
        seen.append(Choice(request, received, stock(request, received, nowhere)))
        return seen[-1].rows

    monkeypatch.setattr(early, "choose", look)
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
    engine: Engine, prompt: list[int], views: list[CheckLayerCandidates]
) -> None:
    spans = spans_of(engine.collect(prompt))
    run(engine, [prompt], [BlendPlan(spans, chosen_by("ahead*hkvd"))], max_tokens=1)
    (view,) = views
    expected = [layer[:TOTAL] for layer in question_attention(engine.folder, prompt)]
    assert relative_error(view.here, expected[1]) < 1e-4  # type: ignore[attr-defined]
    assert relative_error(view.ahead, sum(asked(expected))) < 1e-4  # type: ignore[attr-defined, arg-type]
    assert not view.stale.any()


def test_the_question_is_asked_by_those_who_want_it_alone(
    engine: Engine, prompt: list[int], views: list[CheckLayerCandidates], choices: list[Choice]
) -> None:
    spans = spans_of(alone(engine, prompt))
    names = ("hkvd", "ahead*hkvd", "static", "ahead")
    plans = [BlendPlan(spans, chosen_by(name)) for name in names]
    run(engine, [prompt] * 4, plans, max_tokens=1)
    assert [view.request in view.frame.received for view in views] == [False, True]
    assert [choice.received is None for choice in choices] == [True, False]
    # the same answer, whichever path it is for
    assert torch.equal(choices[1].received, views[1].ahead)  # type: ignore[attr-defined, arg-type]


@pytest.mark.parametrize("policy", ["ahead", "ahead*hkvd"])
def test_tokens_that_no_chunk_holds_are_seen_too(
    engine: Engine, views: list[CheckLayerCandidates], choices: list[Choice], policy: str
) -> None:
    """A head, text between chunks, and a question of more tokens than are asked."""
    ids = engine.ids(330, seed=7)
    exact = engine.collect(ids)
    places = ((5, 40), (43, 290))
    spans = tuple(
        ChunkSpan(start, StoredKV(tuple((k[start:end], v[start:end]) for k, v in exact)))
        for start, end in places
    )
    for layer in engine.model.layers:  # what other requests left in the cache
        layer.self_attn.attn.kv_cache.normal_(0, 50)
    run(engine, [ids], [BlendPlan(spans, chosen_by(policy))], max_tokens=1)
    expected = [
        torch.cat([layer[start:end] for start, end in places])
        for layer in question_attention(engine.folder, ids, MAX_ASKED)
    ]
    if policy == "ahead":
        ((choice,), received) = choices, choices[0].received
        assert choice.rows.tolist() == sorted(
            sum(asked(expected)).topk(int(0.16 * 282)).indices.tolist()
        )  # type: ignore[union-attr, arg-type]
    else:
        (view,) = views
        assert relative_error(view.here, expected[1]) < 1e-4  # type: ignore[attr-defined]
        received = view.ahead  # type: ignore[attr-defined]
    assert received is not None
    assert relative_error(received, sum(asked(expected))) < 1e-4  # type: ignore[arg-type]


def test_deviations_and_places(
    engine: Engine, prompt: list[int], views: list[CheckLayerCandidates]
) -> None:
    apart, whole = alone(engine, prompt), engine.collect(prompt)
    spans = scored(spans_of(apart), without=[1, 2])
    run(engine, [prompt], [BlendPlan(spans, chosen_by("hkvd"))], max_tokens=1)
    (view,) = views
    for kind, found in enumerate((view.k_deviation, view.v_deviation)):
        expected = (apart[1][kind] - whole[1][kind][:TOTAL]).square().sum((1, 2))
        assert relative_error(found, expected) < 1e-3
    assert view.place_in_chunk.tolist() == [i for n in LENGTHS for i in range(n)]
    assert view.positions.tolist() == list(range(TOTAL))
    assert view.stale.tolist() == [False] * LENGTHS[0] + [True] * sum(LENGTHS[1:])
    torch.testing.assert_close(view.static, torch.tensor(slow_static(view.request.windows)))
    before = EarlyCandidates(view.request.windows, None, torch.device("cpu"))
    for name in ("positions", "place_in_chunk", "static"):
        assert torch.equal(getattr(before, name), getattr(view, name))


# --- what is chosen before layer 0 ---------------------------------------------------------------


@pytest.mark.parametrize("policy", ["static", "heads", "random", "random*static"])
@pytest.mark.parametrize("ratio", [0.0, 0.16, 1.0])
def test_rows_are_chosen_early_by_what_is_known_of_the_chunks(
    engine: Engine, prompt: list[int], policy: str, ratio: float
) -> None:
    """One of the chunks has no scores, and one is exact here."""
    spans = list(scored(spans_of(alone(engine, prompt)), without=[2]))
    spans[0] = replace(spans[0], exact=True)
    settings = chosen_by(policy, recomp_ratio=ratio, seed=4)
    plan = BlendPlan(tuple(spans), settings)
    run(engine, [prompt], [plan], max_tokens=1)
    rows = kept(engine)
    view = EarlyCandidates([(span, span.start, span.end) for span in spans], None, torch.device("cpu"))
    check_rows(rows, policy, view, 4, num_kept(ratio, TOTAL))
    assert ratio == 1.0 or not [row for row in rows if row < LENGTHS[0]]


@pytest.mark.parametrize("policy", ["ahead", "ahead*static"])
def test_rows_are_chosen_early_by_the_questions_attention(
    engine: Engine, prompt: list[int], policy: str
) -> None:
    spans = list(scored(spans_of(engine.collect(prompt)), without=[0]))
    spans[2] = replace(spans[2], exact=True)
    settings = chosen_by(policy, recomp_ratio=0.3)
    run(engine, [prompt], [BlendPlan(tuple(spans), settings)], max_tokens=1)
    rows = kept(engine)
    received = sum(asked(question_attention(engine.folder, prompt)))[:TOTAL]  # type: ignore[index]
    view = EarlyCandidates([(s, s.start, s.end) for s in spans], received, torch.device("cpu"))
    check_rows(rows, policy, view, 0, int(0.3 * TOTAL))
    exact = range(spans[2].start, spans[2].end)
    assert not set(rows) & set(exact)


def test_policies_of_both_kinds_share_a_step(
    engine: Engine, prompt: list[int], views: list[CheckLayerCandidates], choices: list[Choice]
) -> None:
    """Each chooses in its own time, as it does alone; and so does one that blends nothing."""
    spans = scored(spans_of(alone(engine, prompt)))
    names = ("ahead", "hkvd", None, "static", "ahead*hkvd", "random")
    gradual: dict[str, Any] = dict(check_layers=(2, 3), recomp_ratios=(0.5, 0.2))
    plans = [
        name and BlendPlan(spans, chosen_by(name, **(gradual if name == "hkvd" else {})))
        for name in names
    ]
    single = [run(engine, [prompt], [plan])[0] for plan in plans]
    chosen = [choice.rows.tolist() for choice in choices], [v.chunk_index.tolist() for v in views]
    choices.clear()
    views.clear()
    assert run(engine, [prompt] * len(plans), plans) == single
    assert [choice.rows.tolist() for choice in choices] == chosen[0]
    # in a step views come layer by layer, not request by request
    assert sorted(v.chunk_index.tolist() for v in views) == sorted(chosen[1])


# --- identities ----------------------------------------------------------------------------------


@pytest.mark.covers("all policies", backend="CPU_ATTN", family="{engine}")
@pytest.mark.parametrize("policy", NAMES)
def test_exact_kv_reproduces_full_prefill(engine: Engine, prompt: list[int], policy: str) -> None:
    plan = BlendPlan(spans_of(engine.collect(prompt)), chosen_by(policy))
    assert run(engine, [prompt], [plan]) == run(engine, [prompt], [None])
    assert len(engine.flags["imp_indices"]) == int(0.16 * TOTAL) + QUESTION


@pytest.mark.parametrize("policy", NAMES)
def test_stored_kv_and_neighbours_in_a_batch_do_not_notice(
    engine: Engine, prompt: list[int], policy: str
) -> None:
    apart = alone(engine, prompt)
    before = [[tensor.clone() for tensor in layer] for layer in apart]
    plan = BlendPlan(spans_of(apart), chosen_by(policy))
    other = BlendPlan(spans_of(apart), chosen_by("hkvd", recomp_ratio=0.5))
    single = [run(engine, [prompt], [p])[0] for p in (plan, other, None)]
    assert run(engine, [prompt] * 3, [plan, other, None]) == single
    for layer, copy in zip(apart, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(layer, copy, strict=True))


@pytest.mark.parametrize("kind", ["early", "in the loop", "gradual"])
def test_a_pass_ahead_leaves_nothing_but_the_choice(
    engine: Engine,
    prompt: list[int],
    views: list[CheckLayerCandidates],
    choices: list[Choice],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """The same rows, chosen without that pass, give the same answer."""
    spans = spans_of(alone(engine, prompt))
    options: dict[str, Any] = {}
    if kind == "gradual":
        options = dict(check_layers=(1, 3), recomp_ratios=(0.5, 0.2))
    asks, does_not = ("ahead", "random") if kind == "early" else ("ahead*hkvd", "hkvd")
    plan = BlendPlan(spans, chosen_by(asks, **options))
    chosen: list[torch.Tensor] = []
    with monkeypatch.context() as patch:
        patch.setattr(loop, "choose_rows", lambda *a: chosen.append(choose_rows(*a)) or chosen[-1])
        with_pass = logits_of(engine, prompt, plan)
        chosen += [choice.rows for choice in choices]
        plain = BlendPlan(spans, chosen_by("hkvd", recomp_ratio=0.4))
        beside = run(engine, [prompt, prompt], [plan, plain])
        assert beside == [run(engine, [prompt], [p])[0] for p in (plan, plain)]
    rows = iter(chosen)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "choose_rows", lambda settings, view, count: next(rows))
        patch.setattr(early, "choose", lambda *_: next(rows))
        without = logits_of(engine, prompt, BlendPlan(spans, chosen_by(does_not, **options)))
    assert relative_error(with_pass, without) < 1e-5


@pytest.mark.parametrize("policy", ["hkvd", "ahead*hkvd", "static", "ahead"])
def test_stored_kv_is_let_go_with_its_request(engine: Engine, prompt: list[int], policy: str) -> None:
    """At once, not when garbage is collected: a store's memory is for other chunks then."""
    plan = BlendPlan(spans_of(alone(engine, prompt)), chosen_by(policy))
    stored = [weakref.ref(span.kv) for span in plan.spans]
    gc.collect()
    gc.disable()
    try:
        run(engine, [prompt], [plan])
        del plan
        run(engine, [prompt], [None])  # vLLM forgets a request in the next step
        assert not any(kv() for kv in stored)
    finally:
        gc.enable()


def logits_of(engine: Engine, ids: list[int], plan: BlendPlan) -> torch.Tensor:
    """Logits of eight greedy tokens, ``[8, vocab_size]``."""
    with engine.watched() as found:
        run(engine, [ids], [plan])
    return torch.cat(found)


@pytest.mark.parametrize("policy", ["query", "ahead*hkvd", "heads", "static", "ahead", "ahead*static"])
def test_windows_without_the_question(engine: Engine, prompt: list[int], policy: str) -> None:
    plan = BlendPlan(spans_of(engine.collect(prompt)), chosen_by(policy))
    gradual = chosen_by(policy, check_layers=(1, 3), recomp_ratios=(0.5, 0.2))
    expected = run(engine, [prompt], [None])
    with windows_of(engine, 64):
        assert run(engine, [prompt], [plan]) == expected
    assert run(engine, [prompt], [BlendPlan(plan.spans, gradual)]) == expected


class windows_of:
    """While it lasts, prompts are cut into windows of so many tokens."""

    def __init__(self, engine: Engine, count: int) -> None:
        self.scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
        self.count, self.before = count, self.scheduler.max_num_scheduled_tokens

    def __enter__(self) -> None:
        self.scheduler.max_num_scheduled_tokens = self.count

    def __exit__(self, *_: object) -> None:
        self.scheduler.max_num_scheduled_tokens = self.before


@pytest.mark.covers("chunked prefill", backend="CPU_ATTN", family="{engine}")
@pytest.mark.parametrize("policy", ["static", "ahead"])
def test_windows_blend_as_the_whole_does(
    engine: Engine, prompt: list[int], choices: list[Choice], policy: str
) -> None:
    """With KV that is off: the same rows and logits, whatever the window. The question is asked in the
    last window alone, whose chunk tokens it chooses among; the others have up to half, by scores."""
    plan = BlendPlan(scored(spans_of(alone(engine, prompt))), chosen_by(policy, recomp_ratio=0.3))
    whole = logits_of(engine, prompt, plan)
    (choice,) = choices
    ratio = 0.3 if policy == "static" else 0.5
    by_scores = early.choose(replace_request(choice.request, plan, ratio), None).tolist()
    choices.clear()
    with windows_of(engine, 80):
        cut = logits_of(engine, prompt, plan)
    assert [c.received is not None for c in choices] == [False] * 2 + [policy == "ahead"]
    found = [(c.request.chunk_rows[c.rows] + c.request.position).tolist() for c in choices]
    if policy == "static":
        assert sum(found, []) == by_scores
        assert relative_error(cut[-8:], whole) < 1e-4
    else:
        assert sum(found[:2], []) == [row for row in by_scores if row < 160]
        assert len(found[2]) == int(0.3 * (TOTAL - 160))


def replace_request(request: StepRequest, plan: BlendPlan, ratio: float) -> StepRequest:
    settings = replace(plan.settings, policy="static", recomp_ratio=ratio)
    return replace(request, plan=replace(plan, settings=settings))


# --- policies alone ------------------------------------------------------------------------------


def fake_view(seed: int, lengths: list[int], exact_first: bool, asked: bool) -> Any:
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    places = [i for n in lengths for i in range(n)]
    stale = [not (exact_first and index < lengths[0]) for index in range(total)]
    names = ("v_deviation", "k_deviation", "attention_here", "attention_ahead", "static")
    scores: dict[str, Any] = {name: torch.rand(total, generator=generator) for name in names}
    if not asked:
        scores |= dict(attention_here=None)
    return SimpleNamespace(
        positions=torch.arange(total) + 3,
        place_in_chunk=torch.tensor(places),
        stale=torch.tensor(stale),
        **scores,
    )


@pytest.mark.parametrize("name", NAMES)
@hypothesis_settings(deadline=None)
@given(
    seed=st.integers(0, 99),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    exact_first=st.booleans(),
    asked=st.booleans(),
    ratio=st.floats(0, 1),
)
def test_rows_are_those_of_plain_python(
    name: str, seed: int, lengths: list[int], exact_first: bool, asked: bool, ratio: float
) -> None:
    view = fake_view(seed, lengths, exact_first, asked)
    settings = chosen_by(name, seed=seed)
    count = num_kept(ratio, sum(lengths))
    rows = make_policy(settings).rows(view, count).tolist()
    check_rows(rows, name, view, seed, count)


@pytest.mark.parametrize("seed", [0, 1300, 2**32 - 1])
def test_any_seed_gives_numbers_in_the_unit_interval(seed: int) -> None:
    found = hashed(torch.arange(1000), seed)
    assert float(found.min()) >= 0 and float(found.max()) < 1
    assert len(found.unique()) > 900


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
        (dict(policy="best"), "policy is 'best'; allowed: static, ahead"),
        (dict(policy=3), "policy is 3; allowed: static, ahead"),
        (dict(policy="ahead*"), "policy is 'ahead\\*'; allowed: .*products"),
        (dict(policy="heads+hkvd"), "policy is 'heads\\+hkvd'; allowed: .*products"),
        (dict(policy="heads*hkvd"), "heads is an order without scores"),
        (dict(seed=-1), "seed is -1; expected a whole number from 0 to 4294967295"),
    ],
)
def test_settings_refuse_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlendSettings(**settings)
