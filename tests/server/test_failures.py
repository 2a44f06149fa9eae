"""A step that fails to blend is a full prefill, and the engine serves on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import pytest
from asking import (
    REPORT,
    answer,
    blending_engine,
    drain,
    outputs,
    prompt_of,
    report,
    scheduler,
    with_known_chunks,
)
from engines import Engine

from vllm_blend.attention.cpu import CPUBlendImpl
from vllm_blend.core.plans import ChunkIds
from vllm_blend.core.step import MAX_FAILURES
from vllm_blend.model import loop, probe, rows
from vllm_blend.model.active_rows import ActiveRows
from vllm_blend.model.guard import Guard
from vllm_blend.model.kv_loader import StoredLayers
from vllm_blend.model.lookahead import Questions
from vllm_blend.model.loop import LayerLoop
from vllm_blend.model.select import CheckLayerCandidates, early
from vllm_blend.plugin import step_requests
from vllm_blend.server.scheduler.request_reports import OFF
from vllm_blend.server.worker.chunk_cache import ChunkCache


@pytest.fixture(scope="module")
def server(tiny: Any) -> Iterator[Engine]:
    with blending_engine(tiny("llama")) as engine:
        yield engine


@pytest.fixture(autouse=True)
def mended(server: Engine) -> Iterator[None]:
    yield
    mend(server)


def mend(server: Engine) -> None:
    """Switches blending on, as an operator does."""
    server.model.blending.guard.switch(True)
    scheduler(server).switch_blending(True)


STAGES = {
    "resolve": (ChunkCache, "resolve", "static"),
    "plan": (step_requests, "plan_step", "static"),
    "ask": (Questions, "received", "ahead"),
    "hear": (Questions, "hear", "ahead"),
    "choose": (early, "choose", "static"),
    "shrink": (ActiveRows, "shrink", "static"),
    "load": (StoredLayers, "old_kv", "static"),
    "metadata": (ActiveRows, "describe", "static"),
    "fuse": (CPUBlendImpl, "fuse", "static"),
    "fuse late": (CPUBlendImpl, "fuse", "static"),
    "scatter": (rows, "scattered", "static"),
    "loop": (LayerLoop, "run", "hkvd"),
    "check": (CheckLayerCandidates, "fresh_v", "hkvd"),
    "choose late": (loop, "choose_rows", "hkvd"),
    "shrink late": (ActiveRows, "shrink", "hkvd"),
    "load late": (StoredLayers, "old_kv", "hkvd"),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_that_fails_is_a_full_prefill(
    server: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stage: str
) -> None:
    """Beside it in the same step: a plain request. After it: one that blends again."""
    owner, name, policy = STAGES[stage]
    (prompt, other), field, (full, plain) = with_known_chunks(server, policy)
    calls = 0

    def fails(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == (2 if stage == "fuse late" else 1):
            raise MemoryError("none left")
        return stock(*args, **kwargs)

    stock = getattr(owner, name)
    if isinstance(stock, cached_property):
        stock, fails = stock.func, property(fails)
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(owner, name, fails)
        found, beside = outputs(server, [prompt, other], [field, None])
    assert calls and "none left" in str([r.exc_info for r in caplog.records])
    assert answer(found) == full and answer(beside) == plain
    told = report(found)
    assert told["reused_tokens"] == told["chunks"] == 0 and "blending failed" in told["why_not"]
    scheduler(server).reset_prefix_cache()
    (after,) = outputs(server, [prompt], [field])
    assert report(after)["reused_tokens"] == 300 and not report(after)["why_not"]


def test_a_chunk_that_cannot_be_kept_is_missed(server: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, spans = prompt_of(server, [11, 12])
    full = answer(*outputs(server, [prompt], [None]))

    def fails(*args: Any) -> None:
        raise OSError("no memory to keep it in")

    with monkeypatch.context() as patch:
        patch.setattr(ChunkCache, "keep", fails)
        outputs(server, [prompt], [{"spans": spans}])
        drain(server)
    scheduler(server).reset_prefix_cache()
    (found,) = outputs(server, [prompt], [{"spans": spans} | REPORT])
    assert answer(found) == full and report(found)["reused_tokens"] == 0
    mend(server)
    scheduler(server).reset_prefix_cache()
    outputs(server, [prompt], [{"spans": spans}])
    drain(server)
    scheduler(server).reset_prefix_cache()
    (again,) = outputs(server, [prompt], [{"spans": spans} | REPORT])
    assert report(again)["reused_tokens"] == 200


def test_after_several_failures_of_a_kind_blending_is_off(
    server: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prompt, spans = prompt_of(server, [1, 2, 3])
    field = {"spans": spans, "policy": "static"} | REPORT
    full = answer(*outputs(server, [prompt], [None]))
    outputs(server, [prompt], [field])
    drain(server)
    calls = 0

    def fails(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        raise ZeroDivisionError("again")

    monkeypatch.setattr(early, "choose", fails)
    with caplog.at_level(logging.ERROR):
        for _ in range(MAX_FAILURES + 2):
            scheduler(server).reset_prefix_cache()
            (found,) = outputs(server, [prompt], [field])
            assert answer(found) == full and report(found)["reused_tokens"] == 0
    assert calls == MAX_FAILURES
    said = [record.getMessage() for record in caplog.records]
    assert sum("a step failed to blend" in text for text in said) == 1
    assert sum("blending is off until" in text and "again" in text for text in said) == 1


def test_while_blending_is_off_nothing_is_done_for_it(
    server: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No chunk is kept or computed; what waited is computed once blending is on again."""
    state, held = scheduler(server), server.model.blending.chunks
    prompt, spans = prompt_of(server, [21, 22])
    moved, places = prompt_of(server, [24, 23, 22])
    full = answer(*outputs(server, [moved], [None]))
    outputs(server, [prompt], [{"spans": spans}])
    drain(server)

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("again")

    with monkeypatch.context() as patch:
        patch.setattr(early, "choose", fails)
        for _ in range(MAX_FAILURES):
            state.reset_prefix_cache()
            outputs(server, [prompt], [{"spans": spans, "policy": "static"}])
    state.blend_internal.background.add(ChunkIds("", tuple(server.ids(100, 25))))
    known, computed = len(held), state.blend_internal.background.num_computed
    drain(server)
    for _ in range(2):
        state.reset_prefix_cache()
        (found,) = outputs(server, [moved], [{"spans": places} | REPORT])
        assert answer(found) == full
        told = report(found)
        assert (told["reused_tokens"], told["missed_chunks"]) == (0, 0) and "is off" in told["why_not"]
    drain(server)
    assert (len(held), state.blend_internal.background.num_computed) == (known, computed)
    assert state.blend_chunks.num_pinned == 0 and not len(state.blend_plans)
    mend(server)
    drain(server)
    assert state.blend_internal.background.num_computed > computed
    state.reset_prefix_cache()
    (again,) = outputs(server, [moved], [{"spans": places} | REPORT])
    assert report(again)["reused_tokens"] == 100 and report(again)["missed_chunks"] == 2


