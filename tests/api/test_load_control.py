"""The controller on a real engine: what it measures, decides, says, and does where a load fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from engines import Engine
from tiers import FakeTier
from vllm import SamplingParams

from vllm_blend import Blender, BlendSettings
from vllm_blend.api.load_control import PacedBlender, measure_engine
from vllm_blend.store import ChunkStore
from vllm_blend.store.compute_time import ComputeTime, EngineTimes
from vllm_blend.store.controller import Decision

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SLOW = ComputeTime(0, 0, 1.0, 0)  # a second a row: every load is faster
FAST = ComputeTime(0, 0, 1e-9, 0)


def make(engine: Engine, tier: FakeTier, times: ComputeTime, **options: Any) -> PacedBlender:
    store = ChunkStore([tier], host_bytes=1 << 26, timeout_s=20)
    blender = Blender(engine.llm, store=store, stand_in="")
    return PacedBlender(blender, times=EngineTimes(times, times), **options)


def tokens(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


def forget(paced: PacedBlender, chunks: list[list[int]]) -> None:
    """So that the chunks lie in the tier alone."""
    assert paced.store.flush()
    for ids in paced.blender.token_ids(chunks):
        paced.store.discard(paced.blender.key(ids))


@pytest.fixture
def chunks(smollm2_engine: Engine) -> list[list[int]]:
    return [smollm2_engine.ids(count, seed) for seed, count in enumerate((40, 70, 25))]


QUESTION = [100, 200, 300, 400]


def test_chunks_are_computed_then_loaded(
    smollm2_engine: Engine, chunks: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(
        "vllm_blend.api.load_control.logger.info", lambda text, *args: said.append(text % args)
    )
    tier = FakeTier()
    paced = make(smollm2_engine, tier, SLOW, floor=0.2)
    blender = paced.blender
    with paced.store:
        first = paced.generate(chunks, QUESTION, GREEDY)
        full = blender.generate(blender.prompt(blender.chunks(chunks), QUESTION), GREEDY, blend=False)
        assert tokens(first.output) == tokens(full)
        assert first.tiers == (None, None, None) and not any(first.decision.load)
        forget(paced, chunks)  # they were computed after the answer
        second = paced.generate(chunks, QUESTION, GREEDY)
        assert second.tiers == ("fake",) * 3 and all(second.decision.load)
        assert second.decision.ratio == 0.2
        third = paced.generate(chunks, QUESTION, GREEDY)
        assert third.tiers == ("host",) * 3
        settings = replace(blender.settings, recomp_ratio=0.2)
        blended = blender.generate(
            blender.prompt(blender.chunks(chunks), QUESTION), GREEDY, settings=settings
        )
        assert tokens(second.output) == tokens(third.output) == tokens(blended)
    assert "reused none; ratio 1.00" in said[0]
    assert "reused 3 from fake; ratio 0.20" in said[1] and "quality floor" in said[1]
    assert "reused 3 from host" in said[2]


def test_each_place_is_loaded_behind_what_suits_it(
    smollm2_engine: Engine, chunks: list[list[int]]
) -> None:
    store = ChunkStore([FakeTier()], host_bytes=1 << 26, timeout_s=20)
    blender = Blender(smollm2_engine.llm, store=store, stand_in=smollm2_engine.ids(50, 9))
    paced = PacedBlender(blender, times=EngineTimes(SLOW, SLOW), floor=0.2)
    with store:
        assert paced.generate(chunks, QUESTION, GREEDY).tiers == (None,) * 3
        loaded = paced.generate(chunks, QUESTION, GREEDY)
        assert loaded.tiers == ("host",) * 3
        # the last comes first, and the first last: they are known for other places
        assert paced.generate(chunks[::-1], QUESTION, GREEDY).tiers == (None, "host", None)
        prompt = blender.prompt(blender.chunks(chunks), QUESTION)
        settings = replace(blender.settings, recomp_ratio=0.2)
        blended = blender.generate(prompt, GREEDY, settings=settings)
        assert tokens(loaded.output) == tokens(blended)


def test_a_slow_tier_is_not_waited_for_and_is_timed_again(
    smollm2_engine: Engine, chunks: list[list[int]]
) -> None:
    tier = FakeTier()
    paced = make(smollm2_engine, tier, FAST)
    (lane,) = paced.store.lanes
    with paced.store:
        paced.blender.chunks(chunks)
        forget(paced, chunks)
        assert not lane.load_time.measured
        answer = paced.generate(chunks, QUESTION, GREEDY)
        assert answer.tiers == ("fake",) * 3 and not any(answer.decision.load)
        assert "no load is faster" in answer.decision.reason
        assert paced.store.flush()
        assert lane.load_time.measured
        assert paced.store.locate(paced.blender.key(paced.blender.token_ids(chunks)[0])) == "host"


def test_some_chunks_loaded_and_some_computed(smollm2_engine: Engine, chunks: list[list[int]]) -> None:
    paced = make(smollm2_engine, FakeTier(), SLOW)
    with paced.store:
        paced.blender.chunks(chunks)
        forget(paced, chunks)
        everything = Decision(1.0, (True, False, True), 0, 0, 0, "")
        mixed = paced.generate(chunks, QUESTION, GREEDY, decision=everything)
        full = paced.generate(chunks, QUESTION, GREEDY, decision=replace(everything, load=(False,) * 3))
        assert tokens(mixed.output) == tokens(
            full.output
        )  # ratio 1 is full prefill, whatever is loaded


def test_a_load_that_breaks_off_becomes_a_full_prefill(
    smollm2_engine: Engine, chunks: list[list[int]]
) -> None:
    tier = FakeTier()
    paced = make(smollm2_engine, tier, SLOW)
    with paced.store:
        expected = paced.generate(chunks, QUESTION, GREEDY)
        forget(paced, chunks)

        def fail_midway(offset: int) -> None:
            tier.failing = offset > 200_000

        tier.on_read = fail_midway
        answer = paced.generate(chunks, QUESTION, GREEDY)
        assert answer.lost is not None and "cannot be loaded" in answer.lost
        assert tokens(answer.output) == tokens(expected.output)
        tier.failing, tier.on_read = False, lambda offset: None
        again = paced.generate(
            chunks, QUESTION, GREEDY
        )  # from the tier, or all computed while it pauses
        assert again.lost is None and len(tokens(again.output)) == 6


def test_the_engine_is_timed(smollm2_engine: Engine) -> None:
    blender = Blender(smollm2_engine.llm)
    times = measure_engine(blender, longest=256, repeat=1)
    for fit in (times.blended, times.full):
        assert 0 < fit.seconds(128, 128) < 10
    assert times.blended.seconds(256, 32) < times.blended.seconds(256, 256)


def test_what_cannot_be_paced_is_refused(smollm2_engine: Engine) -> None:
    with pytest.raises(ValueError, match="the blender has no store"):
        PacedBlender(Blender(smollm2_engine.llm))
    settings = BlendSettings(check_layers=(1, 2), recomp_ratios=(0.3, 0.2))
    with ChunkStore(host_bytes=1 << 20) as store:
        blender = Blender(smollm2_engine.llm, settings, store=store)
        with pytest.raises(ValueError, match="recomp_ratios is set"):
            PacedBlender(blender)
