"""Layers captured one by one, and replayed; torch's graphs are stood in for by a list of calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.forward_context import get_forward_context

from vllm_blend.models import graph as module
from vllm_blend.models.graph import MAX_GRAPHS, ROW_STEPS, AfterCheckGraphs
from vllm_blend.select.asked import Asked

SIZE, NUM_LAYERS, CHECK_LAYER, NUM_SLOTS = 4, 6, 1, 9000


class Cuda:
    """Stands for ``torch.cuda``: one stream at a time, and room for ``most_rows`` rows in a graph.

    Attributes:
        log: of what happened, in order.
    """

    def __init__(self, patch: pytest.MonkeyPatch, most_rows: int = ROW_STEPS[-1]) -> None:
        self.stream, self.most_rows = "main", most_rows
        self.log: list[str] = []
        self.capturing: Graph | None = None
        patch.setattr(torch.cuda, "Stream", lambda: "captures")
        patch.setattr(torch.cuda, "stream", self._on)
        patch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(self))
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
        for name in ("synchronize", "empty_cache"):
            patch.setattr(torch.cuda, name, lambda name=name: self.log.append(name))

    @contextmanager
    def _on(self, stream: str) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before


class Graph(TorchDispatchMode):
    """Notes the calls of a capture; a replay makes them again, into the tensors of the first time."""

    def __init__(self, cuda: Cuda) -> None:
        super().__init__()
        self.cuda = cuda
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert (pool, capture_error_mode) == ("pool", "thread_local")
        assert self.cuda.stream == "captures" and self.cuda.capturing is None
        self.cuda.capturing = self
        self.__enter__()

    def capture_end(self) -> None:
        assert self.cuda.capturing is self
        self.cuda.capturing = None
        self.__exit__(None, None, None)
        self.cuda.log.append("captured")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, found))
        return found

    def replay(self) -> None:
        self.cuda.log.append("replayed")
        for func, args, kwargs, first in self.calls:
            found = func(*args, **kwargs)
            if isinstance(found, torch.Tensor) and found.data_ptr() != first.data_ptr():
                first.copy_(found)


class Attention(torch.nn.Module):
    """Writes a key for each row, and lets each see one; a block of the cache holds a key."""

    def __init__(self, index: int, at: Any) -> None:
        super().__init__()
        self.index, self.layer_name, self.head_size = index, f"layer {index}", SIZE
        self.kv_cache = torch.zeros(NUM_SLOTS + 1, SIZE)  # the last takes what is not to be written
        self.impl = SimpleNamespace(fuses_segments=True, at=at, caches=self.caches, scale=0.5)

    @staticmethod
    def caches(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return kv_cache[:, None, None], kv_cache[:, None, None]

    def forward(self, query: torch.Tensor) -> torch.Tensor:
        context = get_forward_context()
        self.kv_cache[context.slot_mapping[self.layer_name]] = query + self.index
        return self.kv_cache[context.attn_metadata[self.layer_name].keys]


class Layer:
    """A decoder layer: a norm that adds in place, as vLLM's does, and one key for each row to see."""

    def __init__(self, cuda: Cuda, index: int) -> None:
        self.cuda, self.index = cuda, index
        attn = Attention(index, self.at)
        self.cache = attn.kv_cache
        self.self_attn = SimpleNamespace(attn=attn)

    @staticmethod
    def at(metadata: Any, positions: torch.Tensor, starts: torch.Tensor, blocks: torch.Tensor) -> Any:
        """Keys of rows that a request has; the others see none."""
        there = torch.arange(len(positions)) < starts[-1]
        return SimpleNamespace(keys=torch.where(there, positions, NUM_SLOTS))

    def __call__(self, positions: Any, hidden: Any, residual: Any) -> tuple[Any, Any]:
        if self.index == 2 and self.cuda.capturing and len(hidden) > self.cuda.most_rows:
            raise torch.cuda.OutOfMemoryError("no memory")
        residual.add_(hidden)
        hidden.copy_(residual * 0.5)
        seen = self.self_attn.attn(hidden)
        return (hidden + seen).tanh() + positions.unsqueeze(1) * 1e-3, residual


