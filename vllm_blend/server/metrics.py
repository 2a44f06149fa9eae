"""Prometheus metrics of a blending server, beside vLLM's own at ``/metrics``."""

from __future__ import annotations

from functools import cache
from typing import Any

LOOKUP_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


class Metrics:
    """The counters; made once a process, when the first request is counted."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        self.requests = Counter(
            "vllm:blend_requests",
            "Requests that asked for blending, or were offered it, by what came of it.",
            ["result"],
        )
        self.tokens = Counter(
            "vllm:blend_prompt_tokens",
            "Prompt tokens of those requests: reused (recomputed ones included), or fresh.",
            ["source"],
        )
        self.recomputed = Counter(
            "vllm:blend_recomputed_tokens", "Reused tokens whose KV was recomputed."
        )
        self.chunks = Counter("vllm:blend_chunks", "Chunks in those requests: hit or miss.", ["result"])
        self.lookup = Histogram(
            "vllm:blend_lookup_seconds", "Time to find a request's chunks.", buckets=LOOKUP_BUCKETS
        )
        self.stored_chunks = Gauge(
            "vllm:blend_stored_chunks", "Chunks whose KV is kept.", multiprocess_mode="mostrecent"
        )
        self.stored_bytes = Gauge(
            "vllm:blend_stored_bytes", "Bytes of kept KV.", multiprocess_mode="mostrecent"
        )
        self.computed_chunks = Gauge(
            "vllm:blend_computed_chunks",
            "Chunks computed in the background since the start.",
            multiprocess_mode="mostrecent",
        )

        self.evicted_chunks = Gauge(
            "vllm:blend_evicted_chunks",
            "Chunks dropped for others since the start.",
            multiprocess_mode="mostrecent",
        )

    def count(self, report: dict[str, Any]) -> None:
        """Counts one request's report (``scheduler.py``)."""
        reused = report["reused_tokens"]
        self.requests.labels("blended" if reused else "full_prefill").inc()
        self.tokens.labels("reused").inc(reused)
        self.tokens.labels("fresh").inc(report["prompt_tokens"] - reused)
        self.recomputed.inc(report["recomputed_tokens"])
        self.chunks.labels("hit").inc(report["chunks"])
        self.chunks.labels("miss").inc(report["missed_chunks"])
        self.lookup.observe(report["lookup_seconds"])
        self.stored_chunks.set(report["stored_chunks"])
        self.stored_bytes.set(report["stored_bytes"])
        self.computed_chunks.set(report["computed_chunks"])
        self.evicted_chunks.set(report["evicted_chunks"])


@cache
def _metrics() -> Metrics:
    return Metrics()


def count(report: dict[str, Any]) -> None:
    """Counts one request's report."""
    _metrics().count(report)
