"""Stored KV on the step's device, layer by layer.

What a kernel can read where it lies, in the GPU's own memory, stays there. All other KV (in pinned or
pageable memory, on its way from a disk, kept in fp8) is copied through a ring of AHEAD buffers in the
GPU's memory, on a stream of its own beside the layers' compute. Copy engines do that from host memory:
they take no multiprocessor from the layers. KV in fp8 crosses in eight bits, and is widened on the GPU.

Who waits for whom, always on the GPU and by events, never the host:

    the first copies      for what was launched when they ``begin``: it may have written what they read
    copies of a layer     for `done` of the layer whose buffer they overwrite
    readers of a layer    for its copies
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from vllm_blend.core.kv import WIDEST_LOAD, StoredKV, concat_kv
from vllm_blend.core.layers import BlockLayers, LayerKV, NarrowLayers
from vllm_blend.core.stage_clock import StageClock
from vllm_blend.core.step import BlendStep, StepRequest

AHEAD = 3
"""Buffers of the ring: one in use, one ready, one on its way."""

STAGED = 2 * AHEAD + 4
"""What a step may hold on the GPU for blending, in units of one layer's K of all its rows: the ring; K
and V that are collected, or as they come in eight bits."""


@dataclass(frozen=True, eq=False)
class Window:
    """Consecutive stored tokens of a step.

    Attributes:
        kv: what they are a part of: its tokens ``[start, end)``.
        position: of the first one in its prompt.
        row: of the first one in the step.
        addresses: of the first K and the first V of each layer on the GPU, ``[num_layers, 2]``.
        places: K and V in each buffer of the ring, ``[2, num_tokens, num_kv_heads, head_size]``; none
            where they are read where they lie.
    """

    kv: StoredKV
    start: int
    end: int
    position: int
    row: int
    addresses: npt.NDArray[np.int64]
    places: tuple[torch.Tensor, ...] = ()

    def at(self, layer: int) -> LayerKV:
        """Its K and V on the GPU, ``[num_tokens, num_kv_heads, head_size]``; not copied."""
        k, v = self.places[layer % AHEAD] if self.places else self._source(layer)
        return k, v

    def wait(self, layer: int) -> None:
        """Waits for a layer of KV that comes late."""
        if (wait := getattr(self.kv.layers, "wait", None)) is not None:
            wait(layer + 1)

    @property
    def in_one_block(self) -> bool:
        """Whether it is all of a chunk whose layers are one tensor: a copy a layer brings K and V."""
        layers = self.kv.layers
        return (
            isinstance(layers, BlockLayers)
            and layers.block.is_contiguous()
            and (self.start, self.end) == (0, layers.block.shape[2])
            and layers.block.dtype == self.places[0].dtype
        )

    def copy(self, layer: int) -> None:
        """Launches the copies of a layer to its buffer; waits for KV that comes late."""
        place = self.places[layer % AHEAD]
        k, v = self._source(layer)
        if (both := joined(k, v)) is not None:
            _copy(place, both)
        else:
            _copy(place[0], k)
            _copy(place[1], v)

    def _source(self, layer: int) -> LayerKV:
        k, v = self.kv.layers[layer]
        if (self.start, self.end) == (0, len(k)):
            return k, v
        return k[self.start : self.end], v[self.start : self.end]


def joined(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor | None:
    """K and V as one tensor, ``[2, ...]``, where V lies right behind K in the same memory."""
    if (
        k.is_contiguous()
        and v.is_contiguous()
        and k.dtype == v.dtype
        and k.data_ptr() + k.nbytes == v.data_ptr()
        and k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    ):
        return k.as_strided((2, *k.shape), (k.numel(), *k.stride()))
    return None


class NarrowWindows:
    """Windows whose KV is kept in fewer bits: it is copied as it is kept, and a layer of all of them is
    widened at once, on the stream of the copies.

    Args:
        windows: in the order of their places.
        ring: their part of it, ``[AHEAD, 2 * num_tokens, num_kv_heads, head_size]``.
    """

    def __init__(self, windows: Sequence[Window], ring: torch.Tensor) -> None:
        self._windows, self._ring = windows, ring
        self._kept = []
        for window in windows:
            layers = _narrow(window.kv)
            assert layers is not None
            self._kept.append(layers.tokens(window.start, window.end).blocks())
        scales, values = self._kept[0]
        size = ring.shape[1:]
        self._scales = torch.empty((*size[:2], 1), dtype=scales.dtype, device=ring.device)
        self._values = torch.empty(size, dtype=values.dtype, device=ring.device)
        counts = [2 * scales.shape[2] for scales, _ in self._kept]
        self._places = [
            (scales.unflatten(0, (2, -1)), values.unflatten(0, (2, -1)))
            for scales, values in zip(
                self._scales.split(counts), self._values.split(counts), strict=True
            )
        ]

    def read(self, layer: int) -> None:
        """Launches the copies of a layer, and what widens it in its buffer."""
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for window, kept, places in zip(self._windows, self._kept, self._places, strict=True):
            window.wait(layer)
            for place, source in zip(places, (kept[0][layer], kept[1][layer]), strict=True):
                whole = source.is_contiguous()
                targets += [place] if whole else place.unbind(0)
                sources += [source] if whole else source.unbind(0)
        _copy_all(targets, sources)
        _widen(self._values, self._scales, self._ring[layer % AHEAD])


class StoredLayers:
    """Stored KV of a step's requests.

    On a CPU it is handed out as it is. Of KV that is still being loaded to host memory, only the layer
    that is needed is waited for. From pinned memory the host waits for no copy.

    Args:
        requests: those with stored KV in this step.
        device: the step's.
        num_layers: of the model.
        first_layer: the first whose KV will be asked for.
        clock: measures the loads.
        end_layer: no layer from this one on will be asked for; None: all may be.
    """

    def __init__(
        self,
        requests: Sequence[StepRequest],
        device: torch.device,
        num_layers: int,
        first_layer: int,
        clock: StageClock,
        end_layer: int | None = None,
    ) -> None:
        self._begun = False
        self._end = num_layers if end_layer is None else end_layer
        self._clock, self._device, self._num_layers = clock, device, num_layers
        self._windows: dict[StepRequest, list[Window]] = {}
        self._on_ring: list[Window] = []
        self._narrow: NarrowWindows | None = None
        self._next = first_layer  # to be copied
        if not requests or not _reads_ahead(device):
            return
        self._example = requests[0].windows[0][0].kv.described[first_layer][0]
        self._stream = _copy_stream(device)
        self._lay_out(requests)
        if self._on_ring:
            self._ready = [torch.cuda.Event() for _ in range(AHEAD)]
            self._done = [torch.cuda.Event() for _ in range(AHEAD)]  # nobody waits for one not recorded

    def begin(self, after: torch.cuda.Event | None = None) -> None:
        """Starts to read, after all that is launched by now, or by ``after``.

        What little the host sends to the device for a step goes first: behind the copies of a layer it
        would take as long as they do.
        """
        if self._begun or not self._on_ring:
            return
        self._begun = True
        if (event := after or began(self._device)) is not None:
            self._stream.wait_event(event)
        if self._has(self._next):
            self._read(self._next)

    def read(self, layer: int) -> None:
        """Lets the current stream wait for ``layer``."""
        if self._on_ring:
            self.begin()
            self._read(layer)
            self._wait(layer)

    def segments(self, requests: Sequence[StepRequest]) -> list[Window] | None:
        """All that they have stored, to be read with loads as wide as they come; None: no GPU can."""
        if not self._windows or self._example.shape[-1] * self._example.element_size() % WIDEST_LOAD:
            return None
        return [window for request in requests for window in self._windows[request]]

    def old_kv(self, request: StepRequest, layer: int) -> LayerKV:
        """K and V of the request's ``chunk_rows``; of the first layer, or one that is read ahead.

        To be read on the current stream, and before the layer is ``done``.
        """
        windows = self._windows.get(request)
        if windows is None:
            with self._clock.stage("load"):
                return request.old_kv(layer)
        self.read(layer)
        return concat_kv([window.at(layer) for window in windows])

    def done(self, layer: int) -> None:
        """To be called once all that reads ``layer`` is launched: its buffer is free after that, and is
        given to another layer."""
        if self._on_ring:
            self._done[layer % AHEAD].record(torch.cuda.current_stream(self._device))
            self._read_ahead(layer + 1, layer + 1 + AHEAD)

    def _lay_out(self, requests: Sequence[StepRequest]) -> None:
        """Finds each window's place: where it lies, or in the ring, once for all that share it."""
        found = [(request, *window) for request in requests for window in request.windows]
        parts = [(id(span.kv.layers), lo - span.start, hi - span.start) for _, span, lo, hi in found]
        lies_at = [span.kv.addresses(lo - span.start) for _, span, lo, _ in found]
        narrow = {id(span.kv.layers): _narrow(span.kv) is not None for _, span, _, _ in found}
        copied = dict.fromkeys(part for part, at in zip(parts, lies_at, strict=True) if at is None)
        copied = dict.fromkeys(sorted(copied, key=lambda part: not narrow[part[0]]))  # they come first
        ring, in_ring = self._places_in_ring([end - start for _, start, end in copied])
        place_of = dict(zip(copied, in_ring, strict=True))
        on_ring: dict[tuple[int, int, int], Window] = {}
        for (request, span, lo, hi), part, at in zip(found, parts, lies_at, strict=True):
            places: tuple[torch.Tensor, ...] = ()
            if at is None:
                places, at = place_of[part]
            window = Window(
                span.kv,
                start=lo - span.start,
                end=hi - span.start,
                position=lo,
                row=lo + request.shift,
                addresses=at,
                places=places,
            )
            self._windows.setdefault(request, []).append(window)
            if places:
                on_ring.setdefault(part, window)
        self._on_ring = [on_ring[part] for part in copied]
        count = sum(narrow[part[0]] for part in copied)
        if count:
            num_tokens = sum(end - start for _, start, end in [*copied][:count])
            with torch.cuda.stream(self._stream):
                self._narrow = NarrowWindows(self._on_ring[:count], ring[:, : 2 * num_tokens])
        wide = self._on_ring[count:]
        self._fast = [window for window in wide if window.in_one_block]
        self._others = [window for window in wide if not window.in_one_block]
        self._targets = [[window.places[i] for window in self._fast] for i in range(AHEAD)]

    def _places_in_ring(
        self, counts: Sequence[int]
    ) -> tuple[torch.Tensor, list[tuple[tuple[torch.Tensor, ...], npt.NDArray[np.int64]]]]:
        """Makes the ring. It, and of each window with so many tokens ``places`` and ``addresses``."""
        if not counts:
            return torch.empty(0), []
        # a row of K or V is a multiple of WIDEST_LOAD where segments are used, so each place is one
        size = (AHEAD, 2 * sum(counts), *self._example.shape[1:])
        with torch.cuda.stream(self._stream):  # memory that no layer in flight still uses
            ring = torch.empty(size, dtype=self._example.dtype, device=self._device)
        ring.record_stream(torch.cuda.current_stream(self._device))
        start, row = ring.data_ptr(), ring.stride(1) * ring.element_size()
        buffers = start + np.arange(self._num_layers)[:, None] % AHEAD * ring[0].nbytes
        found = []
        for part, count in zip(ring.split([2 * n for n in counts], dim=1), counts, strict=True):
            places = part.view(AHEAD, 2, count, *ring.shape[2:]).unbind(0)
            found.append((places, buffers + np.arange(2) * count * row))
            buffers = buffers + 2 * count * row
        return ring, found

    def _has(self, layer: int) -> bool:
        """Whether a layer is there to be copied."""
        return all(window.kv.has(layer) for window in self._on_ring)

    def _read_ahead(self, first: int, end: int) -> None:
        """Reads those of the layers that are there."""
        for layer in range(max(self._next, first), min(end, self._end)):
            if not self._has(layer):
                return
            self._read(layer)

    def _read(self, layer: int) -> None:
        """Launches the copies of a layer, if they are not yet."""
        if not self._next <= layer < self._end:
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._done[layer % AHEAD])
            with self._clock.stage("load"):
                if self._fast:  # a call for all of them: calls are what takes the host's time
                    sources = [w.kv.layers.block[layer] for w in self._fast]  # type: ignore[attr-defined]
                    _copy_all(self._targets[layer % AHEAD], sources)
                if self._narrow is not None:
                    self._narrow.read(layer)
                for window in self._others:
                    window.copy(layer)
            self._ready[layer % AHEAD].record(self._stream)
        self._next = layer + 1

    def _wait(self, layer: int) -> None:
        """Lets the current stream wait for the copies of a layer."""
        assert self._next - AHEAD <= layer < self._next, f"layer {layer} is not in the ring"
        torch.cuda.current_stream(self._device).wait_event(self._ready[layer % AHEAD])


