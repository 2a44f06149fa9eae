"""The scheduler's list of chunks and the model's KV agree whatever happens, and what is used stays."""

from __future__ import annotations

import pytest
import torch
from background import complete
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vllm_blend.core.kv import KVShape
from vllm_blend.core.plans import ChunkIds, CollectPlan, KeyedPlan, KeyedSpan
from vllm_blend.server.chunks.chunk_registry import IDLE_S, ChunkRegistry, chunk_key
from vllm_blend.server.chunks.token_index import Windows
from vllm_blend.server.internal import background_prefill
from vllm_blend.server.internal.background_prefill import MIN_WINDOW, BackgroundPrefill
from vllm_blend.server.messages import WorkerCommands
from vllm_blend.server.worker.chunk_cache import ChunkCache

CAPACITY = 200
sizes = st.integers(16, 90)


def chunk_of(start: int, end: int, context: tuple[int, ...] = ()) -> ChunkIds:
    return ChunkIds("", tuple(range(start, end)), context)


class Chunks(RuleBasedStateMachine):
    """Requests come and go, chunks are missed, computed or aborted on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.known = ChunkRegistry(CAPACITY)
        self.kv = ChunkCache()
        self.running: dict[str, CollectPlan] = {}
        self.background = BackgroundPrefill(self.known, 81, 0.5, self.begin)
        self.used: list[KeyedSpan] = []

    def begin(self, request_id: str, token_ids: list[int], plan: CollectPlan) -> str:
        assert plan.chunk is not None and token_ids == [*plan.chunk.context, *plan.chunk.token_ids]
        assert plan.start == len(plan.chunk.context)
        assert len(token_ids) == plan.num_prompt_tokens
        self.running[request_id] = plan
        return request_id

    def tokens(self, number: int, size: int) -> list[int]:
        return [1000 * number + at for at in range(size)]

    @rule(number=st.integers(0, 5), size=sizes, context=st.sampled_from([(7,), (7, 8)]))
    def request(self, number: int, size: int, context: tuple[int, ...]) -> None:
        chunk = ChunkIds("", tuple(self.tokens(number, size)), context)
        key = self.known.get(chunk)
        if key is None:
            self.background.add(chunk)
        else:
            self.known.pin([key])
            self.used.append(KeyedSpan(0, size, key))

    @rule()
    def finish_request(self) -> None:
        if self.used:
            self.known.unpin([self.used.pop(0).key])

    @rule(idle=st.booleans(), num_tokens=st.integers(0, 200))
    def step(self, idle: bool, num_tokens: int) -> None:
        self.background.earn(num_tokens)
        self.background.start(idle)
        self.kv.apply(WorkerCommands(self.known.take_drops()))

    @rule(completed=st.booleans(), reached=st.booleans())
    def end_of_chunk(self, completed: bool, reached: bool) -> None:
        for request_id, plan in list(self.running.items()):
            if completed or reached:
                self.compute(plan, whole=completed)
            events = self.kv.collect_events()
            for key in events.kept if events is not None else ():
                assert plan.chunk is not None
                self.known.commit(key)
                self.background.came(key, plan.chunk)
            self.background.finish(request_id)
            del self.running[request_id]

    @rule(nth=st.integers(0, 9))
    def delete(self, nth: int) -> None:
        """An operator deletes a chunk that is here, in use, or on its way."""
        some = [*self.known.all(), *self.known.all_coming()]
        if some:
            key, chunk = some[nth % len(some)]
            used = key in [span.key for span in self.used]
            gone = self.known.delete(key)
            assert gone == (not used and self.known.coming(key) is None)
            assert self.known.get(chunk) is None and self.known.reserve(chunk) is None or gone

    def compute(self, plan: CollectPlan, whole: bool) -> None:
        """What the model does in a window of the chunk's request."""
        rows = plan.num_prompt_tokens if whole else plan.num_prompt_tokens // 2
        if plan.into is None:
            self.kv.collect(plan, KVShape(1, 1, 2, torch.float32), torch.device("cpu"))
        plan.advance(0, rows)
        if whole:
            self.kv.keep(plan)

    @invariant()
    def chunks_in_use_are_there(self) -> None:
        for span in self.used:
            plan = self.kv.resolve(KeyedPlan((span,)), "", 0)
            assert plan is not None
            assert plan.spans[0].kv.num_tokens == span.end

    @invariant()
    def what_is_deleted_stays_for_its_users_alone(self) -> None:
        for key in self.known._deleted:
            assert self.known.is_pinned(key) or self.known.coming(key) is not None
        assert not {key for key, _ in self.known.all()} & self.known._deleted
        for chunk in self.known.take_discards():
            assert chunk_key(chunk) not in self.known

    @rule(nth=st.integers(0, 9))
    def fetch(self, nth: int) -> None:
        """A tier brings a chunk, which may be here or on its way already."""
        some = [*self.known.all(), *self.known.all_coming()]
        if some:
            assert self.known.reserve(some[nth % len(some)][1]) is None

    @invariant()
    def both_sides_agree(self) -> None:
        chunks = self.known
        listed = [*chunks._chunks.values(), *chunks._coming.values()]
        assert chunks.num_tokens == sum(len(chunk.token_ids) for chunk in listed)
        assert chunks.num_tokens <= CAPACITY
        assert set(chunks._chunks) <= set(self.kv._chunks)
        extra = set(self.kv._chunks) - set(chunks._chunks) - set(chunks._coming)
        assert extra <= set(chunks._to_drop)


