"""A server's chunks in a store's tiers, below those in the model's process. Nothing here waits."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_blend.compat.support import first_layer
from vllm_blend.core import pipeline, tensor_parallel
from vllm_blend.core.kv import KVShape, StoredKV
from vllm_blend.core.plans import ChunkIds, ChunkKey
from vllm_blend.server.messages import Place
from vllm_blend.server.worker.shared_records import SharedRecords

if TYPE_CHECKING:
    from vllm_blend.store import ChunkKey as StoreKey
    from vllm_blend.store import ChunkStore, ModelKey

logger = logging.getLogger("vllm.vllm_blend")

FETCHES = 16
"""Chunks that are fetched at once; how many of them are read at once is the store's business."""
STATS_S = 1.0
CLAIMED_TOKENS = 1_000_000
"""Of chunks in lower tiers that are found by content, the most recently used first."""
LOOKS = 4
"""Chunks that are looked for at once."""
PENDING, MISSING, FOUND = range(3)
"""How a fetch stands; that of several ranks stands as their least."""


class TierIO:
    """Writes chunks later, and fetches them.

    Args:
        store: it is closed when it is forgotten, or when the process ends.
        model_key: of this engine's model.
    """

    def __init__(self, store: ChunkStore, model_key: ModelKey) -> None:
        self.store = store
        self._model_key = self._first_key = model_key
        self._pool = ThreadPoolExecutor(FETCHES, thread_name_prefix="chunk-fetch")
        self._fetches: dict[ChunkKey, Future[StoredKV | None]] = {}
        self._puts: dict[ChunkKey, tuple[StoreKey, StoredKV]] = {}
        self._lookers = ThreadPoolExecutor(LOOKS, thread_name_prefix="chunk-locate")
        self._looks: dict[ChunkKey, Future[Place]] = {}
        self._records = SharedRecords(store, CLAIMED_TOKENS)
        self._claimer = ThreadPoolExecutor(1, thread_name_prefix="chunk-claim")
        self._claims: dict[str, Future[list[ChunkIds]]] = {}
        self._names: dict[ChunkKey, StoreKey] = {}
        self._told_at = 0.0

    @classmethod
    def open(cls, values: Any, vllm_config: Any, shape: KVShape) -> TierIO:
        """The tiers of ``open_store``'s values.

        Raises:
            ValueError: names what is wrong with the values.
            ImportError: if a tier's package is not installed.
            FileNotFoundError: if there are no weights to tell the model by.
        """
        from vllm_blend.store import model_key, open_store

        host_gb = values["host_gb"] / pipeline.num_ranks()
        store = open_store({**values, "host_gb": host_gb})
        try:
            key = model_key(
                vllm_config,
                shape,
                tensor_parallel.rank(),
                store.storage,
                store.checksum_key,
                first_layer(vllm_config),
            )
        except FileNotFoundError:
            store.close()
            raise
        return cls(store, key)

    def renew(self, weights: str) -> None:
        """Keeps chunks under other keys from now on, and forgets those that were asked for.

        Args:
            weights: names the model's weights, if they are not those of its start; else empty.
        """
        first = self._first_key
        self._model_key = replace(first, weights=f"{first.weights} {weights}") if weights else first
        for asked in (self._fetches, self._puts, self._looks, self._claims, self._names):
            asked.clear()
        self._records = SharedRecords(self.store, CLAIMED_TOKENS)

    def put(self, key: ChunkKey, chunk: ChunkIds, kv: StoredKV, ready: Any = None) -> bool:
        """Keeps a chunk, later; False if too much waits already. ``ready`` is as the store's."""
        store_key = self._names[key] = self._key(chunk)
        if not self.store.put(store_key, kv, ready):
            return False
        self._puts[key] = store_key, kv
        return True

    def settled(self) -> dict[ChunkKey, StoredKV]:
        """Chunks that were put and lie in the store's memory since, there to be shared with it."""
        found = {}
        for key, (store_key, kv) in list(self._puts.items()):
            held = self.store.peek(store_key)
            if held is not kv:  # else it waits to be copied
                del self._puts[key]
                if held is not None:
                    found[key] = held
        return found

    def nearest(self, key: ChunkKey) -> StoredKV | None:
        """A chunk that is in memory, from the GPU's; None: it is not there, but will be next time."""
        name = self._names.get(key)
        return None if name is None else self.store.nearest(name)

    def forget(self, key: ChunkKey) -> None:
        """A chunk is not here any more."""
        self._names.pop(key, None)

    def fetch(self, key: ChunkKey, chunk: ChunkIds) -> None:
        """Begins to bring a chunk to memory."""
        if key not in self._fetches:
            name = self._names[key] = self._key(chunk)
            self._fetches[key] = self._pool.submit(lambda: self.store.get(name))

    def fetched(self) -> dict[ChunkKey, StoredKV | None]:
        """The chunks whose fetches have ended since this was last asked; None: not to be had.

        They have ended when they have in all ranks, and a chunk is there if all its parts are.
        """
        found: dict[ChunkKey, StoredKV | None] = {}
        states = pipeline.all_reduce_min([_state(future) for future in self._fetches.values()])
        for key, state in zip(list(self._fetches), states, strict=True):
            if state == PENDING:
                continue
            kv = self._result(self._fetches.pop(key))
            found[key] = kv if state == FOUND else None
            if state == MISSING:
                self.forget(key)  # nobody will drop it
        return found

    def discard(self, key: ChunkKey) -> None:
        """Removes a chunk from the store's memory; what the other tiers have is verified when read."""
        if (name := self._names.get(key)) is not None:
            self.store.discard(name)

    def purge(self, chunk: ChunkIds) -> None:
        """Begins to remove a chunk from the store."""
        key = self._key(chunk)
        self.store.purge(key)
        self._claimer.submit(self._records.remove, key.digest)

    def purge_tenant(self, tenant: str, contexts: Collection[tuple[int, ...]]) -> None:
        """Begins to remove all of a tenant's chunks that lie on disk."""

        def work() -> None:
            for digest, ids in self.store.token_ids():
                for chunk in (ChunkIds(tenant, ids, context) for context in contexts):
                    if ids and min(ids) >= 0 and self._key(chunk).digest == digest:
                        self.purge(chunk)

        self._claimer.submit(work)

    def locate(self, key: ChunkKey, chunk: ChunkIds) -> None:
        """Begins to look for a chunk."""
        if key not in self._looks:
            self._looks[key] = self._lookers.submit(self._locate, chunk)

    def located(self) -> dict[ChunkKey, Place]:
        """Where chunks are that were looked for, as far as it is known since this was last asked."""
        ended = [key for key, future in self._looks.items() if future.done()]
        return {key: self._looks.pop(key).result() for key in ended}

    def claim(
        self, tenant: str, contexts: Collection[tuple[int, ...]], all_of_them: bool = True
    ) -> None:
        """Begins to find out which chunks in lower tiers are a tenant's: those whose keys it can make.

        Args:
            all_of_them: False: those alone that came since this was last asked.
        """
        if tenant not in self._claims:
            job = partial(self._claim, self._records, tenant, contexts, all_of_them)
            self._claims[tenant] = self._claimer.submit(job)

    def claimed(self) -> dict[str, list[ChunkIds]]:
        """Tenants' chunks, as far as they are known since this was last asked."""
        ended = [tenant for tenant, future in self._claims.items() if future.done()]
        found = {tenant: self._claims.pop(tenant) for tenant in ended}
        for future in found.values():
            if (error := future.exception()) is not None:
                logger.error("vllm_blend: the chunks on disk could not be read: %s", error)
        return {t: [] if future.exception() else future.result() for t, future in found.items()}

    def loads(self) -> dict[str, tuple[float, float]]:
        """How long loads from each tier take: seconds, and seconds a byte."""
        return {lane.name: lane.load_time.line() for lane in self.store.lanes}

    def stats(self) -> dict[str, int] | None:
        """The store's counters, once a second."""
        if time.monotonic() < self._told_at + STATS_S:
            return None
        self._told_at = time.monotonic()
        return self.store.stats()

    def _locate(self, chunk: ChunkIds) -> Place:
        from vllm_blend.store.record import Layout
        from vllm_blend.store.store import IN_MEMORY

        key = self._key(chunk)
        try:
            tier = self.store.locate(key)
        except Exception as error:
            logger.error("vllm_blend: a chunk could not be looked for: %s", error)
            return None, 0
        return tier, 0 if tier in IN_MEMORY else Layout.of(key).num_bytes

    def _claim(
        self,
        records: SharedRecords,
        tenant: str,
        contexts: Collection[tuple[int, ...]],
        all_of_them: bool,
    ) -> list[ChunkIds]:
        records.update()
        found = []
        for digest, ids in records.tell(tenant, all_of_them):
            if not ids or min(ids) < 0:
                continue
            chunks = (ChunkIds(tenant, ids, context) for context in contexts)
            found += [chunk for chunk in chunks if self._key(chunk).digest == digest]
        return found

    def _key(self, chunk: ChunkIds) -> StoreKey:
        return self._model_key.chunk(chunk.token_ids, chunk.context, chunk.tenant)

    @staticmethod
    def _result(future: Future[StoredKV | None]) -> StoredKV | None:
        if (error := future.exception()) is not None:
            logger.error("vllm_blend: a chunk could not be fetched: %s", error)
            return None
        return future.result()


def _state(fetch: Future[StoredKV | None]) -> int:
    if not fetch.done():
        return PENDING
    return MISSING if fetch.exception() is not None or fetch.result() is None else FOUND