class InFlight:
    """Keeps steps' stored KV until the GPU has read it.

    Nothing else knows when it has: of an aborted request every reference is gone at once, and the store
    gives memory of chunks that nobody holds to others.
    """

    def __init__(self) -> None:
        self._kv: deque[tuple[torch.cuda.Event, list[StoredKV]]] = deque()

    def hold(self, step: BlendStep, device: torch.device) -> None:
        """To be called when all of the step's reads are launched."""
        self.release()
        kv = [span.kv for request in step.blended for span, _, _ in request.windows]
        if kv:
            stream = torch.cuda.current_stream(device)
            stream.wait_stream(_copy_stream(device))
            self._kv.append((stream.record_event(), kv))

    def release(self) -> None:
        """Lets go of what is read; does not wait."""
        while self._kv and self._kv[0][0].query():
            self._kv.popleft()


def began(device: torch.device) -> torch.cuda.Event | None:
    """All that is launched by now; None where nothing is read ahead."""
    return torch.cuda.current_stream(device).record_event() if _reads_ahead(device) else None


def _reads_ahead(device: torch.device) -> bool:
    return device.type == "cuda"


def _copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    torch._foreach_copy_(targets, sources, non_blocking=True)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _widen(values: torch.Tensor, scales: torch.Tensor, target: torch.Tensor) -> None:
    from vllm_blend.ops.widen import widen  # needs Triton

    widen(values, scales, target)


def _narrow(kv: StoredKV) -> NarrowLayers | None:
    """Its layers, if they are kept in fewer bits; KV that comes late need not be there yet."""
    kept = getattr(kv.layers, "tensors", kv.layers)
    return kept if isinstance(kept, NarrowLayers) else None


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]
