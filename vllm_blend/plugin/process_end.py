"""How an engine's own processes end: without looking for garbage in all that they have loaded.

Python's end looks through every object several times, and frees each one: with torch's and vLLM's
modules that takes a spawned process two seconds of a core, and an engine waits for its workers before
it ends itself. vLLM's forked processes leave that out, since they end by ``os._exit``, and on ROCm an
engine that aborts its requests does (``EngineCoreProc.run_engine_core``); here so do all processes of
an engine that blends. Functions that are to run at a process's end do (what waits is written to the
store, logs are flushed), threads are joined, and the system takes the memory back.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing


def end_without_collection() -> None:
    """May be called again. A program that has its engine in its own process ends as without us."""
    if multiprocessing.parent_process() is not None:
        atexit.unregister(gc.freeze)
        atexit.register(gc.freeze)
