"""Examples: passages, a question, the answers that count as right."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Passage:
    """A retrieved text; ``gold`` where the data say that the answer needs it."""

    text: str
    title: str = ""
    gold: bool = False


@dataclass(frozen=True)
class Example:
    """One prompt's parts."""

    id: str
    passages: tuple[Passage, ...]
    question: str
    answers: tuple[str, ...]

    def with_passages(self, count: int) -> Example:
        """The same with at most ``count`` passages: the gold ones, then the first of the others, in
        their order."""
        gold = [i for i, passage in enumerate(self.passages) if passage.gold]
        others = [i for i in range(len(self.passages)) if i not in gold]
        keep = sorted((gold + others)[:count])
        return replace(self, passages=tuple(self.passages[i] for i in keep))


def example_of(row: Mapping[str, Any], name: str) -> Example:
    """An example of one JSON object.

    Args:
        row: ``{"ctxs": [{"title", "text"}], "question", "answers"}`` as the paper's files have it, or
            the same with ``passages``; ``id`` and a passage's ``gold`` may be there.
        name: of the row, for its ``id`` and for errors.

    Raises:
        ValueError: names the row and the key that is missing or empty.
    """
    passages = row.get("passages", row.get("ctxs"))
    if not passages:
        raise ValueError(f'{name} has no passages; expected "ctxs": [{{"title", "text"}}, ...]')
    for key in ("question", "answers"):
        if not row.get(key):
            raise ValueError(f"{name} has no {key}")
    answers = row["answers"]
    return Example(
        id=str(row.get("id", name)),
        passages=tuple(
            Passage(p["text"], p.get("title") or "", bool(p.get("gold"))) for p in passages if p["text"]
        ),
        question=row["question"],
        answers=(answers,) if isinstance(answers, str) else tuple(map(str, answers)),
    )


def read_examples(
    path: Path, limit: int | None = None, max_passages: int | None = None
) -> list[Example]:
    """Examples of a ``.json`` (a list), ``.jsonl`` or ``.jsonl.gz`` file.

    Raises:
        ValueError: names the file and row that is not an example.
    """
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    lined = ".jsonl" in path.name
    rows = (
        [json.loads(line) for line in text.splitlines() if line.strip()] if lined else json.loads(text)
    )
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{path.name} holds no list of examples")
    found = [example_of(row, f"{path.name}[{index}]") for index, row in enumerate(rows[:limit])]
    return [e.with_passages(max_passages) for e in found] if max_passages else found
