"""Missed chunks in the background: computed, then scored behind something else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from background import complete

from vllm_blend.core.kv import KVShape, StoredKV
from vllm_blend.core.plans import ChunkIds, CollectPlan
from vllm_blend.core.static_scores import movement, scores_of
from vllm_blend.server.chunks.chunk_registry import ChunkRegistry, chunk_key
from vllm_blend.server.chunks.fair_queue import MIN_TOKENS
from vllm_blend.server.internal import background_prefill
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


def test_a_chunk_that_cannot_be_computed_any_more_is_dropped(known: ChunkRegistry) -> None:
    background = BackgroundPrefill(
        known, max_tokens=500, share=0.5, make_request=lambda name, ids, plan: None
    )
    background.add(CHUNK)
    assert background.start(idle=True) == []
    assert (background.num_dropped, len(background), known.num_tokens) == (1, 0, 0)


def test_a_computed_chunk_is_scored_behind_the_other_context(background: BackgroundPrefill) -> None:
    background.add(CHUNK)
    computed = start(background)
    assert not computed.plan.scored
    assert computed.ids == [*BEFORE, *CHUNK.token_ids]
    complete(background, computed.request_id)
    assert background.num_waiting == 1
    scored = start(background)
    assert scored.plan.scored and scored.plan.key == computed.plan.key
    assert (scored.plan.start, scored.ids) == (len(HEAD), [*HEAD, *CHUNK.token_ids])
    complete(background, scored.request_id)
    assert background.num_waiting == 0
    assert background.num_computed == 1
    assert background.start(idle=True) == []


def test_chunks_are_computed_before_others_are_scored(background: BackgroundPrefill) -> None:
    background.add(CHUNK)
    complete(background, start(background).request_id)
    background.add(FIRST)
    assert start(background).plan.chunk == FIRST


def test_a_chunk_of_the_first_place_is_not_scored(background: BackgroundPrefill) -> None:
    background.add(FIRST)
    complete(background, start(background).request_id)
    assert background.num_waiting == 0


def test_what_was_dropped_is_not_scored(background: BackgroundPrefill, known: ChunkRegistry) -> None:
    background.add(CHUNK)
    complete(background, start(background).request_id)
    known.lose(chunk_key(CHUNK))
    assert background.start(idle=True) == []
    assert background.num_waiting == 0


def test_an_aborted_score_loses_nothing_else(
    background: BackgroundPrefill, known: ChunkRegistry
) -> None:
    background.add(CHUNK)
    complete(background, start(background).request_id)
    background.finish(start(background).request_id)
    assert chunk_key(CHUNK) in known


def test_a_busy_engine_pays_for_scores_too(background: BackgroundPrefill) -> None:
    background.add(CHUNK)
    complete(background, start(background).request_id)
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
    parts = chunks.distances(plan)
    chunks.keep(plan, None if parts is None else scores_of(parts))


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
        complete(background, request.request_id)
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
        complete(background, request.request_id)
    assert len(looked) == 5


def test_dropped_chunks_are_counted(background: BackgroundPrefill) -> None:
    background.add(ChunkIds("", tuple(range(600)), HEAD), "one")
    assert (background.num_dropped, background.num_waiting, len(background.askers)) == (1, 0, 0)


def test_chunks_that_were_never_reused_are_scored_by_an_idle_engine_alone(
    background: BackgroundPrefill, known: ChunkRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that clients' prefills brought: traffic that never comes back must not pay for them."""
    monkeypatch.setattr(background_prefill, "REST_S", 0.0)
    monkeypatch.setattr(background_prefill, "GAP_S", 0.0)
    kept = [ChunkIds("", tuple(range(at, at + 40)), BEFORE) for at in (100, 200)]
    keys = []
    for chunk in kept:
        assert (key := known.reserve(chunk)) is not None
        known.commit(key)
        background.came(key, chunk)
        keys.append(key)
    background.earn(10_000)
    assert (background.credit, background.start(idle=False)) == (0, [])
    background.used(keys[1])
    background.earn(10_000)
    (scored,) = background.start(idle=False)
    assert scored.plan.key == keys[1] and scored.plan.scored
    background.finish(scored.request_id)
    background.earn(10_000)
    assert not background.start(idle=False)
    (rest,) = background.start(idle=True)
    assert rest.plan.key == keys[0]
    background.finish(rest.request_id)
    assert not background.num_waiting


def bring(background: BackgroundPrefill, known: ChunkRegistry, start: int) -> bytes:
    """A chunk that a client's prefill brought."""
    chunk = ChunkIds("", tuple(range(start, start + 40)), BEFORE)
    key = known.reserve(chunk)
    assert key is not None
    known.commit(key)
    background.came(key, chunk)
    return key


