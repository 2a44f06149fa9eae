"""Tenants in one engine: whose chunks are computed, found and kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from asking import REPORT, answer, come_to_waiting, drain, outputs, prompt_of, report, scheduler
from engines import Engine, make_engine
from vllm import SamplingParams

from vllm_blend.server.config import CLIENT_FIELDS


@pytest.fixture(scope="module")
def server(tiny: Any) -> Iterator[Engine]:
    values = {"ram_gb": 0.05, "stand_in": "", "harvest": False, "report_sizes": True}
    settings = {"vllm_blend": values | {"client_fields": list(CLIENT_FIELDS)}}
    with make_engine(tiny("llama"), enable_prefix_caching=True, additional_config=settings) as engine:
        drain(engine)
        yield engine


def many_spans(engine: Engine, size: int, seed: int) -> tuple[list[int], list[list[int]]]:
    prompt = engine.ids(1500, seed)
    return prompt, [[at, at + size] for at in range(5, 1400, size)]


def test_short_spans_are_computed_afresh(server: Engine) -> None:
    prompt, spans = many_spans(server, 2, 1)
    full = answer(*outputs(server, [prompt], [None]))
    for _ in range(2):
        scheduler(server).reset_prefix_cache()
        (found,) = outputs(server, [prompt], [{"spans": spans} | REPORT])
        told = report(found)
        assert answer(found) == full
        assert (told["short_chunks"], told["missed_chunks"]) == (len(spans), 0)
        assert told["reused_tokens"] == 0 and "min_chunk_tokens" in told["why_not"]
        assert told["waiting_chunks"] == 0
        drain(server)
    mixed = [[5, 9], [20, 120]]
    outputs(server, [prompt], [{"spans": mixed}])
    drain(server)
    scheduler(server).reset_prefix_cache()
    (found,) = outputs(server, [prompt], [{"spans": mixed, "recomp_ratio": 1.0} | REPORT])
    told = report(found)
    assert (told["short_chunks"], told["reused_tokens"], told["chunks"]) == (1, 100, 1)
    assert answer(found) == full


def test_a_tenant_s_flood_does_not_hold_up_the_others(server: Engine) -> None:
    """The other's chunks are known after as many computed ones as they are, twice."""
    background = scheduler(server).blend_internal.background
    for seed in range(2, 6):
        prompt, spans = many_spans(server, 16, seed)
        outputs(server, [prompt], [{"spans": spans, "tenant": "many"}], max_tokens=1)
    assert background.num_waiting > 300
    prompt, spans = prompt_of(server, [11, 12, 13])
    outputs(server, [prompt], [{"spans": spans, "tenant": "few"}], max_tokens=1)
    before = background.num_computed
    while background.num_computed < before + 7:
        server.llm.llm_engine.step()
    scheduler(server).reset_prefix_cache()
    (found,) = outputs(server, [prompt], [{"spans": spans, "tenant": "few"} | REPORT])
    assert report(found)["reused_tokens"] == 300
    assert report(found)["waiting_chunks"] > 300
    background.clear()
    drain(server)


def test_chunks_of_aborted_requests_are_not_computed(server: Engine) -> None:
    engine, background = server.llm.llm_engine, scheduler(server).blend_internal.background
    drain(server)
    prompt, spans = prompt_of(server, [21, 22, 23])
    other, places = prompt_of(server, [23, 24], head=9)
    computed = background.num_computed
    for name, ids, where in (("one", prompt, spans), ("two", other, places)):
        extra: dict[str, Any] = {"blend": {"spans": where}}
        params = SamplingParams(temperature=0, max_tokens=4, detokenize=False, extra_args=extra)
        engine.add_request(name, {"prompt_token_ids": ids}, params)
    come_to_waiting(server)
    assert background.num_waiting == 4
    engine.abort_request(["one"])
    assert background.num_waiting == 2
    while engine.has_unfinished_requests():
        engine.step()
    drain(server)
    assert background.num_computed == computed + 2
    assert len(background.askers) == 0
