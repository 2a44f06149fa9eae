"""Missed chunks in the background: computed, then scored behind something else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_blend.core.kv import StoredKV
from vllm_blend.core.plans import ChunkIds, CollectPlan
from vllm_blend.core.static_scores import movement
from vllm_blend.core.step import BlendStep, StepRequest
from vllm_blend.server.chunks.chunk_registry import ChunkRegistry, chunk_key
from vllm_blend.server.internal.background_prefill import BackgroundPrefill
from vllm_blend.server.worker.chunk_cache import ChunkCache

HEAD, BEFORE = (1, 2), (1, 2, 7, 7, 7)
CHUNK = ChunkIds("", tuple(range(10, 50)), BEFORE)
FIRST = ChunkIds("", tuple(range(60, 90)), HEAD)


@pytest.fixture
def known() -> ChunkRegistry:
    return ChunkRegistry(100)


@pytest.fixture
def background(known: ChunkRegistry) -> BackgroundPrefill:
    return BackgroundPrefill(
        known,
        max_tokens=500,
        share=0.5,
        make_request=lambda name, ids, plan: SimpleNamespace(request_id=name, ids=ids, plan=plan),
        scoring=lambda chunk: HEAD if chunk.context == BEFORE else None,
    )


def start(background: BackgroundPrefill) -> Any:
    (request,) = background.start(idle=True)
    return request


def test_a_computed_chunk_is_scored_behind_the_other_context(background: BackgroundPrefill) -> None:
    background.add(CHUNK)
    computed = start(background)
    assert not computed.plan.scored
    assert computed.ids == [*BEFORE, *CHUNK.token_ids]
    background.finish(computed.request_id, completed=True)
    assert background.num_waiting == 1
    scored = start(background)
    assert scored.plan.scored and scored.plan.key == computed.plan.key
    assert (scored.plan.start, scored.ids) == (len(HEAD), [*HEAD, *CHUNK.token_ids])
    background.finish(scored.request_id, completed=True)
    assert background.num_waiting == 0
    assert background.num_computed == 1
    assert background.start(idle=True) == []


def test_chunks_are_computed_before_others_are_scored(background: BackgroundPrefill) -> None:
    background.add(CHUNK)
    background.finish(start(background).request_id, completed=True)
    background.add(FIRST)
    assert start(background).plan.chunk == FIRST


def test_a_chunk_of_the_first_place_is_not_scored(background: BackgroundPrefill) -> None:
    background.add(FIRST)
    background.finish(start(background).request_id, completed=True)
    assert background.num_waiting == 0


def test_what_was_dropped_is_not_scored(background: BackgroundPrefill, known: ChunkRegistry) -> None:
    background.add(CHUNK)
    background.finish(start(background).request_id, completed=True)
    known.lose(chunk_key(CHUNK))
    assert background.start(idle=True) == []
    assert background.num_waiting == 0


def test_an_aborted_score_loses_nothing_else(
    background: BackgroundPrefill, known: ChunkRegistry
) -> None:
    background.add(CHUNK)
    background.finish(start(background).request_id, completed=True)
    background.finish(start(background).request_id, completed=False)
    assert chunk_key(CHUNK) in known


def test_a_busy_engine_pays_for_scores_too(background: BackgroundPrefill) -> None:
    background.add(CHUNK)
    background.finish(start(background).request_id, completed=True)
    assert background.start(idle=False) == []
    cost = len(HEAD) + len(CHUNK.token_ids)
    background.earn(2 * cost)
    assert background.credit == cost
    (request,) = background.start(idle=False)
    assert request.plan.scored
    assert background.credit == 0


def step_of(plan: CollectPlan) -> BlendStep:
    request = StepRequest(plan, 0, 0, plan.num_prompt_tokens, torch.device("cpu"))
    return BlendStep([request], [0, plan.num_prompt_tokens], "auto")


def test_the_models_process_keeps_scores_with_the_kv() -> None:
    torch.manual_seed(0)
    chunks, key = ChunkCache(), chunk_key(CHUNK)
    one, other = ([(torch.randn(4, 2, 8), torch.randn(4, 2, 8)) for _ in range(3)] for _ in range(2))
    chunks.keep(step_of(CollectPlan(2, num_prompt_tokens=6, kv=list(one), key=key, chunk=CHUNK)))
    (before,) = chunks._chunks.values()
    assert before.scores is None
    again = CollectPlan(1, num_prompt_tokens=5, kv=list(other), key=key, chunk=CHUNK, scored=True)
    chunks.keep(step_of(again))
    (after,) = chunks._chunks.values()
    assert after.layers is before.layers
    assert after.scores is not None
    expected = movement(StoredKV(tuple(one)), StoredKV(tuple(other)))
    assert torch.equal(after.scores, expected)
    assert again.kv == []


def test_a_score_for_kv_that_is_gone_is_forgotten() -> None:
    chunks = ChunkCache()
    kv = [(torch.randn(4, 2, 8), torch.randn(4, 2, 8))]
    plan = CollectPlan(0, num_prompt_tokens=4, kv=kv, key=b"gone", chunk=CHUNK, scored=True)
    chunks.keep(step_of(plan))
    assert len(chunks) == 0


def test_scores_are_shares_of_each_layers_mean_square() -> None:
    generator = torch.Generator().manual_seed(1)
    one, other = (
        StoredKV(
            tuple(
                (
                    torch.randn(5, 2, 4, generator=generator),
                    torch.randn(5, 2, 4, generator=generator) * 9,
                )
                for _ in range(2)
            )
        )
        for _ in range(2)
    )
    expected = [0.0] * 5
    for (k, v), (k2, v2) in zip(one.layers, other.layers, strict=True):
        for x, y in ((k, k2), (v, v2)):
            mean = sum(float(row.square().sum()) for row in y) / 5
            for i in range(5):
                expected[i] += float((x[i] - y[i]).square().sum()) / mean
    assert torch.allclose(movement(one, other), torch.tensor(expected), rtol=1e-5)


def test_chunks_that_only_aborted_requests_asked_for_are_not_computed(
    background: BackgroundPrefill,
) -> None:
    background.add(CHUNK, "one")
    background.add(CHUNK, "two")
    background.add(FIRST, "one")
    assert background.askers.left("one") == [chunk_key(FIRST)]
    background.remove(chunk_key(FIRST))
    assert background.num_waiting == 1
    background.askers.answered("two")
    background.add(CHUNK, "three")
    assert background.askers.left("three") == []  # the next request may want what "two" missed
    assert start(background).plan.chunk == CHUNK
    assert len(background.askers) == 0


def test_tenants_take_turns(background: BackgroundPrefill) -> None:
    for tenant in "aab":
        number = background.num_waiting
        background.add(ChunkIds(tenant, tuple(range(100 * number, 100 * number + 20)), HEAD))
    order = []
    while background.num_waiting:
        request = start(background)
        order.append(request.plan.chunk.tenant)
        background.finish(request.request_id, completed=True)
    assert order == ["a", "b", "a"]


def test_a_step_s_work_does_not_grow_with_the_backlog(known: ChunkRegistry) -> None:
    """Neither counting what was earned nor choosing the next chunk looks at all that wait."""
    looked: list[ChunkIds] = []

    def scoring(chunk: ChunkIds) -> None:
        looked.append(chunk)

    background = BackgroundPrefill(
        ChunkRegistry(10**6),
        500,
        0.5,
        lambda name, ids, plan: SimpleNamespace(request_id=name),
        scoring,
    )
    for number in range(1000):
        background.add(ChunkIds("", tuple(range(number, number + 20)), HEAD))
    for _ in range(5):
        background.earn(100)
        (request,) = background.start(idle=True)
        background.finish(request.request_id, completed=True)
    assert len(looked) == 5


def test_dropped_chunks_are_counted(background: BackgroundPrefill) -> None:
    background.add(ChunkIds("", tuple(range(600)), HEAD), "one")
    assert (background.num_dropped, background.num_waiting, len(background.askers)) == (1, 0, 0)
