"""How much of a step a request takes: a part of the mixin for vLLM's scheduler."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from vllm.v1.request import RequestStatus

from vllm_blend.core.plans import EXTRA_ARG
from vllm_blend.server.internal.internal_requests import InternalRequests
from vllm_blend.server.scheduler.request_plans import RequestPlans

logger = logging.getLogger("vllm.vllm_blend.server")


class StepRoom:
    """Lets a blended prompt wait for a step that has room for it, and bounds a missed chunk's part."""

    # of vLLM's scheduler
    vllm_config: Any
    max_num_scheduled_tokens: int
    max_num_running_reqs: int
    num_spec_tokens: int
    requests: dict[str, Any]

    blend_internal: InternalRequests
    blend_plans: RequestPlans
    _step_rows: int
    _rows_left: int
    _step_blends: bool | None = None
    """Whether the step that is scheduled has prompts that blend (or images); None: neither yet."""

    def _reserve_prefill_lookahead(self, request: Any, num_computed: int, num_new: int) -> int:
        """Asked by vLLM's scheduler how many of ``num_new`` tokens that a step has room for it takes.

        A blended prompt takes all that is left of it or a whole window, else it waits: tokens are
        chosen among those of one step, and must not depend on what else the step holds. It shares no
        step with a prompt that has images. A missed
        chunk takes no more than clients' requests may wait for. A step computes ``step_rows`` at
        most, but for a blended prompt that has it to itself.
        """
        stock: Any = super()
        left = request.num_tokens - num_computed
        blends = self._blends(request, num_computed)
        if blends is not None and self._step_blends not in (None, blends):
            return 0
        background = self.blend_internal.background
        if background.is_mine(request.request_id) and self._cuts:
            running = request.status == RequestStatus.RUNNING
            num_new = background.room(request.request_id, left, num_new, running)
        if request.request_id in self.blend_plans and left > 1 and (window := self._window()):
            num_new = min(left, window) if num_new >= min(left, window) else 0
        rows = self._num_rows(request.request_id, num_computed, num_new)
        if rows > self._rows_left:
            if rows == num_new:
                num_new = rows = self._rows_left
            elif self._rows_left < self._step_rows:
                return 0
        self._rows_left = max(0, self._rows_left - rows)
        taken = int(stock._reserve_prefill_lookahead(request, num_computed, num_new))
        if taken and blends is not None:
            self._step_blends = blends
        return taken

    def _blends(self, request: Any, num_computed: int) -> bool | None:
        """Whether a prompt blends (or has images, whose rows only vLLM's own forward computes); None:
        neither, or its prefill has ended."""
        if num_computed >= request.num_prompt_tokens:
            return None
        params = request.sampling_params
        plan = (params.extra_args or {}).get(EXTRA_ARG) if params is not None else None
        if getattr(plan, "spans", ()):
            return True
        return False if request.mm_features else None

    def tell_window(self) -> None:
        """Says in the log how long prompts may be that are prefilled whole."""
        if window := self._window():
            logger.info("vllm_blend: blended prompts of up to %d tokens are prefilled whole.", window)
        elif self._cuts:
            logger.warning(
                "vllm_blend: blended prompts are cut where a step is full, so what is recomputed "
                "depends on what else it holds; max_num_batched_tokens of at least twice "
                "max_num_seqs prevents it."
            )

    def _num_rows(self, request_id: str, start: int, count: int) -> int:
        """How many of ``count`` tokens from ``start`` on a step computes, about."""
        plan = self.blend_plans.get(request_id)
        if plan is None or start >= plan.spans[-1].end:
            return count
        if not plan.settings.early:  # all rows of the first layers are computed
            return count
        ends = [(max(s.start, start), min(s.end, start + count)) for s in plan.spans]
        reused = sum(max(0, end - begin) for begin, end in ends)
        has_question = start + count >= self.requests[request_id].num_prompt_tokens
        settings = plan.settings.for_rows(count - reused, reused, has_question)
        return count - int((1 - settings.last_ratio) * reused)

    def _client_rows(self, num_scheduled_tokens: Mapping[str, int]) -> int:
        """How many rows the step that was just scheduled computes for clients' requests, about."""
        return sum(
            self._num_rows(name, self.requests[name].num_computed_tokens - count, count)
            for name, count in num_scheduled_tokens.items()
            if not self.blend_internal.is_mine(name)
        )

    @property
    def _cuts(self) -> bool:
        """Whether prefills may be cut."""
        return bool(self.vllm_config.scheduler_config.enable_chunked_prefill)

    def _window(self) -> int:
        """Tokens of a prompt that fit a step beside running decodes; 0: too few, vLLM cuts freely."""
        config = self.vllm_config.scheduler_config
        decodes = self.max_num_running_reqs * (1 + self.num_spec_tokens)
        window = self.max_num_scheduled_tokens - decodes
        if window < decodes or not self._cuts:
            return 0
        return min(window, config.long_prefill_token_threshold or window)
