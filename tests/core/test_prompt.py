"""Prompts of token ids with Llama-, Mistral- and Qwen-style tokenizers, trained here on the inputs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_tokenizers import INPUTS, STYLES, make_tokenizer

from vllm_blend.core.prompt import chat_frame, head_ids, plain_frame, text_ids


@pytest.fixture(scope="module", params=STYLES)
def style(request: pytest.FixtureRequest) -> tuple[str, Any]:
    return request.param, make_tokenizer(request.param)


def test_plain_head_is_bos_where_the_tokenizer_adds_one(style: tuple[str, Any]) -> None:
    name, tokenizer = style
    frame = plain_frame(tokenizer)
    assert frame.tail == ()
    assert frame.head == (() if name == "qwen" else (tokenizer.bos_token_id,))


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_chat_frame_around_a_text_is_the_rendered_template(
    style: tuple[str, Any], system: str | None
) -> None:
    name, tokenizer = style
    frame = chat_frame(tokenizer, system)
    text = "Where is the museum?"
    messages = [{"role": "user", "content": text}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(rendered, add_special_tokens=False)
    assert [*frame.head, *text_ids(tokenizer, text, "question"), *frame.tail] == ids
    assert ids.count(tokenizer.convert_tokens_to_ids("<s>")) == (0 if name == "qwen" else 1)


def test_chunks_keep_their_ids_wherever_they_stand(style: tuple[str, Any]) -> None:
    _, tokenizer = style
    sample = json.loads((INPUTS / "1.json").read_text())
    pieces = [text_ids(tokenizer, sample[str(i)], "chunk") for i in range(3)]
    assert all(tokenizer.bos_token_id not in piece for piece in pieces)
    assert [text_ids(tokenizer, list(piece), "chunk") for piece in pieces] == pieces


HEAD = "Read the texts. Be brief."


def test_a_head_of_raw_text_stands_behind_bos(style: tuple[str, Any]) -> None:
    _, tokenizer = style
    frame, separator = plain_frame(tokenizer), text_ids(tokenizer, "\n\n", "separator")
    ids = head_ids(tokenizer, frame, HEAD, separator)
    assert list(ids) == [*tokenizer.encode(HEAD), *separator]
    assert head_ids(tokenizer, frame, list(ids), separator) == (*frame.head, *ids, *separator)
    assert head_ids(tokenizer, frame, "", separator) == head_ids(tokenizer, frame, [], separator)
    assert head_ids(tokenizer, frame, "", separator) == frame.head


@pytest.mark.parametrize("system", [None, "Be kind."])
def test_a_head_opens_the_users_turn(style: tuple[str, Any], system: str | None) -> None:
    name, tokenizer = style
    frame, separator = chat_frame(tokenizer, system), text_ids(tokenizer, "\n\n", "separator")
    ids = head_ids(tokenizer, frame, HEAD, separator)
    pieces = [*ids, *text_ids(tokenizer, "Where is it?", "question"), *frame.tail]
    messages = [{"role": "user", "content": f"{HEAD}\n\nWhere is it?"}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    spaceless = [tokenizer.decode(pieces).replace(" ", ""), rendered.replace(" ", "")]
    assert spaceless[0] == spaceless[1]
    if name != "mistral":  # SentencePiece puts a space mark before each piece
        assert tokenizer.decode(pieces) == rendered


def test_no_template_and_no_text_are_refused(style: tuple[str, Any]) -> None:
    _, tokenizer = style
    with pytest.raises(ValueError, match="chunk 3 is empty"):
        text_ids(tokenizer, "", "chunk 3")
    with pytest.raises(ValueError, match="question is empty"):
        text_ids(tokenizer, [], "question")
    with pytest.raises(TypeError, match="question is float; expected text or a list of token ids"):
        text_ids(tokenizer, 1.5, "question")  # type: ignore[arg-type]
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        chat_frame(tokenizer)
    tokenizer.chat_template = STYLES["qwen"][2]
