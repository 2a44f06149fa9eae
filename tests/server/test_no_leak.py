"""Two tenants send the same documents; a third, who guesses them, sees what it would of any others."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import NAME, disk, serving

from vllm_blend.server.config import SAFE_FIELDS

WORDS = ["river", "bakery", "winter", "ferry", "island", "stone", "letter", "garden", "window"]
MARK = "<|8c1f|>"
OWN = ("id", "created", "created_at", "text", "content", "tokens", "token_strs")
"""What differs from answer to answer, or is what the request itself sent."""
OPERATORS = [("GET", "stats"), ("GET", "chunks"), ("POST", "delete"), ("POST", "warm")]
OPERATORS += [("POST", "verify"), ("POST", "off"), ("POST", "on")]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["memory", "disk"])
def url(
    model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[str]:
    """A server with the defaults for clients, whose chunks lie in memory alone, or on a disk too."""
    folder = tmp_path_factory.mktemp("server")
    defaults = {"parts": False, "report_sizes": False, "client_fields": list(SAFE_FIELDS)}
    tiers = disk(folder) if request.param == "disk" else {}
    with serving(model, folder, tiers, **defaults) as address:
        yield address


def document(number: int) -> str:
    """45 words in an order of its own: as many tokens as any other."""
    choose = random.Random(number)
    words = WORDS * 5
    choose.shuffle(words)
    return "".join(f" {word}" for word in words)


def ids(number: int) -> list[int]:
    choose = random.Random(number)
    return [choose.randrange(300, 320) for _ in range(60)]


def requests(numbers: list[int]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every way to ask about documents: endpoint and body."""
    texts, question = [document(number) for number in numbers], " Which?"
    spans = [[1 + 60 * at, 61 + 60 * at] for at in range(len(numbers))]
    prompt = [5, *(token for number in numbers for token in ids(number)), 6]
    parts = [{"type": "text", "text": text} for text in [*texts, question]]
    inputs = [{"type": "input_text", "text": text} for text in [*texts, question]]
    marked = MARK.join(["Read.", *texts, question])
    more = {"max_tokens": 1, "temperature": 0, "ignore_eos": True}
    chat = {"messages": [{"role": "user", "content": parts}]} | more
    fields: list[Any] = [None, "on", {"report": True}, {"auto": True, "report": True}]
    fields += [{"report": True, "recomp_ratio": 0}, {"report": True, "policy": "ahead"}]
    fields += [{"off": True, "report": True}]
    for field in fields:
        yield "/v1/chat/completions", with_field(chat, field)
        yield "/v1/completions", with_field({"prompt": prompt} | more, spanned(field, spans))
        yield "/v1/completions", with_field({"prompt": marked} | more, separated(field))
    yield "/v1/chat/completions", with_field(chat | {"stream": True}, {"report": True})
    responses = {"input": [{"role": "user", "content": inputs}], "max_output_tokens": 1}
    yield "/v1/responses", with_field(responses, {"report": True})
    yield "/tokenize", with_field({"prompt": marked}, {"separator": MARK})
    wrong: list[Any] = [{"tenant": "one"}, {"spans": [[0, 4000]]}, {"mask": "exact"}, {"chunks": 1}]
    wrong += [{"recomp_ratio": 2}, {"report": 3}]
    for field in wrong:
        yield "/v1/completions", with_field({"prompt": prompt} | more, field)
    yield "/v1/completions", with_field({"prompt": prompt * 60} | more, {"report": True})
    truncated = {"prompt": marked, "truncate_prompt_tokens": 90} | more
    yield "/v1/completions", with_field(truncated, separated({"report": True}))


def with_field(body: dict[str, Any], field: Any) -> dict[str, Any]:
    if field is None:
        return body
    value = field if isinstance(field, str) else json.dumps(field)
    return body | {"vllm_xargs": {"blend": value}}


def spanned(field: Any, spans: list[list[int]]) -> Any:
    return field | {"spans": spans} if isinstance(field, dict) else field


def separated(field: Any) -> Any:
    return field | {"separator": MARK} if isinstance(field, dict) else field


def ask(url: str, path: str, body: dict[str, Any], tenant: str) -> httpx.Response:
    salted = body if path == "/tokenize" else body | {"cache_salt": tenant}
    return httpx.post(f"{url}{path}", json={"model": NAME} | salted, timeout=300)


def seen(answer: httpx.Response) -> Any:
    """All that an answer tells, but for texts, names and times."""
    text = answer.text
    found: Any
    if text.startswith("data:"):
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
        found = [line if line == "[DONE]" else told(json.loads(line)) for line in lines]
    else:
        found = told(json.loads(text))
    headers = sorted(name for name in answer.headers)
    return answer.status_code, headers, found


def told(value: Any) -> Any:
    if isinstance(value, list):
        return [told(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        key: told(one) for key, one in value.items() if key not in OWN and not key.endswith("_seconds")
    }


def alike(one: list[Any], two: list[Any]) -> None:
    for (path, _, found), (_, field, expected) in zip(one, two, strict=True):
        assert found == expected, (path, field)


def settle(url: str) -> None:
    """Waits until nothing is left to be computed in the background."""
    while True:
        lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
        waiting = [line for line in lines if line.startswith("vllm:blend_waiting_chunks")]
        # one more request, so that the gauge is of now
        ask(url, "/v1/completions", with_field({"prompt": [5], "max_tokens": 1}, {"report": True}), "z")
        if all(float(line.split()[-1]) == 0 for line in waiting):
            return
        time.sleep(0.5)


def ask_all(url: str, numbers: list[int], tenant: str) -> list[Any]:
    """What each way to ask shows, each to a tenant of its own."""
    return [
        (path, body.get("vllm_xargs"), seen(ask(url, path, body, f"{tenant} {at}")))
        for at, (path, body) in enumerate(requests(numbers))
    ]


def test_who_guesses_sees_nothing(url: str) -> None:
    known, unknown = [1, 2, 3], [11, 12, 13]
    first = ask_all(url, known, "one")
    second = ask_all(url, known, "two")  # the same documents, by somebody else
    alike(second, first)
    for tenant in ("one", "two"):
        ask_all(url, known, tenant)
    settle(url)
    httpx.post(f"{url}/reset_prefix_cache", timeout=30)
    again = json.dumps(ask_all(url, known, "one"))
    assert '"missed_chunks": 0' in again and '"reused_tokens": 180' in again  # they know them
    httpx.post(f"{url}/reset_prefix_cache", timeout=30)
    guessed, others = (ask_all(url, numbers, f"three {numbers}") for numbers in (known, unknown))
    alike(guessed, others)
    shown = json.dumps(guessed)
    assert '"missed_chunks": 3' in shown and '"reused_tokens": 0' in shown
    assert {status for _, _, (status, *_) in guessed} == {200, 400}
    for word in ("stored_chunks", "waiting_chunks", "evicted_chunks", "store_hits"):
        assert word not in shown


def test_without_an_operator_there_is_no_list(url: str) -> None:
    for method, name in OPERATORS:
        answer = httpx.request(method, f"{url}/blend/{name}", json={"tenant": "one"}, timeout=30)
        assert answer.status_code == 404 and answer.json() == {"detail": "Not Found"}
    assert httpx.get(f"{url}/blend", timeout=30).status_code == 404
    assert "blend" not in json.dumps(httpx.get(f"{url}/openapi.json", timeout=30).json()["paths"])
