"""Threads beside a model that is bound to one CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, threading
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # as OpenMP does
from vllm_blend.core.cpus import use_others
found = []
def work(frees):
    if frees: use_others()
    found.append(len(os.sched_getaffinity(0)))
for frees in (False, True):
    thread = threading.Thread(target=work, args=(frees,))
    thread.start(), thread.join()
print(found, len(os.sched_getaffinity(0)))
"""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads cannot be bound here")
@pytest.mark.parametrize("bound", [False, True])
def test_a_thread_leaves_the_cpu_that_openmp_bound_the_model_to(bound: bool) -> None:
    num_cpus = len(os.sched_getaffinity(0))
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("GOMP", "KMP", "OMP_PROC"))}
    if bound:
        environment["GOMP_CPU_AFFINITY"] = "0"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
    )
    # without OpenMP's word it is somebody's choice, and stays
    assert done.stdout.strip() == f"[1, {max(num_cpus - 1, 1) if bound else 1}] 1"
