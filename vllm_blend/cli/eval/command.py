"""What the commands of ``vllm-blend eval`` share."""

from __future__ import annotations

import argparse


def command_parser(description: str | None, command: str | None = None) -> argparse.ArgumentParser:
    """An empty parser, of a command or, if that is None, of the script that runs."""
    return argparse.ArgumentParser(
        prog=command and f"vllm-blend eval {command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
