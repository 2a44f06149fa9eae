"""What a server computes chunks behind."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers.utils.chat_template_utils as hf_templates
from chat_tokenizers import LLAMA_CHAT, STYLES, make_tokenizer
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_blend.core import stand_in
from vllm_blend.core.prompt import chat_frame, plain_frame
from vllm_blend.core.static_scores import SCORING_TOKENS
from vllm_blend.server.chunks.chunk_contexts import Contexts, chunk_contexts
from vllm_blend.server.chunks.token_index import Run
from vllm_blend.server.config import ServerSettings

DATED_CHAT = (
    "{% if not day is defined %}{% set day = strftime_now('%d %b %Y') %}{% endif %}"
    "Today is {{ day }}.\n\n" + LLAMA_CHAT
)
HEAD = "Read the texts. Be brief."
STAND_IN = "The ferry was built in 1931. It carried mail.\n\n"


@pytest.fixture(params=STYLES)
def tokenizer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    found = make_tokenizer(request.param)
    monkeypatch.setattr("vllm.tokenizers.registry.cached_tokenizer_from_config", lambda config: found)
    return found


def config(skip_tokenizer_init: bool = False, max_model_len: int = 4096) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(
            skip_tokenizer_init=skip_tokenizer_init, max_model_len=max_model_len
        )
    )


def test_the_template_s_head_then_the_head_that_was_set(tokenizer: Any) -> None:
    ids = tuple(tokenizer.encode(HEAD, add_special_tokens=False))
    assert chunk_contexts(config(), stand_in="")[:2] == (chat_frame(tokenizer).head,) * 2
    both = (chat_frame(tokenizer).head + ids,) * 2
    assert chunk_contexts(config(), head=HEAD, stand_in="")[:2] == both
    kind = chunk_contexts(config(), "Be kind.", HEAD, "")
    assert kind[:2] == (chat_frame(tokenizer, "Be kind.").head + ids,) * 2


def test_a_text_of_our_own_stands_in_or_is_there_for_scores(tokenizer: Any) -> None:
    own = tuple(tokenizer.encode(stand_in.text(), add_special_tokens=False))[:SCORING_TOKENS]
    head = chat_frame(tokenizer).head
    assert chunk_contexts(config())[:3] == (head, head + own, head)
    assert chunk_contexts(config(), stand_in="")[:3] == (head, head, head + own)
    short = chunk_contexts(config(max_model_len=400))[:3]  # no more than a quarter of a prompt
    assert short == (head, head + own[:100], head)


def test_all_chunks_but_the_first_stand_behind_the_stand_in(tokenizer: Any) -> None:
    ids = tuple(tokenizer.encode(STAND_IN, add_special_tokens=False))
    first, later, scoring, _ = chunk_contexts(config(), head=HEAD, stand_in=STAND_IN)
    assert scoring == first
    assert (first, later) == (chunk_contexts(config(), head=HEAD).first, first + ids)
    longest = len(later) + 2  # one token of a chunk, and one that is asked for
    chunk_contexts(config(max_model_len=longest), head=HEAD, stand_in=STAND_IN)
    with pytest.raises(ValueError, match=f"have {len(later)} tokens; allowed: {len(later) - 1}$"):
        chunk_contexts(config(max_model_len=longest - 1), head=HEAD, stand_in=STAND_IN)


def test_the_kv_that_suits_the_place_comes_first() -> None:
    contexts = Contexts((1,), (1, 2))
    first, later = contexts[:2]

    def suited(*runs: tuple[int, int, tuple[int, ...]], taken: Any = ()) -> list[Any]:
        found = contexts.suited([(Run(lo, hi, 0, 0), context) for lo, hi, context in runs], taken)
        return [(run.start, run.end, context) for run, context in found]

    both = [(lo, lo + 5, context) for lo in (10, 20, 30) for context in (first, later)]
    assert suited(*both) == [(10, 15, first), (20, 25, later), (30, 35, later)]
    # another place's KV is better than none
    assert suited((10, 15, later), (20, 25, first)) == [(10, 15, later), (20, 25, first)]
    # a place that is taken before all others is the first
    assert suited(*both, taken=[(0, 5), (29, 31)]) == [(10, 15, later), (20, 25, later)]
    assert suited((10, 30, first), (12, 15, later), (20, 40, later)) == [(10, 30, first)]
    assert contexts.at(10, 10) == first and contexts.at(11, 10) == later


def test_without_a_template_behind_bos(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    ids = tuple(tokenizer.encode(HEAD, add_special_tokens=False))
    assert chunk_contexts(config(), head=HEAD).first == plain_frame(tokenizer).head + ids
    with pytest.raises(ValueError, match="system of vllm_blend does not fit the chat template"):
        chunk_contexts(config(), "Be kind.")


def test_an_engine_without_a_tokenizer_takes_no_text() -> None:
    assert chunk_contexts(config(skip_tokenizer_init=True)) == ((), (), None, False)
    for values in ({"head": HEAD}, {"system": ""}, {"stand_in": STAND_IN}):
        with pytest.raises(ValueError, match="the engine has none"):
            chunk_contexts(config(skip_tokenizer_init=True), **values)  # type: ignore[arg-type]


def test_a_template_that_tells_the_day_has_one_context_for_all_days(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of yesterday, and of a server that was started then, are found today."""
    tokenizer.chat_template = DATED_CHAT
    frames, contexts = [], []
    for day in (1, 2):

        class Day(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> Any:
                return cls(2026, 11, day)  # noqa: B023

        monkeypatch.setattr(hf_templates, "datetime", Day)
        frames.append(chat_frame(tokenizer))
        contexts.append(chunk_contexts(config(), "Be kind.", HEAD))
    assert frames[0] != frames[1]  # a prompt tells its day
    assert contexts[0] == contexts[1]
    assert "2025" in tokenizer.decode(contexts[0].first)
    fixed = chunk_contexts(config(), variables={"day": "Monday"})
    assert "Today is Monday" in tokenizer.decode(fixed.first)


def test_chunks_are_computed_behind_the_servers_own_template(
    tokenizer: Any, smollm2: Path, tmp_path: Path
) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{{ greeting }} to you:" + LLAMA_CHAT)
    words = ["--model", str(smollm2), "--chat-template", str(path)]
    words += ["--default-chat-template-kwargs", '{"greeting": "Good day"}']

    def settings(**values: Any) -> ServerSettings:
        parser = make_arg_parser(FlexibleArgumentParser())
        asked = json.dumps({"vllm_blend": values})
        args = parser.parse_args([*words, "--additional-config", asked])
        found = ServerSettings.of(AsyncEngineArgs.from_cli_args(args).create_engine_config())
        assert found is not None
        return found

    def head(told: ServerSettings) -> str:
        contexts = chunk_contexts(
            config(), template=told.chat_template, variables=told.chat_template_kwargs
        )
        text: str = tokenizer.decode(contexts.first)
        return text

    assert head(settings()).startswith("Good day to you:")
    assert head(settings(chat_template=LLAMA_CHAT)) == tokenizer.decode(
        chat_frame(tokenizer, template=LLAMA_CHAT).head
    )
    kind = settings(chat_template_kwargs={"greeting": "Be welcome"})
    assert head(kind).startswith("Be welcome to you:")
