"""What the question gives to the chunks' tokens: the sum itself, and who hears it, without a model."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_blend.attention import paged
from vllm_blend.core.kv import StoredKV
from vllm_blend.core.plans import BlendPlan, ChunkSpan
from vllm_blend.core.step import MAX_ASKED, BlendStep, StepRequest
from vllm_blend.model.lookahead import Questions
from vllm_blend.model.select.question import attention_received

CPU = torch.device("cpu")
HEADS, KV_HEADS, SIZE = 4, 2, 8


def slow_received(
    q: torch.Tensor,
    k: torch.Tensor,
    last_keys: list[int],
    positions: list[int],
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> list[float]:
    """Key by key, in fp64."""
    got = [0.0] * len(positions)
    group = q.shape[1] // k.shape[1]
    for row, last in enumerate(last_keys):
        seen = [
            i for i, at in enumerate(positions) if at <= last and not (window and at <= last - window)
        ]
        for head in range(q.shape[1]):
            logits = [float(q[row, head].double() @ k[i, head // group].double()) * scale for i in seen]
            if softcap:
                logits = [softcap * math.tanh(x / softcap) for x in logits]
            total = sum(map(math.exp, logits))
            if sinks is not None:
                total += math.exp(float(sinks[head]))
            for i, x in zip(seen, logits, strict=True):
                got[i] += math.exp(x) / total
    return got


variants = st.fixed_dictionaries(
    dict(
        window=st.sampled_from([0, 1, 5, 30]),
        softcap=st.sampled_from([0.0, 1.5, 20.0]),
        sinks=st.sampled_from([None, torch.tensor([-1.0, 0.0, 2.0, 4.0])]),
    )
)


@settings(deadline=None)
@given(
    num_keys=st.integers(1, 40), num_asked=st.integers(1, 6), variant=variants, seed=st.integers(0, 99)
)
def test_attention_received_is_that_of_plain_python(
    num_keys: int, num_asked: int, variant: dict[str, Any], seed: int
) -> None:
    """Keys in any order; queries that end before the last of them, too."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(num_asked, HEADS, SIZE, generator=generator)
    k = torch.randn(num_keys, KV_HEADS, SIZE, generator=generator)
    positions = torch.randperm(num_keys, generator=generator)
    last_keys = torch.randint(num_keys, (num_asked,), generator=generator)
    found = attention_received(q, k, last_keys, positions, 0.4, **variant)
    expected = slow_received(q, k, last_keys.tolist(), positions.tolist(), 0.4, **variant)
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-5)
    if variant["sinks"] is None:
        assert float(found.sum()) == pytest.approx(num_asked * HEADS, rel=1e-4)


def request_of(
    chunks: list[tuple[int, int]], position: int, end: int, row: int, num_prompt: int | None = None
) -> StepRequest:
    """The window ``[position, end)`` of a prompt with chunks at ``[start, stop)``."""
    spans = []
    for start, stop in chunks:
        kv = torch.empty(stop - start, 1, 1)
        spans.append(ChunkSpan(start, StoredKV(((kv, kv),))))
    plan = BlendPlan(tuple(spans))
    return StepRequest(plan, row, position, end - position, CPU, num_prompt_tokens=num_prompt)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 20)), min_size=1, max_size=4),
    num_own=st.integers(1, 60),
    num_answered=st.integers(0, 9),
    window=st.tuples(st.integers(0, 150), st.integers(1, 150)),
)
def test_the_windows_last_question_tokens_are_asked(
    lengths: list[tuple[int, int]], num_own: int, num_answered: int, window: tuple[int, int]
) -> None:
    """Not those of an answer, which a preempted request computes again."""
    chunks, place = [], 0
    for gap, count in lengths:
        chunks.append((place + gap, place + gap + count))
        place = chunks[-1][1]
    num_prompt = place + num_own
    position = min(window[0], num_prompt - 1)
    end = min(position + window[1], num_prompt + num_answered)
    request = request_of(chunks, position, end, 3, num_prompt)
    of_question = [at for at in range(position, end) if place <= at < num_prompt]
    assert request.num_asked == min(len(of_question), MAX_ASKED)


