"""Which chunks the engine has: by tenant, context and token ids, and where their tokens occur.

The scheduler keeps this list; the KV itself lies in the model's process, under the same keys
(``server/worker/chunk_cache.py``). Room is made before a chunk is computed: what is dropped is told to
the model's process with the next step. A chunk that an unfinished request uses is not dropped.

Tenants share the memory. First go the chunks of tenants that used none for ``IDLE_S``, then those of
the tenant that holds most; of a tenant the least recently used. So nobody loses chunks to a tenant that
holds more.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from vllm_blend.core.plans import ChunkIds, ChunkKey, digest_of
from vllm_blend.core.prompt import TokenIds
from vllm_blend.server.chunks.token_index import Run, SequenceIndex, Windows

SCALE_BYTES = 4
"""Of a head's scale in fp8 (``store/fp8.py``)."""
IDLE_S = 600.0
"""A tenant that used no chunk for so long has no share of the memory that others need."""


def chunk_key(chunk: ChunkIds) -> ChunkKey:
    """Names a chunk within one engine: 16 bytes of its tenant, context and token ids."""
    parts = chunk.digest, _digest(chunk.context), chunk.tenant.encode(errors="surrogatepass")
    return hashlib.blake2b(b"".join(parts), digest_size=16).digest()


@lru_cache(maxsize=16)
def _digest(context: TokenIds) -> bytes:
    """A server has one context or two."""
    return digest_of(context)


def bytes_per_token(vllm_config: Any, storage: str = "auto") -> int:
    """Bytes of one token's K and V in all layers, of all ranks.

    Args:
        storage: how they are kept: as they are computed, or in ``"fp8"`` with a scale for each head.
    """
    config, parallel = vllm_config.model_config, vllm_config.parallel_config
    num_kv_heads = config.get_num_kv_heads(parallel) * parallel.tensor_parallel_size
    size = config.get_head_size()
    head = size + SCALE_BYTES if storage == "fp8" else size * config.dtype.itemsize
    return int(2 * config.get_total_num_hidden_layers() * num_kv_heads * head)


@dataclass
class Holding:
    """A tenant's chunks in memory.

    Attributes:
        free: those that no request uses, least recently used first.
        num_tokens: of all of them, and of those that come.
        used_at: when it last used one, in seconds.
        num_dropped: of its chunks, for others, since it last used one.
    """

    free: OrderedDict[ChunkKey, None] = field(default_factory=OrderedDict)
    num_tokens: int = 0
    used_at: float = 0.0
    num_dropped: int = 0


