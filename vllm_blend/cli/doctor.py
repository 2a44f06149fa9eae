"""``vllm-blend doctor``: what is wrong here, and what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape

from vllm_blend.cli.checks.finding import Finding, Level, wrong
from vllm_blend.cli.options import Arguments, Json, Settings, Url
from vllm_blend.cli.output import (
    console,
    found_wrong,
    help_text,
    print_json,
    quiet_vllm,
    wrong_call,
)

MARKS = {Level.OK: "[green]ok[/]", Level.NOTE: "[yellow]note[/]", Level.WRONG: "[bold red]wrong[/]"}

HELP = help_text(
    """Look for what keeps blending from working, and say what to do.

    Checks versions, the plugin, the device and compiled kernels; with MODEL, what an engine would
    refuse and what its probes found before; with settings, these and the store's tiers; with --url,
    a running server. No engine is started.""",
    "vllm-blend doctor",
    "vllm-blend doctor MODEL --settings blend.yaml",
    "vllm-blend doctor MODEL -- --max-model-len 8192   # as for vllm serve",
    "vllm-blend doctor --url http://127.0.0.1:8000 --json",
)


def doctor(
    model: Annotated[str | None, typer.Argument(help="Model folder or name.")] = None,
    arguments: Arguments = None,
    settings: Settings = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    if model is not None and "://" in model:
        raise wrong_call(f"{model} is an address; a running server is looked at with --url", "MODEL")
    quiet_vllm()
    found: list[Finding] = []
    for finding in examine(model, arguments or [], settings, url):
        found.append(finding)
        if not as_json:
            _show(finding)
    counts = Counter(finding.level for finding in found)
    if as_json:
        print_json({"wrong": counts[Level.WRONG], "findings": [asdict(one) for one in found]})
    else:
        noun = "thing is" if counts[Level.WRONG] == 1 else "things are"
        said = f"{counts[Level.WRONG]} {noun} wrong" if counts[Level.WRONG] else "nothing is wrong"
        console().print(f"\n{len(found)} checks: {said}")
    if counts[Level.WRONG]:
        raise found_wrong()


def examine(
    model: str | None, arguments: Sequence[str], settings: str | None, url: str | None
) -> Iterator[Finding]:
    """Everything that can be looked at, in the order in which one thing needs the other."""
    from vllm_blend.cli.checks.install import check_install
    from vllm_blend.cli.checks.settings import check_settings, check_store
    from vllm_blend.compat.version import why_not_registered

    if model is not None and model.startswith("-"):  # there was none, and `--` came first
        arguments = [model, *arguments]
        model = None
    yield from check_install()
    usable = why_not_registered() is None
    served = None
    if arguments and usable:
        from vllm_blend.cli.checks.engine import serve_settings

        try:
            served = serve_settings(arguments)
        except ValueError as error:
            yield wrong("arguments", str(error), "vllm serve --help lists all arguments.")
            return
    findings, values = check_settings(settings, served)
    yield from findings
    yield from check_store(values)
    if (model or arguments) and usable:
        from vllm_blend.cli.checks.engine import check_engine

        sound = values is not None and all(one.level is not Level.WRONG for one in findings)
        yield from check_engine(model, arguments, values if sound and values else {})
    if url is not None:
        from vllm_blend.cli.checks.server import check_server

        yield from check_server(url)


def _show(finding: Finding) -> None:
    console().print(f"{MARKS[finding.level]}\t{finding.check}: {escape(finding.what)}", soft_wrap=True)
    if finding.do:
        console().print(f"\t[dim]do:[/] {escape(finding.do)}", soft_wrap=True)
