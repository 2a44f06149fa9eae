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
from vllm_blend.core.cpus import use_others
from vllm_blend.core.kv import KVShape, StoredKV
from vllm_blend.core.plans import ChunkIds, ChunkKey
from vllm_blend.server.messages import Place
from vllm_blend.server.worker.shared_records import SharedRecords
from vllm_blend.store.streaming_layers import StreamingKV

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
SHORT = 0.05
"""A load with less left than this share of what may overlap is waited for: so a damaged record costs
what it holds, and not the step."""
LEAST_WAIT_S = 0.25
"""A step waits for layers that are still to come twice as long as they may take, and this longer."""


class TierIO:
    """Writes chunks later, and fetches them.

    Args:
        store: it is closed when it is forgotten, or when the process ends.
        model_key: of this engine's model.
    """

    def __init__(self, store: ChunkStore, model_key: ModelKey) -> None:
        self.store = store
        self._model_key = self._first_key = model_key
        self._pool = ThreadPoolExecutor(FETCHES, "chunk-fetch", use_others)
        self._fetches: dict[ChunkKey, Future[StoredKV | None]] = {}
        self._overlaps: dict[ChunkKey, float] = {}  # of fetches that may end before their loads do
        self._late: dict[ChunkKey, StoredKV] = {}  # their chunks, until all layers are there
        self._lost: dict[ChunkKey, StoredKV] = {}  # those that were not to be had after all
        self._whole: dict[ChunkKey, StoredKV] = {}  # the others, until they are settled
        self._puts: dict[ChunkKey, tuple[StoreKey, StoredKV]] = {}
        self._lookers = ThreadPoolExecutor(LOOKS, "chunk-locate", use_others)
        self._looks: dict[ChunkKey, Future[Place]] = {}
        self._records = SharedRecords(store, CLAIMED_TOKENS)
        self._claimer = ThreadPoolExecutor(1, "chunk-claim", use_others)
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
        fetches: list[dict[Any, Any]] = [self._fetches, self._overlaps, self._late]
        fetches += [self._lost, self._whole]
        for asked in (*fetches, self._puts, self._looks, self._claims, self._names):
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
        """Chunks that lie in the store's memory since they were put, or since all of their layers have
        come; there to be shared with it."""
        found, self._whole = self._whole, {}
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
        for known in (self._names, self._late, self._whole):
            known.pop(key, None)

    def fetch(self, key: ChunkKey, chunk: ChunkIds, overlap: float = 0.0) -> None:
        """Begins to bring a chunk to memory.

        Args:
            overlap: seconds of its load that may be left when it counts as fetched.
        """
        if key not in self._fetches:
            name = self._names[key] = self._key(chunk)
            early = overlap > 0
            if early:
                self._overlaps[key] = overlap
            self._fetches[key] = self._pool.submit(lambda: self.store.get(name, layerwise=early))

    def fetched(self) -> dict[ChunkKey, StoredKV | None]:
        """The chunks whose fetches have ended since this was last asked; None: not to be had.

        They have ended when they have in all ranks, and a chunk is there if all its parts are. One that
        may overlap a step is there when what is left of its load takes no longer than that.
        """
        found: dict[ChunkKey, StoredKV | None] = {}
        late, own = list(self._late), [_state_of(kv, 0.0) for kv in self._late.values()]
        own += [_state(f, self._overlaps.get(key, 0.0)) for key, f in self._fetches.items()]
        states = pipeline.all_reduce_min(own)
        for key, state in zip(late, states[: len(late)], strict=True):
            if state != PENDING:
                here = self._late.pop(key)
                if state == MISSING:
                    self._count(here)
                    self._lost[key] = here
                    self._names.pop(key, None)
                else:
                    self._whole[key] = here.wait() if isinstance(here, StreamingKV) else here
        for key, state in zip(list(self._fetches), states[len(late) :], strict=True):
            if state == PENDING:
                continue
            kv = self._result(self._fetches.pop(key))
            overlap = self._overlaps.pop(key, 0.0)
            found[key] = kv if state == FOUND else None
            if state == MISSING:
                self._count(kv)
                self.forget(key)  # nobody will drop it
            elif kv is not None and overlap:
                self._late[key] = kv
                if isinstance(kv, StreamingKV):
                    kv.layers.hurry(2 * overlap + LEAST_WAIT_S)
        return found

    def take_lost(self) -> dict[ChunkKey, StoredKV]:
        """Chunks that counted as fetched, and whose last layers did not come; since this was last
        called."""
        lost, self._lost = self._lost, {}
        return lost

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

    def _count(self, kv: StoredKV | None) -> None:
        """A chunk that was found is not to be had; of those that were not the store keeps count."""
        if isinstance(kv, StreamingKV) and kv.layers.is_lost:
            self.store.lose(kv)

    @staticmethod
    def _result(future: Future[StoredKV | None]) -> StoredKV | None:
        if (error := future.exception()) is not None:
            logger.error("vllm_blend: a chunk could not be fetched: %s", error)
            return None
        return future.result()


def _state(fetch: Future[StoredKV | None], overlap: float) -> int:
    if not fetch.done():
        return PENDING
    kv = None if fetch.exception() is not None else fetch.result()
    return MISSING if kv is None else _state_of(kv, overlap)


def _state_of(kv: StoredKV, overlap: float) -> int:
    """Of KV whose layers may still be on their way."""
    if not isinstance(kv, StreamingKV):
        return FOUND
    left = kv.layers.seconds_left
    if kv.layers.is_lost:
        return MISSING
    return FOUND if left == 0 or SHORT * overlap < left <= overlap else PENDING
