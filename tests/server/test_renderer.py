"""Marked text on its way to token ids, by vLLM's renderer over a real tokenizer."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from cachetools import LRUCache
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest, TokenizeCompletionRequest
from vllm.exceptions import VLLMValidationError
from vllm.renderers.hf import HfRenderer
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.tokenizers import get_tokenizer

from vllm_blend.server.frontend.renderer import BlendRenderer, _num_bytes
from vllm_blend.server.request import SPANS_KEY, WHY_NOT_KEY, WITH_MEDIA

CHUNKS = ("The ferry stops until March, when the ice is gone. " * 3, "Why? " * 20)
PIECES = ("Read.\n\n", *CHUNKS, "Question: 1")
MARK = "<|chunk|>"
MARKED = MARK.join(PIECES)
PARTS = [{"type": "text", "text": piece} for piece in PIECES[1:]]


def front(model: Path, renderer_class: Any = BlendRenderer, **settings: Any) -> OnlineRenderer:
    """The front of a server, without an engine behind it."""
    arguments = EngineArgs(model=str(model), additional_config={"vllm_blend": settings})
    config = arguments.create_engine_config()
    renderer = renderer_class(config, get_tokenizer(str(model)))
    return OnlineRenderer(
        config.model_config,
        renderer,
        request_logger=None,
        chat_template=None,
        chat_template_content_format="auto",
    )


@pytest.fixture(scope="module")
def blending(smollm2: Path) -> OnlineRenderer:
    return front(smollm2)


@pytest.fixture(scope="module")
def stock(smollm2: Path) -> OnlineRenderer:
    return front(smollm2, HfRenderer)


def xargs(field: Any) -> dict[str, Any]:
    value = field if isinstance(field, str) else json.dumps(field)
    return {} if field is None else {"vllm_xargs": {"blend": value}}


def complete(online: OnlineRenderer, prompt: str, field: Any = None, **more: Any) -> Any:
    request = CompletionRequest(model="m", prompt=prompt, **xargs(field), **more)
    (found,) = asyncio.run(online.render_completion(request))
    return found


def chat(online: OnlineRenderer, messages: list[Any], field: Any = None, **more: Any) -> Any:
    request = ChatCompletionRequest(model="m", messages=messages, **xargs(field), **more)
    rendered = asyncio.run(online.render_chat(request))
    assert isinstance(rendered, tuple), rendered
    return rendered[1][0]


def tokens(online: OnlineRenderer, text: str) -> list[int]:
    found: list[int] = online.renderer.get_tokenizer().encode(text, add_special_tokens=False)
    return found


def named(online: OnlineRenderer, rendered: Any) -> list[str]:
    """The texts of a prompt's spans."""
    decode = online.renderer.get_tokenizer().decode
    return [decode(rendered["prompt_token_ids"][lo:hi]) for lo, hi in rendered.get(SPANS_KEY, ())]


def plain(rendered: Any) -> dict[str, Any]:
    return {key: value for key, value in rendered.items() if key != "arrival_time"}


@pytest.mark.parametrize("text", [MARKED, "a\uf8f0b" + CHUNKS[0] + "\uf8f1c", "<|chunk|><|chunk|>"])
def test_what_nobody_asked_to_cut_is_stocks(
    blending: OnlineRenderer, stock: OnlineRenderer, text: str
) -> None:
    assert plain(complete(blending, text)) == plain(complete(stock, text))
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    turns += [{"role": "user", "content": [{"type": "text", "text": t} for t in (text, "Why?")]}]  # type: ignore[dict-item]
    assert plain(chat(blending, turns)) == plain(chat(stock, turns))
    assert plain(chat(blending, turns, "off")) == plain(chat(stock, turns))
    spans = {"spans": [[0, 20]]}
    assert plain(chat(blending, turns, spans)) == plain(chat(stock, turns))


