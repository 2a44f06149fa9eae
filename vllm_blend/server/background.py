"""Chunks that a request missed, computed for the next one within a budget.

Each is a request of the engine's own, behind the chunk's context. It is let in when
the engine has nothing else to do, or when as many tokens of requests were computed as the server's
share asks for.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from vllm_blend.core import ChunkIds, ChunkKey, CollectPlan
from vllm_blend.server.chunks import KnownChunks, chunk_key

MAX_WAITING = 4096
"""Chunks that wait to be computed; more are forgotten until they are seen again."""

_numbers = itertools.count()


class Background:
    """The chunks that wait, and those that are computed now.

    Args:
        chunks: where they become known.
        max_tokens: of a chunk and its context; longer ones are not computed.
        share: of the computed tokens, for an engine that is not idle.
        make_request: an engine request of ``(request_id, token_ids, plan)``.
    """

    def __init__(
        self,
        chunks: KnownChunks,
        max_tokens: int,
        share: float,
        make_request: Callable[[str, list[int], CollectPlan], Any],
    ) -> None:
        self.chunks = chunks
        self.max_tokens = max_tokens
        self.share = share
        self.credit = 0.0  # tokens that may be computed now
        self.num_computed = 0
        self.num_dropped = 0
        self._make_request = make_request
        self._waiting: OrderedDict[ChunkKey, ChunkIds] = OrderedDict()
        self._running: dict[str, CollectPlan] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._waiting or any(plan.key == key for plan in self._running.values())

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, chunk: ChunkIds) -> None:
        """Notes a missed chunk; one that waits, runs or is known already is not computed twice."""
        key = chunk_key(chunk)
        if key in self or key in self.chunks:
            return
        if len(self._waiting) >= MAX_WAITING or _cost(chunk) > self.max_tokens:
            self.num_dropped += 1
            return
        self._waiting[key] = chunk

    def earn(self, num_tokens: int) -> None:
        """Counts tokens that were computed for requests."""
        longest = max(map(_cost, self._waiting.values()), default=0)
        self.credit = min(self.credit + self.share * num_tokens, float(longest))

    def start(self, idle: bool) -> list[Any]:
        """Engine requests to begin with now: one, if there are means for it and none runs."""
        if not self._waiting or self._running:
            return []
        key, chunk = next(iter(self._waiting.items()))
        cost = _cost(chunk)
        if not idle and self.credit < cost:
            return []
        del self._waiting[key]
        if self.chunks.reserve(chunk) is None:
            # what is kept is in use, or the chunk is larger than all there is
            self.num_dropped += 1
            return []
        if not idle:
            self.credit -= cost
        plan = CollectPlan(start=len(chunk.context), num_prompt_tokens=cost, key=key, chunk=chunk)
        request_id = f"vllm_blend-chunk-{next(_numbers)}"
        self._running[request_id] = plan
        return [self._make_request(request_id, [*chunk.context, *chunk.token_ids], plan)]

    def is_mine(self, request_id: str) -> bool:
        return request_id in self._running

    def finish(self, request_id: str, completed: bool) -> None:
        """The model's process has the request's KV, or the request was aborted."""
        plan = self._running.pop(request_id)
        assert plan.key is not None
        if completed:
            self.num_computed += 1
            self.chunks.commit(plan.key)
        else:
            self.chunks.cancel(plan.key)


def _cost(chunk: ChunkIds) -> int:
    """Tokens that are computed for it."""
    return len(chunk.context) + len(chunk.token_ids)
