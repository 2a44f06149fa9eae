"""The page's route, and what streams tell: without an engine."""

from __future__ import annotations

import asyncio
import json
import re
from argparse import Namespace
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from vllm_blend.server.config import ServerSettings
from vllm_blend.server.frontend.page import page_html
from vllm_blend.server.frontend.routes import BlendRoutes
from vllm_blend.server.frontend.streams import with_reports

REPORT = {"reused_tokens": 40, "recomputed_tokens": 4}


def client(additional_config: Any) -> TestClient:
    app = FastAPI()
    app.state.args = Namespace(additional_config=additional_config)
    BlendRoutes().attach_router(app)
    return TestClient(app)


@pytest.mark.parametrize("config", [{}, None, {"vllm_blend": {}}, {"vllm_blend": {"page": False}}])
def test_there_is_no_page_unless_the_operator_wants_one(config: Any) -> None:
    assert client(config).get("/blend").status_code == 404


def test_the_page_loads_nothing_but_itself() -> None:
    server = client({"vllm_blend": {"page": True}})
    first, second = server.get("/blend"), server.get("/blend")
    rules = dict(rule.split(" ", 1) for rule in first.headers["content-security-policy"].split("; "))
    assert rules["default-src"] == "'none'" and rules["connect-src"] == "'self'"
    nonce = re.fullmatch(r"'nonce-([\w-]+)'", rules["script-src"])
    assert nonce and nonce[1] not in second.text  # drawn for each answer
    assert first.text.count(f'nonce="{nonce[1]}"') == 3
    for place in ("NONCE", "STYLE", "SCRIPT", "VALUES"):
        assert place not in first.text
    assert not re.search(r"""(?:src|href)=["'](?!data:)|https?://|@import|url\(""", first.text)


def test_the_page_knows_what_clients_may_set_and_no_more() -> None:
    settings = ServerSettings.from_mapping(
        {
            "client_fields": ["report"],
            "client_ratios": [0.1, 0.4],
            "policy": "static",
            "separator": "</script>secret",
        }
    )
    html = page_html(settings)
    found = re.search(r'<script id="values"[^>]*>(.*?)</script>', html)
    assert found
    values = json.loads(found[1])
    assert values["fields"] == ["report"] and values["ratios"] == [0.1, 0.4]
    assert values["policy"] == next(iter(values["policies"])) == "static"
    assert "secret" not in html


def test_a_page_that_is_not_true_or_false_is_refused() -> None:
    with pytest.raises(ValueError, match="page is 'yes'; allowed: true, false"):
        ServerSettings.from_mapping({"page": "yes"})


def events(prompts: list[tuple[Any, dict[str, Any] | None]], n: int | None = None) -> list[Any]:
    """Streamed chunks of a stub of vLLM's generator: two a choice, of each prompt and its report.

    Prompts with a number are those of Completions, which come as pairs.
    """

    async def results() -> AsyncIterator[Any]:
        for prompt, params in prompts:
            result = Namespace(kv_transfer_params=params)
            yield result if prompt is None else (prompt, result)

    async def stock(
        serving: Any, request: Any, result_generator: AsyncIterator[Any], model_name: str
    ) -> AsyncIterator[str]:
        async for result in result_generator:
            first = (result[0] if isinstance(result, tuple) else 0) * (n or 1)
            for index in range(first, first + (n or 1)):
                quoted = 'is "finish_reason":"stop" – ü'
                for choice in (
                    {"index": index, "delta": {"content": quoted}, "finish_reason": None},
                    {"index": index, "delta": {"content": "."}, "finish_reason": "stop"},
                ):
                    chunk = {"model": model_name, "choices": [choice]}
                    yield f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n"
        yield "data: [DONE]\n\n"

    async def collect() -> list[str]:
        stream = with_reports(stock, None, Namespace(n=n), results(), model_name="m")
        return [event async for event in stream]

    texts = asyncio.run(collect())
    assert texts[-1] == "data: [DONE]\n\n" and all(text.endswith("\n\n") for text in texts)
    return [json.loads(text.removeprefix("data: ")) for text in texts[:-1]]


def told(chunks: list[Any]) -> list[Any]:
    return [chunk.get("kv_transfer_params") for chunk in chunks]


def test_the_chunk_that_ends_a_stream_has_its_report() -> None:
    chunks = events([(None, {"blend": REPORT, "other": 1})])
    assert told(chunks) == [None, {"blend": REPORT}]
    assert chunks[0]["choices"][0]["delta"]["content"].endswith("ü")
    assert chunks[1]["choices"][0]["finish_reason"] == "stop" and chunks[1]["model"] == "m"


@pytest.mark.parametrize("params", [None, {}, {"other": 1}])
def test_a_stream_that_was_not_blended_stays_as_it_was(params: Any) -> None:
    assert told(events([(None, params)])) == [None, None]


def test_each_choice_has_its_own_prompts_report() -> None:
    other = {"blend": REPORT | {"reused_tokens": 7}}
    found = told(events([(0, {"blend": REPORT}), (1, None), (2, other)], n=2))
    one = {"blend": REPORT}
    assert found == [None, one, None, one, None, None, None, None, None, other, None, other]
