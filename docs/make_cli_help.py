"""Writes cli_help.md: what each command of ``vllm-blend`` says to ``--help``, and to a wrong call.

python docs/make_cli_help.py            # writes docs/cli_help.md
python docs/make_cli_help.py --check    # exits with 1 if it is not up to date
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.pop("FORCE_COLOR", None)  # all of these are read when typer is imported
os.environ.pop("GITHUB_ACTIONS", None)
os.environ.pop("PY_COLORS", None)
os.environ["COLUMNS"] = os.environ["TERMINAL_WIDTH"] = "100"

import typer.main
from click.testing import CliRunner

from vllm_blend.cli.app import app

PATH = Path(__file__).with_name("cli_help.md")
WRONG_CALLS = {
    "demo": "--recomp-ratio 8",
    "serve": "MODEL --settings '{\"recomp_ratio\": 8}'",
    "doctor": "http://127.0.0.1:8000",
    "try": "MODEL nowhere.jsonl",
    "warm": "passages.jsonl",
    "simulate": "nowhere.jsonl MODEL",
    "report": "",
    "bench serve": "nowhere.jsonl",
    "store ls": "nowhere",
    "store stat": "redis://127.0.0.1:none/0",
    "store verify": "",
    "store repair": "chunks --tier tape",
    "store purge": "chunks --older-than soon",
    "eval run": "--task trivia",
    "eval tune": "--quality much",
    "eval across": "kl nowhere --methods reuse",
    "eval compare": "nowhere --methods static hkvd",
    "eval worst": "nowhere",
    "eval report": "--task musique --data nowhere.json",
}
"""The arguments of a wrong call, by command."""


def commands() -> Iterator[str]:
    """Their names, those in groups after their group's."""
    for name, command in typer.main.get_command(app).commands.items():
        inner = getattr(command, "commands", None)
        yield from [name] if inner is None else (f"{name} {one}" for one in inner)


def said(arguments: str) -> tuple[str, int]:
    """What a call prints, to both outputs, and its exit code."""
    result = CliRunner().invoke(typer.main.get_command(app), arguments, prog_name="vllm-blend")
    lines = [line.rstrip() for line in result.output.strip("\n").splitlines()]
    return "\n".join(lines).strip("\n"), result.exit_code


def page() -> str:
    names = list(commands())
    if set(names) != set(WRONG_CALLS):
        raise SystemExit(
            f"{__file__}: of {sorted(set(names) ^ set(WRONG_CALLS))} no wrong call is known"
        )
    lines = [
        "# Every command's help",
        "",
        "What each command says to `--help`, and to a wrong call. What they are for: [cli.md](cli.md).",
        "Made by `python docs/make_cli_help.py`; do not edit.",
        "",
    ]
    for name in names:
        lines += [f"## {name}", "", "```", f"$ vllm-blend {name} --help", said(f"{name} --help")[0]]
        wrong = f"{name} {WRONG_CALLS[name]}".strip()
        text, code = said(wrong)
        lines += ["```", "", "```", f"$ vllm-blend {wrong}", text, "$ echo $?", str(code), "```", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    if "--check" in sys.argv:
        if PATH.read_text(encoding="utf-8") != page():
            sys.exit("docs/cli_help.md is not up to date: run python docs/make_cli_help.py")
    else:
        PATH.write_text(page(), encoding="utf-8")
