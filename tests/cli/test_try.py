"""``vllm-blend try`` on the inputs' questions, with the embedded model."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from serving import sample
from traces import write
from typer.testing import CliRunner

from vllm_blend.cli import trial
from vllm_blend.cli.app import app
from vllm_blend.cli.settings import read_settings
from vllm_blend.server.config import ServerSettings


def call(*arguments: Any) -> Any:
    result = CliRunner().invoke(app, ["try", *map(str, arguments)])
    gc.collect()  # its engine
    return result


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = [dict(zip(("chunks", "question"), sample(number), strict=True)) for number in (1, 2, 3)]
    return write(tmp_path / "prompts.jsonl", rows)


@pytest.mark.slow
def test_answers_settings_and_a_recommendation(
    smollm2: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "WORTH", 0.0)  # times decide no test
    out, results = tmp_path / "blend.yaml", tmp_path / "results"
    options = ["--policies", "static", "--ratios", "0.3,0.5", "--max-tokens", "8", "--results", results]
    engine = ["--", "--dtype", "float32"]
    result = call(smollm2, prompts, *options, "--quality", 0.3, "--out", out, "--json", *engine)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["recommended"] and found["recovered"] >= 0.3
    assert found["method"] in ("static@0.3:behind=harvested", "static@0.5:behind=harvested")
    assert len(found["prompts"]) == 3
    for one in found["prompts"]:
        assert one["full"]["answer"] and one["kl"] >= 0 and one["reused"] > one["tokens"] / 2
        assert one["same"] == (one["full"]["answer"] == one["blended"]["answer"])
    served = ServerSettings.from_mapping(read_settings(str(out)))
    assert served.blend.policy == "static" and served.blend.recomp_ratio in (0.3, 0.5)
    assert set(yaml.safe_load(out.read_text())) == {"additional-config"}

    # what was tried is not tried again; a quality that nothing has is found wrong, and nothing written
    lines = (results / "results.jsonl").read_text().count("\n")
    out.unlink()
    result = call(smollm2, prompts, *options, "--quality", 1.0, "--out", out, *engine)
    assert result.exit_code == 1, result.output
    assert "Not recommended: no policy removes 100%" in result.stdout and "KL" in result.stdout
    assert not out.exists()
    assert (results / "results.jsonl").read_text().count("\n") <= lines + 3


def test_settings_are_what_vllm_s_own_parser_takes(tmp_path: Path) -> None:
    from vllm_blend.cli.engine_args import parse

    values = {"policy": "static", "recomp_ratio": 0.16}
    for name in ("blend.yaml", "blend.json"):
        trial.write_settings(tmp_path / name, values)
        assert read_settings(str(tmp_path / name)) == values
    found = parse(["--model", "m", "--config", str(tmp_path / "blend.yaml")])
    assert found.additional_config == {"vllm_blend": values}
    text = (tmp_path / "blend.json").read_text()
    assert parse(["--additional-config", text]).additional_config == {"vllm_blend": values}


@pytest.mark.parametrize(
    ("line", "options", "said"),
    [
        ('{"prompt": "a"}', [], "prompt 1 of"),
        ('{"chunks": ["a"], "question": "b"}', ["--policies", "statik"], "policy is 'statik'"),
        ('{"chunks": ["a"], "question": "b"}', ["--ratios", "8%"], "expected numbers from 0 to 1"),
        ('{"chunks": ["a"], "question": "b"}', ["--quality", "2"], "less than or equal to 1"),
        ('{"chunks": ["a"], "question": "b"}', ["--", "--nonsense"], "unrecognized arguments"),
    ],
)
def test_wrong_calls(tmp_path: Path, line: str, options: list[str], said: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line + "\n")
    result = call("MODEL", path, *options)
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.stderr.replace("│", " ").split())
