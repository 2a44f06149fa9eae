"""Prompts as spans of token ids: a head, the chunks, the question, a tail.

Nothing is decoded and encoded again. Head and tail are what the tokenizer puts around a text: BOS for
Llama and Mistral, nothing for Qwen, or all of a chat template. They are found by what two different
texts have in common, so a tokenizer that joins marker and text (SentencePiece) is cut right too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

TokenIds = tuple[int, ...]

PINNED_DAY: Mapping[str, Any] = {"strftime_now": datetime(2025, 1, 1).strftime}
"""Variables of a chat template for which it is always the same day."""


@dataclass(frozen=True)
class PromptFrame:
    """The token ids before the first chunk and after the question."""

    head: TokenIds
    tail: TokenIds


def common_frame(encode: Callable[[str], Sequence[int]]) -> PromptFrame:
    """The ids that ``encode`` puts before and after any text.

    Args:
        encode: text to token ids, special tokens or template included.
    """
    one, two = list(encode("0")), list(encode("Q"))
    head = 0
    while head < min(len(one), len(two)) and one[head] == two[head]:
        head += 1
    tail = 0
    while tail < min(len(one), len(two)) - head and one[-1 - tail] == two[-1 - tail]:
        tail += 1
    return PromptFrame(tuple(one[:head]), tuple(one[len(one) - tail :]))


def plain_frame(tokenizer: Any) -> PromptFrame:
    """Raw text: BOS where the tokenizer adds one. Nothing follows the question, EOS included."""
    frame = common_frame(tokenizer.encode)
    return PromptFrame(frame.head, ())


def chat_frame(
    tokenizer: Any,
    system: str | None = None,
    template: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> PromptFrame:
    """One user turn in a chat template, up to where the assistant starts.

    Args:
        tokenizer: a transformers tokenizer.
        system: a system message, or None for the template's own default.
        template: a Jinja text, or a name that the tokenizer knows; None: the tokenizer's own.
        variables: of the template.

    Raises:
        ValueError: if there is no chat template.
    """
    if not (template or getattr(tokenizer, "chat_template", None)):
        raise ValueError("the tokenizer has no chat template; use chat=False for raw text")

    def encode(text: str) -> Sequence[int]:
        messages = [] if system is None else [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": text})
        options = {"add_generation_prompt": True} | dict(variables or {}) | {"tokenize": False}
        rendered = tokenizer.apply_chat_template(messages, chat_template=template, **options)
        ids: Sequence[int] = tokenizer.encode(rendered, add_special_tokens=False)
        return ids

    return common_frame(encode)


def between_turns(tokenizer: Any) -> TokenIds:
    """What the chat template puts between an answer and the next question.

    Args:
        tokenizer: one with a chat template.
    """
    answer, question = "<answer 0>", "<question 1>"
    roles = ("user", "assistant", "user")
    messages = [
        {"role": role, "content": content}
        for role, content in zip(roles, ("<question 0>", answer, question), strict=True)
    ]
    rendered: str = tokenizer.apply_chat_template(messages, tokenize=False)
    text = rendered.split(answer, 1)[1].split(question, 1)[0]
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def text_ids(tokenizer: Any, text: str | Sequence[int], name: str) -> TokenIds:
    """Token ids of a piece of a prompt, without special tokens; ids pass through.

    Raises:
        ValueError: names the piece if it is empty.
        TypeError: names the piece if it is neither text nor token ids.
    """
    if isinstance(text, str):
        ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    elif isinstance(text, Sequence) and all(type(token) is int for token in text):
        ids = tuple(text)
    else:
        raise TypeError(f"{name} is {type(text).__name__}; expected text or a list of token ids")
    if not ids:
        raise ValueError(f"{name} is empty; expected at least one token")
    return ids


def head_ids(
    tokenizer: Any, frame: PromptFrame, head: str | Sequence[int], separator: TokenIds
) -> TokenIds:
    """The ids before the first chunk: the frame's, then ``head`` with a separator after it.

    Args:
        tokenizer: a transformers tokenizer.
        frame: what stands around every prompt; in a chat template ``head`` opens the user's turn.
        head: text or token ids; empty: the frame's alone, without a separator.
        separator: as after a chunk.
    """
    if not len(head):
        return frame.head
    return frame.head + text_ids(tokenizer, head, "head") + separator


def split(token_ids: TokenIds, size: int) -> list[TokenIds]:
    """Pieces of at most ``size`` tokens, and of nearly one length.

    Raises:
        ValueError: if ``size`` is not positive.
    """
    if size < 1:
        raise ValueError(f"chunk_tokens is {size}; allowed: 1 or more")
    count = -(-len(token_ids) // size)
    ends = [len(token_ids) * i // count for i in range(count + 1)]
    return [token_ids[lo:hi] for lo, hi in zip(ends, ends[1:], strict=False)]


def check_spans(spans: Sequence[tuple[int, int]], num_prompt_tokens: int) -> None:
    """Raises ValueError unless the spans are non-empty, ascending, disjoint and leave a question.

    Args:
        spans: ``[start, end)`` of each chunk, as token positions of the prompt.
        num_prompt_tokens: length of the prompt.
    """
    if not spans:
        raise ValueError("spans is empty; blending needs at least one chunk")
    for index, (start, end) in enumerate(spans):
        if start < 0:
            raise ValueError(f"spans[{index}] starts at {start}; allowed: 0 or more")
        if end <= start:
            raise ValueError(f"spans[{index}] is [{start}, {end}): an empty chunk")
        if end > num_prompt_tokens:
            raise ValueError(
                f"spans[{index}] is [{start}, {end}): it runs past the prompt of "
                f"{num_prompt_tokens} tokens"
            )
    for index, ((_, end), (start, _)) in enumerate(pairwise(spans), start=1):
        if start < end:
            raise ValueError(
                f"spans[{index}] starts at {start}, before the end of spans[{index - 1}] at "
                f"{end}; spans must ascend and not overlap"
            )
    if spans[-1][1] == num_prompt_tokens:
        raise ValueError(
            "spans cover the prompt's last token; the question (at least one token) must follow "
            "the last chunk, since its logits are what the answer starts from"
        )
