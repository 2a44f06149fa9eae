"""Drift: what it is made of, how it is measured, and what it does for a real model's answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Engine, drifting, make_engine, plan_for, run
from hypothesis import given
from hypothesis import strategies as st

from vllm_blend import Blender, BlendSettings
from vllm_blend.blender import BlendPrompt
from vllm_blend.core import DriftPart, LayerKV, StoredKV
from vllm_blend.drift import (
    FIRST_OCTAVE,
    MIN_TOKENS,
    NUM_OCTAVES,
    Drift,
    DriftFit,
    Measurement,
    correct,
    octaves,
    part_spans,
    weights,
)
from vllm_blend.quality import kl_divergence, suffix_logits

INPUTS = Path(__file__).parent.parent / "inputs"
HEADS, SIZE, LAYERS = 2, 4, 3


@given(st.integers(0, 200_000), st.integers(0, 200_000))
def test_octaves_fill_one_after_the_other(one: int, other: int) -> None:
    low, high = octaves(torch.tensor(sorted((one, other))))
    assert ((low >= 0) & (low <= high) & (high <= 1)).all()
    for filled in (low, high):  # full ones, one in part, empty ones
        assert ((filled == 1) | (filled.roll(-1) == 0))[:-1].all()
    end = 2 ** (FIRST_OCTAVE + NUM_OCTAVES)
    assert torch.equal(octaves(torch.tensor([end])), octaves(torch.tensor([max(one, end)])))


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=20))
def test_tokens_in_their_places_need_nothing(positions: list[int]) -> None:
    places = torch.tensor(positions)
    weight = weights(places, places)
    kv = torch.randn(2, len(positions), HEADS, SIZE).unbind()
    matrix = torch.randn(2 * NUM_OCTAVES, HEADS * SIZE)
    assert all(map(torch.equal, correct((kv[0], kv[1]), weight, matrix), kv))


def moved(kv: list[LayerKV], drift: Drift, count: int, position: int, before: int) -> list[LayerKV]:
    at = torch.arange(count)
    weight = weights(position + at, before + at)
    return [correct(pair, weight, drift.matrix(i, pair[0])) for i, pair in enumerate(kv)]


def random_kv(count: int, dtype: torch.dtype = torch.float32) -> list[LayerKV]:
    return [(k, v) for k, v in torch.randn(LAYERS, 2, count, HEADS, SIZE).to(dtype)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_made_up_drift_is_found(dtype: torch.dtype) -> None:
    """As a server measures it, behind a head of 20 tokens, up to what the ridge holds back."""
    torch.manual_seed(0)
    drift = Drift(torch.randn(LAYERS, 2, NUM_OCTAVES, HEADS, SIZE))
    whole = random_kv(3000, dtype)
    measurement = Measurement()
    spans = part_spans(3000)
    assert spans[0] == (0, 64) and spans[-1][1] == 3000
    assert measurement.take(DriftPart(None, len(spans)), StoredKV(tuple(whole)), 20) is None
    for start, end in spans:
        # a part is what of the whole is left when its drift is taken back
        rows = [(k[start:end], v[start:end]) for k, v in whole]
        part = moved(rows, drift, end - start, 20, 20 + start)
        found = measurement.take(DriftPart(start, len(spans)), StoredKV(tuple(part)), 20)
        assert (found is None) == (end < 3000)
    assert found is not None
    nothing = [(torch.zeros(40, HEADS, SIZE),) * 2] * LAYERS
    for kv, expected in zip(
        moved(nothing, found, 40, 2000, 20), moved(nothing, drift, 40, 2000, 20), strict=True
    ):
        for one, other in zip(kv, expected, strict=True):
            assert (one - other).norm() < 0.05 * other.norm()


def test_what_no_token_shows_is_nothing() -> None:
    fit = DriftFit()
    with pytest.raises(RuntimeError, match="no tokens were added"):
        fit.fit()
    start = 2**FIRST_OCTAVE + 1
    fit.add(random_kv(20), random_kv(20), position=start + 5, computed_at=start)
    table = fit.fit().table
    assert table[:, :, 0].any() and not table[:, :, 1:].any()


def test_correct_leaves_what_it_is_given() -> None:
    kv = random_kv(7)[0]
    before = [x.clone() for x in kv]
    out = correct(kv, torch.rand(7, NUM_OCTAVES), torch.randn(2 * NUM_OCTAVES, HEADS * SIZE))
    assert all(map(torch.equal, kv, before))
    assert not torch.equal(out[0], kv[0])


@pytest.mark.parametrize("policy", ["hkvd", "hkvd_k", "ahead"])
def test_a_step_blends_what_was_corrected(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """The same rows and answers as with KV that was corrected before, others than without."""
    with make_engine(tiny("llama")) as engine:
        chunks = [engine.ids(80, seed) for seed in range(4)]
        options: dict[str, Any] = dict(recomp_ratio=0.2, policy=policy)
        prompt, plan = plan_for(engine, chunks, engine.ids(7, 8), engine.ids(9, 9), **options)
        drift, asked, before = drifting(engine, plan, computed_at=5)
        monkeypatch.setattr(engine.model.blending.chunks, "drift", drift)
        answers = []
        for one in (asked, before, plan):
            tokens = run(engine, [prompt], [one])
            answers.append((tokens, engine.flags["imp_indices"].tolist()))
        assert answers[0] == answers[1] != answers[2]


@pytest.fixture(scope="module")
def blender(smollm2_engine: Engine) -> Blender:
    return Blender(smollm2_engine.llm, stand_in="")


def test_a_text_that_does_not_fit_is_refused(blender: Blender) -> None:
    for count in (1, MIN_TOKENS - 1, 9000):
        with pytest.raises(ValueError, match=f"text has {count} tokens; allowed: {MIN_TOKENS} to"):
            blender.measure_drift([5] * count)
    assert blender.model.blending.chunks.drift is None


def kl(blender: Blender, prompt: BlendPrompt, full: torch.Tensor, settings: BlendSettings) -> float:
    return kl_divergence(full, suffix_logits(blender, prompt, settings=settings))


def test_a_real_model_s_answers_come_nearer_to_full_prefill(blender: Blender) -> None:
    """Without a token more being recomputed; and what stands where it was computed stays exact."""
    off = BlendSettings(policy="hkvd", recomp_ratio=0.16)
    on = replace(off, drift=True)
    samples = [json.loads((INPUTS / f"{number}.json").read_text()) for number in (2, 5, 7)]
    texts = [[sample[str(i)] for i in range(sample["chunk_num"])] for sample in samples]
    prompts = [
        blender.prompt(blender.chunks(one), sample["query"])
        for one, sample in zip(texts, samples, strict=True)
    ]
    with pytest.raises(ValueError, match="drift is true, and it has not been measured"):
        blender.generate(prompts[0], settings=on)
    drift = blender.measure_drift()
    assert torch.equal(blender.measure_drift().table, drift.table)
    try:
        full = [suffix_logits(blender, prompt, blend=False) for prompt in prompts]
        pairs = list(zip(prompts, full, strict=True))
        without = [kl(blender, prompt, logits, off) for prompt, logits in pairs]
        with_it = [kl(blender, prompt, logits, on) for prompt, logits in pairs]
        assert sum(with_it) < 0.6 * sum(without), (with_it, without)
        alone = blender.prompt(blender.chunks(texts[0][:1]), samples[0]["query"])
        assert torch.equal(*(suffix_logits(blender, alone, settings=s) for s in (on, off)))
    finally:
        blender.model.blending.chunks.drift = None  # the engine is shared
