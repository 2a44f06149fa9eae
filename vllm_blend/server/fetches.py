"""Chunks that may lie in a store's lower tiers, and the requests that wait for them.

A chunk that is not in memory is asked for in the model's process, which looks for it and loads it
beside the steps. What is there becomes known; what is not is computed in the background. A request
waits for its chunks at most as long as computing them would take: at worst it takes twice that time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm_blend.core import ChunkIds, ChunkKey
from vllm_blend.server.background import Background
from vllm_blend.server.chunks import KnownChunks, chunk_key
from vllm_blend.server.wire import BlendRequest

MIN_WAIT_S = 0.01
"""A request waits at least this long: the answer that there is nothing takes about that."""
MIN_RATE_TOKENS = 64
"""Steps with fewer tokens tell nothing of how fast a prefill is."""


@dataclass(eq=False)
class Waiting:
    """A request that waits.

    Attributes:
        wish: what it asks for.
        keys: chunks that it waits for; None: they are not asked for yet.
        since: when it asked for them.
        until: when it waits no longer.
    """

    wish: BlendRequest
    keys: frozenset[ChunkKey] | None = None
    since: float = 0.0
    until: float = 0.0

    @property
    def done(self) -> bool:
        """Whether it need not wait any more."""
        return self.keys is not None and time.monotonic() >= self.until


class Fetches:
    """The chunks that were asked for.

    Args:
        chunks: where those that are there become known.
        background: where the others are computed.
    """

    def __init__(self, chunks: KnownChunks, background: Background) -> None:
        self.waiting: dict[str, Waiting] = {}
        self._chunks = chunks
        self._background = background
        self._pending: dict[ChunkKey, ChunkIds] = {}
        self._to_ask: list[tuple[ChunkKey, ChunkIds]] = []
        self._token_seconds = 0.0  # of a prefill, a token; not known yet

    def __len__(self) -> int:
        return len(self._pending)

    def ask(self, tenant: str, token_ids: Sequence[int]) -> ChunkKey | None:
        """Asks for a chunk; None if it is being computed already."""
        key = chunk_key(tenant, token_ids)
        if key in self._background:
            return None
        if key not in self._pending:
            chunk = ChunkIds(tenant, tuple(token_ids), tuple(self._background.context))
            self._pending[key] = chunk
            self._to_ask.append((key, chunk))
        return key

    def take_asked(self) -> tuple[tuple[ChunkKey, ChunkIds], ...]:
        """What the model's process is to fetch."""
        asked, self._to_ask = self._to_ask, []
        return tuple(asked)

    def answer(self, key: ChunkKey, found: bool) -> None:
        """The model's process has the chunk now, or cannot have it."""
        chunk = self._pending.pop(key)
        if not found:
            self._background.add(chunk.tenant, chunk.token_ids)
        elif self._chunks.reserve(chunk.tenant, chunk.token_ids) is None:
            self._chunks.refuse(key)
        else:
            self._chunks.commit(key)
        for request in self.waiting.values():
            if request.keys and not request.keys & self._pending.keys():
                request.until = min(request.until, time.monotonic())

    def wait(self, request: Waiting, tenant: str, missing: Iterable[Sequence[int]]) -> None:
        """Lets a request wait for chunks."""
        asked = {key: ids for ids in missing if (key := self.ask(tenant, ids)) is not None}
        num_tokens = sum(len(ids) for ids in asked.values())
        request.keys = frozenset(asked)
        request.since = request.until = time.monotonic()
        if asked:
            request.until += max(MIN_WAIT_S, num_tokens * (self._token_seconds or 1e-3))

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step without blending took this long."""
        if num_tokens >= MIN_RATE_TOKENS:
            new = seconds / num_tokens
            old = self._token_seconds or new
            self._token_seconds = old + 0.3 * (new - old)
