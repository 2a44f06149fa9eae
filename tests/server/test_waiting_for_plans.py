"""Requests that wait for their plan: they get it where vLLM's scheduler comes to them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from asking import REPORT, answer, cutting_engine, drain, outputs, prompt_of, report, scheduler
from engines import Engine, make_engine
from vllm import SamplingParams

from vllm_blend.server.scheduler.request_reports import OFF
from vllm_blend.server.scheduler.scheduler import ASKED_AHEAD

STEP = 400
"""Tokens that a step computes: one prompt of three chunks, not two."""


@pytest.fixture(scope="module")
def server(tiny: Any) -> Iterator[Engine]:
    settings = {"ram_gb": 0.05, "stand_in": "", "background_share": 0}
    with cutting_engine(tiny("llama"), STEP, **settings) as engine:
        yield engine


def add(engine: Engine, name: str, prompt: list[int], spans: list[list[int]], **more: Any) -> None:
    extra: dict[str, Any] = {"blend": {"spans": spans} | REPORT | more}
    params = SamplingParams(temperature=0, max_tokens=2, detokenize=False, extra_args=extra)
    engine.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)


def finished(engine: Engine) -> list[Any]:
    core, done = engine.llm.llm_engine, []
    while core.has_unfinished_requests():
        done += [output for output in core.step() if output.finished]
    return sorted(done, key=lambda output: output.request_id)


def test_nothing_is_looked_up_as_requests_come(server: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's engine takes all of a burst before its first step."""
    state, looked_up = scheduler(server), []
    stock = state.blend_lookup

    def lookup(*args: Any) -> Any:
        looked_up.append(args)
        return stock(*args)

    monkeypatch.setattr(state, "blend_lookup", lookup)
    prompts = [prompt_of(server, [first, first + 1, first + 2]) for first in (11, 21, 31)]
    for index, (prompt, spans) in enumerate(prompts):
        add(server, f"{index}", prompt, spans)
    assert len(state.blend_waiting) == 3 and not looked_up
    server.llm.llm_engine.step()
    assert len(looked_up) == 2 and len(state.blend_waiting) == 1  # the second had no room
    finished(server)
    assert len(looked_up) == 3 and not state.blend_waiting


def test_of_a_burst_those_that_wait_reuse_what_the_first_computes(server: Engine) -> None:
    orders = [[1, 2, 3], [3, 1, 2], [2, 3, 1], [3, 2, 1]]
    prompts = [prompt_of(server, order) for order in orders]
    (full,) = outputs(server, [prompts[-1][0]], [None], max_tokens=2)
    scheduler(server).reset_prefix_cache()
    for index, (prompt, spans) in enumerate(prompts):
        add(server, f"{index}", prompt, spans, recomp_ratio=1.0)
    first, *_, last = finished(server)
    assert (report(first)["reused_tokens"], report(first)["missed_chunks"]) == (0, 3)
    assert (report(last)["reused_tokens"], report(last)["missed_chunks"]) == (300, 0)
    assert answer(last) == answer(full)


def test_requests_that_wait_as_blending_goes_off_are_prefilled(server: Engine) -> None:
    state = scheduler(server)
    prompt, spans = prompt_of(server, [1, 2, 3])
    outputs(server, [prompt], [{"spans": spans}])
    (full,) = outputs(server, [prompt], [None], max_tokens=2)
    state.reset_prefix_cache()
    add(server, "waits", prompt, spans)
    try:
        state.switch_blending(False)
        assert not state.blend_waiting
        (found,) = finished(server)
    finally:
        state.switch_blending(True)
    assert (report(found)["reused_tokens"], report(found)["why_not"]) == (0, OFF)
    assert answer(found) == answer(full)


def test_an_aborted_one_waits_no_longer(server: Engine) -> None:
    prompt, spans = prompt_of(server, [1, 2, 3])
    add(server, "gone", prompt, spans)
    server.llm.llm_engine.abort_request(["gone"])
    assert not scheduler(server).blend_waiting
    assert not finished(server)


def test_one_that_cannot_be_planned_is_prefilled(
    server: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = scheduler(server)
    prompt, spans = prompt_of(server, [1, 2, 3])
    (full,) = outputs(server, [prompt], [None], max_tokens=2)

    def lookup(*_: Any) -> Any:
        raise RuntimeError("no lookup")

    with monkeypatch.context() as patch:
        patch.setattr(state, "blend_lookup", lookup)
        add(server, "fails", prompt, spans)
        (found,) = finished(server)
    assert not state.blend_waiting
    assert report(found)["reused_tokens"] == 0 and answer(found) == answer(full)
    state.switch_blending(True)  # none of these failures counts for later tests


def test_the_store_is_asked_for_a_few_a_step(tiny: Any, tmp_path: Path) -> None:
    """The chunks of a burst are asked for while its first requests run, without holding them up."""
    disk = {"folder": str(tmp_path), "budget_gb": 0.1, "fsync": False}
    config = {"vllm_blend": {"store": {"host_gb": 0.02, "disk": disk}, "background_share": 0}}
    many = ASKED_AHEAD + 4
    with make_engine(tiny("llama"), max_num_seqs=4, additional_config=config) as engine:
        drain(engine)
        state = scheduler(engine)
        for index in range(many):
            prompt, spans = prompt_of(engine, [100 + index])
            add(engine, f"{index:02}", prompt, spans)
        assert len(state._newcomers) == many and not len(state.blend_fetches)
        state.schedule()
        assert len(state._newcomers) == many - ASKED_AHEAD and len(state.blend_fetches) >= ASKED_AHEAD
        assert len(finished(engine)) == many and not state.blend_waiting
