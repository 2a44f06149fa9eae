"""Which new chunks are kept where nothing comes back.

Keeping a chunk costs a little, and it takes the place of another. Where as many of a tenant's chunks
were dropped as it has in memory, and none was reused meanwhile, that gains nothing: from then on a
chunk is kept only once it comes a second time. The first that does so, and any reuse, ends it. (Caches
in front of the web admit on a second hit likewise: Maggs and Sitaraman, "Algorithmic Nuggets in Content
Delivery", 2015.)
"""

from __future__ import annotations

from cachetools import LRUCache

from vllm_blend.core.plans import ChunkIds
from vllm_blend.server.chunks.chunk_registry import ChunkRegistry

LEAST = 64
"""Chunks that must have been dropped, however few memory holds."""
SEEN = 1 << 15
"""Chunks that are remembered without being kept, 300 bytes each."""


class Doorkeeper:
    """Lets chunks into memory.

    Args:
        chunks: that are in it.
    """

    def __init__(self, chunks: ChunkRegistry) -> None:
        self._chunks = chunks
        self._seen: LRUCache[tuple[str, bytes], None] = LRUCache(SEEN)

    def admits(self, chunk: ChunkIds) -> bool:
        """Whether a chunk that a request brings is to be kept; remembers one that is not."""
        if not self._chunks.turned_over(chunk.tenant, LEAST):
            return True
        name = chunk.tenant, chunk.digest
        if name not in self._seen:
            self._seen[name] = None
            return False
        del self._seen[name]
        self._chunks.used(chunk.tenant)
        return True

    def forget_tenant(self, tenant: str) -> None:
        """Forgets what a tenant brought."""
        for name in [name for name in self._seen if name[0] == tenant]:
            del self._seen[name]
