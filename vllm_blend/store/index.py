"""Which chunks a tier holds: 16 bytes a chunk beside its digest, in flat arrays.

Open addressing with linear probing. A slot holds the number of an entry; entries lie without gaps, so
that the oldest are found with one pass of numpy. Digests are uniformly distributed, so their own bits
are the hash.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_blend.store.keys import DIGEST_BYTES

PAGE = 4096
"""Sizes are kept in pages."""

LAST_TICK = 2**32 - 1


class Index:
    """Digests, sizes and the order of use. Not thread-safe: its tier's lock guards it.

    Attributes:
        num_pages: of all entries.
    """

    def __init__(self) -> None:
        self.num_pages = 0
        self._count = 0
        self._tick = 0
        self._queue: list[tuple[int, bytes]] = []  # the oldest entries at some time, oldest last
        self._digests = np.zeros(0, dtype=np.uint8)
        self._pages = np.zeros(0, dtype=np.uint32)
        self._ticks = np.zeros(0, dtype=np.uint32)
        self._reserve(64)
        self._rehash(128)

    def __len__(self) -> int:
        return self._count

    def __contains__(self, digest: bytes) -> bool:
        return self._find(digest)[1] >= 0

    @property
    def num_bytes(self) -> int:
        """What the entries take in their tier, in whole pages."""
        return self.num_pages * PAGE

    @property
    def memory(self) -> int:
        """What the index itself takes."""
        arrays = self._digests.nbytes, self._pages.nbytes, self._ticks.nbytes, self._slots.nbytes
        return sum(arrays)

    def put(self, digest: bytes, num_bytes: int) -> None:
        """Adds a chunk, or changes its size; it is the most recently used one now."""
        pages = -(-num_bytes // PAGE)
        slot, entry = self._find(digest)
        if entry < 0:
            if self._count == len(self._pages):
                self._reserve(self._count * 5 // 4)
            if 3 * self._count >= 2 * len(self._slots):
                self._rehash(2 * len(self._slots))
                slot, _ = self._find(digest)
            entry = self._count
            self._count += 1
            self._slot_view[slot] = entry + 1
            self._digest_view[DIGEST_BYTES * entry : DIGEST_BYTES * (entry + 1)] = digest
            self._pages[entry] = 0
        self.num_pages += pages - int(self._pages[entry])
        self._pages[entry] = pages
        self._use(entry)

    def put_all(self, digests: NDArray[np.uint8], num_bytes: NDArray[np.int64]) -> None:
        """Adds chunks, least recently used first; those that are there already are left out.

        Args:
            digests: ``[n, 16]``, all different.
            num_bytes: ``[n]``.
        """
        if self._count:
            new = np.array([digest.tobytes() not in self for digest in digests], dtype=bool)
            digests, num_bytes = digests[new], num_bytes[new]
        if self._tick + len(digests) > LAST_TICK:
            self._renumber()
        first, self._count = self._count, self._count + len(digests)
        self._reserve(self._count)
        pages = -(-num_bytes // PAGE)
        self._digests[DIGEST_BYTES * first : DIGEST_BYTES * self._count] = digests.reshape(-1)
        self._pages[first : self._count] = pages
        self._ticks[first : self._count] = np.arange(self._tick, self._tick + len(digests))
        self._tick += len(digests)
        self.num_pages += int(pages.sum())
        size = len(self._slots)
        while 3 * self._count >= 2 * size:
            size *= 2
        self._rehash(size)

    def touch(self, digest: bytes) -> bool:
        """Makes a chunk the most recently used one; False if it is not there."""
        entry = self._find(digest)[1]
        if entry >= 0:
            self._use(entry)
        return entry >= 0

    def remove(self, digest: bytes) -> int:
        """Removes a chunk; returns its pages, 0 if it was not there."""
        slot, entry = self._find(digest)
        if entry < 0:
            return 0
        pages = int(self._pages[entry])
        self.num_pages -= pages
        self._close_gap(slot)
        last = self._count - 1
        if entry != last:
            moved = self._digest(last)
            self._slot_view[self._find(moved)[0]] = entry + 1
            self._digest_view[DIGEST_BYTES * entry : DIGEST_BYTES * (entry + 1)] = moved
            self._pages[entry] = self._pages[last]
            self._ticks[entry] = self._ticks[last]
        self._count = last
        return pages

    def oldest(self) -> bytes | None:
        """The least recently used chunk."""
        while True:
            while self._queue:
                tick, digest = self._queue[-1]
                entry = self._find(digest)[1]
                if entry >= 0 and self._ticks[entry] == tick:
                    return digest
                self._queue.pop()  # used or removed since
            if not self._count:
                return None
            ticks = self._ticks[: self._count]
            some = min(self._count, max(64, self._count // 64))
            found = np.argpartition(ticks, some - 1)[:some]
            newest_first = found[np.argsort(ticks[found])[::-1]]
            self._queue = [(int(ticks[i]), self._digest(i)) for i in newest_first.tolist()]

    def newest(self) -> list[bytes]:
        """Every chunk's digest, most recently used first."""
        return [self._digest(i) for i in np.argsort(self._ticks[: self._count])[::-1].tolist()]

    def digests(self) -> list[bytes]:
        """Every chunk's digest."""
        return [self._digest(entry) for entry in range(self._count)]

    def _digest(self, entry: int) -> bytes:
        return bytes(self._digest_view[DIGEST_BYTES * entry : DIGEST_BYTES * (entry + 1)])

    def _find(self, digest: bytes) -> tuple[int, int]:
        """The chunk's slot and entry; without one, the slot it would take, and -1."""
        slots, digests, mask = self._slot_view, self._digest_view, self._mask
        slot = int.from_bytes(digest[:8], "little") & mask
        while entry := slots[slot]:
            if digests[DIGEST_BYTES * (entry - 1) : DIGEST_BYTES * entry] == digest:
                return slot, entry - 1
            slot = (slot + 1) & mask
        return slot, -1

    def _use(self, entry: int) -> None:
        if self._tick == LAST_TICK:
            self._renumber()
        self._ticks[entry] = self._tick
        self._tick += 1

    def _renumber(self) -> None:
        """After four billion uses: small ticks again, in the same order."""
        ticks = self._ticks[: self._count]
        ticks[np.argsort(ticks)] = np.arange(self._count, dtype=np.uint32)
        self._tick = self._count
        self._queue.clear()

    def _close_gap(self, gap: int) -> None:
        """Empties a slot, and moves up what stands behind it and could not be found any more."""
        slots, mask = self._slot_view, self._mask
        slot = gap
        while entry := slots[slot := (slot + 1) & mask]:
            home = int.from_bytes(self._digest(entry - 1)[:8], "little") & mask
            if (slot - home) & mask >= (slot - gap) & mask:
                slots[gap] = entry
                gap = slot
        slots[gap] = 0

    def _reserve(self, size: int) -> None:
        """Room for ``size`` entries, or more."""
        if size > len(self._pages):
            self._digests = _grown(self._digests, DIGEST_BYTES * size)
            self._pages, self._ticks = _grown(self._pages, size), _grown(self._ticks, size)
            self._digest_view = self._digests.data  # ten times faster than numpy for one element

    def _rehash(self, size: int) -> None:
        """Makes ``size`` slots, a power of two, and puts every entry in one."""
        self._slots = np.zeros(size, dtype=np.int32)
        self._slot_view = self._slots.data
        self._mask = size - 1
        entries = np.arange(self._count)
        low = self._digests.view("<u8")[0 : 2 * self._count : 2]
        slots = (low & np.uint64(self._mask)).astype(np.int64)
        while entries.size:  # each round the first comer of a free slot gets it; the others go on
            free = np.flatnonzero(self._slots[slots] == 0)
            taken, first = np.unique(slots[free], return_index=True)
            placed = free[first]
            self._slots[taken] = entries[placed] + 1
            rest = np.ones(entries.size, dtype=bool)
            rest[placed] = False
            entries, slots = entries[rest], (slots[rest] + 1) & self._mask


def _grown(array: NDArray[Any], size: int) -> NDArray[Any]:
    grown = np.zeros(size, dtype=array.dtype)
    grown[: len(array)] = array
    return grown
