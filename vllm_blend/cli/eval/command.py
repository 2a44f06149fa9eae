"""What the commands of ``vllm-blend eval`` share."""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm_blend.cli.eval.data import Example, read_examples


def command_parser(description: str | None, command: str | None = None) -> argparse.ArgumentParser:
    """An empty parser, of a command or, if that is None, of the script that runs."""
    return argparse.ArgumentParser(
        prog=command and f"vllm-blend eval {command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def data_set(text: str) -> list[Example]:
    """An option's file of examples."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text} is no file")
    try:
        return read_examples(path)
    except (ValueError, OSError) as error:  # OSError: of gzip
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


def results_folder(text: str) -> Path:
    """An option's folder that ``eval run --output`` wrote."""
    from vllm_blend.cli.eval.runs import read_results

    path = Path(text)
    if not read_results(path):
        raise argparse.ArgumentTypeError(
            f"{text}: no results there; give a folder of eval run --output"
        )
    return path
