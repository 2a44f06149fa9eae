"""Stored KV gets to the GPU layer by layer, and stays until it is read; by stand-ins for streams."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from engines import Engine, plan_for, run
from streams import ORDERS, Device

from vllm_blend.attention.base import Fusion, StoredSegments
from vllm_blend.attention.cpu import CPUBlendImpl
from vllm_blend.core.kv import WIDEST_LOAD, KVShape, StoredKV
from vllm_blend.core.layers import LayerKV
from vllm_blend.core.plans import BlendPlan, ChunkSpan
from vllm_blend.core.settings import BlendSettings
from vllm_blend.core.stage_clock import StageClock
from vllm_blend.core.step import BlendStep, StepRequest
from vllm_blend.model import kv_loader
from vllm_blend.store.arena import Arena
from vllm_blend.store.fp8 import Fp8Layers, scale_bytes
from vllm_blend.store.record import PAGE
from vllm_blend.store.streaming_layers import ChunkLost, StreamingKV, StreamingLayers

CPU = torch.device("cpu")


def test_memory_of_an_aborted_request_is_not_given_away_before_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, device = Device(monkeypatch), torch.device("cpu")
    gates = [False, False]  # the copies of each step
    in_flight, arena = kv_loader.InFlight(), Arena(2 * PAGE, pinned=False)
    extents = []
    for step in range(2):
        gpu.copies.launch(lambda: None, lambda step=step: gates[step])
        extent = arena.allocate(PAGE)
        assert extent is not None
        tensor = arena.tensor(extent, 2 * 4 * 8).view(torch.float32).view(2, 2, 4)
        plan = BlendPlan((ChunkSpan(1, StoredKV(((tensor, tensor),))),), BlendSettings())
        in_flight.hold(BlendStep([StepRequest(plan, 0, 0, 3, device)], [0, 3], "auto"), device)
        extents.append(extent)
    del tensor, plan
    for extent in extents:
        arena.free(extent)
    assert arena.allocate(PAGE) is None
    in_flight.release()
    assert arena.allocate(PAGE) is None
    gates[0] = True
    gpu.run_what_can()
    in_flight.release()
    assert arena.allocate(PAGE) is not None
    assert arena.allocate(PAGE) is None


NUM_LAYERS = 9
SHAPE = (2, 8)  # heads and their size: 32 bytes a head in fp32


class OnGPU(StoredKV):
    """Stands for KV that a kernel can read where it lies."""

    def addresses(self, start: int) -> npt.NDArray[np.int64]:
        return np.array([[t[start].data_ptr() for t in layer] for layer in self.layers])


class Widened(Sequence[LayerKV]):
    """Like KV in fp8: made when it is asked for, each time."""

    def __init__(self, layers: tuple[LayerKV, ...]) -> None:
        self.kept, self.described = layers, layers

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, index: Any) -> Any:
        return self.kept[index][0].clone(), self.kept[index][1].clone()


def make_layers(
    num_tokens: int, seed: int, joint: bool, shape: tuple[int, int] = SHAPE
) -> tuple[LayerKV, ...]:
    """K and V of each layer; ``joint``: behind one another in the same memory."""
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(NUM_LAYERS, 2, num_tokens, *shape, generator=generator)
    return tuple((k, v) if joint else (k.clone(), v.clone()) for k, v in kv)


def in_eight_bits(layers: tuple[LayerKV, ...]) -> Fp8Layers:
    count = len(layers[0][0])
    shape = KVShape(NUM_LAYERS, *SHAPE, torch.float32)
    row = 2 * (scale_bytes(shape.of(count)) + math.prod(shape.of(count)))
    kept = Fp8Layers(torch.zeros(NUM_LAYERS * row, dtype=torch.uint8), shape, count)
    for index, (k, v) in enumerate(layers):
        kept.write(index, k, v)
    return kept


def make_requests(kinds: Sequence[str]) -> tuple[list[StepRequest], list[StreamingLayers]]:
    """Two requests with a chunk of each kind; the second one's window begins within a chunk. They have
    the same one where its kind is "shared"."""
    requests, late, row = [], [], 0
    for number, cut in enumerate((0, 4)):
        spans, start = [], 2
        for index, kind in enumerate(kinds):
            layers = make_layers(3 + 2 * index, 10 * number + index, joint=kind != "apart")
            kv: StoredKV = OnGPU(layers) if kind == "gpu" else StoredKV(layers)
            if kind == "late":
                late.append(StreamingLayers(layers, "late", 0))
                kv = StreamingKV(late[-1])
            elif kind == "widened":
                kv = StoredKV(Widened(layers))
            elif kind == "fp8":
                kv = StoredKV(in_eight_bits(layers))
            elif kind == "late fp8":
                late.append(StreamingLayers(in_eight_bits(layers), "late", 0))
                kv = StreamingKV(late[-1])
            elif kind == "shared" and number:
                kv = requests[0].plan.spans[index].kv
            spans.append(ChunkSpan(start, kv))
            start = spans[-1].end + 1
        plan = BlendPlan(tuple(spans), BlendSettings())
        requests.append(StepRequest(plan, row, cut, start - cut, torch.device("cpu")))
        row += start - cut
    return requests, late


def expected_kv(request: StepRequest, layer: int) -> LayerKV:
    """What is stored, of each row of ``chunk_rows``."""
    parts = []
    for span, lo, hi in request.windows:
        layers = span.kv.layers
        k, v = getattr(layers, "tensors", layers)[layer]
        parts.append((k[lo - span.start : hi - span.start], v[lo - span.start : hi - span.start]))
    return torch.cat([k for k, _ in parts]), torch.cat([v for _, v in parts])


def at(address: int, num_tokens: int, shape: tuple[int, int] = SHAPE) -> torch.Tensor:
    """What lies at an address now, in fp32."""
    memory = (ctypes.c_float * (num_tokens * shape[0] * shape[1])).from_address(address)
    return torch.frombuffer(memory, dtype=torch.float32).view(num_tokens, *shape).clone()


KINDS = [
    ["joint"],
    ["apart", "joint"],
    ["gpu"],
    ["gpu", "joint", "widened"],
    ["fp8"],
    ["joint", "fp8", "gpu", "fp8"],
    ["late"],
    ["late fp8", "apart"],
    ["late", "apart", "gpu", "late fp8", "widened", "joint", "fp8"],
    ["joint", "shared", "gpu", "shared"],
]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
@pytest.mark.parametrize("first_layer", [0, 1, 2])
def test_every_layer_is_read_as_it_is_stored(
    monkeypatch: pytest.MonkeyPatch, kinds: list[str], order: str, first_layer: int
) -> None:
    """Whatever order the streams allow: a policy's look at the check layer, then a scatter a layer."""
    device = Device(monkeypatch)
    requests, late = make_requests(kinds)
    stored = kv_loader.StoredLayers(requests, CPU, NUM_LAYERS, first_layer, StageClock())
    segments = stored.segments(requests)
    assert segments is not None
    read: list[tuple[torch.Tensor, torch.Tensor]] = []

    def look(request: StepRequest, layer: int) -> None:
        old_kv = stored.old_kv(request, layer)
        device.main.launch(
            lambda: read.extend(
                zip([t.clone() for t in old_kv], expected_kv(request, layer), strict=True)
            )
        )

    def scatter(layer: int) -> None:
        for request in requests:
            k, v = torch.empty(2, request.num_rows, *SHAPE)
            for segment in stored.segments([request]) or []:
                rows = slice(
                    segment.row - request.row, segment.row - request.row + segment.end - segment.start
                )
                k[rows] = at(int(segment.addresses[layer, 0]), segment.end - segment.start)
                v[rows] = at(int(segment.addresses[layer, 1]), segment.end - segment.start)
                assert segment.position - request.position == rows.start
            rows = request.chunk_rows - request.row
            read.extend(zip((k[rows], v[rows]), expected_kv(request, layer), strict=True))

    for layer in range(first_layer, NUM_LAYERS):
        for layers in late:  # just in time: a wait for a later layer would raise
            while layers.arrived <= layer:
                layers.arrive()
        if layer == first_layer and len(kinds) == 1:  # views: read when the stream gets there
            look(requests[0], layer)
        stored.read(layer)
        device.main.launch(lambda layer=layer: scatter(layer))
        stored.done(layer)
        device.main.launch(lambda: None)  # the layer itself
    device.run(ORDERS[order])
    assert len(read) >= 4 * (NUM_LAYERS - first_layer)
    for found, expected in read:
        assert torch.equal(found, expected)
    assert all(int(a) % WIDEST_LOAD == 0 for s in segments for a in s.addresses.flatten())