class ChunkRegistry:
    """Chunks in memory, and which of them go first.

    Args:
        max_tokens: of all chunks together.
        clock: in seconds.

    Attributes:
        on_evict: called with a chunk that is dropped for others.
        on_remove: called with the key of a chunk that is not here any more, whatever the cause.
    """

    def __init__(self, max_tokens: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self.num_evicted = 0
        self._clock = clock
        self._chunks: dict[ChunkKey, ChunkIds] = {}
        self._coming: dict[ChunkKey, ChunkIds] = {}
        self._tenants: OrderedDict[str, Holding] = OrderedDict()  # the last used last
        self._free_tokens = 0
        self._pins: Counter[ChunkKey] = Counter()
        self._to_drop: list[ChunkKey] = []
        self._deleted: set[ChunkKey] = set()  # but in use, or on their way
        self._to_discard: list[ChunkIds] = []
        self.on_evict: Callable[[ChunkKey, ChunkIds], None] = lambda key, chunk: None
        self.on_remove: Callable[[ChunkKey], None] = lambda key: None
        self._indexes: dict[tuple[str, TokenIds], SequenceIndex] = {}

    def __len__(self) -> int:
        return len(self._chunks)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._chunks

    @property
    def num_pinned(self) -> int:
        """Chunks in use."""
        return len(self._pins)

    def get(self, chunk: ChunkIds) -> ChunkKey | None:
        """The key of a chunk that is here, else None."""
        key = chunk_key(chunk)
        if self._chunks.get(key) != chunk or key in self._deleted:
            return None
        self._use(key)
        return key

    def chunk(self, key: ChunkKey) -> ChunkIds:
        """A chunk that is here."""
        return self._chunks[key]

    def all(self) -> Iterator[tuple[ChunkKey, ChunkIds]]:
        """The chunks that are here, but for deleted ones."""
        return ((key, chunk) for key, chunk in self._chunks.items() if key not in self._deleted)

    def all_coming(self) -> Iterator[tuple[ChunkKey, ChunkIds]]:
        """The chunks that room was made for and that are not here yet."""
        return iter(self._coming.items())

    def is_pinned(self, key: ChunkKey) -> bool:
        """Whether a request uses a chunk."""
        return key in self._pins

    def find(self, tenant: str, context: TokenIds, prompt: Windows, min_tokens: int) -> list[Run]:
        """A tenant's known chunks computed after ``context``, or parts of them, in a prompt."""
        index = self._indexes.get((tenant, context))
        runs = [] if index is None else index.find(prompt, min_tokens)
        for run in runs:
            assert isinstance(run.key, bytes)
            self._use(run.key)
        return runs

    def pin(self, keys: Iterable[ChunkKey]) -> None:
        """Keeps chunks from being dropped, until they are unpinned as often."""
        for key in keys:
            self._pins[key] += 1
            if self._pins[key] == 1 and key in self._chunks:
                self._hold(key)

    def unpin(self, keys: Iterable[ChunkKey]) -> None:
        """Lets go of chunks."""
        for key in keys:
            self._pins[key] -= 1
            if self._pins[key] <= 0:
                del self._pins[key]
                if key in self._chunks:
                    self._release(key)
                    if key in self._deleted:
                        self.delete(key)

    def reserve(self, new: ChunkIds) -> ChunkKey | None:
        """Makes room for a chunk that is to come.

        Returns:
            Its key; None if there is no room, or if it is here or on its way already, or being deleted.
        """
        key = chunk_key(new)
        if self.expects(key) or key in self._deleted:
            return None
        size = len(new.token_ids)
        if self.max_tokens - self.num_tokens + self._free_tokens < size:
            return None
        while self.max_tokens - self.num_tokens < size:
            self.evict(self._victim())
        self._coming[key] = new
        self._count(new, size)
        return key

    def expects(self, key: ChunkKey) -> bool:
        """Whether a chunk is here, or room was made for it."""
        return key in self._chunks or key in self._coming

    def coming(self, key: ChunkKey) -> ChunkIds | None:
        """A chunk that room was made for and that is not here yet."""
        return self._coming.get(key)

    def evict(self, key: ChunkKey) -> None:
        """Drops a chunk for others."""
        chunk = self._chunks[key]
        self.on_evict(key, chunk)
        self._tenants[chunk.tenant].num_dropped += 1
        self._remove(key)
        self.num_evicted += 1

    def delete(self, key: ChunkKey) -> bool:
        """Removes a chunk for good: at once, or once no request uses it and it has come; until then
        nobody finds it.

        Returns:
            Whether it is gone.
        """
        self._deleted.add(key)
        if key in self._pins or key in self._coming:
            if key in self._chunks:
                self._hide(key)
            return False
        self._to_discard.append(self._chunks[key])
        self._remove(key)
        return True

    def turned_over(self, tenant: str, least: int) -> bool:
        """Whether as many of a tenant's chunks were dropped as it has, and at least so many, since it
        last used one."""
        holding = self._tenants.get(tenant)
        return holding is not None and holding.num_dropped >= max(least, len(holding.free))

    def used(self, tenant: str) -> None:
        """What a tenant has is of use."""
        if (holding := self._tenants.get(tenant)) is not None:
            holding.num_dropped = 0

    def clear(self) -> None:
        """The chunks' KV is of no use any more, wherever it lies."""
        for key in list(self._chunks):
            self._remove(key)

    def commit(self, key: ChunkKey) -> None:
        """The model's process has the chunk now."""
        chunk = self._coming.pop(key)
        self._chunks[key] = chunk
        if key not in self._pins:
            self._release(key)
        # what is in it is bounded by max_tokens already
        index = self._indexes.setdefault(chunk.shelf, SequenceIndex(max_tokens=2**62))
        index.add(key, Windows.of(chunk.token_ids))
        if key in self._deleted:
            self.delete(key)

    def cancel(self, key: ChunkKey) -> None:
        """The chunk does not come after all; part of it may be there."""
        chunk = self._coming.pop(key)
        self._deleted.discard(key)
        self._count(chunk, -len(chunk.token_ids))
        self.refuse(key)

    def refuse(self, key: ChunkKey) -> None:
        """There is no room for a chunk that has come."""
        self._to_drop.append(key)

    def take_drops(self) -> tuple[ChunkKey, ...]:
        """What the model's process must drop before its next step."""
        drops, self._to_drop = self._to_drop, []
        return tuple(drops)

    @property
    def has_discards(self) -> bool:
        """Whether the model's process is to drop deleted chunks."""
        return bool(self._to_discard)

    def take_discards(self) -> tuple[ChunkIds, ...]:
        """What is to leave the store's tiers, too."""
        discards, self._to_discard = self._to_discard, []
        return tuple(discards)

    def lose(self, key: ChunkKey) -> ChunkIds | None:
        """The model's process does not have the chunk; None if that was known already."""
        chunk = self._chunks.get(key)
        if chunk is not None:
            self._remove(key)
        return chunk

    def _victim(self) -> ChunkKey:
        """The free chunk that goes next."""
        oldest = next(iter(self._tenants.values()))
        if not oldest.free or oldest.used_at > self._clock() - IDLE_S:
            oldest = max(
                (holding for holding in self._tenants.values() if holding.free),
                key=lambda holding: holding.num_tokens,
            )
        return next(iter(oldest.free))

    def _use(self, key: ChunkKey) -> None:
        """A chunk is the most recently used one."""
        tenant = self._chunks[key].tenant
        holding = self._tenants[tenant]
        holding.used_at, holding.num_dropped = self._clock(), 0
        self._tenants.move_to_end(tenant)
        if key in holding.free:
            holding.free.move_to_end(key)

    def _release(self, key: ChunkKey) -> None:
        """A chunk may be dropped."""
        chunk = self._chunks[key]
        self._tenants[chunk.tenant].free[key] = None
        self._free_tokens += len(chunk.token_ids)

    def _hold(self, key: ChunkKey) -> None:
        """A chunk may not be dropped."""
        chunk = self._chunks[key]
        del self._tenants[chunk.tenant].free[key]
        self._free_tokens -= len(chunk.token_ids)

    def _count(self, chunk: ChunkIds, num_tokens: int) -> None:
        """A tenant holds so many tokens more."""
        holding = self._tenants.get(chunk.tenant)
        if holding is None:
            holding = self._tenants[chunk.tenant] = Holding(used_at=self._clock())
        holding.num_tokens += num_tokens
        self.num_tokens += num_tokens
        if not holding.num_tokens:
            del self._tenants[chunk.tenant]

    def _remove(self, key: ChunkKey) -> None:
        if key not in self._pins:
            self._hold(key)
        self._hide(key)
        chunk = self._chunks.pop(key)
        self._deleted.discard(key)
        self._count(chunk, -len(chunk.token_ids))
        self._to_drop.append(key)
        self.on_remove(key)

    def _hide(self, key: ChunkKey) -> None:
        """A chunk is not found by content any more."""
        chunk = self._chunks[key]
        index = self._indexes.get(chunk.shelf)  # a chunk shorter than a window is in none
        if index is not None:
            index.remove(key)
            if not len(index):
                del self._indexes[chunk.shelf]
