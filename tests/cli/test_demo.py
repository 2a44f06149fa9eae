"""``vllm-blend demo`` as a user runs it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_blend.cli import demo
from vllm_blend.cli.app import app

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_demo_answers_most_questions_right_and_reuse_loses_one_at_most(
    smollm2: Path, tmp_path: Path
) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "vllm_blend", "demo"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
        | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found = re.search(r"full prefill (\d+) of 10, blended (\d+) of 10", result.stdout)
    assert found, result.stdout
    full, blended = map(int, found.groups())
    assert full >= 7 and blended >= full - 1
    assert "\x1b" not in result.stdout  # no colour where it is piped
    assert len(re.findall(r"^\d+\. \S", result.stdout, re.M)) == 10
    assert f"vllm-blend serve {smollm2} --dtype float32\n" in result.stdout
    assert "computing the KV of" in result.stderr and "Warning" not in result.stderr


def test_its_questions_are_the_inputs() -> None:
    samples = [demo.read_sample(path) for path in demo.own_inputs()]
    assert [path.name for path in demo.own_inputs()] == [f"{number}.json" for number in range(1, 11)]
    assert all(len(sample.chunks) >= 5 and sample.answer for sample in samples)


def test_what_is_right() -> None:
    sample = demo.Sample(("a",), "Question: Who was it?\nAnswer:", "Ada Quill")
    row = demo.Row(
        sample, 1000, 90, 2.0, demo.Answer("It was ada quill.", 3.0), demo.Answer("No.", 0.5)
    )
    assert row.is_right(row.full) and not row.is_right(row.blended)
    assert not row.is_right(demo.Answer("No.\nAda Quill", 1.0)), "the first line counts"
    assert not row.is_right(demo.Answer("Ada Quillson", 1.0)), "whole words count"
    assert (sample.question, row.speedup) == ("Who was it?", 6.0)
    told = demo.summary([row])
    assert (told["right_full_prefill"], told["right_blended"], told["computed_share"]) == (1, 0, 0.09)


@pytest.mark.parametrize(
    ("values", "said"),
    [("{", "expected an object with chunk_num"), ({"chunk_num": 1, "query": "a"}, "KeyError('0')")],
)
def test_wrong_inputs(tmp_path: Path, values: object, said: str) -> None:
    path = tmp_path / "my.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    result = CliRunner().invoke(app, ["demo", "--inputs", str(path)])
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.stderr.replace("│", " ").split())
