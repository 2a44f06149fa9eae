"""One slower tier as the store uses it: counted, paused after failures, written to by a thread."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from vllm_blend.core.cpus import use_others
from vllm_blend.store.keys import ChunkKey
from vllm_blend.store.load_time import LoadTime
from vllm_blend.store.record import Reason, Record, Rejected
from vllm_blend.store.tier import Breaker, RecordIds, Shared, Source, Stats, Tier, TierError

logger = logging.getLogger("vllm.vllm_blend.store")


class Writer:
    """Runs jobs in order on a thread of its own; refuses them when too much waits.

    Args:
        limit_bytes: of the KV that waiting jobs hold. One job is always accepted.
    """

    def __init__(self, name: str, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._jobs: deque[tuple[Callable[[], None], int]] = deque()
        self._waiting_bytes = 0
        self._busy = self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name=f"{name}-writer", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None], num_bytes: int) -> bool:
        """Never blocks; False if the job was refused."""
        with self._changed:
            full = self._waiting_bytes and self._waiting_bytes + num_bytes > self._limit_bytes
            if self._closed or full:
                return False
            self._jobs.append((job, num_bytes))
            self._waiting_bytes += num_bytes
            self._changed.notify_all()
            return True

    def flush(self, timeout_s: float) -> bool:
        """Waits until every job is done; False if that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and not self._busy, timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """Does what waits, for at most ``timeout_s``; accepts nothing more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _work(self) -> None:
        use_others()
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return
                job, num_bytes = self._jobs.popleft()
                self._busy = True
            try:
                job()
            except Exception:
                logger.exception("vllm_blend store: a write failed in an unexpected way")
            del job
            with self._changed:
                self._waiting_bytes -= num_bytes


class Lane:
    """A tier with its counters, its pauses, its writer and the speed of its loads."""

    def __init__(self, tier: Tier, stats: Stats, write_behind_bytes: int) -> None:
        self.tier = tier
        self.name = tier.name
        self.load_time = LoadTime()
        self.writer = Writer(tier.name, write_behind_bytes)
        self._stats = stats
        self._reads = Breaker()
        self._writes = Breaker()

    @property
    def paused(self) -> bool:
        """Whether a failure lies so little back that the tier is not asked."""
        return self._reads.open

    def contains(self, key: ChunkKey) -> bool:
        try:
            return not self.paused and self.tier.contains(key)
        except TierError as error:
            self._failed("read", error)
            return False

    def open(self, key: ChunkKey) -> Source | Reason:
        """The chunk's record, or why there is none."""
        if self.paused:
            self._stats.add(f"skipped.{self.name}")
            return Reason.UNAVAILABLE
        try:
            source = self.tier.open(key)
        except Rejected as rejected:
            return self.reject(key, rejected)
        except TierError as error:
            return self.fail(error)
        self._reads.worked()
        return Reason.ABSENT if source is None else source

    def reject(self, key: ChunkKey, rejected: Rejected) -> Reason:
        """Counts a record that must not be used, and removes it."""
        self._stats.add(f"rejected.{self.name}.{rejected.reason}")
        if rejected.reason is not Reason.GONE:
            # as text: a handler that kept the exception would keep the chunk's memory in use
            logger.warning("vllm_blend store: chunk %s on %s: %s", key, self.name, str(rejected))
            self._discard(key)
        return rejected.reason

    def fail(self, error: TierError) -> Reason:
        """Counts a failed read."""
        self._failed("read", error)
        return Reason.UNAVAILABLE

    def loaded(self, num_bytes: int, started: float) -> None:
        """Counts a load that went well, and that ``load_time`` saw start."""
        self.load_time.loaded(num_bytes, started)
        self._stats.add(f"bytes_read.{self.name}", num_bytes)

    def appeared(self) -> list[RecordIds]:
        """Records that other processes have written since this was last asked; none where the tier
        cannot tell, or does not answer."""
        if self.paused or not isinstance(self.tier, Shared):
            return []
        try:
            return self.tier.appeared()
        except TierError as error:
            self._failed("read", error)
            return []

    def submit(self, record: Record) -> None:
        """Writes a record when the earlier ones are written; drops it if they are too many."""
        if not self.writer.submit(lambda: self._write(record), record.num_bytes):
            self._stats.add(f"writes_dropped.{self.name}")

    def purge(self, key: ChunkKey, done: Callable[[], None]) -> None:
        """Removes a chunk once the earlier writes are done; then calls ``done``."""

        def work() -> None:
            self._discard(key)
            done()

        self.writer.submit(work, 0)

    def close(self) -> None:
        self.writer.close()
        self.tier.close()

    def _discard(self, key: ChunkKey) -> None:
        try:
            self.tier.discard(key)
        except TierError as error:
            self._stats.add(f"failures.{self.name}.discard.{error.kind}")

    def _write(self, record: Record) -> None:
        if self._writes.open:
            self._stats.add(f"writes_dropped.{self.name}")
            return
        try:
            self.tier.write(record)
        except TierError as error:
            self._failed("write", error)
            return
        self._writes.worked()
        self._stats.add(f"writes.{self.name}")
        self._stats.add(f"bytes_written.{self.name}", record.num_bytes)

    def _failed(self, what: str, error: TierError) -> None:
        breaker = self._reads if what == "read" else self._writes
        if error.pause:
            if not breaker.open:
                logger.warning("vllm_blend store: %s: %s failed: %s", self.name, what, str(error))
            breaker.failed()
        self._stats.add(f"failures.{self.name}.{what}.{error.kind}")