def test_a_request_names_its_separator(blending: OnlineRenderer) -> None:
    rendered = complete(blending, MARKED, {"separator": MARK})
    assert rendered["prompt_token_ids"] == sum((tokens(blending, piece) for piece in PIECES), [])
    assert named(blending, rendered) == list(CHUNKS)
    assert rendered["prompt"] == "".join(PIECES)
    other = complete(blending, MARKED, {"separator": "##"})
    assert SPANS_KEY not in other and MARK in other["prompt"]
    turns = [{"role": "user", "content": text} for text in (MARKED, f"x{MARK}{CHUNKS[0]}")]
    assert named(blending, chat(blending, turns, {"separator": MARK})) == list(CHUNKS)


def test_parts_are_chunks_where_a_request_asks_for_blending(blending: OnlineRenderer) -> None:
    turns = [{"role": "user", "content": PARTS}]
    for field in ({}, {"report": True}, "auto", "on"):
        assert named(blending, chat(blending, turns, field)) == list(CHUNKS)
    chars = [{"role": "user", "content": [part | {"text": f"\uf8f0{part['text']}"} for part in PARTS]}]
    assert named(blending, chat(blending, chars, {})) == [f"\uf8f0{text}" for text in CHUNKS]


def test_the_operator_marks_for_all(smollm2: Path) -> None:
    online = front(smollm2, separator=MARK, parts=True)
    assert named(online, complete(online, MARKED)) == list(CHUNKS)
    assert named(online, chat(online, [{"role": "user", "content": PARTS}])) == list(CHUNKS)
    assert named(online, chat(online, [{"role": "user", "content": MARKED}])) == list(CHUNKS)
    assert named(online, complete(online, MARKED, {"separator": ""})) == []


def test_responses_are_chunked_as_chats_are(blending: OnlineRenderer) -> None:
    parts = [{"type": "input_text", "text": part["text"]} for part in PARTS]
    turns = [{"role": "user", "content": parts}]
    for field, chunks in ((None, []), ({}, list(CHUNKS))):
        request = ResponsesRequest(model="m", input=turns, **xargs(field))
        rendered: Any = asyncio.run(blending.render_responses(request))
        assert named(blending, rendered.engine_input) == chunks
    assert rendered.messages[-1]["content"][0]["text"] == CHUNKS[0]


def test_tokenize_tells_what_the_engine_would_see(blending: OnlineRenderer) -> None:
    async def tokenized(request: Any) -> Any:
        if isinstance(request, TokenizeCompletionRequest):
            (found,) = await blending.preprocess_completion(request, request.prompt, None)
        else:
            _, (found,) = await blending.preprocess_chat(request, request.messages, None, "auto", None)
        return found["prompt_token_ids"]

    turns = [{"role": "user", "content": PARTS}]
    for field in (None, {"separator": MARK}, {}):
        text = TokenizeCompletionRequest(prompt=MARKED, **xargs(field))
        expected = complete(blending, MARKED, field)["prompt_token_ids"]
        assert asyncio.run(tokenized(text)) == expected
        messages = TokenizeChatRequest(messages=turns, **xargs(field))
        expected = chat(blending, turns, field)["prompt_token_ids"]
        assert asyncio.run(tokenized(messages)) == expected


def test_a_wrong_field_is_refused_before_an_answer_can_begin(blending: OnlineRenderer) -> None:
    wrong: list[Any] = [{"separator": 5}, {"tenant": "a"}, [3], {"ratio": 1}]
    wrong += [{"spans": [[0, 5000]]}, {"spans": [[5, 5]]}]  # do not fit the prompt
    for field in wrong:
        with pytest.raises(VLLMValidationError, match="blend|separator|spans"):
            complete(blending, MARKED, field)


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_a_truncated_text_is_stocks_and_says_so(
    blending: OnlineRenderer, stock: OnlineRenderer, side: str | None
) -> None:
    cut: Any = {"truncate_prompt_tokens": 50, "truncation_side": side}
    rendered = complete(blending, MARKED, {"separator": MARK}, **cut)
    expected = complete(stock, "".join(PIECES), **cut)
    assert rendered["prompt_token_ids"] == expected["prompt_token_ids"]
    assert SPANS_KEY not in rendered
    assert "truncate_prompt_tokens" in rendered[WHY_NOT_KEY]


