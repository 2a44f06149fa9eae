"""What is told of each request: what it reused, what that took, and why not more."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from vllm_blend.core.plans import KeyedPlan, KeyedSpan
from vllm_blend.core.step import Blended
from vllm_blend.server.request import REPORT_KEY, ROWS_KEY, sign

logger = logging.getLogger("vllm.vllm_blend.server")

CACHED = "vLLM's prefix cache has its chunks"
OFF = "blending is off: it failed too often, or the operator switched it off"
STREAMED = "its prompt is streamed, so that its later parts have no places of their own"
REPLACED = "the model's weights were replaced meanwhile"
BROUGHT = "a KV connector has its KV"
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
        self._plans: dict[str, KeyedPlan] = {}
        self._blended: dict[str, list[Blended]] = {}  # by window, ascending

    def __len__(self) -> int:
        return len(self._reports)

    def add(
        self,
        request_id: str,
        num_prompt_tokens: int,
        plan: KeyedPlan | None,
        *,
        missed: int = 0,
        short: int = 0,
        harvested: int = 0,
        why_not: str,
        lookup_seconds: float = 0.0,
        asked: bool,
        decided: dict[str, Any] | None = None,
    ) -> None:
        """A request was planned; ``asked``: its client wants to know.

        Args:
            missed: chunks that are not in memory.
            short: chunks that are too short to be reused.
            harvested: of its reused chunks, those that were kept from another request's prefill, after
                what stood before them there.
            decided: what the controller decided, and why (``Waiting.told``).
        """
        report = {
            "prompt_tokens": num_prompt_tokens,
            "chunks": 0,
            "cached_chunks": 0,
            "missed_chunks": missed,
            "short_chunks": short,
            "harvested_chunks": harvested,
            "lost_chunks": {},
            "loaded_chunks": 0,
            "reused_tokens": 0,
            "recomputed_tokens": 0,
            "cached_tokens": 0,
            "spans": [],
            "lookup_seconds": lookup_seconds,
            "why_not": why_not,
            "asked": asked,
            "tells_sizes": self._tells_sizes,
            "decision": decided,
            "counts": True,
            "labels": self._labels,
        }
        if asked:
            report[ROWS_KEY] = []
        self._reports[request_id] = report
        if plan is not None:
            self._plans[request_id] = plan

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
        if plan is None:
            self._plans.pop(request_id, None)
            report["why_not"] = "its chunks were lost"
        else:
            self._plans[request_id] = plan
        report["missed_chunks"] += len(spans)
        lost = report["lost_chunks"]
        report["lost_chunks"] = lost | {reason: lost.get(reason, 0) + len(spans)}

    def blended(self, done: Blended) -> None:
        """A step blended a window of a request; after a preemption perhaps once more."""
        if done.request_id in self._plans:
            earlier = self._blended.get(done.request_id, [])
            self._blended[done.request_id] = [w for w in earlier if w.position < done.position] + [done]

    def fail(self, request_id: str, why: str = FAILED) -> None:
        """A request did not blend as it was planned, and was computed in full."""
        if request_id in self._reports:
            self._reports[request_id]["why_not"] = why

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
        if output.prefill_stats is not None:  # of the first output
            self._tell(output.request_id, output.prefill_stats.num_cached_tokens)
        told: dict[str, Any] = sign(report)
        if report["asked"] or report["counts"]:
            told = report | self._sizes()
        if told:  # in every output, since any may be the last that a client gets
            output.kv_transfer_params = (output.kv_transfer_params or {}) | {REPORT_KEY: told}
        report["counts"] = False
        report.pop(ROWS_KEY, None)  # may be long: the API server has it now

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._reports.pop(request_id, None)
        self._plans.pop(request_id, None)
        self._blended.pop(request_id, None)

    def _tell(self, request_id: str, cached: int) -> None:
        """A request's prompt is there: what was done of it, but for ``cached`` tokens that vLLM had."""
        report, plan = self._reports[request_id], self._plans.pop(request_id, None)
        windows = self._blended.pop(request_id, [])
        report["cached_tokens"] = cached
        counts = _counts(windows, plan.spans if plan is not None else ())
        report["reused_tokens"] = reused = sum(reused for reused, _ in counts)
        report["recomputed_tokens"] = sum(recomputed for _, recomputed in counts)
        if plan is not None:
            report["cached_chunks"] = sum(span.end <= cached for span in plan.spans)
            if report["asked"]:
                report[ROWS_KEY] = _rows(windows)
                report["spans"] = _spans(plan.spans, cached, bool(reused))
            if reused:
                report["chunks"] = len(plan.spans) - report["cached_chunks"]
            elif not report["why_not"]:
                report["why_not"] = CACHED if report["cached_chunks"] == len(plan.spans) else FAILED
        if self._log_requests:
            self._log(request_id)

    def _log(self, request_id: str) -> None:
        report = self._reports[request_id]
        what = f"not blended, {report['why_not']}"
        if reused := report["reused_tokens"]:
            of = f"{reused} of {report['prompt_tokens']} prompt tokens"
            what = f"{of} reused in {report['chunks']} chunks"
            what += f"; {report['why_not']}" if report["why_not"] else ""
        lost = sum(report["lost_chunks"].values())
        missed = f"{report['missed_chunks']} chunks missed" + (f", {lost} of them lost" if lost else "")
        if report["decision"] is not None and reused:
            missed += f"; ratio {report['decision']['ratio']:.2f}; {report['decision']['reason']}"
        logger.info("Request %s: %s; %s", request_id, what, missed)


def _spans(spans: Sequence[KeyedSpan], cached: int, blended: bool) -> list[list[Any]]:
    """``[start, end, "reused" or "cached"]`` of the chunks that were; what is left is fresh.

    A chunk is both where vLLM's prefix cache, which is asked first, ends within it.
    """
    found: list[list[Any]] = []
    for span in spans:
        if span.start < cached:
            found.append([span.start, min(span.end, cached), "cached"])
        if blended and span.end > cached:
            found.append([max(span.start, cached), span.end, "reused"])
    return found


def _counts(windows: Sequence[Blended], spans: Sequence[KeyedSpan]) -> list[tuple[int, int]]:
    """Tokens that each window reused and recomputed. One that another begins within, after a
    preemption, counts up to there: its recomputed tokens by their share."""
    found = []
    for window, after in zip_longest(windows, windows[1:]):
        reused = window.reused
        if after is not None and spans:
            inside = ((max(s.start, window.position), min(s.end, after.position)) for s in spans)
            reused = min(reused, sum(max(0, end - start) for start, end in inside))
        found.append((reused, window.recomputed * reused // max(window.reused, 1)))
    return found


def _rows(windows: Sequence[Blended]) -> list[list[int]]:
    """``[start, end)`` of the tokens that were recomputed, of windows that follow one another; after a
    preemption one may begin within the one before."""
    found: list[list[int]] = []
    for window in windows:
        while found and found[-1][0] >= window.position:
            found.pop()
        if found:
            found[-1][1] = min(found[-1][1], window.position)
        for start, end in window.recomputed_spans:
            if found and found[-1][1] == start:
                found[-1][1] = end
            else:
                found.append([start, end])
    return found


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
