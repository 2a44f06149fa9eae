"""The rows that a step computes, where they stand, and what is collected of them; without a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_blend.attention.base import RowPlaces, last_keys
from vllm_blend.attention.cpu import virtual_requests
from vllm_blend.attention.rotation import Rotation
from vllm_blend.core.kv import StoredKV
from vllm_blend.core.plans import BlendPlan, ChunkSpan, CollectPlan, LaunchCopies
from vllm_blend.core.settings import BlendSettings
from vllm_blend.core.stage_clock import StageClock
from vllm_blend.core.step import BlendStep, Status, StepRequest
from vllm_blend.model.active_rows import ActiveRows
from vllm_blend.model.collect import Collecting

CPU = torch.device("cpu")
NUM_LAYERS, PADDING = 3, 4
COPIED_LAYERS = 7


@dataclass
class Context:
    """What a frame reads of vLLM's forward context."""

    attn_metadata: dict[str, Any]
    slot_mapping: dict[str, torch.Tensor]
    moe_layer_index: int = 7
    batch_descriptor: str = "all rows"


@dataclass
class Attn:
    """A layer's attention, whose backend describes rows by themselves."""

    layer_name: str
    sliding_window: int | None = None

    @property
    def impl(self) -> Attn:
        return self

    def metadata(self, attn: Attn, stock: Any, places: RowPlaces) -> Any:
        return Described(attn, stock, places)


@dataclass
class Described:
    attn: Attn
    stock: Any
    places: RowPlaces
    active: Any = None


def stored(count: int) -> StoredKV:
    kv = torch.empty(count, 1, 1)
    return StoredKV(((kv, kv),) * NUM_LAYERS)


@dataclass
class Made:
    """A step; of each row its request (None: a decode's) and its position."""

    step: BlendStep
    request_of: list[StepRequest | None]
    positions: list[int]

    def frame(self) -> ActiveRows:
        positions = torch.tensor(self.positions + [0] * PADDING)
        slots = torch.randperm(len(positions), generator=torch.Generator().manual_seed(0)) + 100
        names = ("one", "two")
        context: Any = Context({n: object() for n in names}, dict.fromkeys(names, slots))
        return ActiveRows(self.step, positions, context, NUM_LAYERS, "flags", StageClock())

    def held(self, request: StepRequest) -> list[int]:
        """Rows that stored KV stands for."""
        spans = [(span.start, span.end) for span in request.plan.spans]
        return [
            row
            for row, (owner, at) in enumerate(zip(self.request_of, self.positions, strict=True))
            if owner is request and any(start <= at < end for start, end in spans)
        ]


@st.composite
def steps(draw: st.DrawFn) -> Made:
    """Decodes, and requests that blend or are collected, in windows of chunked prefill."""
    requests: list[StepRequest] = []
    request_of: list[StepRequest | None] = []
    positions: list[int] = []
    starts = [0]
    for kind in draw(st.lists(st.sampled_from(["decode", "blend", "collect", "prefix"]), max_size=5)):
        if kind == "decode":
            count = draw(st.integers(1, 3))
            request_of += [None] * count
            positions += range(900, 900 + count)
            starts.append(len(positions))
            continue
        spans, place = [], 0
        for gap, count in draw(
            st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=3)
        ):
            spans.append(ChunkSpan(place + gap, stored(count)))
            place = spans[-1].end
        end = place + draw(st.integers(1, 5))
        lo = draw(st.integers(0, end - 1))
        hi = draw(st.integers(lo + 1, end))
        plan: BlendPlan | CollectPlan
        if kind == "blend":
            policy = draw(st.sampled_from(["static", "hkvd"]))
            plan = BlendPlan(tuple(spans), BlendSettings(policy=policy, check_layers=(1,)))
        else:
            prefix = stored(draw(st.integers(1, place))) if kind == "prefix" else None
            plan = CollectPlan(start=place, num_prompt_tokens=end, prefix=prefix)
        requests.append(StepRequest(plan, len(positions), lo, hi - lo, CPU))
        request_of += [requests[-1]] * (hi - lo)
        positions += range(lo, hi)
        starts.append(len(positions))
    if not requests:
        plan = BlendPlan((ChunkSpan(0, stored(3)),), BlendSettings(policy="static"))
        requests.append(StepRequest(plan, len(positions), 0, 5, CPU))
        request_of += [requests[-1]] * 5
        positions += range(5)
        starts.append(len(positions))
    return Made(BlendStep(requests, starts, "auto"), request_of, positions)


