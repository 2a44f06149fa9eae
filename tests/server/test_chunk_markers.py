"""Chunks marked in text: pieces, spans, and what the tokenizer makes of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_blend.server.frontend.chunk_markers import END, START, cut, mark_parts, remove_marks, tokenize

text = st.text(alphabet="ab c#" + START + END, max_size=12)


def encode(piece: str, first: bool) -> list[int]:
    """A tokenizer of characters, with BOS."""
    return ([1] if first else []) + [ord(character) for character in piece]


def test_separators() -> None:
    assert cut("head##one##two##question", "##") == [
        ("head", False),
        ("one", True),
        ("two", True),
        ("question", False),
    ]
    assert cut("##one##", "##") == [("one", True)]
    assert cut("one##two", "##") == [("one", False), ("two", False)]


def test_parts_but_the_last_are_chunks() -> None:
    parts = [{"type": "text", "text": word} for word in ("one", "two", "why?")]
    (message,) = mark_parts([{"role": "user", "content": parts}])
    rendered = "<user>" + "\n".join(part["text"] for part in message["content"]) + "</user>"
    pieces = cut(rendered, "##")
    assert [piece for piece, is_chunk in pieces if is_chunk] == ["one", "two"]
    assert "".join(piece for piece, _ in pieces) == "<user>one\ntwo\nwhy?</user>"
    assert parts[0]["text"] == "one"  # the client's message is as it was


def test_other_messages_are_left_alone() -> None:
    messages = [
        {"role": "user", "content": "text"},
        {"role": "user", "content": [{"type": "text", "text": "only one"}]},
        {"role": "assistant", "content": [{"type": "text", "text": t} for t in "ab"]},
        {"role": "user", "content": None},
    ]
    assert mark_parts(messages) == messages


def test_bos_belongs_to_no_chunk() -> None:
    ids, spans = tokenize(cut("##one##two", "##"), encode, 1)
    assert ids[0] == 1
    assert spans == [(1, 4)]


@given(st.lists(text, min_size=1, max_size=5), st.integers(1, 4))
def test_no_text_is_lost_and_spans_are_the_chunks(sections: list[str], smallest: int) -> None:
    marked = "##".join(sections)
    pieces = cut(marked, "##")
    assert "".join(piece for piece, _ in pieces) == remove_marks("".join(marked.split("##")))
    ids, spans = tokenize(pieces, encode, smallest)
    assert ids[1:] == [ord(c) for piece, _ in pieces for c in piece]
    expected = [piece for piece, is_chunk in pieces if is_chunk and len(piece) >= smallest]
    assert ["".join(map(chr, ids[start:end])) for start, end in spans] == expected
