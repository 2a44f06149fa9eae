"""Texts that ``vllm-blend warm`` is given: a folder, lines of JSON, or a Hugging Face data set."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SUFFIXES = (".txt", ".md")
DATASET = "hf:"
"""Before the name of a data set."""


def read_texts(source: str, split: str = "train", column: str = "text") -> Iterator[str]:
    """The texts of a folder's files, of a file's lines, or of a data set's column.

    Args:
        split, column: of a data set.

    Raises:
        ValueError: if there are none, or a line has no text; names it.
        OSError: if it cannot be read.
    """
    if source.startswith(DATASET):
        yield from _of_dataset(source.removeprefix(DATASET), split, column)
        return
    path = Path(source)
    if path.is_dir():
        files = sorted(one for one in path.rglob("*") if one.suffix in SUFFIXES and one.is_file())
        if not files:
            raise ValueError(f"{path} has no files that end in {' or '.join(SUFFIXES)}")
        yield from filter(None, (one.read_text(encoding="utf-8").strip() for one in files))
        return
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            yield from _texts_of(line, f"line {number} of {path.name}")


def _of_dataset(name: str, split: str, column: str) -> Iterator[str]:
    """A data set of the hub, or of a folder: of files that ``datasets`` knows, or saved by it."""
    try:
        import datasets
    except ImportError:
        raise ValueError(f"{DATASET}{name} needs the package datasets: pip install datasets") from None
    folder = Path(name)
    saved = any((folder / file).is_file() for file in ("dataset_dict.json", "state.json"))
    try:
        found: Any = datasets.load_from_disk(name) if saved else datasets.load_dataset(name)
    except Exception as error:  # many kinds of its own, of the hub's and of the files' readers
        told = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"the data set {name} cannot be loaded: {told[0]}") from None
    if isinstance(found, dict):
        if split not in found:
            raise ValueError(f"{name} has no split {split!r}; it has: {', '.join(found)}")
        found = found[split]
    if column not in found.column_names:
        raise ValueError(f"{name} has no column {column!r}; it has: {', '.join(found.column_names)}")
    for number, value in enumerate(found[column]):
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"row {number} of {name}: {column} is no text, and no list of texts")
        yield from (text for text in texts if text.strip())


def _texts_of(line: str, where: str) -> list[str]:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is no JSON: {error}") from None
    found = values
    if isinstance(values, dict):
        found = values.get("text", values.get("chunks"))
    texts = [found] if isinstance(found, str) else found
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) and t for t in texts):
        raise ValueError(f'{where}: expected a text, {{"text": ...}} or {{"chunks": [...]}}')
    return texts
