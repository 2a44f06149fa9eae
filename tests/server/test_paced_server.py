"""Ratio "auto" in a server: chunks in a Redis behind a fast line, and then a slow one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import RedisServer, SlowLine
from serving import chat, connect, reported, reset_prefix_cache, sample, serving, text_of, warm, xargs

REPORT = {"report": True}

pytestmark = pytest.mark.slow


@pytest.fixture
def line(redis_server: RedisServer) -> Iterator[SlowLine]:
    """The way to a real Redis."""
    found = SlowLine(redis_server.port)
    yield found
    found.close()


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    return sum(float(one.rsplit(" ", 1)[1]) for one in lines if one.startswith(f"vllm:{name}"))


def test_a_slow_tier_is_not_loaded_from(line: SlowLine, smollm2: Path, tmp_path: Path) -> None:
    redis = {"url": f"redis://127.0.0.1:{line.port}/0", "budget_gb": 1, "timeout_s": 60}
    tiers = {"redis": redis, "storage": "fp8"}  # loads far faster than prefills, until held up
    with serving(smollm2, tmp_path, tiers, harvest=False) as url:
        client = connect(url)
        for number in (1, 2, 3):
            warm(client, *sample(number))
        time.sleep(2)  # they are written from behind
    values = {"recomp_ratio": "auto", "quality_floor": 0.2, "harvest": False}
    with serving(smollm2, tmp_path, tiers, **values) as url:
        client = connect(url)

        def ask(number: int, **field: Any) -> tuple[str, dict[str, Any]]:
            reset_prefix_cache(url)
            answer = chat(client, *sample(number), **xargs(REPORT | field))
            return text_of(answer), reported(answer)

        measured = "vllm_blend: a prefill of 1024 tokens takes"
        for _ in range(600):  # a request waits for that too, but not for as long
            if measured in (tmp_path / "log.txt").read_text():
                break
            time.sleep(0.5)
        _, told = ask(1)
        decision = told["decision"]
        assert decision["tiers"] == ["redis"] * 3
        assert (decision["load"], decision["ratio"]) == ([True] * 3, 0.2)
        assert (told["loaded_chunks"], told["missed_chunks"]) == (3, 0), told
        assert told["recomputed_tokens"] == int(0.2 * told["reused_tokens"])
        assert decision["load_s"] + decision["compute_s"] == pytest.approx(decision["ttft_s"])

        line.bytes_per_s = 2e5  # a chunk of some 270 tokens would take 15 s
        start = time.monotonic()
        _, told = ask(2)  # it is not known yet that it is slow: waited for, but not for ever
        assert told["decision"]["load"] == [True] * 3
        assert told["loaded_chunks"] < 3
        time.sleep(max(start + 20 - time.monotonic(), 0))  # it is known before they have come
        slow_s = told["stored_bytes"]["redis"] / 3 / line.bytes_per_s
        slow_chunks = 'blend_slow_chunks_total{engine="0",model_name="smollm2",tier="redis"}'
        before = metric(url, slow_chunks)
        start = time.monotonic()
        found, told = ask(3)
        took = time.monotonic() - start
        assert told["decision"]["tiers"] == ["redis"] * 3, told
        assert told["decision"]["load"] == [False] * 3, told
        assert told["decision"]["slow_chunks"] == {"redis": 3}
        assert "no load is faster" in told["why_not"]
        assert told["reused_tokens"] == 0
        assert told["wait_seconds"] < 1  # until it was known where they are
        assert took < slow_s / 2
        assert metric(url, slow_chunks) == before + 3
        assert found == ask(3, recomp_ratio=1.0)[0]  # computed in full
        line.bytes_per_s = inf
        for _ in range(120):  # they come behind
            _, told = ask(2)
            if told["reused_tokens"] and not told["missed_chunks"]:
                break
            time.sleep(0.5)
        assert told["reused_tokens"] and not told["missed_chunks"]
        assert metric(url, "blend_ratio_count") >= 2
    log = (tmp_path / "log.txt").read_text()
    assert measured in log
    assert "ratio 0.20 is the quality floor" in log
    assert "not blended, full prefill takes" in log
