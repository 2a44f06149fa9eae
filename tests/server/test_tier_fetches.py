"""Chunks that are asked for, without a server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import wait
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_blend.core.kv import KVShape
from vllm_blend.core.plans import ChunkIds
from vllm_blend.core.prompt import TokenIds
from vllm_blend.server.chunks.chunk_contexts import HARVESTED, HARVESTED_FIRST, Contexts
from vllm_blend.server.chunks.chunk_registry import ChunkRegistry
from vllm_blend.server.internal.background_prefill import BackgroundPrefill
from vllm_blend.server.request import BlendRequest
from vllm_blend.server.scheduler.lookup import Lookup
from vllm_blend.server.scheduler.tier_fetches import Fetches
from vllm_blend.server.scheduler.tier_waits import TierWaits
from vllm_blend.server.scheduler.waiting import State, Waiting
from vllm_blend.server.worker.tier_io import TierIO
from vllm_blend.store import ModelKey
from vllm_blend.store.controller import Decision

IDS = tuple(range(50))
CHUNK = ChunkIds("", IDS, (1,))
CONTEXTS = Contexts((1,), (1, 2))


def known_and_fetches() -> tuple[ChunkRegistry, Fetches]:
    chunks = ChunkRegistry(1000)
    background = BackgroundPrefill(chunks, 1000, 1.0, lambda request_id, *_: request_id)
    return chunks, Fetches(chunks, background, CONTEXTS)


def test_a_chunk_that_came_meanwhile_takes_its_room_once() -> None:
    """Another request's fetch brings it while this one asks where it is."""
    chunks, found = known_and_fetches()
    now = time.monotonic()
    one, two = (Waiting(BlendRequest(spans=((0, 50),), paced=True), now) for _ in range(2))
    assert {request.advance(now, True, True) for request in (one, two)} == {State.ASK}
    found.wait(one, [CHUNK])
    (key,) = one.chunks
    found.locate(two, [CHUNK])
    asked = found.take_commands(()).fetch
    found.answer(key, found=True)
    found.found(key, ("host", 0))
    assert two.advance(now, True, True) is State.DECIDE
    pace: Any = SimpleNamespace(decide=lambda *_, overlap: Decision(0.2, (True,), 0, 0, 0, ""))
    found.decide(two, [[CHUNK]], 51, pace)
    assert {one.advance(time.monotonic(), True, True), two.advance(time.monotonic(), True, True)} == {
        State.READY
    }
    assert [ask[0] for ask in asked] == [key] and not found.take_commands(()).fetch
    assert (len(found), chunks.num_tokens) == (0, 50)


@pytest.mark.parametrize("come", [False, True], ids=["on its way", "here"])
def test_a_fetched_chunk_that_a_prefill_brings_takes_its_room_once(come: bool) -> None:
    """Two copies of its size would be counted, and one of them dropped: then blending stops, since room
    is looked for where there is none."""
    chunks, found = known_and_fetches()
    now = time.monotonic()
    waiting = Waiting(BlendRequest(spans=((0, 50),), paced=True), now)
    assert waiting.advance(now, True, True) is State.ASK
    found.wait(waiting, [CHUNK])
    ((key, *_),) = found.take_commands(()).fetch
    assert chunks.reserve(CHUNK) == key  # a request's own prefill is to bring it
    if come:
        chunks.commit(key)
    found.answer(key, found=True)
    if not come:
        chunks.commit(key)
    assert chunks.get(CHUNK) == key and not chunks.take_drops()
    assert chunks.num_tokens == 50 and chunks.reserve(CHUNK) is None
    chunks.evict(key)
    assert chunks.num_tokens == 0
    assert chunks.reserve(ChunkIds("", tuple(range(1000)), (1,))) is not None  # all the room


@pytest.mark.parametrize("harvested", [HARVESTED, HARVESTED_FIRST], ids=["later", "first"])
def test_what_a_prefill_computed_is_not_computed_by_itself(harvested: TokenIds) -> None:
    """What stands for its context is no token: a model that is asked for it fails."""
    chunks = ChunkRegistry(1000)
    background = BackgroundPrefill(chunks, 1000, 1.0, lambda request_id, *_: request_id)
    contexts = CONTEXTS._replace(harvest=True)
    found = Fetches(chunks, background, contexts)
    lookup = Lookup(chunks, background, found, contexts, 10, 1000)
    times: Any = SimpleNamespace(done=True)
    waits = TierWaits(found, lookup, contexts, times, 10)
    request = BlendRequest(spans=((0, 50),), auto=True, paced=True)
    waiting = Waiting(request, time.monotonic(), "one")
    found.claim("")
    found.claimed("", [ChunkIds("", tuple(range(100, 150)), harvested)])
    waits.advance(waiting, "", [*IDS, *range(100, 150), 7])
    ((key, _),) = found.take_commands(()).fetch
    found.answer(key, found=False)  # its tier has just dropped it
    assert (background.num_waiting, len(found), len(background.askers)) == (0, 0, 0)


def test_what_is_too_short_to_be_found_is_not_learned() -> None:
    chunks, found = known_and_fetches()
    lookup = Lookup(chunks, found._background, None, CONTEXTS, min_tokens=100, max_tokens=8192)
    for number in range(3):
        lookup("", (*[900 + number] * 20, *range(80), 7), BlendRequest(auto=True))
    assert len(found._background) == 0
    lookup = Lookup(chunks, found._background, None, CONTEXTS, min_tokens=64, max_tokens=8192)
    for number in range(3):
        lookup("", (*[900 + number] * 20, *range(80), 7), BlendRequest(auto=True))
    assert len(found._background) == 1


def test_what_no_tier_has_is_forgotten() -> None:
    store: Any = SimpleNamespace(get=lambda key, layerwise: None)
    tiers = TierIO(store, ModelKey("weights", "rope", KVShape(1, 1, 8, torch.float32)))
    tiers.fetch(b"a", CHUNK)
    wait(tiers._fetches.values())
    assert tiers.fetched() == {b"a": None}
    assert not tiers._names and not tiers._fetches


def test_a_disk_that_fails_once_is_read_at_the_next_claim() -> None:
    model = ModelKey("weights", "rope", KVShape(1, 1, 8, torch.float32))
    on_disk = [(model.chunk(IDS, (1, 2), tenant).digest, IDS) for tenant in ("a", "b")]
    failures = [OSError("first"), None]

    def token_ids() -> Iterator[tuple[bytes, tuple[int, ...]]]:
        yield on_disk[0]
        if (failure := failures.pop(0)) is not None:
            raise failure
        yield on_disk[1]

    store: Any = SimpleNamespace(token_ids=token_ids, lanes=())
    tiers = TierIO(store, model)
    for expected in ([], [ChunkIds("b", IDS, (1, 2))]):
        tiers.claim("b", CONTEXTS[:2])
        wait(tiers._claims.values())
        assert tiers.claimed() == {"b": expected}
    assert failures == []