def own_rows(request: StepRequest) -> list[int]:
    """Rows of the step that no chunk holds."""
    held = set(request.chunk_rows.tolist())
    return [row for row in range(request.row, request.row + request.num_rows) if row not in held]


def frame_of(
    step: BlendStep, asking: list[StepRequest], position_of: dict[int, int], **more: Any
) -> Any:
    rows = [row for request in asking for row in own_rows(request)]
    return SimpleNamespace(
        step=step,
        device=CPU,
        rows=torch.tensor(rows),
        positions=torch.tensor([position_of[row] for row in rows]),
        **more,
    )


def three_requests() -> tuple[BlendStep, list[StepRequest], dict[int, int]]:
    """A decode, then requests of which the first and last ask; before the last another decode.

    The first's window begins within a chunk; the last one's question is longer than is asked, and an
    answer stands behind it.
    """
    first = request_of([(4, 20), (22, 40)], position=10, end=45, row=1)
    other = request_of([(0, 6)], position=0, end=9, row=first.row + first.num_rows)
    row = other.row + other.num_rows + 1
    last = request_of([(2, 12)], 0, 12 + MAX_ASKED + 8, row, num_prompt=12 + MAX_ASKED + 5)
    starts = [0, first.row, other.row, row - 1, row, row + last.num_rows]
    requests = [first, other, last]
    position_of = {r.row + at: r.position + at for r in requests for at in range(r.num_rows)}
    return BlendStep(requests, starts, "auto"), [first, last], position_of


