"""What ends blending, for one request or for all: a part of the mixin for vLLM's scheduler.

An operator's word, too many failures, a failure of the scheduler's own part, other weights, a shutdown.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from vllm.v1.request import RequestStatus

from vllm_blend.core.step import MAX_FAILURES
from vllm_blend.server.chunks.chunk_registry import ChunkRegistry
from vllm_blend.server.request import BlendRequest
from vllm_blend.server.scheduler.kv_connectors import KVConnectors
from vllm_blend.server.scheduler.request_reports import FAILED, OFF, REPLACED, Reports
from vllm_blend.server.scheduler.step_room import StepRoom
from vllm_blend.server.scheduler.tier_fetches import Fetches
from vllm_blend.server.scheduler.waiting import Waiting

logger = logging.getLogger("vllm.vllm_blend.server")


class Switching(StepRoom):
    """Ends blending; what was asked for is prefilled in full."""

    # of vLLM's scheduler
    finish_requests: Callable[..., Any]

    blend_chunks: ChunkRegistry
    blend_fetches: Fetches | None
    blend_reports: Reports
    blend_waiting: dict[str, Waiting]
    """Requests that wait for their plan, by id, in the order in which they came."""
    connectors: KVConnectors
    _num_weights: int
    _in_order: bool
    """What is known of chunks is right, as far as it is known."""
    _failures: Counter[str]

    def _refuse(self, request: Any, asked: bool, why: str) -> None:
        """Lets a request be prefilled in full, as by vLLM alone."""
        self.blend_plans.refuse(request)
        num_tokens = len(request.prompt_token_ids)
        self.blend_reports.add(request.request_id, num_tokens, None, why_not=why, asked=asked)

    def switch_blending(self, on: bool) -> None:
        """Blends requests from now on, or none: then nothing is computed, kept or fetched either.

        The model's process does the same by itself (``model/guard.py``).
        """
        internal = self.blend_internal
        was_paused, internal.paused = internal.paused, not on
        if on:
            self._failures.clear()
        if on or was_paused:
            return
        self._abort(internal.is_mine)
        self.blend_plans.end_harvests()
        if self.blend_fetches is not None:
            self.blend_fetches.clear()
        for request_id, waiting in list(self.blend_waiting.items()):
            self._refuse(self.requests[request_id], waiting.blend_request.report, OFF)
            self._wait_no_longer(self.requests[request_id])

    def _wait_no_longer(self, request: Any) -> None:
        """A request has its plan, or was refused one."""
        if self.blend_waiting.pop(request.request_id, None) is not None:
            self.connectors.planned(request)

    def failed(self, error: Exception) -> None:
        """The scheduler's part of blending failed: what it knows of chunks may be wrong."""
        kind = type(error).__name__
        self._failures[kind] += 1
        if self._failures[kind] == 1:  # those that follow are counted
            logger.error(
                "vllm_blend: the scheduler failed to blend, so chunks are forgotten.", exc_info=error
            )
        if self._failures[kind] == MAX_FAILURES:
            logger.error(
                "vllm_blend: blending is off until the operator switches it on, or the engine is "
                "started again, since the scheduler failed %d times (%s: %s).",
                MAX_FAILURES,
                kind,
                error,
            )
        self._in_order = False

    def put_in_order(self) -> None:
        """Before a step: after a failure all chunks are forgotten, in the model's process too, and
        found or computed anew; after several of a kind blending is off."""
        if self._in_order:
            return
        self._in_order = True
        self.forget_chunks(FAILED)
        if max(self._failures.values(), default=0) >= MAX_FAILURES:
            self.switch_blending(False)

    def refuse_failed(self, request: Any, blend_request: BlendRequest, error: Exception) -> None:
        """A request could not be planned: it is prefilled in full."""
        self.blend_plans.forget(request.request_id)
        self._refuse(request, blend_request.report, FAILED)
        self.failed(error)

    def stop_background(self) -> None:
        """The engine is shutting down: what no client's request waits for is not computed any more."""
        if self.blend_internal.stopped:
            return
        self.blend_internal.stopped = True
        background = self.blend_internal.background
        logger.info("vllm_blend: %d chunks are not computed, for the shutdown.", len(background))
        background.clear()
        self._abort(background.is_mine)

    def weights_replaced(self) -> None:
        """The model has other weights than before: no KV of the old ones is reused.

        The model's process has forgotten it already (``plugin/weights.py``).
        """
        self._num_weights += 1
        self.forget_chunks(REPLACED)

    def forget_chunks(self, why: str) -> None:
        """Knows no chunk any more; requests that were to reuse some are told ``why`` they do not."""
        internal = self.blend_internal
        self._abort(internal.is_mine)
        if internal.calibration is not None:
            internal.calibration.forget_kv()
        self.blend_plans.end_harvests()
        for request_id in list(self.blend_plans):
            self.blend_plans.give_up(self.requests[request_id])
            self.blend_reports.fail(request_id, why)
        self.blend_chunks.clear()
        if self.blend_fetches is not None:
            self.blend_fetches.renew()

    def _abort(self, is_one: Callable[[str], bool]) -> None:
        """Ends those of the engine's own requests."""
        self.finish_requests(list(filter(is_one, self.requests)), RequestStatus.FINISHED_ABORTED)
