"""What ``vllm-blend report`` makes of a server's counters and its operator's routes."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import prometheus_client
import pytest
from answering import answering
from prometheus_client import CollectorRegistry, generate_latest
from servers import free_port
from typer.testing import CliRunner

from vllm_blend.cli.app import app
from vllm_blend.cli.server_metrics import ServerMetrics, reuse
from vllm_blend.server.frontend import metrics as server_metrics

STATS: dict[str, Any] = {
    "engines": [
        {"tenants": {"a": {"chunks": 2, "tokens": 400, "in_use": 1}}},
        {
            "tenants": {
                "a": {"chunks": 1, "tokens": 100, "in_use": 0},
                "": {"chunks": 5, "tokens": 900, "in_use": 0},
            }
        },
    ]
}


def request(**values: Any) -> dict[str, Any]:
    """A request's report, as the scheduler makes it."""
    zeros = {"reused_tokens": 0, "cached_chunks": 0, "cached_tokens": 0, "recomputed_tokens": 0}
    zeros |= {"chunks": 0, "missed_chunks": 0, "short_chunks": 0, "loaded_chunks": 0}
    sizes = {"computed_chunks": 7, "waiting_chunks": 1, "dropped_chunks": 0, "evicted_chunks": 2}
    parts: dict[str, Any] = {
        "stored_chunks": {"host": 5, "disk": 9},
        "stored_bytes": {"host": 5_000_000, "disk": 9_000_000},
        "store_hits": {"disk": 3},
        "store_misses": {"absent": 4},
    }
    return zeros | sizes | parts | {"lost_chunks": {}, "decision": None} | values


@pytest.fixture(scope="module")
def counted() -> str:
    """/metrics after three requests on two engines, as the server itself counts them."""
    registry = CollectorRegistry()
    with pytest.MonkeyPatch.context() as patch:
        for kind in (prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram):
            patch.setattr(prometheus_client, kind.__name__, partial(kind, registry=registry))
        counters = server_metrics.Metrics()
    counters.count(request(prompt_tokens=1000, missed_chunks=4), ("m", "0"))
    blended = request(
        prompt_tokens=1000,
        reused_tokens=800,
        recomputed_tokens=80,
        chunks=3,
        loaded_chunks=1,
        short_chunks=1,
        wait_seconds=0.02,
        lost_chunks={"gone": 1},
    )
    counters.count(blended, ("m", "0"))
    cached = {"cached_tokens": 500, "cached_chunks": 2}
    counters.count(request(prompt_tokens=1000, **cached), ("m", "1"))
    return generate_latest(registry).decode()


def told(metrics: str, *options: str, code: int = 0, **answers: Any) -> Any:
    with answering({"/metrics": (200, metrics)} | answers) as url:
        result = CliRunner().invoke(app, ["report", url, *options])
    assert result.exit_code == code, result.output
    return result


def test_sums_over_engines(counted: str) -> None:
    found = json.loads(told(counted, "--json").stdout)
    assert found["requests"] == {"blended": 1, "cached": 1, "full_prefill": 1}
    assert found["chunks"] == {"hit": 3, "cached": 2, "miss": 4, "short": 1}
    assert found["hit_rate"] == pytest.approx(0.5)
    assert found["reused_share"] == pytest.approx(800 / 3000)
    assert found["prefix_cached_share"] == pytest.approx(500 / 3000)
    assert found["computed_tokens"] == 1000 + 200 + 80 + 500
    assert found["stages_mean_s"] == {"wait": pytest.approx(0.02)}
    assert found["lost_chunks"] == {"gone": 1}
    assert found["tiers"]["disk"] == {"chunks": 18, "bytes": 18_000_000}
    assert found["store_hits"] == {"disk": 6} and found["store_misses"] == {"absent": 8}
    assert found["background"]["computed"] == 14
    assert found["tenants"] is None


def test_what_people_read(counted: str) -> None:
    shown = told(counted).stdout
    assert "1 blended, 1 in vLLM's prefix cache, 1 computed in full" in shown
    assert "50%: 5 of 10, 1 of them loaded from lower tiers" in shown
    assert "1780 of 3000, 1.7 times fewer" in shown and "wait 20.0 ms" in shown
    assert "18.0 MB" in shown and "give the operator's key in $BLEND_KEY" in shown


def test_tenants_are_told_to_the_operator(counted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER", "0123456789abcdef")
    stats: Any = {"/blend/stats": (200, STATS)}
    options = ("--operator-key-env", "OTHER")
    found = json.loads(told(counted, "--json", *options, **stats).stdout)
    assert found["tenants"]["a"] == {"chunks": 3, "tokens": 500, "in_use": 1}
    lines = told(counted, *options, **stats).stdout.splitlines()
    assert [line.split()[:3] for line in lines[-2:]] == [["(none)", "5", "900"], ["a", "3", "500"]]
    refused: Any = {"/blend/stats": (403, {"detail": "this is not the operator's key"})}
    assert "not the operator's key" in told(counted, *options, code=1, **refused).stderr


def test_servers_that_have_nothing_to_tell() -> None:
    assert "has counted no request" in told("vllm:x 1.0\n", code=1).stderr
    url = f"http://127.0.0.1:{free_port()}"
    result = CliRunner().invoke(app, ["report", url])
    assert result.exit_code == 1 and "does not answer" in result.stderr


def test_what_grew(counted: str) -> None:
    before = ServerMetrics.read(counted)
    assert reuse(before.since(before))["requests"]["blended"] == 0
    assert before.since(ServerMetrics({})).total("vllm:blend_recomputed_tokens_total") == 80
