"""A server's defaults, as clients meet them: what is blended, what an answer says, what is refused."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from chat_tokenizers import make_tokenizer
from serving import NAME, sample, serving

from vllm_blend.server.config import SAFE_FIELDS

MARK = "<|8c1f|>"
ODD = f"one{MARK}two \uf8f0three\uf8f1 four{MARK}five <|chunk|> six"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    defaults = {"parts": False, "report_sizes": False, "client_fields": list(SAFE_FIELDS)}
    with serving(model, tmp_path_factory.mktemp("server"), {}, **defaults) as address:
        yield address


def post(url: str, path: str, body: dict[str, Any], field: Any = None) -> Any:
    if field is not None:
        value = field if isinstance(field, str) else json.dumps(field)
        body = body | {"vllm_xargs": {"blend": value}}
    answer = httpx.post(f"{url}{path}", json={"model": NAME} | body, timeout=120)
    if answer.status_code != 200:
        return answer.status_code, answer.json()["error"]["message"]
    return answer.json()


def chat(url: str, content: Any, field: Any = None, **more: Any) -> Any:
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 8}
    return post(url, "/v1/chat/completions", body | {"return_token_ids": True} | more, field)


def parts(number: int, kind: str = "text") -> list[dict[str, str]]:
    texts, question = sample(number)
    return [{"type": kind, "text": text} for text in [*texts, question]]


def told(answer: Any) -> Any:
    return (answer["kv_transfer_params"] or {}).get("blend")


def warm(url: str, content: Any, **more: Any) -> dict[str, Any]:
    """Asks until all chunks are known; the report."""
    for _ in range(60):
        report: dict[str, Any] = told(chat(url, content, {"report": True}, **more))
        if not report["missed_chunks"]:
            return report
        time.sleep(0.5)
    raise AssertionError(report)


def test_a_plain_chat_is_answered_alike_whoever_asked_for_its_parts(url: str) -> None:
    first = chat(url, parts(1))
    assert warm(url, parts(1))["reused_tokens"] > 0
    again = chat(url, parts(1))
    ids = [answer["choices"][0]["token_ids"] for answer in (first, again)]
    assert ids[0] == ids[1]
    assert told(first) is told(again) is None


def test_a_blended_answer_says_so(url: str) -> None:
    warm(url, parts(2))
    httpx.post(f"{url}/reset_prefix_cache", timeout=30)
    sign = told(chat(url, parts(2), "on"))
    assert sign.keys() == {"reused_tokens", "recomputed_tokens"}
    assert sign["reused_tokens"] > sign["recomputed_tokens"] > 0
    inputs = {"input": [{"role": "user", "content": parts(2, "input_text")}], "max_output_tokens": 8}
    httpx.post(f"{url}/reset_prefix_cache", timeout=30)
    assert told(post(url, "/v1/responses", inputs, "on")) == sign


def test_text_is_text(url: str, model: Path) -> None:
    expected = make_tokenizer("qwen").encode(ODD, add_special_tokens=False)
    assert post(url, "/tokenize", {"prompt": ODD})["tokens"] == expected
    body = {"prompt": ODD, "max_tokens": 1, "return_token_ids": True}
    for field in (None, {"report": True}):
        answer = post(url, "/v1/completions", body, field)
        assert answer["choices"][0]["prompt_token_ids"] == expected
    assert told(answer)["why_not"] == "no chunk in the prompt"
    cut = post(url, "/v1/completions", body, {"separator": MARK})
    seen = post(url, "/tokenize", {"prompt": ODD}, {"separator": MARK})
    assert cut["choices"][0]["prompt_token_ids"] == seen["tokens"] != expected


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_field_that_does_not_fit_is_refused_before_a_stream_begins(url: str, path: str) -> None:
    texts = {"/v1/completions": {"prompt": "Hello"}, "/v1/responses": {"input": "Hello"}}
    chat = {"messages": [{"role": "user", "content": "Hello"}]}
    body = texts.get(path, chat) | {"stream": True}
    status, message = post(url, path, body, {"spans": [[0, 4000]]})
    assert status == 400
    assert "spans[0]" in message


def test_a_report_says_why_marked_chunks_are_not_blended(url: str) -> None:
    field = {"separator": MARK, "report": True}
    texts, question = sample(3)
    body = {"prompt": MARK.join(["Read.", *texts, question]), "max_tokens": 1}
    truncated = told(post(url, "/v1/completions", body | {"truncate_prompt_tokens": 100}, field))
    assert "truncate_prompt_tokens" in truncated["why_not"]
    short = told(post(url, "/v1/completions", {"prompt": ODD, "max_tokens": 1}, field))
    assert "min_chunk_tokens" in short["why_not"]


def test_a_tenant_is_what_the_gateway_says(url: str) -> None:
    warm(url, parts(4), cache_salt="a")
    for salt, known in (("a", True), ("b", False), (None, False)):
        httpx.post(f"{url}/reset_prefix_cache", timeout=30)
        report = told(chat(url, parts(4), {"report": True}, cache_salt=salt))
        assert (report["reused_tokens"] > 0) == known, salt
        assert not {"stored_chunks", "waiting_chunks"} & report.keys()
    status, message = chat(url, parts(4), {"tenant": "a", "report": True}, cache_salt="b")
    assert status == 400
    assert "'tenant'" in message and "allowed: auto, keep, off, policy" in message
