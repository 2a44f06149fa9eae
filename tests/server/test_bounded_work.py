"""What a request costs the scheduler grows with its length, and with no square of anything."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_blend.core.plans import ChunkIds
from vllm_blend.server.chunks.chunk_contexts import Contexts
from vllm_blend.server.chunks.chunk_registry import ChunkRegistry, chunk_key
from vllm_blend.server.chunks.token_index import Run, SequenceIndex, Windows
from vllm_blend.server.internal.background_prefill import BackgroundPrefill
from vllm_blend.server.request import BlendRequest
from vllm_blend.server.scheduler.lookup import Lookup
from vllm_blend.server.scheduler.tier_fetches import Fetches
from vllm_blend.server.scheduler.waiting import Waiting

CONTEXTS = Contexts((1,), (1, 2))
TIMES = 4
"""How much more is asked for."""
LINEAR = 1.3 * TIMES
"""How much more may be done for it: a logarithm, and what is done once, are let pass."""


def calls(work: Callable[[], Any]) -> int:
    """Calls of Python's and of C's functions."""
    count = 0

    def note(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


class Sliced(tuple[int, ...]):
    """Token ids that count what is copied of them."""

    copied = 0

    def __getitem__(self, place: Any) -> Any:
        found = tuple.__getitem__(self, place)
        Sliced.copied += len(found) if isinstance(place, slice) else 1
        return found


class Compared(np.ndarray):
    """Token ids that count those that are compared."""

    compared = 0

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        plain = [np.asarray(one) for one in inputs]
        Compared.compared += plain[0].size
        return getattr(ufunc, method)(*plain, **kwargs)


def make_lookup(min_tokens: int = 16) -> Lookup:
    chunks = ChunkRegistry(10**7)
    background = BackgroundPrefill(chunks, 10**6, 1.0, lambda request_id, *_: request_id)
    return Lookup(chunks, background, None, CONTEXTS, min_tokens, 8192)


def know(lookup: Lookup, chunk: ChunkIds) -> None:
    assert (key := lookup._chunks.reserve(chunk)) is not None
    lookup._chunks.commit(key)


def test_named_spans() -> None:
    def work(num_spans: int) -> tuple[int, int]:
        lookup = make_lookup()
        tokens = Sliced(range(1, 20 * num_spans + 5))
        spans = tuple((start, start + 20) for start in range(1, 20 * num_spans, 20))
        for start, end in spans:
            know(lookup, ChunkIds("", tuple(tokens)[start:end], CONTEXTS.at(start, 1)))
        Sliced.copied = 0
        request = BlendRequest(spans=spans)
        count = calls(lambda: lookup("", tokens, request))
        return Sliced.copied, count

    few, many = work(100), work(100 * TIMES)
    assert all(more < LINEAR * less for less, more in zip(few, many, strict=True))


@pytest.mark.parametrize("min_tokens", [16, 64, 700])
@pytest.mark.parametrize("pattern", ["repeated", "pieces", "period"])
def test_finding_known_tokens(min_tokens: int, pattern: str) -> None:
    choose = random.Random(1)

    def tokens_of(num_tokens: int) -> list[int]:
        if pattern == "repeated":
            return [7] * num_tokens
        if pattern == "period":
            return [at % 5 for at in range(num_tokens)]
        return [choose.randrange(10**6) if at % 40 == 39 else 7 for at in range(num_tokens)]

    def work(num_tokens: int) -> tuple[int, int]:
        index = SequenceIndex(10**7)
        for size in (num_tokens, 300, 40):
            index.add(size, Windows.of(tokens_of(size)))
        windows = Windows.of(tokens_of(num_tokens))
        prompt = Windows(windows.tokens.view(Compared))
        prompt.hashes = windows.hashes
        Compared.compared = 0
        count = calls(lambda: index.find(prompt, min_tokens))
        return count, Compared.compared

    few, many = work(10_000), work(10_000 * TIMES)
    assert all(more < LINEAR * less for less, more in zip(few, many, strict=True))


def test_runs_that_suit_their_places() -> None:
    def work(num_runs: int) -> int:
        runs = [(Run(40 * n, 40 * n + 20, b"", 0), CONTEXTS[n % 2]) for n in range(num_runs)]
        taken = [(40 * n + 25, 40 * n + 30) for n in range(num_runs)]
        return calls(lambda: CONTEXTS.suited(runs, taken))

    assert work(200 * TIMES) < LINEAR * work(200)


def test_text_that_comes_back() -> None:
    """Each piece of it among chunks that are named."""

    def work(num_pieces: int) -> int:
        lookup = make_lookup()
        pieces = [list(range(1000 * n, 1000 * n + 70)) for n in range(1, num_pieces)]
        lookup("", tuple(sum(pieces, [])), BlendRequest(auto=True))
        tokens, spans = [1], []
        for number, piece in enumerate(pieces):
            spans.append((len(tokens), len(tokens) + 20))
            tokens += [10**6 + 100 * number + at for at in range(20)] + piece
        request = BlendRequest(spans=tuple(spans), auto=True)
        return calls(lambda: lookup("", (*tokens, 5), request))

    assert work(100 * TIMES) < LINEAR * work(100)


def test_answers_of_the_store() -> None:
    """Each of many waiting requests gets its own chunk."""

    def work(num_requests: int) -> int:
        chunks = ChunkRegistry(10**7)
        background = BackgroundPrefill(chunks, 1000, 1.0, lambda request_id, *_: request_id)
        fetches = Fetches(chunks, background, CONTEXTS)
        for number in range(num_requests):
            request = Waiting(BlendRequest(spans=((0, 20),)), 0.0, f"r{number}")
            request.advance(0.0, True, True)
            fetches.wait(request, [ChunkIds("", tuple(range(number, number + 20)))])

        def step() -> None:
            for key, _ in fetches.take_commands(()).fetch:
                fetches.answer(key, found=False)

        def steps() -> None:
            while fetches:
                step()

        return calls(steps)

    assert work(200 * TIMES) < LINEAR * work(200)


def test_the_model_s_process_is_asked_for_a_few_chunks_at_once() -> None:
    chunks = ChunkRegistry(10**7)
    background = BackgroundPrefill(chunks, 1000, 1.0, lambda request_id, *_: request_id)
    fetches = Fetches(chunks, background, CONTEXTS)
    wanted = [ChunkIds(tenant, tuple(range(n, n + 20))) for tenant in "ab" for n in range(500)]
    for chunk in wanted:
        fetches.ask(chunk)
    asked = [chunk for _, chunk in fetches.take_commands(()).fetch]
    assert 0 < len(asked) < 100
    assert {chunk.tenant for chunk in asked} == {"a", "b"}  # in turn
    assert not fetches.take_commands(()).fetch
    fetches.answer(chunk_key(asked[0]), found=True)
    assert len(fetches.take_commands(()).fetch) == 1


def test_memory_that_is_full_of_chunks_in_use() -> None:
    """Room is found without a look at each of them."""

    def work(num_pinned: int) -> int:
        chunks = ChunkRegistry(20 * (num_pinned + 1))
        for number in range(num_pinned + 1):
            chunk = ChunkIds("", tuple(range(number, number + 20)))
            assert (key := chunks.reserve(chunk)) is not None
            chunks.commit(key)
            if number < num_pinned:
                chunks.pin([key])
        new = ChunkIds("", tuple(range(10**6, 10**6 + 20)))
        return calls(lambda: chunks.reserve(new))

    assert work(100 * TIMES) == work(100)


def test_an_aborted_request_leaves_the_queue_of_the_store() -> None:
    chunks = ChunkRegistry(10**7)
    background = BackgroundPrefill(chunks, 1000, 1.0, lambda name, *_: SimpleNamespace(request_id=name))
    fetches = Fetches(chunks, background, CONTEXTS)
    chunk, other = (ChunkIds("", tuple(range(n, n + 20))) for n in (0, 100))
    fetches.ask(chunk, "one")
    fetches.ask(other, "one")
    fetches.ask(other, "two")
    ((key, asked),) = [(k, c) for k, c in fetches.take_commands(()).fetch if c == chunk]
    for unwanted in background.askers.left("one"):
        background.remove(unwanted)
        fetches.remove(unwanted)
    fetches.answer(key, found=False)
    fetches.answer(chunk_key(other), found=False)
    assert asked == chunk and background.num_waiting == 1  # what "two" waits for
