"""The time line of one request whose KV comes from disk: reads, checks, waits, copies and layers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

from vllm_blend.core.kv import StoredKV
from vllm_blend.core.layers import LayerKV
from vllm_blend.store import ChunkKey, DiskTier, load
from vllm_blend.store.record import Layout, checksum
from vllm_blend.store.tier import Source


@dataclass
class Trace:
    """Events of one request.

    Attributes:
        events: ``(kind, chunk, layer, start, end)``, in seconds from the request's start. Kinds: "read"
            and "check" of a chunk's layer, "wait" of the layer loop for it, "compute" of a layer.
    """

    num_chunks: int
    num_layers: int
    events: list[tuple[str, int, int, float, float]] = field(default_factory=list)
    chunks: dict[bytes, int] = field(default_factory=dict)
    start: float = 0.0
    _marks: list[tuple[int, Any, Any]] = field(default_factory=list)
    _base: Any = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, kind: str, chunk: int, layer: int, start: float, end: float) -> None:
        with self._lock:
            self.events.append((kind, chunk, layer, start - self.start, end - self.start))

    @contextmanager
    def recording(self, tier: TracedDisk) -> Iterator[None]:
        """One request, from its first look-up to its first token."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            self._base = torch.cuda.Event(enable_timing=True)
            self._base.record()
            torch.cuda.synchronize()
        self.start, tier.trace = time.perf_counter(), self
        with patch.object(load, "checksum", self._checksum):
            yield
        tier.trace = None
        self.add("all", -1, -1, self.start, time.perf_counter())
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for layer, start, end in self._marks:
            self.add("compute", -1, layer, self._time(start), self._time(end))

    def mark(self) -> Any:
        """Now, on the device."""
        if self._base is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def computed(self, layer: int, start: Any) -> None:
        self._marks.append((layer, start, self.mark()))

    def save(self, path: str, title: str) -> None:
        events = sorted(self.events, key=lambda event: event[3])
        with open(path, "w") as file:
            json.dump({"title": title, "chunks": self.num_chunks, "events": events}, file)

    def _checksum(self, key: ChunkKey, layer: int, *parts: memoryview) -> bytes:
        start = time.perf_counter()
        found = checksum(key, layer, *parts)
        self.add("check", self.chunks[key.digest], layer, start, time.perf_counter())
        return found

    def _time(self, mark: Any) -> float:
        return mark if self._base is None else self.start + self._base.elapsed_time(mark) / 1e3


class TracedDisk(DiskTier):
    """A disk tier that notes its reads of layers."""

    trace: Trace | None = None

    def open(self, key: ChunkKey) -> Any:
        source = super().open(key)
        if source is None or self.trace is None:
            return source
        chunk = self.trace.chunks.setdefault(key.digest, len(self.trace.chunks))
        return TracedSource(source, Layout.of(key), self.trace, chunk)


class TracedSource:
    def __init__(self, source: Source, layout: Layout, trace: Trace, chunk: int) -> None:
        self._source, self._layout, self._trace, self._chunk = source, layout, trace, chunk
        self.num_bytes = source.num_bytes

    def read(self, offset: int, into: memoryview) -> int:
        start = time.perf_counter()
        count = self._source.read(offset, into)
        end = time.perf_counter()
        if offset >= self._layout.preamble_bytes:
            layer = (offset - self._layout.preamble_bytes) // self._layout.layer_bytes
            self._trace.add("read", self._chunk, layer, start, end)
        return count

    def close(self) -> None:
        self._source.close()


class WatchedLayers(Sequence[LayerKV]):
    """A chunk's layers; notes how long whoever asks for one waits."""

    def __init__(self, layers: Any, chunk: int, trace: Trace) -> None:
        self._layers, self._chunk, self._trace = layers, chunk, trace
        self.described = layers.described

    @property
    def arrived(self) -> int:
        return int(self._layers.arrived)

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, index: Any) -> Any:
        start = time.perf_counter()
        found = self._layers[index]
        self._trace.add("wait", self._chunk, index, start, time.perf_counter())
        return found


def watched(kv: StoredKV, chunk: int, trace: Trace) -> StoredKV:
    return StoredKV(WatchedLayers(kv.layers, chunk, trace))


@contextmanager
def layer_hooks(layers: Sequence[torch.nn.Module], trace: Trace) -> Iterator[None]:
    """Notes when each layer is computed."""
    starts: dict[int, Any] = {}

    def before(index: int) -> None:
        starts[index] = trace.mark()

    handles = []
    for index, layer in enumerate(layers):
        handles += [
            layer.register_forward_pre_hook(lambda *_, index=index: before(index)),
            layer.register_forward_hook(lambda *_, index=index: trace.computed(index, starts[index])),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


COLORS = {"read": "#4c72b0", "check": "#dd8452", "wait": "#c44e52", "compute": "#55a868"}


def draw(source: str, target: str) -> None:
    """Draws a saved time line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    with open(source) as file:
        trace = json.load(file)
    figure, axes = plt.subplots(figsize=(10, 3.6), layout="constrained")
    rows = ["layers computed", "layer loop waits", *(f"chunk {i}" for i in range(trace["chunks"]))]
    end = 0.0
    for kind, chunk, layer, start, stop in trace["events"]:
        if kind == "all":
            end = stop
            continue
        row = {"compute": 0, "wait": 1}.get(kind, 2 + chunk)
        axes.broken_barh(
            [(1e3 * start, 1e3 * (stop - start))],
            (row + (0.15 if kind == "check" else -0.4), 0.3 if kind == "check" else 0.8),
            facecolor=COLORS[kind],
            alpha=1.0 if layer % 2 else 0.7,
            linewidth=0,
        )
    axes.axvline(1e3 * end, color="black", linewidth=1)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("ms from the request; the line: first token")
    axes.set_title(trace["title"], fontsize=10)
    axes.legend(
        handles=[Patch(color=color, label=kind) for kind, color in COLORS.items()],
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
    )
    figure.savefig(target)
