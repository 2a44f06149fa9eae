"""Where the time of one step goes on a GPU, from torch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

TO_HOST = "copies to the host"
KINDS = {
    "attention": ("flash::", "_sparse_attention", "fmha", "attention"),
    "stored KV": ("segment_scatter", "shift_scatter", "Memcpy HtoD"),
    TO_HOST: ("Memcpy DtoH",),
    "matrix products": ("nvjet", "gemm", "cutlass", "cublas"),
    "norms, rotary, activation, KV cache": (
        "rms_norm",
        "_typeConvert",
        "rotary",
        "act_and_mul",
        "reshape_and_cache",
    ),
}
OTHER = "the choice and the rest"


def timeline(run: Callable[[], object], trace: str | None = None) -> dict[str, float]:
    """Milliseconds of one call of ``run``, by kind of kernel.

    Kernels on two streams count twice, so kinds may add up to more than ``GPU from first to last``. The
    profiler itself slows the host.

    Args:
        run: the step.
        trace: where to write the profiler's own trace (Chrome's format), if anywhere.
    """
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
    if trace is not None:
        profile.export_chrome_trace(trace)
    events = list(profile.events() or [])
    kernels = [e for e in events if e.device_type.name == "CUDA"]
    host = [e for e in events if e.device_type.name == "CPU"]
    start = min(e.time_range.start for e in kernels)
    end = max(e.time_range.end for e in kernels)
    found = {kind: 0.0 for kind in [*KINDS, OTHER]}
    for kernel in kernels:
        found[kind_of(kernel.name)] += kernel.time_range.elapsed_us() / 1e3
    found["GPU idle"] = idle([e for e in kernels if kind_of(e.name) != TO_HOST]) / 1e3
    found["GPU from first to last"] = (end - start) / 1e3
    found["host before"] = (start - min(e.time_range.start for e in host)) / 1e3
    found["host after"] = (max(e.time_range.end for e in host) - end) / 1e3
    return found


def kind_of(name: str) -> str:
    for kind, parts in KINDS.items():
        if any(part in name for part in parts):
            return kind
    return OTHER


def idle(kernels: list[Any]) -> float:
    """Microseconds between the first and the last of ``kernels`` in which none ran."""
    total = 0.0
    until = min(e.time_range.start for e in kernels)
    for kernel in sorted(kernels, key=lambda e: e.time_range.start):
        total += max(0.0, kernel.time_range.start - until)
        until = max(until, kernel.time_range.end)
    return total
