"""The CPUs for what is done beside the model."""

from __future__ import annotations

import os
from contextlib import suppress

BINDINGS = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PROC_BIND")
"""Variables by which OpenMP binds a process's first thread to one CPU."""


def _others() -> set[int]:
    if not hasattr(os, "sched_getaffinity"):
        return set()
    own = os.sched_getaffinity(0)
    if any(name in os.environ for name in BINDINGS):
        with suppress(OSError):
            return (os.sched_getaffinity(os.getppid()) - own) or own
    return own


_OTHERS = _others()


def use_others() -> None:
    """Lets the calling thread run on the process's CPUs, but for that of the model's thread.

    OpenMP binds the thread that runs the model to one CPU, as vLLM tells it to where the model runs on
    CPUs. Threads that this one starts inherit that: whatever they do, the model would wait for.
    """
    if _OTHERS:
        with suppress(OSError):
            os.sched_setaffinity(0, _OTHERS)
