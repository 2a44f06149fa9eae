"""What is told of each request: what it reused, what that took, and why not more."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from vllm_blend.core.plans import KeyedPlan, KeyedSpan
from vllm_blend.core.settings import num_kept
from vllm_blend.server.request import REPORT_KEY, sign

logger = logging.getLogger("vllm.vllm_blend.server")


FAILED = "blending failed, so it was computed in full; the server's log has the cause"


class Reports:
    """Reports of unfinished requests; a request's outputs take one along, or a sign of it.

    Args:
        labels: model name and engine, as vLLM's metrics have them.
        log_requests: one INFO line a request.
        sizes: what is kept, for gauges.
        tells_sizes: clients that ask for a report are told that too.
    """

    def __init__(
        self,
        labels: tuple[str, str],
        log_requests: bool,
        sizes: Callable[[], dict[str, Any]],
        tells_sizes: bool = False,
    ) -> None:
        self._labels = labels
        self._tells_sizes = tells_sizes
        self._log_requests = log_requests
        self._sizes = sizes
        self._reports: dict[str, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._reports)

    def add(
        self,
        request_id: str,
        num_prompt_tokens: int,
        plan: KeyedPlan | None,
        *,
        missed: int,
        harvested: int,
        why_not: str,
        lookup_seconds: float,
        asked: bool,
        decided: dict[str, Any] | None = None,
    ) -> None:
        """A request was planned; ``asked``: its client wants to know.

        Args:
            harvested: of its reused chunks, those that were kept from another request's prefill, after
                what stood before them there.
            decided: what the controller decided, and why (``Waiting.told``).
        """
        report = {
            "prompt_tokens": num_prompt_tokens,
            "missed_chunks": missed,
            "harvested_chunks": harvested,
            "lost_chunks": {},
            "loaded_chunks": 0,
            "lookup_seconds": lookup_seconds,
            "why_not": why_not,
            "asked": asked,
            "tells_sizes": self._tells_sizes,
            "decision": decided,
            "counts": True,
            "labels": self._labels,
        }
        self._reports[request_id] = report | _reused(plan)
        if self._log_requests:
            self._log(request_id)

    def waited(self, request_id: str, seconds: float, loaded: int) -> None:
        """A request waited for chunks of the store, and ``loaded`` of them came."""
        self._reports[request_id] |= {"wait_seconds": seconds, "loaded_chunks": loaded}

    def lose(
        self, request_id: str, spans: list[KeyedSpan], reason: str, plan: KeyedPlan | None
    ) -> None:
        """Chunks of a request's plan were not there; ``plan`` is what is left of it."""
        report = self._reports.get(request_id)
        if report is None:
            return
        report |= _reused(plan)
        report["missed_chunks"] += len(spans)
        lost = report["lost_chunks"]
        report["lost_chunks"] = lost | {reason: lost.get(reason, 0) + len(spans)}
        if plan is None:
            report["why_not"] = "its chunks were lost"
        if self._log_requests:
            self._log(request_id)

    def fail(self, request_id: str) -> None:
        """A request did not blend as it was planned: that failed, and it was computed in full."""
        report = self._reports.get(request_id)
        if report is None:
            return
        report |= _reused(None) | {"why_not": FAILED}
        if self._log_requests:
            self._log(request_id)

    def took(self, request_id: str, stages: dict[str, float]) -> None:
        """A step spent time on a request, by stage."""
        report = self._reports.get(request_id, {})
        for stage, seconds in stages.items():
            name = f"{stage}_seconds"
            report[name] = report.get(name, 0.0) + seconds

    def attach(self, output: Any) -> None:
        """Gives an output of a request its report."""
        report = self._reports.get(output.request_id)
        if report is None:
            return
        told: dict[str, Any] = sign(report)
        if report["asked"] or report["counts"]:
            told = report | self._sizes()
        if told:  # in every output, since any may be the last that a client gets
            output.kv_transfer_params = (output.kv_transfer_params or {}) | {REPORT_KEY: told}
        report["counts"] = False

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._reports.pop(request_id, None)

    def _log(self, request_id: str) -> None:
        report = self._reports[request_id]
        what = (
            f"not blended, {report['why_not']}"
            if report["why_not"]
            else f"{report['reused_tokens']} of {report['prompt_tokens']} prompt tokens reused in "
            f"{report['chunks']} chunks"
        )
        lost = sum(report["lost_chunks"].values())
        missed = f"{report['missed_chunks']} chunks missed" + (f", {lost} of them lost" if lost else "")
        if report["decision"] is not None and not report["why_not"]:
            missed += f"; ratio {report['decision']['ratio']:.2f}; {report['decision']['reason']}"
        logger.info("Request %s: %s; %s", request_id, what, missed)


def _reused(plan: KeyedPlan | None) -> dict[str, int]:
    if plan is None:
        return {"reused_tokens": 0, "recomputed_tokens": 0, "chunks": 0}
    reused = sum(span.end - span.start for span in plan.spans)
    ratio = (plan.settings.recomp_ratios or (plan.settings.recomp_ratio,))[-1]
    return {
        "reused_tokens": reused,
        "recomputed_tokens": num_kept(ratio, reused),
        "chunks": len(plan.spans),
    }


def sizes(num_chunks: int, num_bytes: int, store: dict[str, int]) -> dict[str, dict[str, int]]:
    """What is kept, by tier, and what a store was asked.

    Args:
        num_chunks, num_bytes: in the model's process.
        store: of ``ChunkStore.stats``; empty without a store.
    """
    chunks, all_bytes = _under("entries", store), _under("bytes", store)
    return {
        "stored_chunks": chunks | {"host": num_chunks},
        "stored_bytes": all_bytes | {"host": num_bytes},
        "store_hits": dict.fromkeys(chunks, 0) | _under("hits", store),
        "store_misses": _under("misses", store),
    }


def _under(kind: str, stats: dict[str, int]) -> dict[str, int]:
    """``{"disk": 3}`` of ``{"hits.disk": 3}``."""
    pairs = (name.split(".", 1) for name in stats if name.startswith(f"{kind}."))
    return {name: stats[f"{kind}.{name}"] for _, name in pairs}
