"""Ratio "auto": the engine is measured, and what is loaded is decided by where it lies."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from asking import REPORT, answer, drain, outputs, prompt_of, report, scheduler
from engines import Engine, make_engine

from vllm_blend.core.plans import CollectPlan, KeyedPlan
from vllm_blend.core.settings import BlendSettings
from vllm_blend.server.config import ServerSettings
from vllm_blend.server.internal.calibration import KEY, TRIES, Calibration
from vllm_blend.server.request import BlendRequest
from vllm_blend.server.scheduler import tier_fetches, waiting
from vllm_blend.store.compute_time import RATIOS, ComputeTime, EngineTimes
from vllm_blend.store.disk import DiskTier
from vllm_blend.store.file_source import FileSource

SLOW = EngineTimes(ComputeTime(0, 0, 1e-3, 0), ComputeTime(0, 0, 1e-3, 0))
"""An engine that computes a thousand tokens a second."""


@contextmanager
def server(tiny: Any, folder: Path, **config: Any) -> Iterator[Engine]:
    store = {"host_gb": 0.02, "disk": {"folder": str(folder), "budget_gb": 1, "fsync": False}}
    values = {"store": store, "recomp_ratio": "auto", "harvest": False} | config
    with (
        pytest.MonkeyPatch.context() as patch,
        make_engine(
            tiny("llama"), enable_prefix_caching=True, additional_config={"vllm_blend": values}
        ) as engine,
    ):
        patch.setattr(tier_fetches, "MIN_WAIT_S", 5.0)
        patch.setattr(waiting, "LOCATE_S", 5.0)
        yield engine


@pytest.fixture(scope="module")
def started(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with server(tiny, tmp_path_factory.mktemp("chunks"), quality_floor=0.2) as engine:
        drain(engine)
        yield engine


def forget(engine: Engine) -> None:
    """Leaves chunks in the lower tiers alone."""
    drain(engine)
    state, tiers = scheduler(engine), engine.model.blending.chunks.tiers
    assert tiers.store.flush()
    names = list(tiers._names.values())
    for key in list(state.blend_chunks._chunks):
        state.blend_chunks.evict(key)
    state.reset_prefix_cache()
    outputs(engine, [engine.ids(20, 7)], [None])  # a step takes the orders along
    for name in names:
        tiers.store.discard(name)


def throttle(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Each read from disk takes so long."""
    stock = FileSource.read

    def read(self: FileSource, offset: int, into: memoryview) -> int:
        time.sleep(seconds)
        return stock(self, offset, into)

    patch.setattr(FileSource, "read", read)


@contextmanager
def reads_held() -> Iterator[list[int]]:
    """No read from disk ends before the context does; the list gets an entry for each that does."""
    stock, released, ended = FileSource.read, threading.Event(), list[int]()

    def read(self: FileSource, offset: int, into: memoryview) -> int:
        released.wait(60)
        ended.append(offset)
        return stock(self, offset, into)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSource, "read", read)
        try:
            yield ended
        finally:
            released.set()


def ask(
    engine: Engine, seeds: list[int], **field: Any
) -> tuple[list[int], dict[str, Any], list[list[int]]]:
    scheduler(engine).reset_prefix_cache()
    prompt, spans = prompt_of(engine, seeds)
    (output,) = outputs(engine, [prompt], [REPORT | {"spans": spans} | field])
    return answer(output), report(output), spans


def test_the_engine_is_measured_once(started: Engine) -> None:
    state = scheduler(started)
    pace = state.blend_internal.calibration
    assert pace.done
    measured = pace.measurement
    assert measured.seconds.keys() == {(n, r) for n in measured.sizes for r in (None, *RATIOS)}
    assert all(seconds > 0 for seconds in measured.seconds.values())
    size, seconds = pace.longest
    assert size == max(measured.sizes)
    assert state.blend_fetches._token_seconds == pytest.approx(seconds / size, rel=1)
    assert "are recomputed" in str(pace)
    outputs(started, [started.ids(20, 3)], [None])
    assert KEY not in started.model.blending.chunks._chunks
    assert pace.start() == []