def test_a_scheduler_that_was_not_told_that_blending_is_off_learns_it(server: Engine) -> None:
    """By the first request whose chunks were to be kept, which has none that is reused."""
    prompt, spans = prompt_of(server, [41, 42, 43])
    server.model.blending.guard.is_open = False
    (first,) = outputs(server, [prompt], [{"spans": spans} | REPORT])
    (second,) = outputs(server, [prompt], [{"spans": spans} | REPORT])
    assert report(first)["missed_chunks"] == 3
    assert report(second)["why_not"] == OFF


def test_what_fails_in_a_probe_does_not_switch_blending_off(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody would be told: the scheduler hears of an engine's steps alone."""
    stock = probe.probe

    def failing(worker: Any, blending: Any) -> str | None:
        verdict = stock(worker, blending)
        for _ in range(MAX_FAILURES):
            blending.guard.caught(RuntimeError("no memory"))
        assert not blending.guard.is_open
        return verdict

    with monkeypatch.context() as patch:
        patch.setattr(probe, "probe", failing)
        with blending_engine(tiny("qwen3")) as engine:
            prompt, spans = prompt_of(engine, [1, 2, 3])
            outputs(engine, [prompt], [{"spans": spans}])
            scheduler(engine).reset_prefix_cache()
            (found,) = outputs(engine, [prompt], [{"spans": spans} | REPORT])
    assert report(found)["reused_tokens"] == 300
    assert "no memory" in caplog.text


def test_a_script_gets_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard()
    with pytest.raises(ValueError, match="wrong"):
        guard.caught(ValueError("wrong"))
    assert guard.is_open
