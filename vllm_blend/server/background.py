"""Chunks that a request missed, computed for the next one within a budget.

Each is a request of the engine's own, behind the context in which chunks are kept. It is let in when
the engine has nothing else to do, or when as many tokens of requests were computed as the server's
share asks for.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from vllm_blend.core import ChunkIds, ChunkKey, CollectPlan
from vllm_blend.prompt import TokenIds, chat_frame, head_ids, plain_frame
from vllm_blend.server.chunks import KnownChunks, chunk_key

MAX_WAITING = 4096
"""Chunks that wait to be computed; more are forgotten until they are seen again."""

_numbers = itertools.count()


class Background:
    """The chunks that wait, and those that are computed now.

    Args:
        chunks: where they become known.
        context: token ids that chunks are computed behind.
        max_tokens: of a chunk; longer ones are not computed.
        share: of the computed tokens, for an engine that is not idle.
        make_request: an engine request of ``(request_id, token_ids, plan)``.
    """

    def __init__(
        self,
        chunks: KnownChunks,
        context: Sequence[int],
        max_tokens: int,
        share: float,
        make_request: Callable[[str, list[int], CollectPlan], Any],
    ) -> None:
        self.chunks = chunks
        self.context = list(context)
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

    def add(self, tenant: str, token_ids: Sequence[int]) -> None:
        """Notes a missed chunk; one that waits, runs or is known already is not computed twice."""
        key = chunk_key(tenant, token_ids)
        if key in self or key in self.chunks:
            return
        if len(self._waiting) >= MAX_WAITING or len(token_ids) > self.max_tokens:
            self.num_dropped += 1
            return
        self._waiting[key] = ChunkIds(tenant, tuple(token_ids), tuple(self.context))

    def earn(self, num_tokens: int) -> None:
        """Counts tokens that were computed for requests."""
        longest = max((len(chunk.token_ids) for chunk in self._waiting.values()), default=0)
        self.credit = min(self.credit + self.share * num_tokens, float(longest + len(self.context)))

    def start(self, idle: bool) -> list[Any]:
        """Engine requests to begin with now: one, if there are means for it and none runs."""
        if not self._waiting or self._running:
            return []
        key, chunk = next(iter(self._waiting.items()))
        cost = len(self.context) + len(chunk.token_ids)
        if not idle and self.credit < cost:
            return []
        del self._waiting[key]
        if (
            self.chunks.reserve(chunk.tenant, chunk.token_ids) is None
        ):  # what is kept is in use, or the chunk is larger than all there is
            self.num_dropped += 1
            return []
        if not idle:
            self.credit -= cost
        plan = CollectPlan(start=len(self.context), num_prompt_tokens=cost, key=key, chunk=chunk)
        request_id = f"vllm_blend-chunk-{next(_numbers)}"
        self._running[request_id] = plan
        return [self._make_request(request_id, self.context + list(chunk.token_ids), plan)]

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


def chunk_context(vllm_config: Any, system: str | None = None, head: str = "") -> TokenIds:
    """What chunks are computed behind: the chat template's head, else BOS, then ``head``.

    One context for the whole server, so that a chunk's KV serves in every prompt. It need not be the
    prompt's own beginning, but the nearer it is, the better (docs/quality.md).

    Args:
        vllm_config: the engine's.
        system: a system message for the template; None: its default.
        head: text behind all that.

    Raises:
        ValueError: if there is no tokenizer for ``head``, or no template for ``system``.
    """
    if vllm_config.model_config.skip_tokenizer_init:
        if system is not None or head:
            raise ValueError("system and head of vllm_blend need a tokenizer; the engine has none")
        return ()
    from vllm.tokenizers.registry import cached_tokenizer_from_config

    tokenizer = cached_tokenizer_from_config(vllm_config.model_config)
    try:
        frame = chat_frame(tokenizer, system)
    except Exception as error:  # no chat template, or one that does not take these messages
        if system is not None:
            raise ValueError(f"system of vllm_blend does not fit the chat template: {error}") from error
        frame = plain_frame(tokenizer)
    return head_ids(tokenizer, frame, head, ())