def subset(data: st.DataObject, values: Sequence[int]) -> list[int]:
    return sorted(data.draw(st.sets(st.sampled_from(list(values))))) if values else []


@settings(deadline=None)
@given(made=steps(), data=st.data())
def test_rows_are_those_that_are_kept(made: Made, data: st.DataObject) -> None:
    """Chosen at once or one request after another, then fewer of some; on the host or the device."""
    frame, step = made.frame(), made.step
    everything = list(range(step.num_rows))
    assert frame.rows.tolist() == everything and frame.num_rows == len(everything)
    left = {request: made.held(request) for request in step.blended}
    chosen: dict[StepRequest, list[int]] = {}
    dropped: set[int] = set()
    rounds = data.draw(st.lists(st.sets(st.sampled_from(step.blended)), max_size=3)) if left else []
    for each in rounds:
        kept = {}
        for request in sorted(each, key=lambda r: r.row):
            held = made.held(request)
            chosen[request] = subset(data, left[request])
            dropped |= set(left[request]) - set(chosen[request])
            left[request] = chosen[request]
            kept[request] = torch.tensor([held.index(row) for row in chosen[request]]).long()
        before = frame.rows
        take = frame.shrink(kept)
        rows = [row for row in everything if row not in dropped]
        assert frame.rows.tolist() == rows == before[take].tolist()
        assert frame.num_rows == len(rows)
        assert frame.positions.tolist() == [made.positions[row] for row in rows]

    rows = frame.rows.tolist()
    for request in step.requests:
        own = [index for index, row in enumerate(rows) if made.request_of[row] is request]
        if own:
            assert frame.first_row(request) == own[0]
    for request in step.blended:
        at, index = frame.candidates(request)
        assert [rows[i] for i in at.tolist()] == left[request]
        assert [made.held(request)[i] for i in index.tolist()] == left[request]
    early = all(request.settings.early for request in step.blended)
    assert frame.status(2) == (Status.AFTER_CHECK if frame.kept else Status.FULL_PREFILL)
    assert frame.status(1) == (frame.status(2) if early else Status.CHECK)

    results = frame.results()
    assert results["imp_indices"].tolist()[: len(rows)] == [made.positions[row] for row in rows]
    assert results["org_pos"].tolist() == made.positions
    assert results["org_seq_len"] == len(made.positions)
    assert torch.equal(results["our_slot_mapping"], results["original_slot_mapping"][frame.rows])


@settings(deadline=None)
@given(made=steps(), data=st.data())
def test_layers_find_the_rows_in_their_context(made: Made, data: st.DataObject) -> None:
    frame, step = made.frame(), made.step
    kept = {r: torch.tensor(subset(data, range(r.num_chunk_rows))).long() for r in step.blended}
    frame.shrink(kept)
    one, two, local = Attn("one"), Attn("two"), Attn("one", sliding_window=5)
    whole = frame._context.slot_mapping["one"]
    found = frame.context([one, two], batch_descriptor=None)
    assert found.moe_layer_index == 0 and found.batch_descriptor is None
    assert frame._context.moe_layer_index == 7  # vLLM's own is not changed
    assert torch.equal(found.slot_mapping["one"], whole[frame.rows])
    described = found.attn_metadata["one"]
    assert described.stock is frame._context.attn_metadata["one"] and described.active is frame
    # described once for layers that are alike
    assert frame.describe(one) is described is not found.attn_metadata["two"]
    assert frame.describe(local) is not described
    rows = frame.rows.tolist()
    places = described.places
    assert torch.equal(places.rows, frame.rows) and torch.equal(places.positions, frame.positions)
    assert places.query_start_loc.dtype == torch.int32
    assert places.query_start_loc.tolist() == [sum(r < start for r in rows) for start in step.starts]
    _, slots = frame._places(one)
    expected = whole.clone()
    expected[frame.rows] = -1
    assert torch.equal(slots, expected)

    frame.shrink({request: index[:0] for request, index in kept.items()})
    assert frame.describe(one) is not described  # other rows


