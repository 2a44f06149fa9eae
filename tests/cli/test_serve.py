"""What ``vllm-blend serve`` starts: the command that takes its process's place."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from typer.testing import CliRunner

from vllm_blend.cli.app import app


class Started(Exception):
    """Instead of a server."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Commands and environments of servers that would have been started."""
    found: list[Any] = []

    def start(program: str, command: list[str], environment: dict[str, str]) -> None:
        found.append((command, environment))
        raise Started

    monkeypatch.setattr(os, "execvpe", start)
    return found


@pytest.mark.parametrize("between", [["--"], []])
def test_options_of_vllm_are_taken_with_two_hyphens_before_them_or_without(
    started: list[Any], between: list[str]
) -> None:
    options = ["--port", "8001", "--max-model-len", "4096", "--enforce-eager"]
    call = ["serve", "m", "--settings", '{"page": true}', *between, *options]
    assert isinstance(CliRunner().invoke(app, call).exception, Started)
    ((command, environment),) = started
    assert command[2:] == [
        "vllm_blend.cli.vllm_command",
        "serve",
        "m",
        *options,
        "--additional-config",
        json.dumps({"vllm_blend": {"page": True}}),
    ]
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in environment


def test_the_command_is_quiet_and_the_server_is_not(
    started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    assert isinstance(CliRunner().invoke(app, ["serve", "m"]).exception, Started)
    ((_, environment),) = started
    assert "VLLM_LOGGING_LEVEL" not in environment


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["m", "--prot", "8001"], "unrecognized arguments: --prot"),
        (["--port", "8001", "m"], "the model comes before vLLM's options"),
        (["m", "--settings", '{"polcy": "static"}'], "unknown key 'polcy'"),
        ([], "Missing argument"),
    ],
)
def test_wrong_calls(started: list[Any], arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["serve", *arguments])
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.stderr.replace("│", " ").split())
    assert not started