Chunks.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
TestChunks = Chunks.TestCase


def test_the_budget_bounds_what_is_computed_beside_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_prefill, "GAP_S", 0.0)
    started: list[int] = []

    def begin(request_id: str, token_ids: list[int], plan: CollectPlan) -> str:
        started.append(len(token_ids))
        return request_id

    background = BackgroundPrefill(ChunkRegistry(10_000), 1000, 0.25, begin)
    for number in range(20):
        background.add(chunk_of(number, number + 100))
    computed = 0
    for _ in range(40):
        background.earn(50)
        computed += 50
        for request_id in background.start(idle=False):
            complete(background, request_id)
        assert sum(started) <= 0.25 * computed
    assert sum(started) == 500
    assert background.start(idle=True)


def test_what_of_its_context_is_cached_is_not_paid_for() -> None:
    background = BackgroundPrefill(ChunkRegistry(10_000), 1000, 0.5, lambda request_id, *_: request_id)
    background.add(chunk_of(0, 900))
    background.earn(1800)
    (name,) = background.start(idle=False)
    assert background.credit == 0
    for _ in range(2):  # vLLM may ask again where it has too few blocks
        assert background.room(name, 700, 512, running=False) == 512
        assert background.credit == 200
    assert background.room(name, 188, 512, running=True) == 512  # computed, not cached
    assert background.credit == 200
    complete(background, name)


def test_a_chunk_of_an_idle_engine_goes_by_windows_and_stands_back() -> None:
    background = BackgroundPrefill(ChunkRegistry(10_000), 1000, 0.5, lambda request_id, *_: request_id)
    background.add(chunk_of(0, 900))
    (name,) = background.start(idle=True)
    background.took(256, 0.064)  # 4,000 tokens a second
    assert background.window == 400
    assert background.room(name, 900, 4096, running=False) == 400
    assert background.room(name, 500, 4096, running=True) == 400
    background.took(MIN_WINDOW - 1, 1.0)  # too few to tell
    background.start(idle=False)  # requests came
    assert background.room(name, 100, 4096, running=True) == 0
    assert background.room(name, 900, 4096, running=False) == 400  # preempted: else all behind it wait
    background.stalled = True  # they wait for what the chunk holds
    assert background.room(name, 100, 4096, running=True) == 400
    background.stalled = False
    background.earn(150)
    assert background.room(name, 100, 4096, running=True) == 0
    background.earn(100)
    assert background.room(name, 100, 4096, running=True) == 4096
    assert background.credit == 25
    assert background.room(name, 30, 4096, running=True) == 4096  # nothing is paid twice
    assert background.credit == 25
    background.took(256, 60.0)
    assert background.window == MIN_WINDOW
    complete(background, name)


def test_what_is_too_large_or_all_in_use_is_not_computed() -> None:
    chunks = ChunkRegistry(100)
    background = BackgroundPrefill(chunks, 1000, 1.0, lambda request_id, *_: request_id)
    background.add(chunk_of(0, 60))
    (request_id,) = background.start(idle=True)
    complete(background, request_id)
    key = chunks.get(chunk_of(0, 60))
    assert key is not None
    chunks.pin([key])
    background.add(chunk_of(200, 250))
    assert background.start(idle=True) == []
    chunks.unpin([key])
    background.add(chunk_of(200, 250))
    assert background.start(idle=True)
    background.add(chunk_of(0, 1001))
    background.add(chunk_of(0, 1000, context=(7,)))
    assert background.num_dropped == 3
    assert background.num_waiting == 0


