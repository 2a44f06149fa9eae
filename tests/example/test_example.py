"""The loop of the paper's flags as a user runs it, and the inputs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_blend_script_prints_both_generations_and_json(smollm2: Path) -> None:
    command = [sys.executable, "example/blend.py", "--inputs", "inputs/1.json", "inputs/3.json"]
    result = subprocess.run(
        [*command, "--recomp-ratio", "1.0", "--max-tokens", "8"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    lines = result.stdout.splitlines()
    assert sum("cached generation, TTFT" in line for line in lines) == 2
    assert sum("normal generation, TTFT" in line for line in lines) == 2
    found = json.loads(lines[-1])
    assert [row["sample"] for row in found["samples"]] == ["1", "3"]
    for row in found["samples"]:
        assert row["cached"]["text"] == row["normal"]["text"]  # at ratio 1 nothing is approximate
        assert row["cached"]["ttft"] > 0
    assert "100%" in result.stderr  # the progress bar


def test_inputs_are_in_the_papers_format() -> None:
    for number in range(1, 11):
        sample = json.loads((ROOT / f"inputs/{number}.json").read_text())
        chunks = [sample[str(i)] for i in range(sample["chunk_num"])]
        assert 5 <= len(chunks) <= 10
        assert set(sample) == {"chunk_num", "query", "answer", *map(str, range(len(chunks)))}
        assert any(sample["answer"].lower() in chunk.lower() for chunk in chunks)
        assert sample["answer"].lower() not in sample["query"].lower()
