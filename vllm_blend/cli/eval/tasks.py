"""Tasks: what the prompt says around the passages, and how an answer is scored.

The protocol is the paper's (arXiv 2405.16444, section 7.1): an instruction first, then each passage as
chunks of at most 512 tokens, then the question; question answering is scored by F1, summaries by
Rouge-L. The wording is our own. The instruction holds worked examples, since small models copy a form
better than they follow an order. It is the head that chunks are computed after; its KV is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_blend.cli.eval.data import Example, Passage

_QA = """Each question is answered from the passages above it, in a few words.

The ferry Marlene was built in Turku in 1931 and carried mail until the bridge was opened.
Question: Where was the ferry Marlene built?
Answer: Turku

Ida Brandt wrote her only play in a hotel in Lucerne. Its first night was on 3 May 1908.
Question: When was the first night of Ida Brandt's play?
Answer: 3 May 1908"""


@dataclass(frozen=True)
class Task:
    """How a data set is asked and scored.

    Attributes:
        header: the prompt's head, or "".
        question: a format string with ``{question}``; what follows the last chunk.
        metric: a name in ``metrics.METRICS``.
        max_tokens: of an answer.
        stop: texts that end an answer.
        titled: whether a passage's title stands before its text.
    """

    name: str
    header: str
    question: str
    metric: str
    max_tokens: int
    stop: tuple[str, ...] = ("\n",)
    titled: bool = True

    def passage(self, passage: Passage) -> str:
        """A passage as it stands in the prompt."""
        if self.titled and passage.title:
            return f"{passage.title}\n{passage.text}"
        return passage.text

    def ask(self, example: Example) -> str:
        """What follows the last chunk."""
        return self.question.format(question=example.question.strip())

    def chunks(
        self,
        tokenizer: Any,
        example: Example,
        chunk_tokens: int,
        passage_tokens: int | None = None,
    ) -> list[list[int]]:
        """Token ids of each passage, cut where it has more than ``chunk_tokens``.

        Of a passage only the first ``passage_tokens`` are taken; None: all.
        """
        pieces = self.pieces(tokenizer, example, chunk_tokens, passage_tokens)
        return [piece for piece, _ in pieces]

    def pieces(
        self,
        tokenizer: Any,
        example: Example,
        chunk_tokens: int,
        passage_tokens: int | None = None,
    ) -> list[tuple[list[int], list[int]]]:
        """The same chunks, each with the token ids that stand before it in its passage."""
        found: list[tuple[list[int], list[int]]] = []
        for passage in example.passages:
            text = self.passage(passage)
            ids = list(tokenizer.encode(text, add_special_tokens=False)[:passage_tokens])
            starts = range(0, len(ids), chunk_tokens)
            found += [(ids[i : i + chunk_tokens], ids[:i]) for i in starts]
        return found


_ASK = "Question: {question}\nAnswer:"

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("musique", _QA, _ASK, "F1", 16),
        Task("wikimqa", _QA, _ASK, "F1", 16),
        Task("hotpotqa", _QA, _ASK, "F1", 16),
        Task("nq", _QA, _ASK, "F1", 16),
        Task(
            "samsum",
            "Each conversation is followed by a summary of it in a sentence or two.",
            "{question}",
            "Rouge-L",
            48,
            titled=False,
        ),
        Task(
            "multinews",
            "The news passages below are about one event. They are followed by one summary of all.",
            "{question}\nSummary:",
            "Rouge-L",
            128,
            stop=(),
            titled=False,
        ),
        Task(
            "ruler",
            "The text below says what belongs to many keys. Remember it: one of them is asked for.",
            "{question}",
            "holds",
            64,
            titled=False,
        ),
        Task("synthetic", "", "Question: {question}", "begins", 6, stop=("\n", "."), titled=False),
    )
}
