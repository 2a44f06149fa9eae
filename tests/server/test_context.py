"""What a server computes chunks behind."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from test_prompt import STYLES, make_tokenizer

from vllm_blend.prompt import chat_frame, plain_frame
from vllm_blend.server.background import chunk_context

HEAD = "Read the texts. Be brief."


@pytest.fixture(params=STYLES)
def tokenizer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    found = make_tokenizer(request.param)
    monkeypatch.setattr("vllm.tokenizers.registry.cached_tokenizer_from_config", lambda config: found)
    return found


def config(skip_tokenizer_init: bool = False) -> Any:
    return SimpleNamespace(model_config=SimpleNamespace(skip_tokenizer_init=skip_tokenizer_init))


def test_the_template_s_head_then_the_head_that_was_set(tokenizer: Any) -> None:
    ids = tuple(tokenizer.encode(HEAD, add_special_tokens=False))
    assert chunk_context(config()) == chat_frame(tokenizer).head
    assert chunk_context(config(), head=HEAD) == chat_frame(tokenizer).head + ids
    kind = chunk_context(config(), "Be kind.", HEAD)
    assert kind == chat_frame(tokenizer, "Be kind.").head + ids


def test_without_a_template_behind_bos(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    ids = tuple(tokenizer.encode(HEAD, add_special_tokens=False))
    assert chunk_context(config(), head=HEAD) == plain_frame(tokenizer).head + ids
    with pytest.raises(ValueError, match="system of vllm_blend does not fit the chat template"):
        chunk_context(config(), "Be kind.")


def test_an_engine_without_a_tokenizer_takes_no_text() -> None:
    assert chunk_context(config(skip_tokenizer_init=True)) == ()
    for values in ({"head": HEAD}, {"system": ""}):
        with pytest.raises(ValueError, match="the engine has none"):
            chunk_context(config(skip_tokenizer_init=True), **values)  # type: ignore[arg-type]
