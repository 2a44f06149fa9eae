"""Chunks marked in text: the parts of a chat message, and a separator.

Marks go into the text before the chat template and come out before the tokenizer: the text is cut at
them, each piece is tokenized by itself, and the pieces that are chunks become spans. So a chunk has the
same token ids in every prompt, and no text is tokenized twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm_blend.server.request import Span

START, END = "\uf8f0", "\uf8f1"
"""Around a chunk; of Unicode's private use area, which texts have no business with."""


def mark_parts(messages: Sequence[Any]) -> list[Any]:
    """Chat messages whose text parts, but the last of each message, are marked as chunks."""
    return [_mark_message(message) for message in messages]


def _mark_message(message: Any) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if content is None or isinstance(content, str) or message.get("role") == "assistant":
        return message
    parts = list(content)  # vLLM may hand over an iterator
    texts = [at for at, part in enumerate(parts) if isinstance(_text_of(part), str)]
    for at in texts[:-1]:
        parts[at] = {"type": "text", "text": f"{START}{remove_marks(_text_of(parts[at]))}{END}"}
    return message | {"content": parts}


def _text_of(part: Any) -> Any:
    if isinstance(part, dict) and part.get("type") == "text":
        return part.get("text")
    return None


def remove_marks(text: str) -> str:
    """``text`` without marks."""
    return text.replace(START, "").replace(END, "")


def cut(text: str, separator: str) -> list[tuple[str, bool]]:
    """The pieces of a marked text, and whether each is a chunk; none is empty."""
    pieces: list[tuple[str, bool]] = []
    sections = text.split(separator) if separator else [text]
    for index, section in enumerate(sections):
        between = 0 < index < len(sections) - 1
        first, *marked = section.split(START)
        pieces.append((first, between))
        for part in marked:
            chunk, _, rest = part.partition(END)
            pieces += [(chunk, True), (rest, between)]
    return [(text.replace(END, ""), is_chunk) for text, is_chunk in pieces if text]


def tokenize(
    pieces: Sequence[tuple[str, bool]],
    encode: Callable[[str, bool], Sequence[int]],
    min_chunk_tokens: int,
) -> tuple[list[int], list[Span]]:
    """Token ids of the pieces, one after the other, and the chunks' spans.

    Args:
        pieces: of ``cut``.
        encode: a piece's token ids; its second argument tells the first piece, which alone gets BOS.
        min_chunk_tokens: shorter chunks get no span.
    """
    token_ids: list[int] = []
    spans: list[Span] = []
    if pieces and pieces[0][1]:
        pieces = [("", False), *pieces]  # BOS, where there is one, is no chunk's
    for index, (text, is_chunk) in enumerate(pieces):
        start = len(token_ids)
        token_ids += encode(text, index == 0)
        if is_chunk and len(token_ids) - start >= min_chunk_tokens:
            spans.append((start, len(token_ids)))
    return token_ids, spans
