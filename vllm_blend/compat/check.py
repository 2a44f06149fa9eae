"""Does a vLLM fit this package? Its members are read from its files and held against the table.

    python -m vllm_blend.compat.check               the installed one
    python -m vllm_blend.compat.check FOLDER        one that is unpacked there, e.g. a wheel's

Prints a line for each member that is missing or takes other parameters, and exits with 1 if there is
one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_blend.compat.fit import is_known, known_version, misfits
from vllm_blend.compat.members import VERSIONS, members
from vllm_blend.compat.source import PACKAGE, Source
from vllm_blend.compat.version import vllm_version


def problems() -> list[str]:
    """What of the installed vLLM is otherwise than this package needs it, a sentence each."""
    source, version = Source.installed(), vllm_version()
    if source is None or version is None:
        return ["vLLM is not installed"]
    unknown = [] if is_known(version) else [f"vLLM {version} is not one of {', '.join(VERSIONS)}"]
    return unknown + misfits(source, version)


def version_in(root: Path) -> str | None:
    """The version that a package folder says it is, or None."""
    path = root / "_version.py"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    found = re.search(r"^(?:__version__ = )?version = ['\"]([^'\"]+)", text, re.MULTILINE)
    return found[1] if found else None


def main(arguments: Sequence[str]) -> int:
    source, version = Source.installed(), vllm_version()
    if arguments:
        folder = Path(arguments[0])
        root = folder if (folder / "envs.py").is_file() else folder / PACKAGE
        source, version = Source(root), version_in(root)
        if not source.has("envs"):
            print(f"{folder} holds no vLLM: there is no {root / 'envs.py'}")
            return 1
    if source is None or version is None:
        print("vLLM is not installed, or does not tell its version")
        return 1
    found = misfits(source, version)
    for sentence in found:
        print(sentence)
    print(
        f"vLLM {version} ({source.root}): {len(members())} members, {len(found)} otherwise than "
        f"vLLM {known_version(version)} has them"
    )
    if not is_known(version):
        print(f"This package blends with vLLM {' and '.join(f'{one}.*' for one in VERSIONS)} alone.")
        return 1
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
