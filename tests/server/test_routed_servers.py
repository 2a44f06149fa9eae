"""Two servers that share nothing, as a gateway that goes by ``Router`` asks them: real ones."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import GREEDY, NAME, sample, serving, xargs

from vllm_blend.api.routing import Router

pytestmark = pytest.mark.slow


def request(texts: list[str], question: str) -> dict[str, Any]:
    parts = [{"type": "text", "text": text} for text in (*texts, question)]
    body = {"model": NAME, "messages": [{"role": "user", "content": parts}], **GREEDY}
    return body | xargs({"report": True})


def answered(url: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["kv_transfer_params"]["blend"]
    return found


def test_each_chunk_is_computed_on_one_server(model: Path, tmp_path: Path) -> None:
    """Two topics in pairs: routed in turn, each server would have to learn both."""
    topics = [sample(number)[0] for number in (1, 2)]
    with ExitStack() as stack:
        urls = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            arguments = ("--no-enable-prefix-caching",)
            urls.append(stack.enter_context(serving(model, tmp_path / name, {}, arguments)))
        router = Router(urls)
        gone: list[list[str]] = [[], []]
        missed = reused = 0
        for number in range(12):
            topic = number // 2 % 2
            texts = topics[topic][number % 3 :] + topics[topic][: number % 3]
            body = request(texts, f"What is told in text {number}?")
            url = router.choose(body)
            gone[topic].append(url)
            report = answered(url, body)
            missed += report["missed_chunks"]
            reused += report["chunks"]
    assert [len(set(each)) for each in gone] == [1, 1] and gone[0][0] != gone[1][0]
    assert (missed, reused) == (6, 30)
