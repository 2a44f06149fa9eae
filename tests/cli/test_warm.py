"""What ``vllm-blend warm`` reads, and wrong calls of it; servers are in test_cli_server.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from servers import free_port
from typer.testing import CliRunner

from vllm_blend.cli.app import app
from vllm_blend.cli.sources import read_texts
from vllm_blend.cli.warm import Book


def test_texts_of_a_folder_and_of_lines(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name, text in (("b.txt", "two\n"), ("deep/c.md", "three"), ("a.txt", " "), ("d.pdf", "no")):
        (tmp_path / name).write_text(text)
    assert list(read_texts(str(tmp_path))) == ["two", "three"]
    lines = tmp_path / "t.jsonl"
    lines.write_text('{"text": "one"}\n\n"two"\n{"chunks": ["three", "four"], "question": "?"}\n')
    assert list(read_texts(str(lines))) == ["one", "two", "three", "four"]


def test_a_book_is_of_one_target(tmp_path: Path) -> None:
    Book(tmp_path / "done", "server").note(["one", "two"])
    assert "one" in Book(tmp_path / "done", "server")
    assert "one" not in Book(tmp_path / "done", "another server")
    assert "three" not in Book(tmp_path / "done", "server")
    nothing = Book(None, "server")
    nothing.note(["one"])
    assert "one" not in nothing


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "give --url, or --model"),
        (["--url", "http://x", "--model", "m"], "give --url, or --model"),
        (["--model", "m", "--settings", "{}"], "no store to write to"),
        (["--model", "m", "--settings", '{"polcy": 1}'], "unknown key 'polcy'"),
    ],
)
def test_wrong_calls(tmp_path: Path, options: list[str], said: str) -> None:
    (tmp_path / "a.txt").write_text("text")
    result = CliRunner().invoke(app, ["warm", str(tmp_path), *options])
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.stderr.replace("│", " ").split())


@pytest.mark.parametrize(("line", "said"), [("{", "is no JSON"), ('{"a": 1}', "expected a text")])
def test_lines_without_text(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "t.jsonl").write_text(line)
    result = CliRunner().invoke(app, ["warm", str(tmp_path / "t.jsonl"), "--url", "http://x"])
    assert result.exit_code == 2 and said in " ".join(result.stderr.replace("│", " ").split())


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    url = f"http://127.0.0.1:{free_port()}"
    result = CliRunner().invoke(app, ["warm", str(tmp_path), "--url", url])
    assert result.exit_code == 1 and "stopped after 0 texts" in result.stderr
