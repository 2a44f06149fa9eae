"""The chunk store: one object for whoever needs a chunk's KV, or has computed one.

store = ChunkStore([DiskTier("/var/cache/chunks", 200 << 30)], host_bytes=16 << 30)
kv = store.get(key)             # memory, else the tiers in order; verified; None is a miss
if kv is None:
    store.put(key, compute())   # returns at once; a thread writes it
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any

from vllm_blend.core.kv import StoredKV
from vllm_blend.store import gpu
from vllm_blend.store.copy_in import copy_to_slot, written_event
from vllm_blend.store.disk import DiskTier
from vllm_blend.store.host import HostTier
from vllm_blend.store.keys import ChunkKey, check_storage
from vllm_blend.store.load import Load, Loads
from vllm_blend.store.record import Reason, Record, check_kv
from vllm_blend.store.secrets import check_key
from vllm_blend.store.streaming_layers import StreamingKV
from vllm_blend.store.tier import Level, Stats, Tier
from vllm_blend.store.tier_client import Lane, Writer

IN_MEMORY = "gpu", "host"
"""Tiers from which nothing is loaded."""


class ChunkStore:
    """Chunks' KV in memory and slower tiers; for several threads.

    What is put goes to host memory and to every tier; what a slower tier had is copied to the faster
    ones. Each tier drops what was used least recently, memory nothing that is in use; a chunk that
    leaves host memory and is in no other tier that can be asked quickly is written there first.

    Args:
        tiers: slower ones, fastest first, e.g. ``[DiskTier(...), RedisTier(...)]``.
        host_bytes: of host memory, taken at once.
        gpu_bytes: of the GPU's memory, likewise: chunks that are found in host memory are copied there
            once their requests have read them, and are found there from then on. 0: none.
        pinned: page-locked host memory; None: where there is a GPU.
        load_threads: loads that run at once; with fewer than a request has chunks, its last chunks'
            first layer comes late.
        write_behind_bytes: KV that may wait to be written, for each tier; what is beyond is dropped.
        timeout_s: how long a request waits for a chunk, and a layer for its data.
        storage: how this store's users are to keep KV: ``"auto"``, as it is computed, or ``"fp8"``. It
            goes into their ``ModelKey``, so that neither finds what the other has kept.
        checksum_key: a secret of 16 bytes or more, likewise: a record that was written without it is
            not used. In settings ``{"env": NAME}`` or ``{"file": PATH}``. None: there is none.

    Raises:
        ValueError: if ``storage`` is neither, or ``checksum_key`` is short.
    """

    def __init__(
        self,
        tiers: Sequence[Tier] = (),
        *,
        host_bytes: int,
        gpu_bytes: int = 0,
        pinned: bool | None = None,
        load_threads: int = 16,
        write_behind_bytes: int = 1 << 30,
        timeout_s: float = 30.0,
        storage: str = "auto",
        checksum_key: bytes | None = None,
    ) -> None:
        check_storage(storage)
        self.timeout_s = timeout_s
        self.storage = storage
        self.checksum_key = check_key(checksum_key or b"")
        self._stats = Stats()
        self._lock = threading.Lock()
        self._pending: dict[bytes, tuple[ChunkKey, StoredKV]] = {}  # put, not yet in host memory
        self._purging: Counter[bytes] = Counter()  # chunks that lanes have yet to remove
        self._demoted: set[bytes] = set()
        self._host = HostTier(host_bytes, pinned, self._may_evict)
        self._gpu = gpu.GpuTier(gpu_bytes) if gpu_bytes else None
        self._to_gpu: set[bytes] = set()  # being copied, or waiting for it
        self._intake = Writer("host", write_behind_bytes)
        self._uploads = Writer("gpu", write_behind_bytes) if self._gpu else None
        self._lanes = [Lane(tier, self._stats, write_behind_bytes) for tier in tiers]
        self._loads = Loads(self._host, self._lanes, load_threads, timeout_s, self._promote)
        self._levels: list[Level] = [*([self._gpu] if self._gpu else []), self._host, *tiers]
        writers = [self._intake, *(lane.writer for lane in self._lanes)]
        self._writers = [*writers, *([self._uploads] if self._uploads else [])]
        # not weakref.finalize, which does not run where a forked process ends
        self._at_exit = Finalize(self, _close_all, args=(self._writers,), exitpriority=10)

    @property
    def lanes(self) -> Sequence[Lane]:
        """The slower tiers, fastest first, each with the speed of its loads."""
        return self._lanes

    @property
    def budget_bytes(self) -> int:
        """Of the largest tier: chunks beyond that push each other out."""
        return max(level.budget_bytes for level in self._levels)

    def get(self, key: ChunkKey, *, layerwise: bool = False) -> StoredKV | None:
        """A chunk's KV, or None: a miss, counted with its reason.

        Every byte that comes from a slower tier is verified. By default that is done before this
        returns.

        Args:
            layerwise: return as soon as the chunk is found; ``kv.layers[i]`` then waits for layer
                ``i``, and raises ``ChunkLost`` if it cannot be had. Whoever asks for that must be able
                to go on without the chunk.
        """
        return self.get_many([key], layerwise=layerwise)[0]

    def get_many(self, keys: Sequence[ChunkKey], *, layerwise: bool = False) -> list[StoredKV | None]:
        """Like ``get``, for several chunks, which are loaded at the same time."""
        deadline = time.monotonic() + self.timeout_s
        found = [self._find(key) for key in keys]
        return [
            self._await(one, deadline, layerwise) if isinstance(one, Load) else one for one in found
        ]

    def lose(self, kv: StreamingKV) -> None:
        """Counts a chunk as a miss that was found, and whose last layers did not come."""
        self._stats.add(f"misses.{kv.layers.reason or Reason.UNAVAILABLE}")

    def peek(self, key: ChunkKey) -> StoredKV | None:
        """A chunk's KV if it is in memory now, put lately included; never waits, and counts nothing."""
        with self._lock:
            if (waiting := self._pending.get(key.digest)) and waiting[0].id_bytes == key.id_bytes:
                return waiting[1]
        return self._host.get(key)

    def nearest(self, key: ChunkKey) -> StoredKV | None:
        """A chunk's KV in GPU memory, or None; then, if host memory has it, it is copied there.

        Never waits, and counts hits alone.
        """
        if self._gpu is None:
            return None
        if (found := self._gpu.get(key)) is not None:
            self._stats.add("hits.gpu")
        else:
            self._upload(key)
        return found

    def prefetch(self, keys: Sequence[ChunkKey]) -> None:
        """Starts to load chunks that will be asked for; returns at once."""
        for key in keys:
            if not self._host.contains(key):
                self._start(key)

    def contains(self, key: ChunkKey) -> bool:
        """Whether a chunk would probably be found; may ask a tier over the network."""
        return self.locate(key) is not None

    def locate(self, key: ChunkKey) -> str | None:
        """The name of the fastest tier that says it has a chunk, or None; of memory one of IN_MEMORY.

        May ask a tier over the network. A tier that is paused has nothing.
        """
        if key.digest in self._purging:
            return None
        if self._gpu is not None and self._gpu.contains(key):
            return self._gpu.name
        with self._lock:
            if key.digest in self._pending or self._host.contains(key):
                return self._host.name
        return next((lane.name for lane in self._lanes if lane.contains(key)), None)

    def token_ids(self) -> Iterator[tuple[bytes, tuple[int, ...]]]:
        """Digest and token ids of the chunks on disk, most recently used first; not verified.

        For whoever finds chunks by content: ids belong to a chunk if its key has this digest.
        """
        for lane in self._lanes:
            if isinstance(lane.tier, DiskTier):
                yield from lane.tier.token_ids()

    def put(self, key: ChunkKey, kv: StoredKV, ready: Any = None) -> bool:
        """Keeps a chunk's KV. Never waits: threads copy and write it.

        A chunk that is in memory is not written again, unless it has no scores there and ``kv`` has:
        then they are added to it, in memory and in every tier. Known scores stay, whatever is put.

        Args:
            kv: must not be changed afterwards. KV that the store is still loading (``StreamingKV``) is
                the store's own already, and is not kept.
            ready: after what writes ``kv``; None: it is written, or the current stream writes it.

        Returns:
            False if too much is waiting, so that it was dropped.

        Raises:
            ValueError: if ``kv`` is not what the key's model stores.
        """
        check_kv(key, kv)
        with self._lock:
            if isinstance(kv, StreamingKV) or self._knows(key, kv.scores is not None):
                return True
            ready = ready or written_event(kv)
            taken = self._intake.submit(lambda: self._take_in(key, kv, ready), kv.num_bytes)
            if taken:
                self._pending[key.digest] = key, kv  # in the place of one without scores
        self._stats.add("puts" if taken else "puts_dropped")
        return taken

    def discard(self, key: ChunkKey) -> None:
        """Removes a chunk from memory; KV in use stays valid. Slower tiers keep it."""
        self._host.discard(key)
        if self._gpu is not None:
            self._gpu.discard(key)

    def purge(self, key: ChunkKey) -> None:
        """Removes a chunk from memory, and from all tiers once what was put before is written; nobody
        finds it there any more. KV in use stays valid. Never waits."""

        def done() -> None:
            with self._lock:
                self._purging -= Counter([key.digest])

        def from_tiers() -> None:
            self.discard(key)
            for lane in self._lanes:
                lane.purge(key, done)
            done()

        with self._lock:
            self._purging[key.digest] += len(self._lanes) + 1
        self.discard(key)
        self._intake.submit(from_tiers, 0)

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Waits until all loads have ended and all is written; False if that takes longer."""
        deadline = time.monotonic() + timeout_s
        steps = [self._loads.flush, *(writer.flush for writer in self._writers)]
        return all(flush(max(deadline - time.monotonic(), 0)) for flush in steps)

    def stats(self) -> dict[str, int]:
        """Counters and levels, by name.

        ``hits.TIER``, ``misses.REASON``, ``puts``, ``puts_dropped``, and by tier
        ``rejected.TIER.REASON``, ``failures.TIER.read.KIND``, ``skipped.TIER``, ``writes.TIER``,
        ``writes_dropped.TIER``, ``bytes_read.TIER``, ``bytes_written.TIER``, ``evictions.TIER``,
        ``full.gpu`` (chunks not copied to the GPU: all that is there is in use); levels:
        ``entries.TIER``, ``bytes.TIER``.
        """
        found = self._stats.snapshot()
        for level in self._levels:
            both = level.stats.snapshot() | level.usage()
            found |= {f"{name}.{level.name}": value for name, value in both.items()}
        return found

    def close(self) -> None:
        """Writes what waits (for at most ten seconds a tier), and ends the store's threads."""
        self._loads.close()
        self._intake.close()
        for lane in self._lanes:
            lane.close()
        if self._uploads is not None:
            self._uploads.close()
        self._at_exit.cancel()
        self._host.close()
        if self._gpu is not None:
            self._gpu.close()

    def __enter__(self) -> ChunkStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _knows(self, key: ChunkKey, scored: bool) -> bool:
        """Whether a chunk is in memory, or waits to be (with scores, if ``scored``). Under the lock."""
        if (waiting := self._pending.get(key.digest)) is not None:
            return not scored or waiting[1].scores is not None
        return self._host.contains(key) and (not scored or self._host.scores(key) is not None)

    def _find(self, key: ChunkKey) -> StoredKV | Load | None:
        """The KV if it is in memory, else its load; None is a miss that is counted."""
        if key.digest in self._purging:
            self._stats.add(f"misses.{Reason.ABSENT}")
            return None
        if (near := self.nearest(key)) is not None:
            return near
        with self._lock:
            if (waiting := self._pending.get(key.digest)) and waiting[0].id_bytes == key.id_bytes:
                self._stats.add("hits.host")
                return waiting[1]
        found = self._host.get(key) or self._start(key)
        if isinstance(found, StoredKV):
            self._stats.add("hits.host")
        elif found is None:
            self._stats.add(f"misses.{Reason.ABSENT}")
        return found

    def _start(self, key: ChunkKey) -> StoredKV | Load | None:
        """Starts a load, unless it is certain at once that no tier has the chunk."""
        if all(lane.tier.quick and not lane.paused and not lane.contains(key) for lane in self._lanes):
            return None
        return self._loads.start(key)

    def _await(self, load: Load, deadline: float, layerwise: bool) -> StoredKV | None:
        kv = load.wait(max(deadline - time.monotonic(), 0), layerwise)
        if kv is None:
            self._stats.add(f"misses.{load.reason}")
        else:
            self._stats.add(f"hits.{load.lane.name if load.lane else 'host'}")
        return kv

    def _upload(self, key: ChunkKey) -> None:
        """Copies a chunk from host memory to the GPU's, on a thread."""
        if self._gpu is None or self._uploads is None or not self._host.contains(key):
            return
        with self._lock:
            if key.digest in self._to_gpu:
                return
            self._to_gpu.add(key.digest)
        due = time.monotonic() + gpu.DELAY_S

        def copy() -> None:
            time.sleep(max(due - time.monotonic(), 0))
            try:
                memory = self._host.memory(key)
                if memory is not None and self._gpu is not None:
                    self._stats.add("writes.gpu" if self._gpu.copy_in(key, memory) else "full.gpu")
                    if (scores := self._host.scores(key)) is not None:  # as they are now
                        self._gpu.learn(key, scores)
            finally:
                with self._lock:
                    self._to_gpu.discard(key.digest)

        if not self._uploads.submit(copy, 0):
            with self._lock:
                self._to_gpu.discard(key.digest)

    def _take_in(self, key: ChunkKey, kv: StoredKV, ready: Any) -> None:
        """What a put leaves to a thread: into host memory, then to every tier."""
        try:
            held = self._host.learn(key, kv.scores)
            if held is None:
                slot = self._host.reserve(key)
                copy_to_slot(kv, slot, ready)
                self._host.publish(slot)
                held = StoredKV(slot.layers, slot.scores)
            if self._gpu is not None and held.scores is not None:
                self._gpu.learn(key, held.scores)
        finally:
            with self._lock:
                if self._pending[key.digest][1] is kv:  # else one with scores waits
                    del self._pending[key.digest]
        if self._lanes:
            record = Record.of(key, held)
            for lane in self._lanes:
                lane.submit(record)

    def _promote(self, key: ChunkKey, kv: StoredKV, lanes: Sequence[Lane]) -> None:
        def write() -> None:
            record = Record.of(key, kv)
            for lane in lanes:
                lane.submit(record)

        if not self._intake.submit(write, kv.num_bytes):
            self._stats.add("promotions_dropped")

    def _may_evict(self, key: ChunkKey) -> bool:
        """Asked before host memory drops a chunk, which is written to the next tier if it lacks it.

        Called with host memory's lock held, so it takes no lock under which host memory is asked.
        """
        lane = next((lane for lane in self._lanes if lane.tier.quick), None)
        if lane is None or lane.paused or lane.contains(key) or key.digest in self._demoted:
            self._demoted.discard(key.digest)  # it was tried, whether it worked or not
            return True
        self._demoted.add(key.digest)

        def write() -> None:
            if (kv := self._host.get(key)) is not None:
                lane.submit(Record.of(key, kv))

        return not self._intake.submit(write, 0)


def _close_all(writers: list[Writer]) -> None:
    for writer in writers:
        writer.close()
