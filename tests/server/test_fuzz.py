"""Some requests of ``benchmarks/fuzz_server.py``, which is the long form."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fuzz_server.py"


@pytest.mark.slow
def test_badly_formed_and_ordinary_requests_in_a_crowd() -> None:
    command = [sys.executable, str(SCRIPT), "--requests", "300", "--seed", "1", "--concurrency", "16"]
    done = subprocess.run(command, capture_output=True, text=True)
    told = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stdout[-6000:]
    assert (told["failed"], told["dead"], told["differ"]) == (0, [], 0)
    assert {"/v1/completions 200", "/v1/chat/completions 200"} <= told["outcomes"].keys()