@settings(deadline=None)
@given(made=steps(), data=st.data())
def test_a_frame_of_own_rows_alone(made: Made, data: st.DataObject) -> None:
    """What the question is asked by: no other request's rows, and no stored KV of theirs."""
    frame, step = made.frame(), made.step
    asking = [r for r in step.blended if len(made.held(r)) < r.num_rows]
    if not asking:
        return
    asking = asking[: data.draw(st.integers(1, len(asking)))]
    frame.own_rows_of(asking)
    held = {row for request in asking for row in made.held(request)}
    expected = [row for row, owner in enumerate(made.request_of) if owner in asking and row not in held]
    assert frame.rows.tolist() == expected
    assert frame.fusing(0).requests == asking
    assert frame._row_places().query_start_loc.tolist() == [
        sum(row < start for row in expected) for start in step.starts
    ]


@settings(deadline=None)
@given(made=steps(), data=st.data(), framed=st.booleans(), staged=st.booleans())
def test_collected_rows_are_found_among_those_that_are_computed(
    made: Made, data: st.DataObject, framed: bool, staged: bool
) -> None:
    """K tells the row of each token, V its position; rows before ``start`` are not kept, nor a prefix
    that is not computed."""
    step, frame = made.step, None
    kept = {r: torch.tensor(subset(data, range(r.num_chunk_rows))).long() for r in step.blended}
    for request in step.blended:
        if isinstance(request.plan, CollectPlan):
            kept[request] = torch.empty(0, dtype=torch.int64)
            framed = True  # nothing of a prefix is computed
    if framed:
        frame = made.frame()
        frame.shrink(kept)
    rows = list(range(step.num_rows)) if frame is None else frame.rows.tolist()
    # padding is not collected
    key = torch.tensor([*rows, *[-5] * PADDING]).float()[:, None, None]
    value = torch.tensor([*(made.positions[row] for row in rows), *[-5] * PADDING]).float()
    rotation = Rotation.none(4, torch.float32, CPU)
    collecting = Collecting(step, frame, len(key), CPU, staged=staged)
    for layer in range(2):
        collecting.layer(
            layer, rotation, (key + layer).expand(-1, 1, 2), value[:, None, None].expand(-1, 1, 2)
        )
    for request, plan in step.collected:
        tokens = range(max(plan.start, request.position), request.end)
        if len(plan.kv) == 0:
            assert not tokens
            continue
        for layer, (k, v) in enumerate(plan.kv):
            assert len(k) == len(v) == plan.num_prompt_tokens - plan.start
            for at in tokens:
                row = request.row + at - request.position
                assert (k[at - plan.start].tolist(), v[at - plan.start].tolist()) == (
                    [[row + layer] * 2],
                    [[at] * 2],
                )


