"""Python's search for garbage at the end of an engine's own process, and of a program's."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import subprocess
import sys
from pathlib import Path

from vllm_blend.plugin.process_end import end_without_collection


def frozen_at_end(path: str) -> None:
    atexit.register(lambda: Path(path).write_text(str(gc.get_freeze_count() > 0)))
    for _ in range(2):
        end_without_collection()


def test_a_spawned_process_collects_nothing_at_its_end(tmp_path: Path) -> None:
    told = tmp_path / "told"
    process = multiprocessing.get_context("spawn").Process(target=frozen_at_end, args=(str(told),))
    process.start()
    process.join(60)
    assert process.exitcode == 0 and told.read_text() == "True"


def test_a_program_ends_as_without_us(tmp_path: Path) -> None:
    told = tmp_path / "told"
    code = f"from test_process_end import frozen_at_end; frozen_at_end({str(told)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=True, timeout=60)
    assert told.read_text() == "False"
