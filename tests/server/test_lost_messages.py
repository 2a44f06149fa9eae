"""What fails outside of a blend step: messages between scheduler and model, and the scheduler's part.

Then both forget all chunks, every request is answered, and the next ones blend again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from asking import REPORT, answer, drain, outputs, prompt_of, report, scheduler
from engines import Engine, make_engine

from vllm_blend.core.stage_clock import StageClock
from vllm_blend.core.step import MAX_FAILURES
from vllm_blend.server.chunks.chunk_registry import ChunkRegistry
from vllm_blend.server.scheduler.lookup import Lookup
from vllm_blend.server.scheduler.request_plans import RequestPlans
from vllm_blend.server.scheduler.request_reports import Reports
from vllm_blend.server.scheduler.tier_fetches import Fetches
from vllm_blend.server.scheduler.tier_waits import TierWaits
from vllm_blend.server.worker.chunk_cache import ChunkCache
from vllm_blend.server.worker.tier_io import TierIO

WORKER = {
    "commands": (ChunkCache, "apply"),
    "a drop": (ChunkCache, "drop"),
    "a fetch": (TierIO, "fetch"),
    "events": (ChunkCache, "collect_events"),
    "what is written": (TierIO, "settled"),
    "what came": (TierIO, "fetched"),
    "counters": (TierIO, "stats"),
}
SCHEDULER = {
    "what is kept": (ChunkRegistry, "commit"),
    "what is blended": (Reports, "blended"),
    "what is fetched": (Fetches, "answer"),
    "the wait": (TierWaits, "advance"),
    "the look": (Lookup, "__call__"),
    "the plan": (RequestPlans, "give"),
    "the pins": (ChunkRegistry, "pin"),
}
STAGES = WORKER | SCHEDULER


@pytest.fixture(scope="module")
def server(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = str(tmp_path_factory.mktemp("chunks"))
    store = {"host_gb": 0.2, "disk": {"folder": folder, "budget_gb": 1, "fsync": False}}
    settings = {"vllm_blend": {"store": store, "stand_in": ""}}
    with make_engine(tiny("llama"), enable_prefix_caching=True, additional_config=settings) as engine:
        drain(engine)
        yield engine


@pytest.fixture(autouse=True)
def mended(server: Engine) -> Iterator[None]:
    yield
    server.model.blending.guard.switch(True)
    scheduler(server).switch_blending(True)


def ask(engine: Engine, prompt: list[int], spans: Any) -> tuple[list[int], dict[str, Any]]:
    """A request that recomputes all, so that it is full prefill's answer, blended or not."""
    scheduler(engine).reset_prefix_cache()
    (found,) = outputs(engine, [prompt], [{"spans": spans, "recomp_ratio": 1.0} | REPORT])
    return answer(found), report(found)


def know_the_same(engine: Engine) -> bool:
    """Whether scheduler and model have the same chunks, and nothing is held."""
    state = scheduler(engine)
    known = {key for key, _ in state.blend_chunks.all()}
    drain(engine)
    assert not len(state.blend_plans) and not len(state.blend_reports)
    assert state.blend_chunks.num_pinned == 0 and not list(state.blend_chunks.all_coming())
    return set(engine.model.blending.chunks._chunks) == known


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_lost_is_known_again(
    server: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stage: str
) -> None:
    seed = 10 * list(STAGES).index(stage)
    prompt, spans = prompt_of(server, [seed + 1, seed + 2, seed + 3])
    new, places = prompt_of(server, [seed + 4, seed + 5])
    full, full_new = (answer(one) for one in outputs(server, [prompt, new], [None, None]))
    ask(server, prompt, spans)
    drain(server)
    assert ask(server, prompt, spans)[1]["reused_tokens"] == 300
    owner, name = STAGES[stage]
    stock, calls = getattr(owner, name), 0

    def fails(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise MemoryError("none left")
        return stock(*args, **kwargs)

    scheduler(server).blend_chunks.refuse(b"a chunk that is not there")  # a command to drop it
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(owner, name, fails)
        if stage == "counters":
            server.model.blending.chunks.tiers._told_at = 0.0
        assert ask(server, prompt, spans)[0] == full
        assert ask(server, new, places)[0] == full_new
        drain(server)
    assert calls and "none left" in str([record.exc_info for record in caplog.records])
    assert know_the_same(server)
    for asked, where, expected in ((prompt, spans, full), (new, places, full_new)):
        assert ask(server, asked, where)[0] == expected
        drain(server)
        found, told = ask(server, asked, where)
        assert found == expected and not told["why_not"]
        assert told["reused_tokens"] == 100 * len(where)
    assert know_the_same(server)


def test_times_that_cannot_be_read_are_left_out(
    server: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, spans = prompt_of(server, [901, 902])
    ask(server, prompt, spans)
    drain(server)

    def fails(clock: StageClock) -> Any:
        raise RuntimeError("no event")

    with monkeypatch.context() as patch:
        patch.setattr(StageClock, "seconds", fails)
        told = ask(server, prompt, spans)[1]
    assert told["reused_tokens"] == 200 and "select_seconds" not in told
    assert "select_seconds" in ask(server, prompt, spans)[1]


@pytest.mark.parametrize("stage", ["events", "the look"])
def test_after_several_failures_blending_is_off(
    server: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stage: str
) -> None:
    prompt, spans = prompt_of(server, [911, 912])
    full = answer(*outputs(server, [prompt], [None]))
    owner, name = STAGES[stage]
    calls = 0

    def fails(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        raise ZeroDivisionError("again")

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(owner, name, fails)
        for _ in range(MAX_FAILURES + 2):
            assert ask(server, prompt, spans)[0] == full
    said = [record.getMessage() for record in caplog.records]
    assert sum("blending is off until" in text and "again" in text for text in said) == 1
    assert "is off" in ask(server, prompt, spans)[1]["why_not"]
    server.model.blending.guard.switch(True)
    scheduler(server).switch_blending(True)
    for _ in range(2):
        found, told = ask(server, prompt, spans)
        drain(server)
        assert found == full
    assert told["reused_tokens"] == 200
    assert know_the_same(server)
