"""Reports tell which tokens of a prompt were reused: without an engine."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from vllm_blend.core.plans import KeyedPlan, KeyedSpan
from vllm_blend.core.settings import BlendSettings
from vllm_blend.core.step import Blended
from vllm_blend.server.scheduler.request_reports import Reports


def told(cached: int, reused: int, asked: bool = True) -> dict[str, Any]:
    """The report of a prompt with chunks at [10, 40) and [40, 90), once its first token is there."""
    reports = Reports(("m", "0"), log_requests=False, sizes=dict)
    plan = KeyedPlan((KeyedSpan(10, 40, b"a"), KeyedSpan(40, 90, b"b")), BlendSettings())
    reports.add("1", 100, plan, missed=0, short=0, why_not="", lookup_seconds=0.0, asked=asked)
    if reused:
        reports.blended(Blended("1", cached, reused, 3))
    output = Namespace(
        request_id="1",
        kv_transfer_params=None,
        prefill_stats=Namespace(num_cached_tokens=cached),
    )
    reports.attach(output)
    found: dict[str, Any] = output.kv_transfer_params["blend"]
    return found


@pytest.mark.parametrize(
    ("cached", "reused", "spans"),
    [
        (0, 80, [[10, 40, "reused"], [40, 90, "reused"]]),
        (32, 58, [[10, 32, "cached"], [32, 40, "reused"], [40, 90, "reused"]]),
        (48, 42, [[10, 40, "cached"], [40, 48, "cached"], [48, 90, "reused"]]),
        (96, 0, [[10, 40, "cached"], [40, 90, "cached"]]),
        (0, 0, []),  # its step failed
    ],
)
def test_spans_tell_what_was_reused_and_what_the_prefix_cache_had(
    cached: int, reused: int, spans: list[Any]
) -> None:
    report = told(cached, reused)
    assert report["spans"] == spans
    assert sum(end - start for start, end, state in spans if state == "reused") == reused
    assert report["reused_tokens"] == reused


def test_nobody_is_told_who_did_not_ask() -> None:
    assert told(0, 80, asked=False)["spans"] == []
