"""Tables for people, JSON for programs, and the three exit codes."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

FOUND = 1
"""The exit code of a command that found something wrong. (0: all is well; 2: the call was wrong.)"""


def help_text(text: str, *examples: str) -> str:
    """A command's help: paragraphs, and calls of it as they are typed."""
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    calls = "\n".join(f"  {example}" for example in examples)
    return "\n\n".join([*paragraphs, f"\b\nExamples:\n{calls}"])


def wrong_call(message: str, option: str | None = None) -> typer.BadParameter:
    """What to raise where the call itself is wrong: exit code 2, with the usage."""
    return typer.BadParameter(message, param_hint=option)


def found_wrong() -> typer.Exit:
    """What to raise where the command did its work and found something wrong."""
    return typer.Exit(FOUND)


def console(stderr: bool = False) -> Console:
    """As wide as the terminal, and 100 columns where there is none."""
    made = Console(stderr=stderr, highlight=False)
    if not made.is_terminal:
        made.width = int(os.environ.get("COLUMNS", 100))
    return made


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=1, default=str))


def print_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()
) -> None:
    """A table without frames.

    Args:
        numbers: columns that are set flush right.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, head in enumerate(heads):
        right = index in numbers
        table.add_column(head, justify="right" if right else "left", no_wrap=right)
    for row in rows:
        table.add_row(*map(escape, row))
    console().print(table)


def say(text: str) -> None:
    """A line for people; nothing in it is markup."""
    console().print(escape(text), soft_wrap=True)


def size(num_bytes: float) -> str:
    """In units of 1,000, as all sizes of this package."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def share(value: float) -> str:
    return f"{value:.0%}"


@contextmanager
def working(what: str) -> Iterator[None]:
    """Says on standard error that something takes its time, and what: at a terminal while it does."""
    shown = console(stderr=True)
    if not shown.is_terminal:
        shown.print(f"{what} ...", markup=False)
        yield
        return
    with shown.status(escape(what)):
        yield


def quiet_vllm() -> None:
    """Keeps vLLM's log off standard output, and it and torch's to errors; before they are imported."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for name in ("torch._library", "vllm.triton_utils"):  # this one speaks before vLLM sets up its log
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
