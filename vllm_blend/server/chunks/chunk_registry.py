"""Which chunks the engine has: by tenant, context and token ids, and where their tokens occur.

The scheduler keeps this list; the KV itself lies in the model's process, under the same keys
(``server/worker/chunk_cache.py``). Room is made before a chunk is computed: what is dropped is told to
the model's process with the next step. A chunk that an unfinished request uses is not dropped.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from vllm_blend.core.plans import ChunkIds, ChunkKey
from vllm_blend.core.prompt import TokenIds
from vllm_blend.server.chunks.token_index import Run, SequenceIndex, Windows

SCALE_BYTES = 4
"""Of a head's scale in fp8 (``store/fp8.py``)."""


def chunk_key(chunk: ChunkIds) -> ChunkKey:
    """Names a chunk within one engine: 16 bytes of its tenant, context and token ids."""
    # the length first: else a tenant's name may read like a chunk's last tokens
    ids = array("q", [len(chunk.token_ids), *chunk.token_ids])
    digest = hashlib.blake2b(ids.tobytes() + _digest(chunk.context), digest_size=16)
    digest.update(chunk.tenant.encode(errors="surrogatepass"))
    return digest.digest()


@lru_cache(maxsize=16)
def _digest(context: TokenIds) -> bytes:
    """A server has one context or two."""
    return hashlib.blake2b(array("q", context).tobytes(), digest_size=16).digest()


def bytes_per_token(vllm_config: Any, storage: str = "auto") -> int:
    """Bytes of one token's K and V in all layers, of all tensor-parallel ranks.

    Args:
        storage: how they are kept: as they are computed, or in ``"fp8"`` with a scale for each head.
    """
    config, parallel = vllm_config.model_config, vllm_config.parallel_config
    num_kv_heads = config.get_num_kv_heads(parallel) * parallel.tensor_parallel_size
    size = config.get_head_size()
    head = size + SCALE_BYTES if storage == "fp8" else size * config.dtype.itemsize
    return int(2 * config.get_num_layers(parallel) * num_kv_heads * head)


class ChunkRegistry:
    """Chunks in memory, least recently used out first.

    Args:
        max_tokens: of all chunks together.

    Attributes:
        on_evict: called with a chunk that is dropped for others.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self.num_evicted = 0
        self._chunks: OrderedDict[ChunkKey, ChunkIds] = OrderedDict()
        self._coming: dict[ChunkKey, ChunkIds] = {}
        self._pins: Counter[ChunkKey] = Counter()
        self._to_drop: list[ChunkKey] = []
        self.on_evict: Callable[[ChunkKey, ChunkIds], None] = lambda key, chunk: None
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
        if self._chunks.get(key) != chunk:
            return None
        self._chunks.move_to_end(key)
        return key

    def chunk(self, key: ChunkKey) -> ChunkIds:
        """A chunk that is here."""
        return self._chunks[key]

    def find(self, tenant: str, context: TokenIds, prompt: Windows, min_tokens: int) -> list[Run]:
        """A tenant's known chunks computed after ``context``, or parts of them, in a prompt."""
        index = self._indexes.get((tenant, context))
        runs = [] if index is None else index.find(prompt, min_tokens)
        for run in runs:
            assert isinstance(run.key, bytes)
            self._chunks.move_to_end(run.key)
        return runs

    def pin(self, keys: Iterable[ChunkKey]) -> None:
        """Keeps chunks from being dropped, until they are unpinned as often."""
        self._pins.update(keys)

    def unpin(self, keys: Iterable[ChunkKey]) -> None:
        """Lets go of chunks."""
        self._pins.subtract(keys)
        self._pins = +self._pins

    def reserve(self, new: ChunkIds) -> ChunkKey | None:
        """Makes room for a chunk that is to come.

        Returns:
            Its key; None if there is no room, or if it is on its way already.
        """
        if chunk_key(new) in self._coming:
            return None
        free = self.max_tokens - self.num_tokens
        victims = []
        for key, chunk in self._chunks.items():
            if free >= len(new.token_ids):
                break
            if key not in self._pins:
                victims.append(key)
                free += len(chunk.token_ids)
        if free < len(new.token_ids):
            return None
        for key in victims:
            self._drop(key)
        key = chunk_key(new)
        self._coming[key] = new
        self.num_tokens += len(new.token_ids)
        return key

    def coming(self, key: ChunkKey) -> ChunkIds | None:
        """A chunk that room was made for and that is not here yet."""
        return self._coming.get(key)

    def commit(self, key: ChunkKey) -> None:
        """The model's process has the chunk now."""
        chunk = self._coming.pop(key)
        self._chunks[key] = chunk
        # what is in it is bounded by max_tokens already
        index = self._indexes.setdefault(chunk.shelf, SequenceIndex(max_tokens=2**62))
        index.add(key, Windows.of(chunk.token_ids))

    def cancel(self, key: ChunkKey) -> None:
        """The chunk does not come after all; part of it may be there."""
        self.num_tokens -= len(self._coming.pop(key).token_ids)
        self.refuse(key)

    def refuse(self, key: ChunkKey) -> None:
        """There is no room for a chunk that has come."""
        self._to_drop.append(key)

    def take_drops(self) -> tuple[ChunkKey, ...]:
        """What the model's process must drop before its next step."""
        drops, self._to_drop = self._to_drop, []
        return tuple(drops)

    def lose(self, key: ChunkKey) -> ChunkIds | None:
        """The model's process does not have the chunk; None if that was known already."""
        chunk = self._chunks.get(key)
        if chunk is not None:
            self._remove(key)
        return chunk

    def _drop(self, key: ChunkKey) -> None:
        self.on_evict(key, self._chunks[key])
        self._remove(key)
        self.num_evicted += 1

    def _remove(self, key: ChunkKey) -> None:
        chunk = self._chunks.pop(key)
        self.num_tokens -= len(chunk.token_ids)
        self._to_drop.append(key)
        index = self._indexes.get(chunk.shelf)  # chunks too short to be found leave none
        if index is not None:
            index.remove(key)
            if not len(index):
                del self._indexes[chunk.shelf]
