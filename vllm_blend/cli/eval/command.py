"""What the commands of ``vllm-blend eval`` share."""

from __future__ import annotations

import argparse
from pathlib import Path


def command_parser(description: str | None, command: str | None = None) -> argparse.ArgumentParser:
    """An empty parser, of a command or, if that is None, of the script that runs."""
    return argparse.ArgumentParser(
        prog=command and f"vllm-blend eval {command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def data_file(text: str) -> Path:
    """An option's file that is to be read."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text} is no file")
    return path


def results_folder(text: str) -> Path:
    """An option's folder that ``eval run --output`` wrote."""
    from vllm_blend.cli.eval.runs import read_results

    path = Path(text)
    if not read_results(path):
        raise argparse.ArgumentTypeError(
            f"{text}: no results there; give a folder of eval run --output"
        )
    return path
