"""Copies from a GPU of K and V, two runs of memory that do not lie behind one another.

torch takes such a copy apart, or makes it by way of memory of its own, for which the host waits. A
GPU's copy engine makes it at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

import torch


class _Run(NamedTuple):
    """A part's place in bytes: of layer 0's K, from layer to layer, from K to V; and the part's own,
    from its layer's first row on."""

    place: int
    to_next_layer: int
    to_v: int
    offset: int
    size: int


class StridedCopies:
    """Copies that each layer of a step makes, prepared once: at a layer, each call counts.

    Args:
        parts: each one's place in page-locked memory, ``[num_layers, 2, num_tokens, num_kv_heads,
            head_size]``, K and V of a layer each contiguous; and its first row among the layer's.
    """

    def __init__(self, parts: Iterable[tuple[torch.Tensor, int]]) -> None:
        self._parts = list(parts)
        self._runs = [_run_of(place, first) for place, first in self._parts]

    def launch(self, layer: int, rows: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Launches a layer's copies; the memory of both sides must stay until they are made.

        Args:
            rows: K and V on a GPU, ``[2, num_rows, num_kv_heads, head_size]``, each contiguous.
            stream: the one that makes the copies.

        Raises:
            RuntimeError: CUDA refuses it.
        """
        runtime = _runtime()
        if runtime is None:
            with torch.cuda.stream(stream):
                for place, first in self._parts:
                    for half, other in zip(place[layer], rows, strict=True):
                        half.copy_(other[first : first + len(half)], non_blocking=True)
            return
        copy, kind = runtime.cudaMemcpy2DAsync, runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        done, on = runtime.cudaError_t.cudaSuccess, stream.cuda_stream
        first_row, to_v = rows.data_ptr(), rows.stride(0) * rows.element_size()
        for run in self._runs:
            (error,) = copy(
                run.place + layer * run.to_next_layer,
                run.to_v,
                first_row + run.offset,
                to_v,
                run.size,
                2,
                kind,
                on,
            )
            if error != done:
                raise RuntimeError(f"cudaMemcpy2DAsync: {error.name}")


def _run_of(place: torch.Tensor, first: int) -> _Run:
    size, (to_next_layer, to_v, to_next_row, *_) = place.element_size(), place.stride()
    return _Run(
        place.data_ptr(),
        to_next_layer * size,
        to_v * size,
        first * to_next_row * size,
        place.shape[2] * to_next_row * size,
    )


@cache
def _runtime() -> Any:
    """CUDA's own; torch's builds for CUDA need it from 2.10 on. None: it is not installed, or finds no
    device."""
    try:
        from cuda.bindings import runtime

        error, _ = runtime.cudaGetDevice()
    except (ImportError, RuntimeError):
        return None
    return runtime if error == runtime.cudaError_t.cudaSuccess else None