def test_chunks_on_a_fast_tier_are_loaded_at_the_floor(started: Engine) -> None:
    state = scheduler(started)
    state.blend_internal.calibration.measurement.times = SLOW
    first, told, _ = ask(started, [1, 2, 3])
    assert (told["reused_tokens"], told["why_not"]) == (0, "no chunk is known yet")
    drain(started)
    known, told, _ = ask(started, [1, 2, 3])
    assert told["decision"]["tiers"] == ["host"] * 3
    assert told["recomputed_tokens"] == 60  # the floor
    forget(started)
    again, told, _ = ask(started, [1, 2, 3])
    assert again == known
    assert (told["loaded_chunks"], told["missed_chunks"]) == (3, 0)
    decision = told["decision"]
    assert decision["tiers"] == ["disk"] * 3
    assert decision["load"] == [True] * 3
    assert decision["ratio"] == 0.2
    assert decision["slow_chunks"] == {}
    assert "ratio 0.20 is the quality floor" in decision["reason"]
    # a client's own ratio is what it gets
    _, told, _ = ask(started, [1, 2, 3], recomp_ratio=0.5)
    assert (told["recomputed_tokens"], told["decision"]) == (150, None)


def test_rows_that_hide_behind_a_load_where_they_are_known(
    started: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefill begins beside the loads, but where it asks a question before it chooses rows."""
    scheduler(started).blend_internal.calibration.measurement.times = SLOW
    ask(started, [4, 6, 7])
    loads = {"disk": (0.04, 0.0)}  # seconds a chunk
    tiers = started.model.blending.chunks.tiers
    monkeypatch.setattr(tiers, "loads", lambda: loads)
    found = {}
    for policy in ("static", "ahead*static"):
        forget(started)
        _, told, _ = ask(started, [4, 6, 7], policy=policy)
        assert (told["reused_tokens"], told["loaded_chunks"]) == (300, 3)
        found[policy] = decision = told["decision"]
        assert decision["load_s"] == pytest.approx(0.12)
        assert told["recomputed_tokens"] == int(decision["ratio"] * 300)
    beside, after = found["static"], found["ahead*static"]
    assert beside["ratio"] > after["ratio"] == 0.2
    assert beside["ttft_s"] < beside["load_s"] + beside["compute_s"]
    assert after["ttft_s"] == pytest.approx(after["load_s"] + after["compute_s"])


@contextmanager
def _logger_caplog(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """vLLM's loggers do not propagate to pytest's."""
    import logging

    logger = logging.getLogger("vllm.vllm_blend.server")
    logger.addHandler(caplog.handler)
    try:
        yield
    finally:
        logger.removeHandler(caplog.handler)


def test_full_prefill_where_blending_is_slower(started: Engine) -> None:
    state = scheduler(started)
    ask(started, [5, 6])
    drain(started)
    times = EngineTimes(ComputeTime(10, 0, 1e-3, 0), SLOW.full)
    state.blend_internal.calibration.measurement.times = times
    _, told, _ = ask(started, [5, 6])
    assert told["reused_tokens"] == 0
    assert told["why_not"].startswith("full prefill takes")
    state.blend_internal.calibration.measurement.times = SLOW
    assert ask(started, [5, 6])[1]["reused_tokens"] == 200


def test_an_answer_that_does_not_come_is_not_waited_for(
    started: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler(started).blend_internal.calibration.measurement.times = SLOW
    monkeypatch.setattr(waiting, "LOCATE_S", 0.3)
    stock = DiskTier.contains
    ask(started, [8])
    forget(started)
    monkeypatch.setattr(DiskTier, "contains", lambda *args: time.sleep(1) or stock(*args))
    _, told, _ = ask(started, [8])
    assert told["decision"]["tiers"] == [None]
    assert told["why_not"] == "no chunk is known yet"
    drain(started)


def test_chunks_of_other_requests_prefills_are_loaded_too(tiny: Any, tmp_path: Path) -> None:
    with server(tiny, tmp_path, harvest=True) as engine:
        drain(engine)
        scheduler(engine).blend_internal.calibration.measurement.times = SLOW
        assert ask(engine, [1, 2, 3])[1]["reused_tokens"] == 0
        forget(engine)
        _, told, _ = ask(engine, [1, 2, 3])
        assert (told["reused_tokens"], told["loaded_chunks"], told["harvested_chunks"]) == (300, 3, 3)


def test_chunks_on_a_slow_tier_are_computed(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once it is known that it is slow; they are fetched behind, so that it is known when it is not."""
    with server(tiny, tmp_path) as engine:
        drain(engine)
        state = scheduler(engine)
        state.blend_internal.calibration.measurement.times = SLOW  # 300 tokens: 0.3 s
        ask(engine, [1, 2, 3])
        drain(engine)
        known, _, _ = ask(engine, [1, 2, 3])
        forget(engine)
        with pytest.MonkeyPatch.context() as slow:
            throttle(slow, 0.3)
            found, told, _ = ask(engine, [1, 2, 3])
            assert told["loaded_chunks"] == 3  # it was not known
            assert found == known
            waited = told["wait_seconds"]
            assert waited >= 0.3
            forget(engine)
            with reads_held() as ended:
                _, told, _ = ask(engine, [1, 2, 3])
                assert not ended  # nobody waited for a read
            assert told["wait_seconds"] < waited
            assert told["reused_tokens"] == 0
            assert told["decision"]["load"] == [False] * 3
            assert told["decision"]["slow_chunks"] == {"disk": 3}
            assert told["why_not"] == told["decision"]["reason"]
            assert "no load is faster" in told["why_not"]
            drain(engine)  # they come behind
            found, told, _ = ask(engine, [1, 2, 3])
            assert (told["reused_tokens"], told["loaded_chunks"]) == (300, 0)
            assert found == known
            # one is in memory, two are slow: it alone is reused
            tiers = engine.model.blending.chunks.tiers
            forget(engine)
            ask(engine, [3])
            drain(engine)
            caplog.set_level("INFO", logger="vllm.vllm_blend.server")
            engine_log = _logger_caplog(caplog)
            with engine_log:
                _, told, _ = ask(engine, [1, 2, 3])
            assert told["decision"]["tiers"] == ["disk", "disk", "host"]
            assert told["decision"]["load"] == [False, False, True]
            assert told["reused_tokens"] == 100
            assert "2 chunks are faster computed than loaded" in caplog.text
            forget(engine)
        for _ in range(60):
            _, told, _ = ask(engine, [1, 2, 3])
            if told["decision"]["load"] == [True] * 3:
                break
            forget(engine)
        assert told["reused_tokens"] == 300, "a tier that is fast again is used again"
        assert tiers.store.stats()["hits.disk"] > 0
        assert state.blend_internal.background.num_computed == 3  # each once


def test_a_server_without_auto_is_not_measured_until_it_is_asked(tiny: Any, tmp_path: Path) -> None:
    with server(tiny, tmp_path, recomp_ratio=0.3) as engine:
        drain(engine)
        state = scheduler(engine)
        assert not state.blend_internal.calibration.done
        _, told, _ = ask(engine, [1, 2])
        assert told["decision"] is None
        drain(engine)
        assert not state.blend_internal.calibration.done
        assert ask(engine, [1, 2], recomp_ratio="auto")[1]["decision"]["tiers"] == ["host"] * 2
        assert state.blend_internal.calibration.done


def test_a_measurement_that_does_not_end_is_not_waited_for(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "CALIBRATION_S", 0.3)
    monkeypatch.setattr(Calibration, "start", lambda self: [])  # no room for its request
    with server(tiny, tmp_path, recomp_ratio=0.3, quality_floor=0.2) as engine:
        drain(engine)
        ask(engine, [1, 2])
        drain(engine)
        _, told, _ = ask(engine, [1, 2], recomp_ratio="auto")
        assert told["decision"] is None
        assert (told["reused_tokens"], told["recomputed_tokens"]) == (200, 40)


def pace(seen: list[Any]) -> Calibration:
    def make(request_id: str, token_ids: list[int], plan: Any) -> str:
        seen.append((len(token_ids), plan))
        return request_id

    found = Calibration(1000, 4, 400, 2, BlendSettings(), 0.15, make)
    found.wanted = True
    return found


def test_runs_beside_others_are_repeated() -> None:
    seen: list[Any] = []
    one = pace(seen)
    (request_id,) = one.start()
    assert isinstance(seen[0][1], CollectPlan)
    assert one.is_mine(request_id) and one.start() == []
    one.step_took([request_id], 1.0)
    one.finish(True)
    number = 0
    while not one.done:
        (request_id,) = one.start()
        number += 1
        size, plan = seen[-1]
        ratio = plan.settings.recomp_ratio if isinstance(plan, KeyedPlan) else 1.0
        assert plan is None or plan.spans[0].end == size - 8
        others = number % 3 == 0
        one.step_took(
            [request_id, "other"] if others else [request_id], 9e9 if others else size * ratio
        )
        one.step_took(["other"], 5.0)  # not its own
        if number % 5 == 0 and not others:
            one._clean = True
        one.finish(number % 7 > 0)  # an aborted one is run again
    assert number < 3 * TRIES * (1 + len(RATIOS)) * 3 * 3
    assert one.start() == []


def test_what_is_measured_is_what_is_fitted() -> None:
    seen: list[Any] = []
    one = pace(seen)
    while not one.done:
        (request_id,) = one.start()
        size, plan = seen[-1]
        rows = size
        if isinstance(plan, KeyedPlan):
            reused = plan.spans[0].end - plan.spans[0].start
            rows = size - reused + plan.settings.recomp_ratio * reused
        one.step_took([request_id], 1e-3 * rows + 1e-4 * size)
        one.finish(True)
    assert len(seen) == 1 + 3 * 3 * 3  # KV once; three lengths, three ratios, three runs
    times = one.measurement.times
    assert times is not None
    assert times.blended.seconds(300, 50) == pytest.approx(0.08)
    assert times.full.seconds(300, 300) == pytest.approx(0.33)


@pytest.mark.parametrize(
    "values, says",
    [
        ({"recomp_ratio": "auto"}, "the server has no store"),
        ({"recomp_ratio": "aut", "store": {"host_gb": 1}}, "recomp_ratio is 'aut'"),
        (
            {"recomp_ratio": "auto", "recomp_ratios": [0.2], "store": {"host_gb": 1}},
            "recomp_ratios is set",
        ),
        ({"quality_floor": 2}, "quality_floor is 2; allowed: 0 to 1"),
        ({"paced": True}, "unknown key 'paced'"),
    ],
)
def test_bad_settings(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ServerSettings.from_mapping(values)


def test_the_request_field() -> None:
    defaults = BlendRequest(paced=True, floor=0.25, settings=BlendSettings(recomp_ratio=0.25))
    assert BlendRequest.parse({}, defaults).paced
    assert BlendRequest.parse("auto", defaults).paced
    fixed = BlendRequest.parse({"recomp_ratio": 0.4}, defaults)
    assert (fixed.paced, fixed.settings.recomp_ratio) == (False, 0.4)
    assert not BlendRequest.parse({"recomp_ratios": [0.4]}, defaults).paced
    auto = BlendRequest.parse({"recomp_ratio": "auto"}, BlendRequest(floor=0.1))
    assert (auto.paced, auto.settings.recomp_ratio) == (True, 0.1)
    assert BlendRequest.from_wire(auto.to_wire()) == auto
    with pytest.raises(ValueError, match="recomp_ratio is 'some'"):
        BlendRequest.parse({"recomp_ratio": "some"}, defaults)


def test_a_request_for_auto_needs_a_store(tiny: Any) -> None:
    with (
        make_engine(tiny("llama"), additional_config={"vllm_blend": {}}) as engine,
        pytest.raises(Exception, match="the server has no store to load from"),
    ):
        ask(engine, [1], recomp_ratio="auto")