@pytest.mark.parametrize("end", [None, NUM_LAYERS - 2])
def test_a_layer_is_copied_once_and_as_far_ahead_as_the_ring_is_deep(
    monkeypatch: pytest.MonkeyPatch, end: int | None
) -> None:
    """And not behind the last layer that will be asked for."""
    device = Device(monkeypatch)
    requests, _ = make_requests(["joint", "apart"])

    def copied() -> int:
        count = len(device.launched)
        device.launched.clear()
        return count

    stored = kv_loader.StoredLayers(requests, CPU, NUM_LAYERS, 1, StageClock(), end_layer=end)
    num_layers = NUM_LAYERS if end is None else end
    # K and V at once where they lie behind one another; of the second request's first chunk, only the
    # end is in its window
    a_layer = (1 + 2) + (2 + 2)
    assert copied() == 0  # what the step itself needs goes first
    stored.begin()
    assert copied() == a_layer
    stored.begin()
    stored.old_kv(requests[0], 1)
    assert copied() == 0
    for layer in range(1, num_layers):
        stored.read(layer)
        stored.old_kv(requests[1], layer)
        assert copied() == 0
        stored.done(layer)
        left = num_layers - 1 - layer
        assert (
            copied()
            == min(left, kv_loader.AHEAD if layer == 1 else left + 1 > kv_loader.AHEAD) * a_layer
        )


