"""What unfinished requests reuse, and what is kept of their prefills: plans, pins, names of blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from vllm_blend.core.plans import EXTRA_ARG, ChunkIds, ChunkKey, KeyedPlan, KeyedSpan
from vllm_blend.server.chunks.chunk_registry import ChunkRegistry
from vllm_blend.server.chunks.prefix_cache import disown_blocks, name_blocks
from vllm_blend.server.messages import Lost


class RequestPlans:
    """The plans of requests that reuse chunks, and what is kept of any request's prefill.

    Args:
        chunks: that are known; those of a plan are pinned while it lasts.
        manager: vLLM's ``KVCacheManager``; None: there is no prefix cache.
        block_size: of the prefix cache, in tokens.
    """

    def __init__(self, chunks: ChunkRegistry, manager: Any, block_size: int) -> None:
        self._chunks = chunks
        self._manager, self._block_size = manager, block_size
        self._plans: dict[str, KeyedPlan] = {}
        self._harvests: dict[str, list[ChunkKey]] = {}

    def __len__(self) -> int:
        return len(self._plans)

    def __iter__(self) -> Iterator[str]:
        """Ids of the requests that reuse chunks."""
        return iter(self._plans)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._plans

    def get(self, request_id: str) -> KeyedPlan | None:
        return self._plans.get(request_id)

    def give(self, request: Any, plan: KeyedPlan, owner: str) -> KeyedPlan | None:
        """Gives a new request its plan, which the model's process gets with it.

        Args:
            owner: for whom its approximate blocks are kept in the prefix cache.

        Returns:
            The plan; None where it reuses nothing.
        """
        _strip(request)
        if plan.spans or plan.harvest:
            request.sampling_params.extra_args[EXTRA_ARG] = plan
        if plan.harvest:
            self._harvests[request.request_id] = [kept.key for kept in plan.harvest if kept.key]
        if not plan.spans:
            return None
        self._plans[request.request_id] = plan
        self._chunks.pin(span.key for span in plan.spans)
        if self._manager is not None:
            name_blocks(request, plan, owner, self._block_size)
        return plan

    def refuse(self, request: Any) -> None:
        """Lets a new request be prefilled in full, as by vLLM alone."""
        _strip(request)

    def lose(self, request: Any, lost: Lost) -> tuple[list[KeyedSpan], KeyedPlan | None]:
        """A chunk of a request's plan is not where it should be: it goes on with what is left.

        Its blocks were named by the plan when it was scheduled, so they are taken out of the prefix
        cache. (A request with the same plan in the same step may have read them: they are nearer to
        full prefill than their names say.)

        Returns:
            The spans that are lost, none where the prefix cache has their tokens; and the new plan.
        """
        plan = self._plans[lost.request_id]
        spans = [s for s in plan.spans if s.key == lost.key and s.end > lost.computed]
        left = tuple(span for span in plan.spans if span not in spans)
        new = replace(plan, spans=left) if left else None
        if spans:
            self.give_up(request, lost.computed, new)
        return spans, new

    def give_up(self, request: Any, computed: int = 0, new: KeyedPlan | None = None) -> None:
        """Gives a request another plan, or none; its blocks behind ``computed`` tokens are its own."""
        plan = self._plans.pop(request.request_id)
        _strip(request)
        if new is not None:
            self._plans[request.request_id] = request.sampling_params.extra_args[EXTRA_ARG] = new
            self._chunks.pin(span.key for span in new.spans)
        self._chunks.unpin(span.key for span in plan.spans)
        if self._manager is not None:
            disown_blocks(request, max(computed, plan.spans[0].start), self._manager)

    def withdraw(self, request: Any) -> bool:
        """Takes a request's plan away, and gives up what was to be kept of its prefill; returns whether
        it was to blend."""
        blends = request.request_id in self._plans
        if blends:
            self.give_up(request)
        self.end_harvest(request.request_id)
        if request.sampling_params is not None and request.sampling_params.extra_args:
            _strip(request)
        return blends

    def end_harvest(self, request_id: str) -> list[ChunkIds]:
        """Gives up what is still to come of a request's prefill; returns that."""
        left = []
        for key in self._harvests.pop(request_id, ()):
            if (chunk := self._chunks.coming(key)) is not None:
                self._chunks.cancel(key)
                left.append(chunk)
        return left

    def end_harvests(self) -> None:
        """Gives up what is still to come of all requests' prefills."""
        for request_id in list(self._harvests):
            self.end_harvest(request_id)

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        plan = self._plans.pop(request_id, None)
        if plan is not None:
            self._chunks.unpin(span.key for span in plan.spans)
        self.end_harvest(request_id)


def _strip(request: Any) -> None:
    """Takes a request's plan, or what it asks for, out of its parameters."""
    params = request.sampling_params
    params.extra_args = {k: v for k, v in params.extra_args.items() if k != EXTRA_ARG}
