"""What the clients' examples share: a few documents, a BM25 index over them, questions, a table."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from openai import OpenAI
from rank_bm25 import BM25Okapi

INPUT = Path(__file__).parents[2] / "inputs" / "1.json"
QUESTIONS = (
    "What was wrong with the fan guard of the Corrie 5?",
    "For how many years is a heat pump covered by the warranty?",
    "By whom was the project of the Corrie 11 led?",
    "What did the test engineer discover in the reversing valve?",
)
INSTRUCTION = "Answer the question in one sentence, from the documents alone."


class Library:
    """Documents, found by BM25."""

    def __init__(self, input: Path = INPUT) -> None:
        values = json.loads(input.read_text())
        self.texts: list[str] = [values[str(at)] for at in range(values["chunk_num"])]
        self._index = BM25Okapi([words(text) for text in self.texts])

    def search(self, question: str, count: int = 4) -> list[str]:
        """The ``count`` best documents, the best one first."""
        found: list[str] = self._index.get_top_n(words(question), self.texts, count)
        return found


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def options(description: str) -> argparse.Namespace:
    """The server's address, and its model: the first one that it serves unless it is named."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="of a blending server")
    parser.add_argument("--api-key", default="-")
    parser.add_argument("--model")
    chosen = parser.parse_args()
    if chosen.model is None:
        models = OpenAI(base_url=chosen.url, api_key=chosen.api_key).models.list()
        chosen.model = models.data[0].id
    return chosen


Asked = Iterator[tuple[str, dict[str, Any] | None]]
"""A streamed answer: pieces of text, each with the report where it is the one that brings it."""


def compare(before: Callable[[str], Asked], after: Callable[[str], Asked]) -> None:
    """Asks all questions twice and prints the times to first token, what was reused, the answers."""
    print("TTFT before    after   reused  answer")
    for question in QUESTIONS:
        blended, report, answer = timed(after(question))
        plain, _, _ = timed(before(question))
        reused = (report or {}).get("reused_tokens", 0)
        print(f"{plain:9.3f} s {blended:6.3f} s {reused:6d}   {' '.join(answer.split())}", flush=True)


def timed(pieces: Asked) -> tuple[float, dict[str, Any] | None, str]:
    """Seconds until the first text, the report, all text."""
    start, first, report, answer = perf_counter(), None, None, ""
    for text, told in pieces:
        if text and first is None:
            first = perf_counter() - start
        answer, report = answer + text, told or report
    return first or 0.0, report, answer
