"""That a vLLM fits is remembered, so that not every process of every start reads its files again.

What is kept are the sizes and times of the files that were read: any change of them, of the table or of
the version makes them be read anew. That a vLLM does not fit is never kept.
"""

from __future__ import annotations

import json
import os
from hashlib import sha256
from pathlib import Path

from vllm_blend.compat.fit import misfits, needed
from vllm_blend.compat.source import Source


def kept_misfits(source: Source, version: str) -> list[str]:
    """As ``misfits``; empty at once where the same files were found to fit before."""
    path = _place(source, version)
    if _is_as_kept(path):
        return []
    found = misfits(source, version)
    if not found:
        _keep(path, source.files)
    return found


def _place(source: Source, version: str) -> Path:
    root = os.environ.get("VLLM_CACHE_ROOT")
    if not root:  # as vLLM has it, which is not imported for this
        root = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "vllm")
    said = repr([str(source.root), version, needed()])
    name = sha256(said.encode()).hexdigest()[:32]
    return Path(root).expanduser() / "vllm_blend" / "fits" / f"{name}.json"


def _stamps(files: list[Path]) -> dict[str, list[int]]:
    states = {str(file): file.stat() for file in files}
    return {name: [state.st_size, state.st_mtime_ns] for name, state in states.items()}


def _is_as_kept(path: Path) -> bool:
    try:
        kept = json.loads(path.read_text())
        return bool(kept) and bool(_stamps([Path(name) for name in kept]) == kept)
    except (OSError, ValueError, TypeError):
        return False


def _keep(path: Path, files: list[Path]) -> None:
    """A folder that cannot be written to is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(_stamps(files)))
        part.replace(path)
    except OSError:
        pass
