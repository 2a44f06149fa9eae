"""Examples: passages, a question, the answers that count as right."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
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
    if not isinstance(row, Mapping):
        raise ValueError(f"{name} is no object")
    passages = row.get("passages", row.get("ctxs"))
    if not passages or not all(isinstance(p, Mapping) and "text" in p for p in passages):
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


def read_examples(path: Path, limit: int | None = None) -> list[Example]:
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
    return [example_of(row, f"{path.name}[{index}]") for index, row in enumerate(rows[:limit])]


def of_length(
    examples: Sequence[Example], room: Callable[[Example], int], length: Callable[[Passage], int]
) -> list[Example]:
    """The examples with longer or shorter prompts: as many passages as there is room for.

    An example's gold passages come first, and stay whatever the room; then its others, then those of
    the examples after it, up to the first that does not fit. They stand in an order drawn from the
    example's id, the same in each run. Where no passage is gold, one that the answer needs may be left
    out.

    Args:
        room: tokens for an example's passages.
        length: tokens of a passage.

    Raises:
        ValueError: names an example for which all the passages are too few, or that has room for none.
    """
    found = []
    for at, example in enumerate(examples):
        left = room(example)
        kept: dict[str, Passage] = {}
        own = sorted(example.passages, key=lambda passage: not passage.gold)
        others = chain.from_iterable(e.passages for e in (*examples[at + 1 :], *examples[:at]))
        for passage in chain(own, (replace(other, gold=False) for other in others)):
            if passage.text not in kept:
                if (size := length(passage)) > left and not passage.gold:
                    break
                kept[passage.text], left = passage, left - size
        else:
            if left > 0:
                raise ValueError(
                    f"{example.id!r} has room for {left} tokens more than all passages have"
                )
        if not kept:
            raise ValueError(f"{example.id!r} has room for {left} tokens, and so for no passage")
        passages = list(kept.values())
        random.Random(example.id).shuffle(passages)
        found.append(replace(example, passages=tuple(passages)))
    return found
