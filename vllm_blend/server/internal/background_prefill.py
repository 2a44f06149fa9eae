"""Chunks that a request missed, computed for the next one within a budget.

Each is a request of the engine's own, after the chunk's context; where tokens are chosen by scores, it
is computed once more after another one. It is let in when
the engine has nothing else to do, or when as many tokens of requests were computed as the server's
share asks for. In the first case it goes window by window, and stands back when requests come, until
the share has room for the rest of it.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from vllm_blend.core.plans import ChunkIds, ChunkKey, CollectPlan
from vllm_blend.core.prompt import TokenIds
from vllm_blend.server.chunks.chunk_registry import ChunkRegistry, chunk_key

MAX_WAITING = 4096
"""Chunks that wait to be computed; more are forgotten until they are seen again."""

STEP_SECONDS = 0.1
"""What a step of an idle engine is to take for a chunk: a request that comes waits for its end."""

MIN_WINDOW = 128
"""Tokens of a chunk that such a step computes at least."""

_numbers = itertools.count()


class BackgroundPrefill:
    """The chunks that wait, and those that are computed now.

    Args:
        chunks: where they become known.
        max_tokens: of a chunk and its context; longer ones are not computed.
        share: of the computed tokens, for an engine that is not idle.
        make_request: an engine request of ``(request_id, token_ids, plan)``.
        scoring: what a chunk's KV is computed after once more for its tokens' scores, if that is
            wanted.

    Attributes:
        window: tokens of a chunk that a step of an idle engine computes at most.
        stalled: the last step had nothing to compute, so no request is held up by a chunk; one may be
            waiting for the blocks that a chunk holds.
    """

    def __init__(
        self,
        chunks: ChunkRegistry,
        max_tokens: int,
        share: float,
        make_request: Callable[[str, list[int], CollectPlan], Any],
        scoring: Callable[[ChunkIds], TokenIds | None] = lambda chunk: None,
    ) -> None:
        self.chunks = chunks
        self.max_tokens = max_tokens
        self.share = share
        self.credit = 0.0  # tokens that may be computed now
        self.num_computed = 0
        self.num_dropped = 0
        self.window = 2 * MIN_WINDOW
        self._make_request = make_request
        self._scoring = scoring
        self._unscored: OrderedDict[ChunkKey, ChunkIds] = OrderedDict()
        self._waiting: OrderedDict[ChunkKey, ChunkIds] = OrderedDict()
        self._running: dict[str, CollectPlan] = {}
        self._paid: set[str] = set()  # of these; all that they need was taken from the credit
        self._idle = True
        self.stalled = False

    def __len__(self) -> int:
        return self.num_waiting + len(self._running)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._waiting or any(plan.key == key for plan in self._running.values())

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._unscored)

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

    def score(self, key: ChunkKey, chunk: ChunkIds) -> None:
        """Computes a known chunk's KV once more for its tokens' scores, if that is wanted."""
        if self._scoring(chunk) is not None:
            self._unscored[key] = chunk

    def earn(self, num_tokens: int) -> None:
        """Counts tokens that were computed for requests."""
        costs = [_cost(chunk) for chunk in self._waiting.values()]
        for chunk in self._unscored.values():
            costs.append(len(self._scoring(chunk) or ()) + len(chunk.token_ids))
        costs += [p.num_prompt_tokens for name, p in self._running.items() if name not in self._paid]
        self.credit = min(self.credit + self.share * num_tokens, float(max(costs, default=0)))

    def start(self, idle: bool) -> list[Any]:
        """Engine requests to begin with now: one, if there are means for it and none runs.

        To be called before each step; ``idle``: the engine has no requests but these.
        """
        self._idle = idle
        if self._running:
            return []
        for key in [key for key in self._unscored if key not in self.chunks]:
            del self._unscored[key]  # dropped meanwhile
        queue = self._waiting or self._unscored
        if not queue:
            return []
        key, chunk = next(iter(queue.items()))
        scored = queue is self._unscored
        context = self._scoring(chunk) if scored else chunk.context
        assert context is not None
        cost = len(context) + len(chunk.token_ids)
        if not idle and self.credit < cost:
            return []
        del queue[key]
        if not scored and self.chunks.reserve(chunk) is None:
            # what is kept is in use, or the chunk is larger than all there is
            self.num_dropped += 1
            return []
        plan = CollectPlan(len(context), num_prompt_tokens=cost, key=key, chunk=chunk, scored=scored)
        request_id = f"vllm_blend-chunk-{next(_numbers)}"
        self._running[request_id] = plan
        if not idle:
            self._pay(request_id, cost)
        return [self._make_request(request_id, [*context, *chunk.token_ids], plan)]

    def room(self, request_id: str, left: int, num_new: int, running: bool) -> int:
        """How many of the ``num_new`` tokens that a step has room for a chunk's request takes.

        Args:
            left: its tokens that are not computed.
            running: it has been let in. One that has not takes some, or vLLM lets in none after it.
        """
        stands_back = not (self._idle or self.stalled or request_id in self._paid)
        if running and stands_back:
            if self.credit < left:
                return 0
            self._pay(request_id, left)
        return num_new if request_id in self._paid else min(num_new, self.window)

    def _pay(self, request_id: str, num_tokens: int) -> None:
        self.credit -= num_tokens
        self._paid.add(request_id)

    def took(self, num_tokens: int, seconds: float) -> None:
        """A step with nothing but a chunk took this long."""
        if num_tokens >= MIN_WINDOW and seconds > 0:
            self.window = max(MIN_WINDOW, int(STEP_SECONDS * num_tokens / seconds))

    def is_mine(self, request_id: str) -> bool:
        return request_id in self._running

    def finish(self, request_id: str, completed: bool) -> None:
        """The model's process has the request's KV, or the request was aborted."""
        plan = self._running.pop(request_id)
        self._paid.discard(request_id)
        assert plan.key is not None and plan.chunk is not None
        if plan.scored:
            return
        if completed:
            self.num_computed += 1
            self.chunks.commit(plan.key)
            self.score(plan.key, plan.chunk)
        else:
            self.chunks.cancel(plan.key)


def _cost(chunk: ChunkIds) -> int:
    """Tokens that are computed for it."""
    return len(chunk.context) + len(chunk.token_ids)