@settings(deadline=None, max_examples=15)
@given(variant=variants, seed=st.integers(0, 99))
def test_on_a_cpu_each_requests_keys_get_what_its_question_gives(
    variant: dict[str, Any], seed: int
) -> None:
    """Over two layers; K of a window's own rows, of its chunks and of what stands before the window,
    and of no other request's."""
    step, asking, position_of = three_requests()
    tables = torch.arange(len(step.starts) - 1)[:, None]
    frame = frame_of(
        step, asking, position_of, stock_metadata=lambda layer: SimpleNamespace(block_table=tables)
    )
    questions = Questions(frame, asking, range(3))
    generator = torch.Generator().manual_seed(seed)
    impl = SimpleNamespace(
        blend=SimpleNamespace(index=0),
        head_size=SIZE,
        scale=0.4,
        logits_soft_cap=variant["softcap"],
        sinks=variant["sinks"],
        cached_keys=lambda layer, table, count: cached[int(table)][:count],
    )
    layer = SimpleNamespace(sliding_window=variant["window"] or None)
    expected = {request: torch.zeros(request.num_chunk_rows) for request in asking}
    for _ in range(2):
        query = torch.randn(len(frame.rows), HEADS * SIZE, generator=generator)
        key = torch.randn(len(frame.rows), KV_HEADS, SIZE, generator=generator)
        num_stored = sum(request.num_chunk_rows for request in asking)
        stored = torch.randn(num_stored, KV_HEADS, SIZE, generator=generator)
        cached = torch.randn(len(tables), 20, KV_HEADS, SIZE, generator=generator)
        questions.hear(impl, layer, query, key, stored)
        at, first = 0, 0
        for request in asking:
            own, held = own_rows(request), request.chunk_rows.tolist()
            rows = slice(at, at + len(own))
            before = cached[step.starts.index(request.row), : request.position]
            k = torch.cat([stored[first : first + len(held)], key[rows], before])
            positions = [position_of[row] for row in held + own] + [*range(request.position)]
            count, answered = request.num_asked, request.end - request.prompt_end
            asked = slice(len(own) - answered - count, len(own) - answered)
            got = slow_received(
                query[rows][asked].view(count, HEADS, SIZE),
                k,
                [position_of[row] for row in own[asked]],
                positions,
                0.4,
                **variant,
            )
            expected[request] += torch.tensor(got[: len(held)])
            at, first = at + len(own), first + len(held)
    received = questions.received()
    assert list(received) == asking
    for request in asking:
        torch.testing.assert_close(received[request], expected[request], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("alike", [True, False])
def test_on_a_gpu_the_last_rows_are_asked_in_their_requests_blocks(
    monkeypatch: pytest.MonkeyPatch, alike: bool
) -> None:
    """What the kernel is called with for all layers that are alike: it reads K from the paged cache."""
    step, asking, position_of = three_requests()
    blocks = torch.arange(5 * 3).view(5, 3).int()
    described: list[Any] = []

    def stock_metadata(layer: Any) -> Any:
        described.append(layer)
        return SimpleNamespace(block_table=blocks)

    frame = frame_of(step, asking, position_of, stock_metadata=stock_metadata)
    calls: list[tuple[Any, ...]] = []

    def kernel(query: Any, caches: Any, table: Any, last_keys: Any, total: Any, **more: Any) -> None:
        calls.append((query, caches, table.tolist(), last_keys.tolist(), more))
        total += len(query) * (1 + torch.arange(len(total)))

    monkeypatch.setattr(paged, "received_attention", kernel)
    sinks = torch.randn(3, HEADS)
    caches = [torch.zeros(9, 16, KV_HEADS, SIZE) for _ in range(3)]
    windows = [None, None, None] if alike else [None, 64, None]
    layers = [
        SimpleNamespace(kv_cache=cache, sliding_window=window)
        for cache, window in zip(caches, windows, strict=True)
    ]
    questions = Questions(frame, asking, range(3))
    queries = torch.randn(3, len(frame.rows), HEADS, SIZE)
    for index, layer in enumerate(layers):
        impl: Any = paged.PagedFuse()
        impl.__dict__.update(
            blend=SimpleNamespace(index=index),
            head_size=SIZE,
            kv_cache_dtype="auto",
            scale=0.4,
            logits_soft_cap=30.0,
            sinks=sinks[index],
            caches=lambda kv_cache: (kv_cache, None),
        )
        before = queries[index].clone()
        questions.hear(impl, layer, before, None, None)  # type: ignore[arg-type]
        before.fill_(math.nan)  # a layer's memory is the next one's
    assert described == layers and not calls
    received = questions.received()
    kinds = [[0, 1, 2]] if alike else [[0, 2], [1]]
    expected = [(request, kind) for request in range(len(asking)) for kind in kinds]
    assert len(calls) == len(expected)
    first_rows = [0, len(own_rows(asking[0])), len(frame.rows)]
    for call, (number, kind) in zip(calls, expected, strict=True):
        asked, key_caches, table, last_keys, more = call
        request, (lo, hi) = asking[number], list(pairwise(first_rows))[number]
        count, end = request.num_asked, request.prompt_end
        hi -= request.end - end
        assert all(cache is caches[at] for cache, at in zip(key_caches, kind, strict=True))
        assert table == blocks[[1, 4][number]].tolist()
        assert last_keys == [*range(end - count, end)] + [-1] * (MAX_ASKED - count)
        assert asked.shape == (len(kind), MAX_ASKED, HEADS, SIZE)
        of_layers = queries[kind]
        assert torch.equal(asked[:, :count], of_layers[:, lo:hi][:, -count:])
        padding = of_layers[:, hi - 1 : hi].expand(-1, MAX_ASKED - count, -1, -1)
        assert torch.equal(asked[:, count:], padding)
        assert torch.equal(more.pop("sinks"), sinks[kind])
        assert more == dict(scale=0.4, sliding_window=windows[kind[0]] or 0, softcap=30.0)
    for request, got in received.items():
        chunk_positions = [position_of[row] for row in request.chunk_rows.tolist()]
        assert got.tolist() == [3 * (1 + position) for position in chunk_positions]
