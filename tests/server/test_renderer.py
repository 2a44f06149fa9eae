"""Marked text on its way to token ids, by vLLM's renderer over a real tokenizer."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.renderers.hf import HfRenderer
from vllm.renderers.params import TokenizeParams
from vllm.tokenizers import get_tokenizer

from vllm_blend.server.frontend.renderer import BlendRenderer
from vllm_blend.server.request import SPANS_KEY

CHUNKS = ("The ferry stops until March, when the ice is gone. " * 3, "Why? " * 20)
PIECES = ("Read.\n\n", *CHUNKS, "Question: 1")


@pytest.fixture(scope="module")
def renderer(smollm2: Path) -> BlendRenderer:
    arguments = EngineArgs(model=str(smollm2), additional_config={"vllm_blend": {}})
    return BlendRenderer(arguments.create_engine_config(), get_tokenizer(str(smollm2)))


def test_pieces_are_tokenized_once(renderer: BlendRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenized: list[str] = []
    stock = HfRenderer._tokenize_prompt

    def counted(self: Any, prompt: Any, params: Any) -> Any:
        tokenized.append(prompt["prompt"])
        return stock(self, prompt, params)

    monkeypatch.setattr(HfRenderer, "_tokenize_prompt", counted)
    params = TokenizeParams(max_total_tokens=8192)
    text = "<|chunk|>".join(PIECES)
    first = renderer._tokenize_prompt({"prompt": text}, params)
    assert tokenized == list(PIECES)
    encode = renderer.get_tokenizer().encode
    ids = [encode(piece, add_special_tokens=index == 0) for index, piece in enumerate(PIECES)]
    assert first["prompt_token_ids"] == sum(ids, [])
    (a, b), (c, d) = first[SPANS_KEY]
    assert first["prompt_token_ids"][a:b] == ids[1]
    assert first["prompt_token_ids"][c:d] == ids[2]

    tokenized.clear()
    again = renderer._tokenize_prompt({"prompt": text.replace("Question: 1", "Question: 2")}, params)
    assert tokenized == ["Read.\n\n", "Question: 2"]  # the first piece alone may get special tokens
    assert again["prompt_token_ids"][: len(sum(ids[:3], []))] == sum(ids[:3], [])
    assert again[SPANS_KEY] == first[SPANS_KEY]


def test_what_is_remembered_is_bounded_in_bytes(renderer: BlendRenderer) -> None:
    """Short pieces are questions: many, and each seen once."""
    params = TokenizeParams(max_total_tokens=8192)
    renderer._ids.clear()
    tracemalloc.start()
    for number in range(2000):
        renderer._tokenize_prompt({"prompt": f"a<|chunk|>Why {number}?"}, params)
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(renderer._ids) == 2000
    assert 0.5 * renderer._ids.currsize < used < 1.5 * renderer._ids.currsize


def test_unmarked_text_is_stocks(renderer: BlendRenderer) -> None:
    params = TokenizeParams(max_total_tokens=8192)
    expected = HfRenderer._tokenize_prompt(renderer, {"prompt": PIECES[1]}, params)
    assert renderer._tokenize_prompt({"prompt": PIECES[1]}, params) == expected
