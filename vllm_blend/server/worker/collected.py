"""Where a chunk's K and V go while they are computed: on a GPU no layer of them stays behind.

A layer's rows are copied to host memory as attention hands them over, beside the layers that follow, so
the GPU holds a step's rows of three layers at most. What is computed for scores alone is compared with
what is stored, and not kept at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from vllm_blend.core.kv import KVShape, StoredKV
from vllm_blend.core.layers import BlockLayers
from vllm_blend.core.plans import LaunchCopies
from vllm_blend.core.static_scores import apart
from vllm_blend.server.worker.strided_copy import StridedCopies


class HostCopies:
    """Copies from a GPU to page-locked memory, on a stream of their own beside the layers' compute.

    Compute waits, on the GPU, for the copies of the layer two before, and before it reads what they
    wrote. The host waits for none.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._launched: deque[tuple[torch.cuda.Event, list[Any]]] = deque()
        self._computed = torch.cuda.Event()
        self._free: list[torch.cuda.Event] = []

    def prepared(self, parts: Iterable[tuple[torch.Tensor, int]]) -> LaunchCopies:
        """As ``Copies``'s.

        Few calls a layer, since a stream takes no more than some thousand copies that are not made:
        then the host waits for the GPU, and with it whoever else wants something of the engine.
        """
        return partial(self._launch, StridedCopies(parts))

    def _launch(self, copies: StridedCopies, layer: int, rows: torch.Tensor) -> None:
        compute = torch.cuda.current_stream(self._stream.device)
        while len(self._launched) > 1:
            event, _ = self._launched.popleft()
            compute.wait_event(event)
            self._free.append(event)
        self._computed.record(compute)
        self._stream.wait_event(self._computed)
        copies.launch(layer, rows, self._stream)
        event = self._free.pop() if self._free else torch.cuda.Event()
        event.record(self._stream)
        # held until compute has waited for the copies: then their memory may be used again
        self._launched.append((event, [rows, copies]))

    def end(self) -> torch.cuda.Event:
        """To be called once a chunk's copies are launched: what a host thread waits for that reads
        it."""
        done = torch.cuda.Event(blocking=True)
        done.record(self._stream)
        return done

    def join(self) -> None:
        """Lets what is launched from now on read what the copies wrote."""
        if self._launched:  # compute has waited for others, or they are done
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            self._free += [event for event, _ in self._launched]
            self._launched.clear()

    def release(self) -> None:
        """Lets go of rows that are copied; does not wait."""
        while self._launched and self._launched[0][0].query():
            self._free.append(self._launched.popleft()[0])


class HostRows:
    """K and V of all layers, in host memory.

    Args:
        block: ``[num_layers, 2, num_tokens, num_kv_heads, head_size]``.
        copies: for K and V that come from a GPU.
    """

    def __init__(self, block: torch.Tensor, copies: HostCopies | None = None) -> None:
        self._block = block
        self._copies = copies

    def copied(self, first: int, count: int) -> tuple[HostCopies, torch.Tensor] | None:
        """As ``Collected``'s."""
        if self._copies is None:
            return None
        return self._copies, self._block[:, :, first : first + count]

    def write(self, layer: int, first: int, k: torch.Tensor, v: torch.Tensor) -> None:
        places = self._block[layer, :, first : first + len(k)]
        for place, rows in zip(places, (k, v), strict=True):
            place.copy_(rows)

    def kv(self) -> StoredKV:
        """All of it."""
        return StoredKV(BlockLayers(self._block))


class Distances:
    """How far K and V of each token are from those that are stored (``core/static_scores.py``).

    Args:
        base: what is stored.
        device: of the K and V that come.
    """

    def __init__(self, base: StoredKV, shape: KVShape, device: torch.device) -> None:
        self._base = base
        size = shape.num_layers, 2, 2, base.num_tokens
        self._parts = torch.zeros(size, dtype=torch.float32, device=device)

    def copied(self, first: int, count: int) -> None:
        """Nothing is."""

    def write(self, layer: int, first: int, k: torch.Tensor, v: torch.Tensor) -> None:
        for stored, rows, parts in zip(
            self._base.layers[layer], (k, v), self._parts[layer], strict=True
        ):
            end = first + len(rows)
            moved, squares = apart(stored[first:end].to(rows.device, non_blocking=True), rows)
            parts[0, first:end], parts[1, first:end] = moved, squares

    def sums(self) -> torch.Tensor:
        """``[2 * num_layers, num_tokens + 1]`` float32 on the host, as ``distances`` gives them."""
        moved, squares = self._parts.flatten(0, 1).unbind(1)
        return torch.cat([moved, squares.sum(1, keepdim=True)], dim=1).cpu()
