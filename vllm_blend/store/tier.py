"""What the store asks of a tier, and what the tiers share."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Protocol, runtime_checkable

from vllm_blend.store.keys import ChunkKey
from vllm_blend.store.record import Record

RecordIds = tuple[bytes, tuple[int, ...]]
"""A record's digest and its token ids, which are not verified."""


class TierError(Exception):
    """A tier failed or did not answer; the store goes on without it.

    Args:
        kind: one word for the counters, e.g. ``"no_space"``.
        pause: whether the whole tier should be left alone for a while.
    """

    def __init__(self, kind: str, detail: str = "", *, pause: bool = True) -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind
        self.pause = pause


class Source(Protocol):
    """One record, open for reading.

    Its methods raise TierError, and Rejected where the record was replaced meanwhile and its bytes do
    not belong together.

    Attributes:
        num_bytes: of the whole record, as the tier has it.
    """

    num_bytes: int

    def read(self, offset: int, into: memoryview) -> int:
        """Fills ``into`` from a place in the record; returns how many bytes there were."""

    def close(self) -> None: ...


class Level(Protocol):
    """What every tier has, host memory included.

    Attributes:
        name: for counters and messages.
        stats: what the tier counts itself: evictions, and data it removed.
        budget_bytes: of all that the tier may hold.
    """

    name: str
    stats: Stats
    budget_bytes: int

    def usage(self) -> dict[str, int]:
        """``entries`` and ``bytes`` that the tier holds, as far as is known without waiting."""


class Tier(Level, Protocol):
    """Where records lie. Called from the store's own threads; methods may block and raise TierError.

    Attributes:
        quick: whether ``contains`` answers from memory, without waiting.
    """

    quick: bool

    def contains(self, key: ChunkKey) -> bool:
        """Whether the chunk is there; a guess where the tier is shared and not asked each time."""

    def open(self, key: ChunkKey) -> Source | None:
        """The chunk's record, or None; raises Rejected where it is seen at once to be unfit."""

    def write(self, record: Record) -> None:
        """Adds a record; the least recently used ones make room for it.

        Nothing is done where one is there already, unless this one has scores and that one has none: it
        is replaced then, at once for whoever opens it.
        """

    def discard(self, key: ChunkKey) -> None:
        """Removes a chunk's record, if it is there."""

    def close(self) -> None: ...


@runtime_checkable
class Shared(Protocol):
    """A tier that tells what other processes write to it."""

    def appeared(self) -> list[RecordIds]:
        """Records that others have written since this was last asked, soon after they did."""


class Stats:
    """Counters by name, for several threads."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[name] += amount

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)


class Breaker:
    """Keeps requests from waiting for a tier that just failed: it pauses, each time for longer.

    Args:
        first_s, last_s: the first pause, and the longest.
    """

    def __init__(self, first_s: float = 0.5, last_s: float = 30.0) -> None:
        self._first_s = first_s
        self._last_s = last_s
        self._pause_s = 0.0
        self._until = 0.0

    @property
    def open(self) -> bool:
        """Whether the tier should be left alone now."""
        return time.monotonic() < self._until

    def failed(self) -> None:
        if not self.open:
            self._pause_s = min(max(2 * self._pause_s, self._first_s), self._last_s)
            self._until = time.monotonic() + self._pause_s

    def worked(self) -> None:
        self._pause_s = self._until = 0.0
