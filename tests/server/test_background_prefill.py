"""Missed chunks in the background: computed, then scored behind something else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_blend.core.kv import KVShape, StoredKV
from vllm_blend.core.plans import ChunkIds, CollectPlan
from vllm_blend.core.static_scores import movement
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


Layers = list[tuple[torch.Tensor, torch.Tensor]]


def compute(chunks: ChunkCache, plan: CollectPlan, layers: Layers) -> None:
    """What the model does with a chunk's request, in one step."""
    chunks.collect(plan, KVShape(len(layers), 2, 8, torch.float32), torch.device("cpu"))
    if plan.into is not None:
        for index, (k, v) in enumerate(layers):
            plan.write(index, plan.start, k, v)
    plan.advance(0, plan.num_prompt_tokens)
    chunks.keep(plan, chunks.distances(plan))


def random_layers() -> Layers:
    return [(torch.randn(4, 2, 8), torch.randn(4, 2, 8)) for _ in range(3)]


def test_the_models_process_keeps_scores_with_the_kv() -> None:
    torch.manual_seed(0)
    chunks, key = ChunkCache(), chunk_key(CHUNK)
    one, other = random_layers(), random_layers()
    compute(chunks, CollectPlan(2, num_prompt_tokens=6, key=key, chunk=CHUNK), one)
    (before,) = chunks._chunks.values()
    assert before.scores is None
    again = CollectPlan(1, num_prompt_tokens=5, key=key, chunk=CHUNK, scored=True)
    compute(chunks, again, other)
    (after,) = chunks._chunks.values()
    assert after.layers is before.layers
    assert after.scores is not None
    expected = movement(StoredKV(tuple(one)), StoredKV(tuple(other)))
    assert torch.allclose(after.scores, expected, rtol=1e-6)
    assert again.into is None


def test_a_score_for_kv_that_is_gone_is_forgotten() -> None:
    chunks = ChunkCache()
    plan = CollectPlan(0, num_prompt_tokens=4, key=b"gone", chunk=CHUNK, scored=True)
    compute(chunks, plan, random_layers())
    assert len(chunks) == 0


def test_a_chunk_with_a_gap_is_not_kept() -> None:
    """A step in which it was computed had failed."""
    chunks = ChunkCache()
    plan = CollectPlan(0, num_prompt_tokens=4, key=chunk_key(CHUNK), chunk=CHUNK)
    chunks.collect(plan, KVShape(3, 2, 8, torch.float32), torch.device("cpu"))
    plan.advance(0, 2)
    plan.advance(3, 4)
    chunks.keep(plan)
    assert len(chunks) == 0
    compute(chunks, plan, random_layers())  # after a preemption
    assert len(chunks) == 1


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
