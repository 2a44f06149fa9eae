"""A copy from a GPU of two runs of memory that do not lie behind one another.

torch takes such a copy apart, or makes it by way of memory of its own, for which the host waits. A
GPU's copy engine makes it at once.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


def copy_both(target: torch.Tensor, source: torch.Tensor, stream: torch.cuda.Stream) -> None:
    """Launches a copy; the memory of both must stay until it is made.

    Args:
        target: ``[2, ...]`` in page-locked memory, each half contiguous.
        source: the same shape and type on a GPU, each half contiguous.
        stream: the one that makes the copy; it is the current one.

    Raises:
        RuntimeError: CUDA refuses it.
    """
    runtime = _runtime()
    if runtime is None:
        for half, other in zip(target, source, strict=True):
            half.copy_(other, non_blocking=True)
        return
    size = source.element_size()
    (error,) = runtime.cudaMemcpy2DAsync(
        target.data_ptr(),
        target.stride(0) * size,
        source.data_ptr(),
        source.stride(0) * size,
        source[0].numel() * size,
        2,
        runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost,
        stream.cuda_stream,
    )
    if error != runtime.cudaError_t.cudaSuccess:
        raise RuntimeError(f"cudaMemcpy2DAsync: {error.name}")


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