class Copies:
    """Those of a GPU, made late: compute waits for a layer's when two more are launched."""

    def __init__(self) -> None:
        self.launched: list[int] = []
        self.waiting: list[tuple[torch.Tensor, torch.Tensor]] = []

    def prepared(self, parts: Iterable[tuple[torch.Tensor, int]]) -> LaunchCopies:
        assert not self.launched
        return partial(self.launch, list(parts))

    def launch(self, copies: list[tuple[torch.Tensor, int]], layer: int, rows: torch.Tensor) -> None:
        late = [(place[layer], rows[:, at : at + place.shape[2]]) for place, at in copies]
        self.make(self.waiting[: -len(copies)])
        self.waiting = self.waiting[-len(copies) :] + late
        self.launched.append(layer)

    def make(self, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for place, part in copies:
            place.copy_(part)


class Copied:
    """Host rows as of a GPU, -1 where nothing was written."""

    def __init__(self, num_tokens: int, copies: Copies) -> None:
        self.block = torch.full((COPIED_LAYERS, 2, num_tokens, 1, 2), -1.0)
        self.copies = copies

    def copied(self, first: int, count: int) -> tuple[Copies, torch.Tensor]:
        return self.copies, self.block[:, :, first : first + count]

    def write(self, *args: Any) -> None:
        raise AssertionError("it is copied")


@settings(deadline=None)
@given(made=steps(), data=st.data())
def test_collected_rows_are_copied_once_a_layer_where_they_go(made: Made, data: st.DataObject) -> None:
    """Beside plans of the same step whose rows are handed over."""
    step = made.step
    key = torch.arange(step.num_rows).float()[:, None, None].expand(-1, 1, 2)
    value = torch.tensor(made.positions).float()[:, None, None].expand(-1, 1, 2)
    into: dict[CollectPlan, Copied] = {}
    copies = Copies()
    for _, plan in step.collected:
        if data.draw(st.booleans()):
            plan.into = into[plan] = Copied(plan.num_tokens, copies)
    collecting = Collecting(step, None, step.num_rows, CPU, staged=True)
    for layer in range(COPIED_LAYERS):
        collecting.layer(layer, Rotation.none(4, torch.float32, CPU), key + layer, value)
    copies.make(copies.waiting)
    assert copies.launched == ([*range(COPIED_LAYERS)] if into else [])
    for request, plan in step.collected:
        expected = torch.full((COPIED_LAYERS, 2, plan.num_tokens, 1, 2), -1.0)
        for at in range(max(plan.start, request.position), min(plan.num_prompt_tokens, request.end)):
            keys = torch.arange(COPIED_LAYERS) + request.row + at - request.position
            expected[:, 0, at - plan.start] = keys[:, None, None]
            expected[:, 1, at - plan.start] = at
        if plan in into:
            assert torch.equal(into[plan].block, expected) and not plan.kv
        elif plan.kv:
            computed = expected[0, 1, :, 0, 0] >= 0
            found = torch.stack([torch.stack(layer) for layer in plan.kv])
            assert torch.equal(found[:, :, computed], expected[:, :, computed])


# --- the last key that each row sees -------------------------------------------------------------


@pytest.mark.parametrize("mask", ["exact", "bottom_right"])
@settings(deadline=None)
@given(data=st.data())
def test_the_last_key_of_each_kept_row(mask: str, data: st.DataObject) -> None:
    """Its own position; or, as in the paper's code, as if the kept rows were the prompt's last."""
    lens = data.draw(
        st.lists(st.tuples(st.integers(1, 12), st.integers(0, 20)), min_size=1, max_size=4)
    )
    starts, requests = [0], []
    positions: list[int] = []
    for index, (count, before) in enumerate(lens):
        if index % 2 == 0:
            plan = BlendPlan((), BlendSettings(mask=mask))
            requests.append(StepRequest(plan, starts[-1], before, count, CPU))
        positions += range(before, before + count)
        starts.append(starts[-1] + count)
    rows = subset(data, range(starts[-1])) or [0]
    step = BlendStep(requests, starts, "auto")
    first = [sum(row < start for row in rows) for start in starts]
    places = RowPlaces(
        step,
        torch.tensor(rows),
        torch.tensor([positions[row] for row in rows]),
        torch.tensor(first, dtype=torch.int32),
    )

    class Stock:
        query_start_loc = torch.tensor(starts, dtype=torch.int32)
        seq_lens = torch.tensor([count + before for count, before in lens], dtype=torch.int32)

    expected = []
    for index, row in enumerate(rows):
        owner = sum(row >= start for start in starts) - 1
        if mask == "bottom_right" and owner % 2 == 0:
            expected.append(sum(lens[owner]) - (first[owner + 1] - index))
        else:
            expected.append(positions[row])
    assert last_keys(Stock, places).tolist() == expected

    # the same on a CPU: runs of rows, whose last row sees the run's last key
    run_first, length = virtual_requests(step, places.rows, Stock.query_start_loc[:-1].long())
    found = []
    for at, count in zip(run_first.tolist(), length.tolist(), strict=True):
        last = rows[at + count - 1]
        owner = sum(last >= start for start in starts) - 1
        seen = sum(lens[owner]) - (starts[owner + 1] - 1 - last)
        if mask == "bottom_right" and owner % 2 == 0 and last + 1 < starts[owner + 1]:
            found += expected[at : at + count]  # such a request's last row is the question's: kept
        else:
            found += range(seen - count, seen)
    assert found == expected