def test_a_deleted_chunk_is_found_by_nobody_and_goes_with_its_last_user() -> None:
    chunks, mine, other = ChunkRegistry(1000), chunk_of(0, 90), chunk_of(500, 590)
    come(chunks, mine)
    come(chunks, other)
    key = chunks.get(mine)
    assert key is not None
    chunks.pin([key, key])
    assert not chunks.delete(key)
    prompt = Windows.of(tuple(range(90)))
    for _ in range(2):
        assert chunks.get(mine) is None and not chunks.find("", (), prompt, 16)
        assert chunks.reserve(mine) is None and not chunks.take_drops()
        assert key in chunks
        chunks.unpin([key])
    assert key not in chunks and chunks.take_drops() == (key,)
    assert chunks.take_discards() == (mine,) and chunks.num_tokens == 90
    come(chunks, mine)  # it was sent again
    assert chunks.get(mine) == key and chunks.find("", (), prompt, 16)
    (coming,) = [k for k in [chunks.reserve(chunk_of(700, 790))] if k]
    assert not chunks.delete(coming)
    chunks.commit(coming)
    assert coming not in chunks and chunks.take_drops() == (coming,)
    assert chunks.get(other) is not None


def test_a_tenant_s_name_is_no_part_of_a_chunk() -> None:
    other = (2).to_bytes(8, "little").decode()
    assert chunk_key(ChunkIds("", (1, 2))) != chunk_key(ChunkIds(other, (1,)))
    assert chunk_key(ChunkIds("a", (1, 2))) != chunk_key(ChunkIds("b", (1, 2)))
    assert chunk_key(ChunkIds("a", (1, 2))) != chunk_key(ChunkIds("a", (2,), (1,)))


def tenants_chunk(tenant: str, number: int, size: int = 10) -> ChunkIds:
    return ChunkIds(tenant, tuple(range(1000 * number, 1000 * number + size)))


def come(chunks: ChunkRegistry, chunk: ChunkIds) -> None:
    assert (key := chunks.reserve(chunk)) is not None
    chunks.commit(key)


def kept(chunks: ChunkRegistry, tenant: str) -> list[int]:
    return [n for n in range(60) if chunk_key(tenants_chunk(tenant, n)) in chunks]


def test_the_tenant_that_holds_most_makes_room() -> None:
    now = [0.0]
    chunks = ChunkRegistry(100, clock=lambda: now[0])
    for number in range(3):
        come(chunks, tenants_chunk("few", number))
    for number in range(50):
        now[0] += 1
        come(chunks, tenants_chunk("many", number))
    assert kept(chunks, "few") == [0, 1, 2]  # as long ago as they were used
    assert kept(chunks, "many") == list(range(43, 50))
    for number in range(3, 20):
        now[0] += 1
        come(chunks, tenants_chunk("few", number))
        assert chunks.num_tokens == 100
    assert len(kept(chunks, "few")) == len(kept(chunks, "many")) == 5
    assert kept(chunks, "few") == list(range(15, 20))  # of its own the oldest


def test_a_tenant_that_is_long_idle_makes_room_first() -> None:
    now = [0.0]
    chunks = ChunkRegistry(100, clock=lambda: now[0])
    for number in range(2):
        come(chunks, tenants_chunk("idle", number))
    now[0] += IDLE_S + 1
    for number in range(9):
        come(chunks, tenants_chunk("busy", number))
    assert (kept(chunks, "idle"), kept(chunks, "busy")) == ([1], list(range(9)))


def test_chunks_in_use_are_kept_whoever_holds_most() -> None:
    chunks = ChunkRegistry(40)
    for number in range(3):
        come(chunks, tenants_chunk("many", number))
    come(chunks, tenants_chunk("few", 0))
    keys = [chunk_key(tenants_chunk("many", number)) for number in range(3)]
    chunks.pin([*keys, keys[0]])
    come(chunks, tenants_chunk("few", 1))
    assert (kept(chunks, "many"), kept(chunks, "few")) == ([0, 1, 2], [1])
    chunks.unpin(keys)
    come(chunks, tenants_chunk("few", 2))
    assert kept(chunks, "many") == [0, 2]  # the first is in use still
    assert chunks.reserve(tenants_chunk("few", 3, size=31)) is None


def test_chunks_that_are_too_short_to_be_found_are_dropped_like_others() -> None:
    registry = ChunkRegistry(max_tokens=100)
    keys = [registry.reserve(ChunkIds("", (at,) * 5, (1,))) for at in (3, 4)]
    for key in keys:
        assert key is not None
        registry.commit(key)
    assert registry.reserve(ChunkIds("", tuple(range(95)), (2,))) is not None  # in one's place
    assert registry.reserve(ChunkIds("", (7,) * 5, (2,))) is not None  # in the other's
    assert registry.take_drops() == tuple(keys)
