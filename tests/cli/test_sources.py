"""Data sets as a source of texts: saved ones, folders of files, and what is wrong with others."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
from typer.testing import CliRunner

from vllm_blend.cli.app import app
from vllm_blend.cli.sources import read_texts

ROWS = {"text": ["one", " ", "two"], "parts": [["a", "b"], [], ["c"]], "number": [1, 2, 3]}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    both = datasets.DatasetDict(
        train=datasets.Dataset.from_dict(ROWS),
        test=datasets.Dataset.from_dict({"text": ["three"], "parts": [["d"]], "number": [4]}),
    )
    both.save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


def test_a_saved_data_set(saved: Path) -> None:
    name = f"hf:{saved}"
    assert list(read_texts(name)) == ["one", "two"]
    assert list(read_texts(name, split="test")) == ["three"]
    assert list(read_texts(name, column="parts")) == ["a", "b", "c"]
    assert list(read_texts(f"{name}/train")) == ["one", "two"]  # one split alone


def test_a_folder_of_parquet_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "files").mkdir()
    datasets.Dataset.from_dict(ROWS).to_parquet(tmp_path / "files/train.parquet")
    assert list(read_texts(f"hf:{tmp_path}/files")) == ["one", "two"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--split", "dev"], "has no split 'dev'; it has: train, test"),
        (["--column", "body"], "has no column 'body'; it has: text, parts, number"),
        (["--column", "number"], "row 0 of"),
    ],
)
def test_wrong_calls(saved: Path, options: list[str], said: str) -> None:
    assert said in told(saved, *options)


def test_a_data_set_that_is_not_there(tmp_path: Path) -> None:
    assert "cannot be loaded: " in told(tmp_path / "nothing")


def test_without_the_package(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "needs the package datasets: pip install datasets" in told(saved)


def told(name: Any, *options: str) -> str:
    """What a wrong call says."""
    result = CliRunner().invoke(app, ["warm", f"hf:{name}", "--url", "http://x", *options])
    assert result.exit_code == 2, result.output
    return " ".join(result.stderr.replace("│", " ").split())