class Frame:
    """What graphs ask of a frame: some rows of some requests."""

    def __init__(self, num_rows: int, num_reqs: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = torch.arange(num_rows)
        self.positions = torch.randint(0, 3000, (num_rows,), generator=generator)
        slots = torch.randperm(NUM_SLOTS, generator=generator)
        self.slots, self.stored = slots[:num_rows], slots[num_rows : 2 * num_rows]
        self.hidden = torch.randn(num_rows, SIZE, generator=generator)
        self.old = torch.randn(NUM_LAYERS, num_rows, SIZE, generator=generator)
        starts = torch.linspace(0, num_rows, num_reqs + 1).int()
        self.metadata = SimpleNamespace(
            positions=self.stored, query_start_loc=starts, block_table=torch.zeros(num_reqs, 2).int()
        )
        settings = SimpleNamespace(check_layers=(CHECK_LAYER,))
        self.step = SimpleNamespace(collected=[], blended=[SimpleNamespace(settings=settings)])

    def share_tables(self, attns: Any) -> bool:
        return True

    def describe(self, attn: Any) -> Any:
        return self.metadata

    def kept_slots(self, attn: Any) -> torch.Tensor:
        return self.slots

    def kept_context(self) -> Any:
        return SimpleNamespace(attn_metadata={}, slot_mapping={})

    def fuse(self, layer: Layer) -> None:
        layer.cache[self.stored] = self.old[layer.index]

    def asked(self, num_asked: int) -> Asked:
        """The last rows; they see keys in any of the slots."""
        rows = torch.arange(len(self.rows) - num_asked, len(self.rows)).repeat(32)[:32]
        last_keys = self.positions[rows]
        last_keys[num_asked:] = -1
        blocks = torch.arange(NUM_SLOTS).roll(-int(self.slots[0]))[:3000].int()
        return Asked(rows, last_keys, blocks, torch.zeros(len(blocks)))

    def one_by_one(
        self, layers: list[Layer], asked: Asked | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layers' output for these rows, without graphs."""
        hidden, residual = self.hidden.clone(), torch.ones_like(self.hidden)
        context = self.kept_context()
        for layer in layers[CHECK_LAYER : NUM_LAYERS - 1]:
            self.fuse(layer)
            name = layer.self_attn.attn.layer_name
            starts = self.metadata.query_start_loc
            context.attn_metadata[name] = layer.at(None, self.stored, starts, None)
            context.slot_mapping[name] = self.slots
            listening = nullcontext() if asked is None else asked.listening(layer.self_attn.attn)
            with module.override_forward_context(context), listening:
                hidden, residual = layer(self.positions, hidden, residual)
        return hidden, residual


def make(cuda: Cuda, max_num_tokens: int, ahead: bool) -> tuple[AfterCheckGraphs, list[Layer]]:
    layers = [Layer(cuda, index) for index in range(NUM_LAYERS)]
    return AfterCheckGraphs(layers, max_num_tokens, 100, ahead), layers


def prepare(graphs: AfterCheckGraphs, frame: Any, asked: Asked | None = None) -> Any:
    residual = torch.ones_like(frame.hidden)
    return graphs.prepare(frame, CHECK_LAYER, frame.hidden.clone(), residual, asked)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_replay_is_what_the_layers_compute(monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    """Steps of all sizes in turn, each padded, each with KV of its own fused before every layer."""
    cuda = Cuda(monkeypatch)
    graphs, layers = make(cuda, 1000, ahead)
    steps = [(5, 1), (128, 8), (129, 2), (700, 9), (5, 3), (1000, 60), (700, 64), (1, 1)]
    for seed, (num_rows, num_reqs) in enumerate(steps):
        frame = Frame(num_rows, num_reqs, seed)
        replay = prepare(graphs, frame)
        assert replay.layers == range(CHECK_LAYER, NUM_LAYERS - 1)
        for index in replay.layers:
            frame.fuse(layers[index])
            hidden, residual = replay.run(index)
        caches = [layer.cache[frame.slots].clone() for layer in layers]
        for found, expected in zip((hidden, residual), frame.one_by_one(layers), strict=True):
            assert torch.equal(found, expected)
        for layer, cache in zip(layers, caches, strict=True):
            assert torch.equal(layer.cache[frame.slots], cache)
    assert len(graphs) == (16 if ahead else 4)
    assert cuda.log.count("captured") == len(graphs) * (NUM_LAYERS - 1 - CHECK_LAYER)
    assert cuda.log.count("synchronize") == cuda.log.count("empty_cache") == len(graphs)
    assert cuda.log.count("replayed") == len(steps) * (NUM_LAYERS - 1 - CHECK_LAYER)
    assert cuda.stream == "main"


def test_rows_that_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured apart from the same rows that are not, for requests and numbers of rows in turn."""
    graphs, layers = make(Cuda(monkeypatch), 1000, ahead=False)
    for seed, (num_rows, num_asked) in enumerate([(60, 32), (40, 7), (1, 1), (200, 20), (50, 30)]):
        frame = Frame(num_rows, 1, seed)
        assert prepare(graphs, frame).received is None
        replay = prepare(graphs, frame, frame.asked(num_asked))
        for index in replay.layers:
            frame.fuse(layers[index])
            hidden, _ = replay.run(index)
        alone = frame.asked(num_asked)
        assert torch.equal(hidden, frame.one_by_one(layers, alone)[0])
        assert torch.equal(replay.received, alone.received)
        heard = num_asked * len(replay.layers)
        assert replay.received.sum().item() == pytest.approx(heard, rel=1e-5)
    assert [(shape.num_rows, shape.asked) for shape in graphs._graphs] == [
        (256, False),
        (256, True),
        (128, False),
        (128, True),
    ]


@pytest.mark.parametrize("most_rows", [0, ROW_STEPS[2], ROW_STEPS[-2], ROW_STEPS[-1]])
def test_what_there_is_room_for_is_captured(monkeypatch: pytest.MonkeyPatch, most_rows: int) -> None:
    """A capture that fails at its second layer leaves no part of that shape."""
    cuda = Cuda(monkeypatch, most_rows)
    longest = ROW_STEPS[-3] - 1
    graphs, _ = make(cuda, longest, ahead=True)
    replay = prepare(graphs, Frame(5, 1, 0))
    assert (replay is None) == (most_rows == 0)
    rows = [n for n in ROW_STEPS if n <= min(most_rows, longest + 1)]
    assert {(s.num_rows, s.num_reqs) for s in graphs._graphs} == {(n, r) for n in rows for r in (8, 64)}
    assert all(len(kept) == NUM_LAYERS - 1 - CHECK_LAYER for kept in graphs._graphs.values())
    assert graphs._max_rows == (most_rows if most_rows < longest else ROW_STEPS[-1])
    assert len(ROW_STEPS) * 2 <= MAX_GRAPHS
    assert cuda.stream == "main" and cuda.capturing is None
    if most_rows < longest:
        count = cuda.log.count("captured")
        assert prepare(graphs, Frame(most_rows + 1, 1, 0)) is None
        assert cuda.log.count("captured") == count  # it is not tried again


def test_shapes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_GRAPHS", 2)
    graphs, _ = make(Cuda(monkeypatch), 1000, ahead=False)
    for num_rows in (100, 200, 100, 300):
        assert prepare(graphs, Frame(num_rows, 1, 0)) is not None
    assert [shape.num_rows for shape in graphs._graphs] == [128, 384]


def test_steps_that_cannot_be_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, layers = make(Cuda(monkeypatch), 1000, ahead=False)
    good = Frame(5, 1, 0)
    assert prepare(graphs, good) is not None

    def refused(**changes: Any) -> bool:
        frame = Frame(5, 1, 0)
        vars(frame).update(changes)
        return prepare(graphs, frame) is None

    assert refused(rows=torch.arange(0))
    assert refused(rows=torch.arange(ROW_STEPS[-1] + 1))
    assert refused(share_tables=lambda attns: False)
    assert refused(step=SimpleNamespace(collected=[1], blended=good.step.blended))
    later = SimpleNamespace(settings=SimpleNamespace(check_layers=(1, 3)))
    assert refused(step=SimpleNamespace(collected=[], blended=[later]))
    assert graphs.prepare(good, NUM_LAYERS - 1, good.hidden, good.hidden) is None  # type: ignore[arg-type]
    layers[3].self_attn.attn.impl.fuses_segments = False
    assert refused()
