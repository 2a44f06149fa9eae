"""Reports tell which tokens of a prompt were reused, and recomputed: without an engine."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_blend.core.plans import KeyedPlan, KeyedSpan
from vllm_blend.core.settings import BlendSettings
from vllm_blend.core.step import Blended
from vllm_blend.core.window_news import stretches
from vllm_blend.server.frontend.admission import count_reports
from vllm_blend.server.request import ROWS_KEY
from vllm_blend.server.scheduler.request_reports import Reports


def told(
    cached: int, reused: int, asked: bool = True, windows: Sequence[Blended] = ()
) -> dict[str, Any]:
    """The report of a prompt with chunks at [10, 40) and [40, 90), once its first token is there."""
    reports = Reports(("m", "0"), log_requests=False, sizes=dict)
    plan = KeyedPlan((KeyedSpan(10, 40, b"a"), KeyedSpan(40, 90, b"b")), BlendSettings())
    reports.add("1", 100, plan, missed=0, short=0, why_not="", lookup_seconds=0.0, asked=asked)
    if reused:
        reports.blended(Blended("1", cached, reused, 3))
    for window in windows:
        reports.blended(window)
    first, second = (
        Namespace(request_id="1", kv_transfer_params=None, prefill_stats=stats)
        for stats in (Namespace(num_cached_tokens=cached), None)
    )
    for output in (first, second):
        reports.attach(output)
    later = (second.kv_transfer_params or {}).get("blend", {})
    assert ROWS_KEY not in later  # which may be long
    found: dict[str, Any] = first.kv_transfer_params["blend"]
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
    report = told(0, 80, asked=False)
    assert report["spans"] == [] and ROWS_KEY not in report


@pytest.mark.parametrize(
    ("windows", "spans"),
    [
        ([], []),  # its step failed
        ([(0, ((12, 14), (20, 21)))], [[12, 14], [20, 21]]),
        ([(0, ((30, 50),)), (50, ((50, 51), (60, 61)))], [[30, 51], [60, 61]]),  # a run goes on
        ([(0, ((12, 14),)), (50, ()), (80, ((81, 82),))], [[12, 14], [81, 82]]),
        # preempted: the first window once more; or from within it on, behind cached blocks
        ([(0, ((12, 14),)), (50, ((60, 61),)), (0, ((15, 16),))], [[15, 16]]),
        ([(0, ((12, 14), (30, 40), (45, 46))), (32, ((33, 34),))], [[12, 14], [30, 32], [33, 34]]),
    ],
)
def test_rows_of_all_windows_are_told_as_one_list(windows: list[Any], spans: list[Any]) -> None:
    done = [
        Blended("1", position, 40, sum(end - start for start, end in rows), rows)
        for position, rows in windows
    ]
    assert told(0, 0, windows=done)[ROWS_KEY] == spans


@pytest.mark.parametrize(
    ("windows", "reused", "recomputed"),
    [
        ([], 0, 0),
        ([(0, 80, 8)], 80, 8),
        ([(0, 30, 3), (40, 50, 5)], 80, 8),
        ([(0, 40, 6), (50, 40, 3)], 80, 9),  # cut within a chunk
        ([(0, 40, 6), (50, 40, 3), (0, 40, 5)], 40, 5),  # preempted: the first window once more
        ([(0, 80, 8), (50, 40, 3)], 80, 7),  # from within it on: half of it counts
        ([(0, 80, 8), (95, 0, 0)], 80, 8),  # behind all chunks
    ],
)
@pytest.mark.parametrize("asked", [True, False])
def test_a_token_of_two_windows_counts_once(
    windows: list[Any], reused: int, recomputed: int, asked: bool
) -> None:
    report = told(0, 0, asked, [Blended("1", *window) for window in windows])
    assert (report["reused_tokens"], report["recomputed_tokens"]) == (reused, recomputed)


def test_the_api_server_keeps_what_only_the_first_output_tells() -> None:
    state = Namespace()

    def left(states: dict[str, Any], **report: Any) -> Any:
        figures = {"reused_tokens": 40, "recomputed_tokens": 2} | report
        output = Namespace(request_id="1", kv_transfer_params={"blend": figures})
        count_reports([output], states)
        return output.kv_transfer_params["blend"].get(ROWS_KEY)

    assert left({"1": state}, asked=True, recomputed_spans=[[12, 14]]) == [[12, 14]]
    assert left({"1": state}, asked=True) == [[12, 14]]
    assert left({"1": Namespace()}, asked=True) == []
    assert left({"1": state}, asked=False) is None
    assert left({}, asked=True) is None  # aborted


@settings(deadline=None)
@given(st.sets(st.integers(0, 40)))
def test_stretches_are_the_positions(positions: set[int]) -> None:
    found = stretches(torch.tensor(sorted(positions), dtype=torch.int64))
    assert [at for start, end in found for at in range(start, end)] == sorted(positions)
    assert all(end < start for (_, end), (start, _) in pairwise(found))
