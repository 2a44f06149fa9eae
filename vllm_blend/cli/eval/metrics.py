"""Scores of an answer against the right ones: F1 of words, Rouge-L, exact, begins, holds."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def words(text: str) -> list[str]:
    """Lower-case words without punctuation and articles (as SQuAD's evaluation counts them)."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def f1(found: str, answer: str) -> float:
    """Harmonic mean of precision and recall of the words, 0 to 1."""
    have, want = words(found), words(answer)
    if not have or not want:
        return float(have == want)
    common = sum((Counter(have) & Counter(want)).values())
    return 2 * common / (len(have) + len(want))


def exact(found: str, answer: str) -> float:
    """1.0 if the words are the same in the same order."""
    return float(words(found) == words(answer))


def begins(found: str, answer: str) -> float:
    """1.0 if the answer's words come first: for models that talk on."""
    want = words(answer)
    return float(words(found)[: len(want)] == want)


def holds(found: str, answer: str) -> float:
    """1.0 if the answer stands anywhere in it, in whatever case (as RULER counts it)."""
    return float(answer.lower() in found.lower())


def rouge_l(found: str, answer: str) -> float:
    """F-measure of the longest common subsequence of stems (``rouge_score``), 0 to 1."""
    return float(_rouge_scorer().score(answer, found)["rougeL"].fmeasure)


@cache
def _rouge_scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], use_stemmer=True)


METRICS: dict[str, Callable[[str, str], float]] = {
    "F1": f1,
    "Rouge-L": rouge_l,
    "exact": exact,
    "begins": begins,
    "holds": holds,
}


def score(metric: str, found: str, answers: Sequence[str]) -> float:
    """The best score over the right answers."""
    return max(METRICS[metric](found, answer) for answer in answers)