def test_a_text_beside_an_image_is_stocks(
    blending: OnlineRenderer, stock: OnlineRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut, tokenize = BlendRenderer._split, HfRenderer._tokenize_prompt

    def beside_an_image(self: Any, prompts: list[Any]) -> list[Any]:
        return [prompt | {"multi_modal_data": {"image": ["one"]}} for prompt in cut(self, prompts)]

    def without_it(self: Any, prompt: Any, params: Any) -> Any:  # this model has no use for one
        prompt = {key: value for key, value in prompt.items() if key != "multi_modal_data"}
        return tokenize(self, prompt, params)

    monkeypatch.setattr(BlendRenderer, "_split", beside_an_image)
    monkeypatch.setattr(HfRenderer, "_tokenize_prompt", without_it)
    rendered = complete(blending, MARKED, {"separator": MARK})
    expected = complete(stock, "".join(PIECES))
    assert rendered["prompt_token_ids"] == expected["prompt_token_ids"]
    assert SPANS_KEY not in rendered and rendered[WHY_NOT_KEY] == WITH_MEDIA


def test_short_chunks_have_no_span_and_the_prompt_says_so(blending: OnlineRenderer) -> None:
    rendered = complete(blending, MARK.join(["a", "tiny", "b"]), {"separator": MARK})
    assert SPANS_KEY not in rendered
    assert "min_chunk_tokens, 16" in rendered[WHY_NOT_KEY]


def test_pieces_are_tokenized_once_a_tenant(
    blending: OnlineRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenized: list[Any] = []
    tokenizer = blending.renderer.get_tokenizer()

    def counted(texts: Any, **kwargs: Any) -> Any:
        tokenized.append(texts)
        return tokenizer(texts, **kwargs)

    monkeypatch.setattr(HfRenderer, "get_tokenizer", lambda _: counted)
    field = {"separator": MARK}
    begin, *rest = PIECES
    first = complete(blending, MARKED, field, cache_salt="a")
    assert tokenized == [begin, rest]  # the first piece alone may get special tokens
    tokenized.clear()
    again = complete(blending, MARKED.replace(": 1", ": 2"), field, cache_salt="a")
    assert tokenized == [begin, ["Question: 2"]]
    assert again[SPANS_KEY] == first[SPANS_KEY]
    tokenized.clear()
    complete(blending, MARKED, field, cache_salt="b")  # learns nothing of what `a` sent
    assert tokenized == [begin, rest]


def test_a_piece_that_comes_twice_or_is_too_large_to_remember(
    blending: OnlineRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    marked = MARK.join([PIECES[0], *[PIECES[1]] * 2, *PIECES[2:]])
    expected = complete(blending, marked, {"separator": MARK}, cache_salt="c")
    renderer: Any = blending.renderer
    monkeypatch.setattr(renderer, "_ids", LRUCache(1, _num_bytes))
    found = complete(blending, marked, {"separator": MARK}, cache_salt="c")
    assert found["prompt_token_ids"] == expected["prompt_token_ids"]
    assert found[SPANS_KEY] == expected[SPANS_KEY] and len(expected[SPANS_KEY]) == 3
    assert not renderer._ids


def test_what_is_remembered_is_bounded_in_bytes(blending: OnlineRenderer) -> None:
    """Short pieces are questions: many, and each seen once."""
    renderer: Any = blending.renderer
    renderer._ids.clear()
    complete(blending, MARKED, {"separator": MARK})
    renderer._ids.clear()
    tracemalloc.start()
    for number in range(2000):
        complete(blending, f"a<|chunk|>b<|chunk|>Why {number}?", {"separator": MARK})
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(renderer._ids) == 2001
    assert 0.5 * renderer._ids.currsize < used < 1.5 * renderer._ids.currsize
