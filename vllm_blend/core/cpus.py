"""The CPUs for what is done beside the model."""

from __future__ import annotations

import os
from contextlib import suppress

BINDINGS = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PROC_BIND")
"""Variables by which OpenMP binds a process's first thread to one CPU."""


def _all() -> set[int]:
    if not hasattr(os, "sched_getaffinity"):
        return set()
    found = os.sched_getaffinity(0)
    if any(name in os.environ for name in BINDINGS):
        with suppress(OSError):
            found |= os.sched_getaffinity(os.getppid())
    return found


_CPUS = _all()


def use_all() -> None:
    """Lets the calling thread run on all of the process's CPUs.

    OpenMP binds the thread that runs the model to one of them, as vLLM tells it to on a CPU. Threads
    that this one starts inherit that: whatever they do, the model would wait for.
    """
    if _CPUS:
        with suppress(OSError):
            os.sched_setaffinity(0, _CPUS)