def test_what_waits_to_be_scored_is_in_memory(
    background: BackgroundPrefill, known: ChunkRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks that come and go, again and again, would fill the queues of an engine that is never idle;
    those that are in memory then would not be scored once it is."""
    monkeypatch.setattr(background_prefill, "REST_S", 0.0)
    queues = background._unscored, background._unused
    for number in range(10_000):  # two of 40 tokens have room
        key = bring(background, known, 100 + 100 * (number % 5))
        if number % 2:
            background.used(key)
        here = {chunk_key(chunk) for queue in queues for chunk in queue}
        assert here == set(known._chunks)
        assert sum(queue.num_tokens for queue in queues) == MIN_TOKENS * len(here)
    (request,) = background.start(idle=True)
    assert request.plan.key == key and request.plan.scored
    background.finish(request.request_id)
    known.clear()
    assert (background.num_waiting, background.start(idle=True)) == (0, [])


def test_a_chunk_that_is_dropped_while_it_is_scored_does_not_wait_again(
    background: BackgroundPrefill, known: ChunkRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_prefill, "REST_S", 0.0)
    key = bring(background, known, 100)
    (request,) = background.start(idle=True)
    known.evict(key)
    assert background.give_up() == [request.request_id]
    background.finish(request.request_id)
    assert background.num_waiting == 0


def test_between_two_requests_an_engine_is_not_idle(
    background: BackgroundPrefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk is not begun there, nor gone on with; what is paid for goes on."""
    now = 100.0
    monkeypatch.setattr(background, "clock", lambda: now)
    background.add(FIRST)
    assert not background.start(idle=False)
    now += 0.9 * background_prefill.GAP_S
    assert not background.start(idle=True)
    now += 0.2 * background_prefill.GAP_S
    (request,) = background.start(idle=True)
    name = request.request_id
    assert background.room(name, 100, 50, running=True) == 50
    background.start(idle=False)
    background.stalled = False
    assert background.room(name, 100, 50, running=True) == 0
    background.stalled = True  # the last step had nothing to compute
    background.start(idle=True)
    assert background.room(name, 100, 50, running=True) == 0
    now += 1.1 * background_prefill.GAP_S
    background.start(idle=True)
    assert background.room(name, 100, 50, running=True) == 50
    background.start(idle=False)
    background.stalled, background.credit = False, 100.0
    assert background.room(name, 100, 50, running=True) == 50
    background.start(idle=True)
    assert background.room(name, 100, 50, running=True) == 50


def test_an_engine_rests_before_it_does_what_nobody_asked_for(
    background: BackgroundPrefill, known: ChunkRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a client that asks one request after the other would wait for a step of it each time."""
    now = 100.0
    monkeypatch.setattr(background, "clock", lambda: now)
    key = bring(background, known, 100)
    for _ in range(3):
        assert not background.start(idle=False)
        now += 0.9 * background_prefill.REST_S
        assert not background.start(idle=True)
    background.add(FIRST)  # a client asked for this one
    (asked,) = background.start(idle=True)
    assert asked.plan.chunk == FIRST
    complete(background, asked.request_id)
    now += background_prefill.REST_S
    (request,) = background.start(idle=True)
    assert request.plan.key == key


def test_how_long_an_engine_has_nothing_to_begin_with(
    background: BackgroundPrefill, known: ChunkRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the end of the last step for requests on: a step may take longer than the gap after it."""
    now = 100.0
    monkeypatch.setattr(background, "clock", lambda: now)
    assert background.idles_for() == 0  # nothing waits
    bring(background, known, 100)
    background.start(idle=False)
    now += 1
    background.worked()
    rest_s, gap_s = background_prefill.REST_S, background_prefill.GAP_S
    assert background.idles_for() == pytest.approx(rest_s)
    now += 0.75 * rest_s
    assert background.idles_for() == pytest.approx(0.25 * rest_s) and not background.start(idle=True)
    background.add(FIRST)
    background.worked()
    assert background.idles_for() == pytest.approx(gap_s) and not background.start(idle=True)
    now += 1.01 * gap_s
    assert background.idles_for() == 0 and background.start(idle=True)


def test_it_rests_longer_each_time_that_requests_come_before_it_is_done(
    background: BackgroundPrefill, known: ChunkRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, begun = 100.0, 0
    monkeypatch.setattr(background, "clock", lambda: now)
    bring(background, known, 100)
    for _ in range(60):  # a request a second, which takes no time
        background.start(idle=False)
        now += 0.99
        requests = background.start(idle=True)
        begun += len(requests)
        now += 0.01
        for request_id in background.give_up():
            background.finish(request_id)
    assert begun == 2  # after 0.25 and 0.5 s; then it rests for a second
    now += background_prefill.LONGEST_REST_S
    (request,) = background.start(idle=True)
    complete(background, request.request_id)
    bring(background, known, 200)
    background.start(idle=False)
    now += 0.26
    assert background.start(idle=True)  # it was done in time, so it rests no longer


def test_what_nobody_asked_for_is_given_up_when_requests_come(
    background: BackgroundPrefill, known: ChunkRegistry
) -> None:
    keys = [bring(background, known, 100), bring(background, known, 200)]
    (request,) = background.start(idle=True)
    assert request.plan.key == keys[0]
    assert background.give_up() == [request.request_id]
    background.finish(request.request_id)
    assert not background.give_up() and background.num_waiting == 2
    background.earn(10_000)
    assert not background.start(idle=False)  # takes nothing of the share
    background.used(keys[0])
    background.earn(10_000)
    (request,) = background.start(idle=False)
    assert request.plan.key == keys[0]
    assert not background.give_up()
    background.finish(request.request_id)


def test_what_is_reused_while_it_is_scored_is_not_given_up(
    background: BackgroundPrefill, known: ChunkRegistry
) -> None:
    key = bring(background, known, 100)
    (request,) = background.start(idle=True)
    background.used(key)
    assert not background.give_up()
    background.earn(10_000)
    assert background.room(request.request_id, 40, 40, running=True) == 40
