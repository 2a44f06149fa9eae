"""Arguments and options that several commands have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_blend.cli.output import wrong_call
from vllm_blend.cli.prompts import Row, read_rows

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else.")]

Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]", help="Arguments of vllm serve.")
]

Prompts = Annotated[Path, typer.Argument(help="Prompts, as lines of JSON (.jsonl, .jsonl.gz).")]

Limit = Annotated[int | None, typer.Option(min=1, help="So many of the prompts.")]

PATH_STARTS = ("/", "./", "../", "~")
"""Of a model that is a folder; anything else may be a name of a hub."""


def folder_or_name(model: str | None) -> str | None:
    """A model as it was given; a folder that is not there is a wrong call."""
    if model is not None and model.startswith(PATH_STARTS) and not Path(model).expanduser().exists():
        raise typer.BadParameter(f"{model} is not there; expected a model's folder, or a name")
    return model


Model = Annotated[str, typer.Argument(help="Model folder or name.", callback=folder_or_name)]

Settings = Annotated[
    str | None,
    typer.Option(
        "--settings",
        metavar="FILE|JSON",
        help="A server's settings: a JSON or YAML file, or JSON; what stands under vllm_blend, or all "
        "of --additional-config.",
    ),
]

KEY_ENV = "OPENAI_API_KEY"
"""The environment variable that has the server's API key, where it wants one."""

Url = Annotated[
    str | None,
    typer.Option("--url", help=f"A running server, e.g. http://127.0.0.1:8000 (its key: ${KEY_ENV})."),
]


def rows_or_wrong_call(path: Path, limit: int | None, argument: str) -> list[Row]:
    """The prompts of a file, for a command that cannot go on without them."""
    try:
        return read_rows(path, limit)
    except ValueError as error:
        raise wrong_call(str(error), argument) from None
