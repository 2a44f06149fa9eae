"""``vllm-blend eval``: the evaluation's commands, each with its own options."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import typer

from vllm_blend.cli.output import help_text

COMMANDS = {
    "run": "Methods on a data set, paired with full prefill.",
    "tune": "The smallest ratio, and the policy, for a stated quality on a data set.",
    "across": "Tables over many runs.",
    "compare": "Two methods, example by example.",
    "worst": "The examples at which a method is farthest from full prefill.",
    "report": "One self-contained HTML page.",
}
"""Each is a module of that name, with a ``main`` that takes the arguments after it."""

HELP = help_text(
    "Measure how near to full prefill's answers are, on data sets (docs/quality.md).",
    "vllm-blend eval run --task musique --data inputs/eval/musique.json --methods full reuse hkvd@0.16",
    "vllm-blend eval tune --help",
)

OWN = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""A command reads its own arguments, ``--help`` among them."""

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")


def _command(name: str) -> Callable[[typer.Context], None]:
    def command(context: typer.Context) -> None:
        import_module(f"vllm_blend.cli.eval.{name}").main(context.args)

    return command


for _name, _help in COMMANDS.items():
    app.command(_name, help=_help, context_settings=OWN, add_help_option=False)(_command(_name))
