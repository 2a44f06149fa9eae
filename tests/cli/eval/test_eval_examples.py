"""The scripts of the paper's data sets, and the small sets that they come with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_blend.cli.eval.data import read_examples
from vllm_blend.cli.eval.tasks import TASKS

ROOT = Path(__file__).parents[3]
NAMES = ("musique", "wikimqa", "samsum", "multinews")


@pytest.mark.parametrize("name", NAMES)
def test_a_set_of_our_own_stands_behind_each_script(name: str) -> None:
    examples = read_examples(ROOT / f"inputs/eval/{name}.json")
    assert len(examples) >= 3
    assert name in (ROOT / f"example/blend_{name}.py").read_text()
    assert len((ROOT / f"example/blend_{name}.py").read_text().splitlines()) < 70
    for example in examples:
        assert len(example.passages) >= 3
        assert all(len(p.text) > 150 for p in example.passages)
        if TASKS[name].metric == "F1":
            texts = [p for p in example.passages if example.answers[0] in f"{p.title} {p.text}"]
            assert texts, example.question


def test_a_script_runs_out_of_the_box(smollm2: Path, tmp_path: Path) -> None:
    command = [sys.executable, "example/blend_samsum.py", "--limit", "1", "--max-passages", "3"]
    options = ["--output", str(tmp_path), "--methods", "reuse", "--policies", "ahead", "--ratios", "1"]
    result = subprocess.run(
        command + options, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "| samsum | `reuse` | 1 |" in result.stdout
    assert "100%" in result.stderr  # the progress bar
    summaries = {row["method"]: row for row in json.loads((tmp_path / "summary.json").read_text())}
    assert list(summaries) == ["full", "reuse", "ahead@1"]
    assert summaries["ahead@1"]["same"] == 1.0 and summaries["ahead@1"]["kl"]["value"] < 1e-4
    assert summaries["reuse"]["kl"]["value"] > 1e-3
