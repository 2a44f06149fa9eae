"""The commands of ``vllm-blend``, by name."""

from __future__ import annotations

from typing import Annotated

import typer

from vllm_blend.cli import bench, demo, doctor, report, serve, simulate, store, trial, warm
from vllm_blend.cli.eval import app as eval
from vllm_blend.cli.output import help_text
from vllm_blend.compat.version import package_version

HELP = help_text(
    """Blending in vLLM: check it, try it on your own prompts, fill and keep its store.

    Exit codes: 0 all is well, 1 something wrong was found, 2 the call was wrong.""",
    "vllm-blend demo",
    "vllm-blend serve MODEL",
    "vllm-blend doctor",
    "vllm-blend try MODEL prompts.jsonl",
    "vllm-blend warm passages/ --url http://127.0.0.1:8000",
    "vllm-blend store stat /var/cache/chunks",
    "vllm-blend simulate trace.jsonl MODEL",
)

app = typer.Typer(
    name="vllm-blend",
    help=HELP,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(package_version())
        raise typer.Exit()


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of all commands."""


app.command("demo", help=demo.HELP)(demo.demo)
app.command("doctor", help=doctor.HELP)(doctor.doctor)
app.command("serve", help=serve.HELP, context_settings={"ignore_unknown_options": True})(serve.serve)
app.command("try", help=trial.HELP)(trial.attempt)
app.command("warm", help=warm.HELP)(warm.warm)
app.command("simulate", help=simulate.HELP)(simulate.simulate)
app.command("report", help=report.HELP)(report.report)
app.add_typer(bench.app, name="bench", help=bench.HELP)
app.add_typer(store.app, name="store", help=store.HELP)
app.add_typer(eval.app, name="eval", help=eval.HELP)


def main() -> None:
    """The entry point."""
    app(prog_name="vllm-blend")