def test_what_prompts_share_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where both have all of it in their windows; of the first chunk the second has the end alone."""
    device = Device(monkeypatch)
    requests, _ = make_requests(["shared", "shared", "joint"])
    stored = kv_loader.StoredLayers(requests, CPU, NUM_LAYERS, 1, StageClock())
    stored.begin()
    whole, end, shared, others = 1, 2, 1, 2
    assert len(device.launched) == whole + end + shared + others
    copied = [segment.addresses.tolist() for segment in stored.segments(requests) or []]
    assert copied[1] == copied[4] and copied[0] != copied[3] and copied[2] != copied[5]


def test_copies_wait_for_what_was_launched_before_the_step_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device(monkeypatch)
    ready = {"what wrote the KV": False, "layer 0": False}
    device.main.launch(lambda: None, lambda: ready["what wrote the KV"])
    after = kv_loader.began(CPU)
    device.main.launch(lambda: None, lambda: ready["layer 0"])
    kv_loader.StoredLayers(make_requests(["joint"])[0], CPU, NUM_LAYERS, 1, StageClock()).begin(after)
    device.run_what_can()
    assert device.launched and not device.copied
    ready["what wrote the KV"] = True
    device.run_what_can()
    assert len(device.copied) == len(device.launched)
    assert device.main.work


def test_no_stream_waits_for_more_than_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies for a layer run as soon as its buffer is free, whatever the layers still compute."""
    device = Device(monkeypatch)
    requests, _ = make_requests(["joint"])
    stored = kv_loader.StoredLayers(requests, CPU, NUM_LAYERS, 1, StageClock())
    gates = dict.fromkeys(range(NUM_LAYERS), False)
    for layer in range(1, 4):
        stored.read(layer)
        stored.done(layer)
        device.main.launch(lambda: None, lambda layer=layer: gates[layer])  # the layer itself

    per_layer = len(device.launched) // 6

    def copied() -> int:
        device.run_what_can()
        return len(device.copied) // per_layer

    assert copied() == 4  # layer 1 still runs; its own buffer holds layer 4
    gates[1] = True
    assert copied() == 5
    gates[2] = True
    assert copied() == 6
    assert device.main.work and not device.copies.work


def test_the_host_is_asked_for_no_layer_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    Device(monkeypatch)
    requests, late = make_requests(["late", "joint"])
    stored = kv_loader.StoredLayers(requests, CPU, NUM_LAYERS, 1, StageClock())
    with pytest.raises(ChunkLost, match="layer 0 did not arrive"):
        stored.read(1)
    for layers in late:
        layers.arrive()
        layers.arrive()
    stored.read(1)
    stored.done(1)
    with pytest.raises(ChunkLost, match="layer 2 did not arrive"):
        stored.read(2)


