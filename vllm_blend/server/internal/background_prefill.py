"""Chunks that a request missed, computed for the next one within a budget.

Each is a request of the engine's own, after the chunk's context; where tokens are chosen by scores, it
is computed once more after another one. It is let in when
the engine has nothing else to do, or when as many tokens of requests were computed as the server's
share asks for. In the first case it goes window by window, and stands back when requests come, until
the share has room for the rest of it. Scores of chunks that nobody has reused are an idle engine's work
alone: it begins with them after a rest, and gives them up when requests come.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

from vllm_blend.core.plans import ChunkIds, ChunkKey, CollectPlan
from vllm_blend.core.prompt import TokenIds
from vllm_blend.server.chunks.askers import ANSWERED, Askers
from vllm_blend.server.chunks.chunk_registry import ChunkRegistry, chunk_key
from vllm_blend.server.chunks.fair_queue import FairQueue

MAX_WAITING_TOKENS = 1 << 21
"""Of chunks that wait to be computed; what is beyond is dropped until it is seen again."""

STEP_SECONDS = 0.1
"""What a step of an idle engine is to take for a chunk: a request that comes waits for its end."""

GAP_S = 0.05
"""How long an engine has had no requests when it is idle: clients that ask again as soon as they are
answered find it free."""

REST_S = 0.25
"""How long an engine has had no requests when it begins with what nobody asked for: a client that asks
again as soon as it is answered does not wait for that. Twice as long after each time that requests came
before it was done."""

LONGEST_REST_S = 8.0
"""So a client that asks once a second makes it begin a few times, and not each time."""

MIN_WINDOW = 128
"""Tokens of a chunk that such a step computes at least."""

_numbers = itertools.count()


class BackgroundPrefill:
    """The chunks that wait, one of each tenant in turn, and the one that is computed now.

    Args:
        chunks: where they become known.
        max_tokens: of a chunk and its context; longer ones are not computed.
        share: of the computed tokens, for an engine that is not idle.
        make_request: an engine request of ``(request_id, token_ids, plan)``; None: the chunk cannot be
            computed any more.
        scoring: what a chunk's KV is computed after once more for its tokens' scores, if that is
            wanted.

    Attributes:
        askers: the requests that asked for chunks that are not begun.
        num_computed, num_dropped: chunks, since the start.
        window: tokens of a chunk that a step of an idle engine computes at most.
        stalled: the last step had nothing to compute, so no request is held up by a chunk; one may be
            waiting for the blocks that a chunk holds.
        clock: seconds; a simulated server has its own.
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
        chunks.on_remove = self._gone
        self.max_tokens = max_tokens
        self.share = share
        self.credit = 0.0  # tokens that may be computed now
        self.num_computed = 0
        self.num_dropped = 0
        self.askers = Askers()
        self.window = 2 * MIN_WINDOW
        self._make_request = make_request
        self._scoring = scoring
        # of chunks that are in memory
        self._unscored = FairQueue(MAX_WAITING_TOKENS)
        self._unused = FairQueue(MAX_WAITING_TOKENS)  # and not reused yet
        self._waiting = FairQueue(MAX_WAITING_TOKENS)
        self._running: dict[str, CollectPlan] = {}
        self._paid: dict[str, int] = {}  # of these; tokens taken from the credit for all that they need
        self._spare: set[str] = set()  # of these; for chunks that were not reused yet
        self._interrupted = 0  # times in a row that such a chunk was given up
        self._busy_at = -LONGEST_REST_S
        self._idle = True
        self._in_gap = False  # between two requests, as it seems
        self.stalled = False
        self.clock: Callable[[], float] = time.monotonic

    def __len__(self) -> int:
        return self.num_waiting + len(self._running)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._waiting or any(plan.key == key for plan in self._running.values())

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._unscored) + len(self._unused)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def add(self, chunk: ChunkIds, request_id: str | None = ANSWERED) -> None:
        """Notes a missed chunk; one that waits, runs or is known already is not computed twice.

        Args:
            request_id: who asked for it; None: those who did before. If all of them are aborted, it is
                not computed.
        """
        key = chunk_key(chunk)
        if key in self.chunks or (key in self and key not in self._waiting):
            return
        if request_id is not None:
            self.askers.ask(key, request_id)
        if key in self._waiting:
            return
        dropped = [key] if _cost(chunk) > self.max_tokens else self._waiting.add(key, chunk)
        self.num_dropped += len(dropped)
        for key in dropped:
            self.askers.forget(key)

    def remove(self, key: ChunkKey) -> None:
        """Nobody waits for a chunk any more; one that is begun is computed nevertheless."""
        self._waiting.remove(key)

    def waiting(self) -> list[ChunkIds]:
        """The chunks that wait to be computed."""
        return list(self._waiting)

    def forget(self, key: ChunkKey) -> None:
        """A chunk is deleted: it does not wait any more, whoever asked for it."""
        self._waiting.remove(key)
        self.askers.forget(key)

    def clear(self) -> None:
        """Computes nothing more but what is begun."""
        while self._waiting:
            self.askers.forget(self._waiting.pop()[0])
        for queue in (self._unscored, self._unused):
            while queue:
                queue.pop()

    def came(self, key: ChunkKey, chunk: ChunkIds) -> None:
        """The model's process has a chunk now, by a request of these or of a client: it is computed
        once more for its tokens' scores, if that is wanted. One that a client's request brought takes
        nothing of the share for that until it is reused, since most may never come back."""
        mine = any(plan.key == key for plan in self._running.values())
        self.num_computed += mine
        if self._scoring(chunk) is not None and key in self.chunks:  # else it is deleted already
            (self._unscored if mine else self._unused).add(key, chunk)

    def _gone(self, key: ChunkKey) -> None:
        """A chunk is not here any more, so that there is nothing to score."""
        self._unscored.remove(key)
        self._unused.remove(key)

    def used(self, key: ChunkKey) -> None:
        """A known chunk is reused."""
        if key in self._unused:
            self._unused.remove(key)
            self._unscored.add(key, self.chunks.chunk(key))
        self._spare -= {name for name, plan in self._running.items() if plan.key == key}

    def earn(self, num_tokens: int) -> None:
        """Counts tokens that are computed for requests; those that they reuse are not."""
        costs = [p.num_prompt_tokens for name, p in self._running.items() if name not in self._paid]
        if (found := self._next(rested=False)) is not None:
            queue, _, chunk = found
            costs.append(len(self._context(chunk, queue)) + len(chunk.token_ids))
        self.credit = min(self.credit + self.share * num_tokens, float(max(costs, default=0)))

    def start(self, idle: bool) -> list[Any]:
        """Engine requests to begin with now: one, if there are means for it and none runs.

        To be called before each step; ``idle``: the engine has no requests but these.
        """
        now = self.clock()
        if not idle:
            self._busy_at = now
        self._in_gap = idle and now < self._busy_at + GAP_S
        self._idle = idle = idle and not self._in_gap
        rested = idle and now >= self._busy_at + self._rest_s
        if self._in_gap or self._running or (found := self._next(rested)) is None:
            return []
        queue, key, chunk = found
        context, scored = self._context(chunk, queue), queue is not self._waiting
        cost = len(context) + len(chunk.token_ids)
        if not idle and self.credit < cost:
            return []
        queue.pop()
        self.askers.forget(key)
        if not scored and self.chunks.reserve(chunk) is None:
            # what is kept is in use, or the chunk is larger than all there is
            self.num_dropped += 1
            return []
        plan = CollectPlan(len(context), num_prompt_tokens=cost, key=key, chunk=chunk, scored=scored)
        request_id = f"vllm_blend-chunk-{next(_numbers)}"
        request = self._make_request(request_id, [*context, *chunk.token_ids], plan)
        if request is None:
            if not scored:
                self.chunks.cancel(key)
            self.num_dropped += 1
            return []
        self._running[request_id] = plan
        if queue is self._unused:
            self._spare.add(request_id)
        if not idle:
            self._pay(request_id, cost)
        return [request]

    def idles_for(self) -> float:
        """Seconds until an idle engine may begin with a chunk; 0: it may now, or there is none."""
        if not self.num_waiting:
            return 0.0
        pause_s = GAP_S if self._waiting or self._unscored else self._rest_s
        return max(0.0, self._busy_at + pause_s - self.clock())

    def worked(self) -> None:
        """A step that computed for requests has ended."""
        self._busy_at = self.clock()

    @property
    def _rest_s(self) -> float:
        return min(REST_S * 2**self._interrupted, LONGEST_REST_S)

    def give_up(self) -> list[str]:
        """Requests that are to be ended, since clients' have come; their chunks wait again."""
        names = sorted(self._spare)
        for name in names:
            plan = self._running[name]
            assert plan.key is not None and plan.chunk is not None
            if plan.key in self.chunks:
                self._unused.add(plan.key, plan.chunk)
        if names:
            self._spare.clear()
            self._interrupted = min(self._interrupted + 1, 16)
        return names

    def _next(self, rested: bool) -> tuple[FairQueue, ChunkKey, ChunkIds] | None:
        """The chunk that is to be computed, or scored, next; and the queue that it is first in."""
        if (found := self._waiting.first()) is not None:
            return self._waiting, *found
        for queue in (self._unscored, self._unused) if rested else (self._unscored,):
            if (found := queue.first()) is not None:
                return queue, *found
        return None

    def _context(self, chunk: ChunkIds, queue: FairQueue) -> TokenIds:
        """What a chunk of this queue is computed after."""
        context = chunk.context if queue is self._waiting else self._scoring(chunk)
        assert context is not None
        return context

    def room(self, request_id: str, left: int, num_new: int, running: bool) -> int:
        """How many of the ``num_new`` tokens that a step has room for a chunk's request takes.

        Args:
            left: its tokens that are not computed.
            running: it has been let in. One that has not takes some, or vLLM lets in none after it.
        """
        if not running and self._paid.get(request_id, 0) > left:  # some of its context is cached
            self.credit += self._paid[request_id] - left
            self._paid[request_id] = left
        if running and self._in_gap and request_id not in self._paid:
            return 0
        stands_back = not (self._idle or self.stalled or request_id in self._paid)
        if running and stands_back:
            if self.credit < left:
                return 0
            self._pay(request_id, left)
        return num_new if request_id in self._paid else min(num_new, self.window)

    def _pay(self, request_id: str, num_tokens: int) -> None:
        self.credit -= num_tokens
        self._paid[request_id] = num_tokens

    def took(self, num_tokens: int, seconds: float) -> None:
        """A step with nothing but a chunk took this long."""
        if num_tokens >= MIN_WINDOW and seconds > 0:
            self.window = max(MIN_WINDOW, int(STEP_SECONDS * num_tokens / seconds))

    def is_mine(self, request_id: str) -> bool:
        return request_id in self._running

    def finish(self, request_id: str) -> None:
        """The request has ended; its chunk does not come any more."""
        plan = self._running.pop(request_id)
        self._paid.pop(request_id, None)
        if request_id in self._spare:  # and was not given up
            self._spare.remove(request_id)
            self._interrupted = 0
        assert plan.key is not None and plan.chunk is not None
        if not plan.scored and self.chunks.coming(plan.key) is not None:
            self.chunks.cancel(plan.key)


def _cost(chunk: ChunkIds) -> int:
    """Tokens that are computed for it."""
    return len(chunk.context) + len(chunk.token_ids)
