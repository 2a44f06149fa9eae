"""Chunks marked in text: pieces, spans, and what the tokenizer makes of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_blend.server.frontend.chunk_markers import (
    Marks,
    cut,
    mark_messages,
    split,
    tokenize,
    without_marks,
)

MARKS = Marks("12", "34")
text = st.text(alphabet="ab c#12\uf8f0\uf8f1", max_size=12)


def encode(texts: list[str]) -> list[list[int]]:
    """A tokenizer of characters, with BOS."""
    ids = [[ord(character) for character in text] for text in texts]
    return [[1, *first] for first in ids[:1]] + ids[1:]


def render(messages: list[Any]) -> str:
    """A chat template."""
    texts = []
    for message in messages:
        content = message["content"]
        if not isinstance(content, str):
            content = "\n".join(part["text"] for part in content)
        texts.append(f"<{message['role']}>{content}</{message['role']}>")
    return "".join(texts)


def parts_of(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def chunks_of(messages: list[Any], parts: bool = False, separator: str = "") -> tuple[list[str], str]:
    """The chunks of rendered messages, and the text that is left."""
    marks = Marks.draw()
    pieces = cut(render(mark_messages(messages, parts, separator, marks)), marks)
    return [piece for piece, is_chunk in pieces if is_chunk], "".join(piece for piece, _ in pieces)


def test_separators() -> None:
    assert split("head##one##two##question", "##") == [
        ("head", False),
        ("one", True),
        ("two", True),
        ("question", False),
    ]
    assert split("##one##", "##") == [("one", True)]
    assert split("one##two", "##") == [("one", False), ("two", False)]
    assert split("one##two", "") == [("one##two", False)]


def test_parts_but_the_last_are_chunks() -> None:
    parts = parts_of("one", "two", "why?")
    messages = [{"role": "user", "content": parts}]
    assert chunks_of(messages, parts=True) == (["one", "two"], "<user>one\ntwo\nwhy?</user>")
    assert chunks_of(messages) == ([], "<user>one\ntwo\nwhy?</user>")
    assert parts[0]["text"] == "one"  # the client's message is as it was
    other = [{"role": "user", "content": [part | {"type": "input_text"} for part in parts]}]
    assert chunks_of(other, parts=True)[0] == ["one", "two"]  # as Responses have them


def test_a_separator_counts_within_one_message() -> None:
    turns = [
        {"role": "system", "content": "a##b"},
        {"role": "user", "content": "x##one##y"},
        {"role": "assistant", "content": "x##mine##y"},
        {"role": "user", "content": "c##d"},
    ]
    chunks, left = chunks_of(turns, separator="##")
    assert chunks == ["one"]
    assert left == (
        "<system>ab</system><user>xoney</user><assistant>x##mine##y</assistant><user>cd</user>"
    )
    assert chunks_of(turns) == ([], render(turns))


def test_separators_in_parts_cut_them() -> None:
    messages = [{"role": "user", "content": parts_of("a##b##c", "x##one##why?")}]
    assert chunks_of(messages, True, "##")[0] == ["a", "b", "c", "one"]
    assert chunks_of(messages, False, "##")[0] == ["b", "one"]


def test_other_messages_are_left_alone() -> None:
    messages: list[Any] = [
        {"role": "user", "content": "text"},
        {"role": "user", "content": [{"type": "text", "text": "only one"}]},
        {"role": "assistant", "content": [{"type": "text", "text": t} for t in "ab"]},
        {"role": "user", "content": None},
        {"role": "user", "content": [{"type": "text"}, {"type": "image_url", "text": "a"}, "plain"]},
    ]
    assert mark_messages(messages, True, "##", MARKS) == messages


@pytest.mark.parametrize("template", [json.dumps, str.upper, str.strip])
def test_marks_go_through_templates_and_come_out_of_conversations(template: Any) -> None:
    marks = Marks.draw()
    assert marks != Marks.draw()
    marked = mark_messages([{"role": "user", "content": parts_of("one", "two")}], True, "", marks)
    rendered = template(marked[0]["content"][0]["text"])
    assert [piece for piece, is_chunk in cut(rendered, marks) if is_chunk] == [
        template("one").strip('"')
    ]
    assert without_marks(marked, marks) == [{"role": "user", "content": parts_of("one", "two")}]


@given(st.lists(text, min_size=1, max_size=4))
def test_a_text_that_marks_nothing_stays_as_it_is(texts: list[str]) -> None:
    """Whatever characters it has, of the private use area too."""
    messages = [{"role": "user", "content": parts_of(*texts)}]
    chunks, left = chunks_of(messages, parts=True)
    assert left == render(messages)
    assert chunks == [text for text in texts[:-1] if text]


def test_bos_belongs_to_no_chunk() -> None:
    ids, spans = tokenize(split("##one##two", "##"), encode, 1)
    assert ids[0] == 1
    assert spans == [(1, 4)]


@given(st.lists(text, min_size=1, max_size=5), st.integers(1, 4))
def test_no_text_is_lost_and_spans_are_the_chunks(sections: list[str], smallest: int) -> None:
    whole = "##".join(sections)
    pieces = split(whole, "##")
    assert "".join(piece for piece, _ in pieces) == "".join(whole.split("##"))
    ids, spans = tokenize(pieces, encode, smallest)
    assert ids[1:] == [ord(c) for piece, _ in pieces for c in piece]
    expected = [piece for piece, is_chunk in pieces if is_chunk and len(piece) >= smallest]
    assert ["".join(map(chr, ids[start:end])) for start, end in spans] == expected