def test_small_heads_are_no_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    layers = make_layers(5, 0, True, (3, 2))
    plan = BlendPlan((ChunkSpan(1, StoredKV(layers)),), BlendSettings())
    request = StepRequest(plan, 0, 0, 7, torch.device("cpu"))
    stored = kv_loader.StoredLayers([request], CPU, NUM_LAYERS, 1, StageClock())
    assert stored.segments([request]) is None
    stored.read(1)
    k, v = stored.old_kv(request, 1)
    device.run(ORDERS["main first"])
    assert torch.equal(k, layers[1][0]) and torch.equal(v, layers[1][1])


def test_on_a_cpu_nothing_is_copied() -> None:
    requests, _ = make_requests(["joint"])
    stored = kv_loader.StoredLayers(requests, CPU, NUM_LAYERS, 1, StageClock())
    stored.read(1)
    assert stored.segments(requests) is None
    span = requests[0].windows[0][0]
    assert stored.old_kv(requests[0], 1)[0].data_ptr() == span.kv.layers[1][0].data_ptr()
    stored.done(1)


def fuse_segments(self: Any, layer: Any, kv_cache: torch.Tensor, fusion: Fusion) -> torch.Tensor | None:
    """What ``segment_scatter`` does, by the CPU's own fuse."""
    stored = fusion.old_kv
    if isinstance(stored, StoredSegments):
        num_segments, size = (
            int(stored.tables.totals[stored.layer, 0]),
            (self.num_kv_heads, self.head_size),
        )
        table = stored.tables.segments[:num_segments, :3].tolist()
        addresses = stored.tables.addresses[stored.layer].tolist()
        parts, positions, rows = [], [], []
        for (count, position, row), pair in zip(table, addresses, strict=False):
            parts.append([at(address, count, size) for address in pair])
            positions.append(torch.arange(position, position + count))
            rows.append(torch.arange(row, row + count))
        k, v = (torch.cat(part) for part in zip(*parts, strict=True))
        slots = stored.slot_mapping[torch.cat(rows)]
        fusion = replace(fusion, old_kv=(k, v), positions=torch.cat(positions), slot_mapping=slots)
    return CPUBlendImpl.fuse(self, layer, kv_cache, fusion)


@pytest.mark.parametrize("copies", ["early", "late"])
@pytest.mark.parametrize("segments", [False, True])
def test_an_engine_answers_through_the_ring_as_without_it(
    llama: Engine, monkeypatch: pytest.MonkeyPatch, segments: bool, copies: str
) -> None:
    """Requests in a step that choose before layer 0, at a check layer, and twice; two are asked before.
    Then those that choose before layer 0 alone."""
    chunks = [llama.ids(count, count) for count in (5, 30, 11)]
    question = llama.ids(4, 1)
    settings: list[dict[str, Any]] = [
        dict(recomp_ratio=0.3, policy="ahead*hkvd"),
        dict(recomp_ratio=0.3),
        dict(check_layers=[1, 3], recomp_ratios=[0.6, 0.2]),
        dict(recomp_ratio=0.3, policy="ahead"),
        dict(recomp_ratio=0.3, policy="random"),
    ]
    plans = [plan_for(llama, chunks, question[: n % 3], question, **s) for n, s in enumerate(settings)]
    prompts, kvs = zip(*plans, strict=True)
    steps = [(list(prompts[first:]), list(kvs[first:])) for first in (0, 3)]
    expected = [run(llama, *step) for step in steps]
    device = Device(monkeypatch, copies)
    if segments:
        impl = type("Segments", (CPUBlendImpl,), {"fuses_segments": True, "fuse": fuse_segments})
        for layer in llama.model.layers:
            monkeypatch.setattr(layer.self_attn.attn.impl, "__class__", impl)
    for step, answers in zip(steps, expected, strict=True):
        device.launched.clear()
        assert run(llama, *step) == answers
        assert device.launched


def test_chunks_on_the_host_and_on_the_device_are_put_together() -> None:
    """Torch's device without data stands for a GPU, to which it cannot be joined unmoved."""
    device = torch.device("meta")
    there = StoredKV(tuple((k.to(device), v.to(device)) for k, v in make_layers(3, 1, True)))
    spans = (ChunkSpan(1, there), ChunkSpan(4, StoredKV(make_layers(5, 2, True))))
    request = StepRequest(BlendPlan(spans, BlendSettings()), 0, 0, 10, device)
    for kv in request.old_kv(1):
        assert (kv.device.type, kv.shape) == ("meta", (8, *SHAPE))
