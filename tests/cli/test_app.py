"""What all commands have in common, and the evaluation's, which parse their own arguments."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from vllm_blend.cli.app import app
from vllm_blend.cli.eval.app import COMMANDS
from vllm_blend.compat.version import package_version

NAMES = ("demo", "doctor", "report", "serve", "simulate", "try", "warm")


GROUPS = (("store",), ("bench",), ("bench", "serve"), ("eval",), ())


@pytest.mark.parametrize("arguments", [*((name,) for name in NAMES), *GROUPS])
def test_help_has_examples(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*arguments, "--help"])
    assert result.exit_code == 0 and "Examples:" in result.stdout


def test_the_version_is_the_package_s() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout.strip()) == (0, package_version())


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "/nowhere"],
        ["try", "/nowhere", "p.jsonl"],
        ["simulate", "p.jsonl", "/nowhere"],
        ["demo", "--model", "/nowhere"],
        ["warm", "p.jsonl", "--model", "/nowhere"],
        ["bench", "serve", "p.jsonl", "--model", "/nowhere"],
    ],
)
def test_a_model_s_folder_that_is_not_there_is_a_wrong_call(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and "/nowhere is not there" in result.stderr


def test_an_unknown_command_is_a_wrong_call() -> None:
    result = CliRunner().invoke(app, ["docter"])
    assert result.exit_code == 2 and "No such command" in result.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_of_the_evaluation_has_its_own_help(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = CliRunner().invoke(app, ["eval", name, "--help"])
    assert result.exit_code == 0
    assert f"usage: vllm-blend eval {name} " in result.stdout


def test_a_wrong_call_of_the_evaluation_is_one() -> None:
    assert CliRunner().invoke(app, ["eval", "cli"]).exit_code == 2
    assert CliRunner().invoke(app, ["eval"]).exit_code == 2
    result = CliRunner().invoke(app, ["eval", "tune", "--quality", "much"])
    assert result.exit_code == 2 and "--quality" in result.stderr


def test_the_module_is_the_command_and_loads_no_engine_for_its_help() -> None:
    code = (
        "import sys; sys.argv = ['vllm-blend', '--help']\n"
        "import runpy\n"
        "try:\n    runpy.run_module('vllm_blend', run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "loaded = {'torch', 'transformers', 'vllm'} & set(sys.modules)\n"
        "assert not loaded, f'the help loads {loaded}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Usage: vllm-blend" in done.stdout


def test_completion_is_offered() -> None:
    # as a shell asks for it; --show-completion looks for the shell that started it
    shell = {"_VLLM_BLEND_COMPLETE": "source_bash"}
    result = CliRunner().invoke(app, [], env=shell, prog_name="vllm-blend")
    assert result.exit_code == 0 and "vllm_blend" in result.stdout.lower().replace("-", "_")
