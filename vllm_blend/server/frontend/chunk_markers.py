"""Chunks marked in text: the parts of a chat message, and a separator.

Messages are marked before the chat template, and the rendered text is cut at the marks. Each piece is
tokenized by itself, and the pieces that are chunks become spans. So a chunk has the same token ids in
every prompt, and no text is tokenized twice.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from vllm_blend.server.request import Span

Piece = tuple[str, bool]
"""A piece of a text, and whether it is a chunk."""

TEXT_PARTS = ("text", "input_text")
"""Types of a message's text parts, in Chat Completions and in Responses."""


class Marks(NamedTuple):
    """Around a chunk: drawn for each request after its text is there, so that no text can hold them.

    Digits alone, which templates leave as they are, JSON or not.
    """

    start: str
    end: str

    @classmethod
    def draw(cls) -> Marks:
        return cls(*(f"{secrets.randbits(128):039d}" for _ in cls._fields))


def mark_messages(messages: Sequence[Any], parts: bool, separator: str, marks: Marks) -> list[Any]:
    """Chat messages with their chunks marked; the assistant's have none.

    Args:
        messages: as vLLM has them; they are not changed.
        parts: the text parts of a message, but its last, are chunks.
        separator: chunks are also what lies between two of it within one text; it is taken out.
            Empty: none.
        marks: put around each chunk.
    """
    return [_mark_message(message, parts, separator, marks) for message in messages]


def _mark_message(message: Any, parts: bool, separator: str, marks: Marks) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if content is None or message.get("role") == "assistant":
        return message
    if isinstance(content, str):
        return message | {"content": _mark_text(content, False, separator, marks)}
    content = list(content)  # vLLM may hand over an iterator
    texts = [at for at, part in enumerate(content) if isinstance(_text_of(part), str)]
    for at in texts:
        text = _mark_text(_text_of(content[at]), parts and at != texts[-1], separator, marks)
        content[at] = content[at] | {"text": text}
    return message | {"content": content}


def _text_of(part: Any) -> Any:
    if isinstance(part, dict) and part.get("type") in TEXT_PARTS:
        return part.get("text")
    return None


def _mark_text(text: str, whole: bool, separator: str, marks: Marks) -> str:
    """``text`` with its chunks marked; ``whole``: all of it is."""
    pieces = split(text, separator)
    return "".join(
        f"{marks.start}{piece}{marks.end}" if whole or between else piece for piece, between in pieces
    )


def split(text: str, separator: str) -> list[Piece]:
    """The pieces of a text around its separators; those between two are chunks, and none is empty."""
    pieces = text.split(separator) if separator else [text]
    last = len(pieces) - 1
    return [(piece, 0 < index < last) for index, piece in enumerate(pieces) if piece]


def cut(text: str, marks: Marks) -> list[Piece]:
    """The pieces of a marked text; none is empty."""
    first, *marked = text.split(marks.start)
    pieces = [(first, False)]
    for part in marked:
        chunk, _, rest = part.partition(marks.end)
        pieces += [(chunk, True), (rest, False)]
    return [(text.replace(marks.end, ""), is_chunk) for text, is_chunk in pieces if text]


def without_marks(value: Any, marks: Marks) -> Any:
    """A conversation, or a part of one, with all marks taken out of its texts."""
    if isinstance(value, str):
        return value.replace(marks.start, "").replace(marks.end, "")
    if isinstance(value, list):
        return [without_marks(item, marks) for item in value]
    if isinstance(value, dict):
        return {key: without_marks(item, marks) for key, item in value.items()}
    return value


def tokenize(
    pieces: Sequence[Piece],
    encode: Callable[[list[str]], Sequence[Sequence[int]]],
    min_chunk_tokens: int,
) -> tuple[list[int], list[Span]]:
    """Token ids of the pieces, one after the other, and the chunks' spans.

    Args:
        pieces: of ``split`` or ``cut``.
        encode: token ids of texts, each by itself; the first of them alone gets BOS.
        min_chunk_tokens: shorter chunks get no span.
    """
    token_ids: list[int] = []
    spans: list[Span] = []
    if pieces and pieces[0][1]:
        pieces = [("", False), *pieces]  # BOS, where there is one, is no chunk's
    encoded = encode([text for text, _ in pieces])
    for (_, is_chunk), ids in zip(pieces, encoded, strict=True):
        start = len(token_ids)
        token_ids += ids
        if is_chunk and len(ids) >= min_chunk_tokens:
            spans.append((start, len(token_ids)))
    return token_ids, spans
