"""Chunks that wait for something: a tenant's in their order, one of each tenant in turn."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from vllm_blend.core.plans import ChunkIds, ChunkKey

MIN_TOKENS = 512
"""What a chunk counts at least: a short one costs a request of its own too."""


class FairQueue:
    """A queue that is bounded, and shared by tenants.

    While there is room a tenant may take all of it. Where there is none, one that holds its equal share
    is refused, and for one that holds less the newest chunks of the tenant that holds most are dropped.

    Args:
        max_tokens: of all chunks, each counted as ``MIN_TOKENS`` at least.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._chunks: dict[ChunkKey, ChunkIds] = {}
        # by tenant, the next one first
        self._queues: OrderedDict[str, OrderedDict[ChunkKey, None]] = OrderedDict()
        self._held: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._chunks)

    def __iter__(self) -> Iterator[ChunkIds]:
        return iter(self._chunks.values())

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._chunks

    def add(self, key: ChunkKey, chunk: ChunkIds) -> list[ChunkKey]:
        """Takes a chunk in, once; returns those that are dropped for want of room, perhaps this one."""
        if key in self._chunks:
            return []
        size, held = _size(chunk), self._held.get(chunk.tenant, 0)
        dropped: list[ChunkKey] = []
        while self.num_tokens + size > self.max_tokens:
            num_tenants = len(self._held) + (chunk.tenant not in self._held)
            if (held + size) * num_tenants > self.max_tokens:
                return [*dropped, key]
            most = max(self._held, key=self._held.__getitem__)
            dropped.append(next(reversed(self._queues[most])))
            self.remove(dropped[-1])
        self._chunks[key] = chunk
        self._queues.setdefault(chunk.tenant, OrderedDict())[key] = None
        self._held[chunk.tenant] = held + size
        self.num_tokens += size
        return dropped

    def first(self) -> tuple[ChunkKey, ChunkIds] | None:
        """The next chunk, which stays."""
        if not self._queues:
            return None
        key = next(iter(next(iter(self._queues.values()))))
        return key, self._chunks[key]

    def pop(self) -> tuple[ChunkKey, ChunkIds]:
        """Takes the next chunk out; the next one after it is another tenant's, if one has any."""
        found = self.first()
        assert found is not None
        self._queues.move_to_end(found[1].tenant)
        self.remove(found[0])
        return found

    def remove(self, key: ChunkKey) -> None:
        """Takes a chunk out; one that is not here is no error."""
        chunk = self._chunks.pop(key, None)
        if chunk is None:
            return
        del self._queues[chunk.tenant][key]
        self._held[chunk.tenant] -= _size(chunk)
        self.num_tokens -= _size(chunk)
        if not self._queues[chunk.tenant]:
            del self._queues[chunk.tenant], self._held[chunk.tenant]


def _size(chunk: ChunkIds) -> int:
    return max(MIN_TOKENS, len(chunk.token_ids))
