"""Prometheus metrics of a blending server, beside vLLM's own at ``/metrics`` and with their labels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

LABELS = ("model_name", "engine")
"""Of vLLM's own metrics."""

LOST = ("gone", "short")
"""Why a chunk that was known could not be used: its KV is not there, or not all of it."""

STAGES = {
    "lookup": "Time to find a request's chunks.",
    "wait": "Time a request waited for chunks of the store's lower tiers.",
    "load": "Time to bring a request's stored KV to the device, beside the compute where it can be.",
    "select": "Time to choose the tokens of a request that are recomputed.",
    "fuse": "Time to write a request's stored KV, rotated to its place, to the paged cache.",
}
BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
RATIO_BUCKETS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0)


class Metrics:
    """The counters; made once a process, when the first request is counted."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"vllm:blend_{name}", text, [*LABELS, *labels])

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"vllm:blend_{name}", text, [*LABELS, *labels], multiprocess_mode="mostrecent")

        self.requests = counter(
            "requests",
            "Requests that asked for blending, or were offered it, by what came of it.",
            "result",
        )
        self.tokens = counter(
            "prompt_tokens",
            "Prompt tokens of those requests: reused (recomputed ones included), cached, or fresh.",
            "source",
        )
        self.recomputed = counter("recomputed_tokens", "Reused tokens whose KV was recomputed.")
        self.chunks = counter(
            "chunks", "Chunks in those requests: hit, cached, miss or short.", "result"
        )
        self.lost = counter(
            "lost_chunks", "Missed chunks whose KV should have been in memory, by reason.", "reason"
        )
        self.loaded = counter("loaded_chunks", "Chunks hit that came from the store's lower tiers.")
        self.slow = counter(
            "slow_chunks", "Chunks that were computed faster than loaded, by where they were.", "tier"
        )
        self.ratio = Histogram(
            "vllm:blend_ratio",
            "Share of reused tokens recomputed, where it was decided by times.",
            LABELS,
            buckets=RATIO_BUCKETS,
        )
        self.seconds = {
            stage: Histogram(f"vllm:blend_{stage}_seconds", text, LABELS, buckets=BUCKETS)
            for stage, text in STAGES.items()
        }
        self.parts = {
            "stored_chunks": gauge("stored_chunks", "Chunks whose KV is kept, by tier.", "tier"),
            "stored_bytes": gauge("stored_bytes", "Bytes of kept KV, by tier.", "tier"),
            "store_hits": gauge("store_hits", "Chunks found in the store since the start.", "tier"),
            "store_misses": gauge("store_misses", "Chunks not had from it, by reason.", "reason"),
        }
        self.sizes = {
            "computed_chunks": gauge(
                "computed_chunks", "Chunks computed in the background since the start."
            ),
            "waiting_chunks": gauge(
                "waiting_chunks", "Chunks to be fetched, computed, or scored in the background."
            ),
            "dropped_chunks": gauge(
                "dropped_chunks",
                "Missed chunks that were not computed since the start: too many waited, or too long.",
            ),
            "evicted_chunks": gauge("evicted_chunks", "Chunks dropped for others since the start."),
        }

    def count(self, report: dict[str, Any], labels: Sequence[str]) -> None:
        """Counts one request's report (``scheduler.py``)."""
        reused = report["reused_tokens"]
        result = "blended" if reused else "cached" if report["cached_chunks"] else "full_prefill"
        self.requests.labels(*labels, result).inc()
        self.tokens.labels(*labels, "reused").inc(reused)
        cached = report["cached_tokens"]
        self.tokens.labels(*labels, "cached").inc(cached)
        self.tokens.labels(*labels, "fresh").inc(max(0, report["prompt_tokens"] - reused - cached))
        self.recomputed.labels(*labels).inc(report["recomputed_tokens"])
        self.chunks.labels(*labels, "hit").inc(report["chunks"])
        self.chunks.labels(*labels, "cached").inc(report["cached_chunks"])
        self.chunks.labels(*labels, "miss").inc(report["missed_chunks"])
        self.chunks.labels(*labels, "short").inc(report["short_chunks"])
        for reason in LOST:
            self.lost.labels(*labels, reason).inc(report["lost_chunks"].get(reason, 0))
        for stage, histogram in self.seconds.items():
            if (seconds := report.get(f"{stage}_seconds")) is not None:
                histogram.labels(*labels).observe(seconds)
        self.loaded.labels(*labels).inc(report["loaded_chunks"])
        if (decision := report["decision"]) is not None:
            if reused:
                self.ratio.labels(*labels).observe(decision["ratio"])
            for tier, number in decision["slow_chunks"].items():
                self.slow.labels(*labels, tier).inc(number)
        for name, gauge in self.parts.items():
            for part, value in report[name].items():
                gauge.labels(*labels, part).set(value)
        for name, gauge in self.sizes.items():
            gauge.labels(*labels).set(report[name])


@cache
def _metrics() -> Metrics:
    return Metrics()


def count(report: dict[str, Any], labels: Sequence[str]) -> None:
    """Counts one request's report, under the values of ``LABELS``."""
    _metrics().count(report, labels)
