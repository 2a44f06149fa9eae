"""Stored KV on the step's device, layer by layer; KV in host memory is read ahead of its use."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from vllm_blend.core import BlendStep, StepRequest, StoredKV
from vllm_blend.layers import LayerKV
from vllm_blend.models.clock import StageClock

AHEAD = 3
"""Layers of host KV that are on the device at once: one in use, one ready, one on its way."""


class StoredLayers:
    """Stored KV of a step's requests.

    KV on the device is handed out as it is. KV in host memory goes through a ring of AHEAD buffers on a
    stream of its own, beside the layers' compute; from pinned memory the host does not wait for it. Of
    KV that is still being loaded to host memory, only the layer that is needed is waited for.

    Args:
        requests: those with stored KV in this step.
        device: the step's.
        num_layers: of the model.
        first_layer: the first whose KV will be asked for.
        clock: measures the loads.
    """

    def __init__(
        self,
        requests: Sequence[StepRequest],
        device: torch.device,
        num_layers: int,
        first_layer: int,
        clock: StageClock,
    ) -> None:
        self._clock = clock
        self._on_host = [r for r in requests if device.type == "cuda" and _on_host(r, first_layer)]
        self._num_layers = num_layers
        self._next = first_layer
        if not self._on_host:
            return
        rows = sum(r.chunk_rows.numel() for r in self._on_host)
        example = self._on_host[0].windows[0][0].kv.described[first_layer][0]
        size = (AHEAD, 2, rows, *example.shape[1:])
        self._ring = torch.empty(size, dtype=example.dtype, device=device)
        self._stream = _copy_stream(device)
        self._ring.record_stream(self._stream)  # what was read ahead may never be asked for
        self._stream.wait_stream(torch.cuda.current_stream(device))  # the buffers may be in use yet
        self._ready = [torch.cuda.Event() for _ in range(AHEAD)]
        if self._has(first_layer):
            self._read(first_layer, first_layer + 1)

    def read_ahead(self, layer: int) -> None:
        """Starts to read ``layer`` and those after it, into the buffers of layers before it."""
        if self._on_host:
            self._stream.wait_stream(torch.cuda.current_stream(self._ring.device))
            self._read(layer, layer + AHEAD)

    def old_kv(self, request: StepRequest, layer: int) -> LayerKV:
        """K and V of the request's ``chunk_rows``; of the first layer, or one that is read ahead."""
        if request not in self._on_host:
            with self._clock.stage("load"):
                k, v = request.old_kv(layer)
                device = request.device
                return k.to(device), v.to(device)
        if layer >= self._next:
            self._read(layer, layer + 1)
        torch.cuda.current_stream(request.device).wait_event(self._ready[layer % AHEAD])
        start = 0
        for other in self._on_host:
            end = start + other.chunk_rows.numel()
            if other is request:
                k, v = self._ring[layer % AHEAD, :, start:end]
                return k, v
            start = end
        raise AssertionError("unreachable")

    def _has(self, layer: int) -> bool:
        """Whether a layer is in host memory."""
        return all(span.kv.has(layer) for r in self._on_host for span, _, _ in r.windows)

    def _read(self, first: int, end: int) -> None:
        """Reads ``first``, and of those behind it up to ``end`` the ones that are there."""
        end = min(end, self._num_layers)
        with torch.cuda.stream(self._stream), self._clock.stage("load"):
            for layer in range(max(self._next, first), end):
                if layer > first and not self._has(layer):
                    return
                row = 0
                for request in self._on_host:
                    for span, lo, hi in request.windows:
                        stored = slice(lo - span.start, hi - span.start)
                        target = self._ring[layer % AHEAD, :, row : row + hi - lo]
                        for part, source in zip(target, span.kv.layers[layer], strict=True):
                            part.copy_(source[stored], non_blocking=True)
                        row += hi - lo
                self._ready[layer % AHEAD].record(self._stream)
                self._next = layer + 1


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


def _on_host(request: StepRequest, layer: int) -> bool:
    return any(span.kv.described[layer][0].device.type == "cpu" for span, _, _ in request.windows)


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]
