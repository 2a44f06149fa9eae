"""One bounded block of memory for KV, cut into extents that do not fragment it.

A hole that is large enough is used. Where there is room, but only in pieces, extents that nobody uses
are moved together: the fewest bytes that make a hole. (Not in a GPU's memory: chunks leave until a hole
is large enough.) What is handed out is a tensor over the block; an extent is in use as long as that
tensor, or any view of it, is alive, and is then neither moved nor given away.
"""

from __future__ import annotations

import ctypes
import weakref
from bisect import bisect_left, insort
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from vllm_blend.core.cpus import use_others
from vllm_blend.store.record import PAGE

MADV_HUGEPAGE, MADV_POPULATE_WRITE = 14, 23
"""Linux' numbers; the second from 5.14 on."""

TOUCHED_AT_ONCE = 1 << 25
"""Bytes that a thread has backed by a call (``Arena.touch``)."""

LEFT_FREE = 1 << 30
"""Bytes of the machine's memory that it leaves free, or it does nothing."""


@dataclass(eq=False)
class Extent:
    """A piece of the arena: ``size`` bytes, whole pages, from ``offset`` on."""

    offset: int
    size: int
    view: weakref.ref[Any] | None = field(default=None, repr=False)

    @property
    def end(self) -> int:
        return self.offset + self.size

    @property
    def in_use(self) -> bool:
        return self.view is not None and self.view() is not None


class Arena:
    """Not thread-safe: its tier's lock guards it.

    Args:
        num_bytes: of the block, all reserved at once.
        pinned: page-locked, so that a GPU reads it without a copy; None: where there is a GPU.
        device: whose memory; pinned is of the host's.

    Attributes:
        moved_bytes: moved so far to join holes.
    """

    def __init__(
        self, num_bytes: int, pinned: bool | None = None, device: torch.device | None = None
    ) -> None:
        device = device or torch.device("cpu")  # vLLM makes models with the GPU as torch's default
        on_host = device.type == "cpu"
        pin = on_host and (torch.cuda.is_available() if pinned is None else pinned)
        block = torch.empty(num_bytes + PAGE, dtype=torch.uint8, pin_memory=pin, device=device)
        self._block = block[-block.data_ptr() % PAGE :]
        self._bytes: NDArray[np.uint8] | None = self._block.numpy() if on_host else None
        self.size = num_bytes // PAGE * PAGE
        if self._bytes is not None:
            use_huge_pages(self._bytes)
        self.free_bytes = self.size
        self.moved_bytes = 0
        self._extents: set[Extent] = set()
        self._leaving: list[Extent] = []  # given back while in use
        self._holes: list[tuple[int, int]] = []  # (size, offset), ascending
        self._hole_at: dict[int, int] = {}  # offset -> size
        self._hole_to: dict[int, int] = {}  # end -> offset
        if self.size:
            self._add_hole(0, self.size)

    def allocate(self, num_bytes: int) -> Extent | None:
        """An extent of at least ``num_bytes``, or None if there is no room.

        A None with enough ``free_bytes`` means that extents in use stand in the way.
        """
        size = max(-(-num_bytes // PAGE), 1) * PAGE
        self.collect()
        found = self._take_hole(size)
        if found is None and self.free_bytes >= size and self._join(size):
            found = self._take_hole(size)
        if found is None:
            return None
        extent = Extent(found, size)
        self._extents.add(extent)
        self.free_bytes -= size
        return extent

    def free(self, extent: Extent) -> None:
        """Gives an extent back, at once or when it is no longer in use."""
        if extent.in_use:
            self._leaving.append(extent)
            return
        self._extents.remove(extent)
        self.free_bytes += extent.size
        self._add_hole(extent.offset, extent.size)

    def tensor(self, extent: Extent, num_bytes: int) -> torch.Tensor:
        """The extent's first bytes, uint8 ``[num_bytes]``; keeps it in use."""
        view = extent.view() if extent.view is not None else None
        if self._bytes is None:
            if view is None:
                view = _DeviceView(self._block[extent.offset : extent.end])
                extent.view = weakref.ref(view)
            return torch.as_tensor(view, device=self._block.device)[:num_bytes]
        if view is None:
            view = self._bytes[extent.offset : extent.end]
            extent.view = weakref.ref(view)
        return torch.from_numpy(view)[:num_bytes]  # torch holds `view` itself, not just its base

    def touch(self) -> bool:
        """Has Linux back all of the host's memory now, as page-locked memory is: else whoever writes
        to a page first waits for it, in a virtual machine up to 5 ms for 2 MiB. What lies in it stays.

        Returns:
            Whether it is backed; not where Linux is too old, or the machine has too little memory.
        """
        if self._block.is_pinned():
            return True
        if self._bytes is None or psutil.virtual_memory().available < self.size + LEFT_FREE:
            return False
        starts = range(0, self.size, TOUCHED_AT_ONCE)
        pieces = [self._bytes[start : self.size][:TOUCHED_AT_ONCE] for start in starts]
        with ThreadPoolExecutor(initializer=use_others) as threads:  # ctypes lets go of Python's lock
            return all(threads.map(_advise, pieces, repeat(MADV_POPULATE_WRITE)))

    def collect(self) -> None:
        """Takes back what was given back while in use, and is not any more."""
        leaving, self._leaving = self._leaving, []
        for extent in leaving:
            self.free(extent)

    def _add_hole(self, offset: int, size: int) -> None:
        if (after := self._hole_at.get(offset + size)) is not None:
            self._remove_hole(offset + size, after)
            size += after
        if (before := self._hole_to.get(offset)) is not None:
            self._remove_hole(before, offset - before)
            size += offset - before
            offset = before
        insort(self._holes, (size, offset))
        self._hole_at[offset] = size
        self._hole_to[offset + size] = offset

    def _remove_hole(self, offset: int, size: int) -> None:
        del self._holes[bisect_left(self._holes, (size, offset))]
        del self._hole_at[offset]
        del self._hole_to[offset + size]

    def _take_hole(self, size: int) -> int | None:
        """The smallest hole that is large enough; what is left of it stays one."""
        at = bisect_left(self._holes, (size, 0))
        if at == len(self._holes):
            return None
        found, offset = self._holes[at]
        self._remove_hole(offset, found)
        if found > size:
            self._add_hole(offset + size, found - size)
        return offset

    def _join(self, size: int) -> bool:
        """Moves idle extents to the left until a hole of ``size`` is free; False if none can be."""
        if self._bytes is None:
            return False
        extents = sorted(self._extents, key=lambda extent: extent.offset)
        window = cheapest_window(extents, self.size, size)
        if window is None:
            return False
        first, last = window
        place = extents[first - 1].end if first else 0
        for extent in extents[first:last]:
            self._move(extent, place)
            place = extent.end
        return True

    def _move(self, extent: Extent, offset: int) -> None:
        if extent.offset == offset:
            return
        assert self._bytes is not None
        start = self._bytes.ctypes.data
        ctypes.memmove(start + offset, start + extent.offset, extent.size)
        self._remove_hole(offset, extent.offset - offset)  # what it moves over is one hole
        extent.offset, old_end = offset, extent.end
        self._add_hole(extent.end, old_end - extent.end)
        self.moved_bytes += extent.size


class _DeviceView:
    """Memory of a GPU; torch makes tensors of it that hold this object."""

    def __init__(self, block: torch.Tensor) -> None:
        self.block = block
        self.__cuda_array_interface__ = {
            "shape": (block.numel(),),
            "typestr": "|u1",
            "data": (block.data_ptr(), False),
            "strides": None,
            "version": 2,
        }


def cheapest_window(extents: Iterable[Extent], arena_size: int, size: int) -> tuple[int, int] | None:
    """Neighbours that, pushed together, leave a hole of ``size``, with the fewest bytes to move.

    Args:
        extents: by ascending offset.

    Returns:
        The first extent to move and the one after the last; None if extents in use forbid it.
    """
    order = list(extents)
    best: tuple[int, int] | None = None
    best_bytes = arena_size + 1
    first = moved = 0
    for last in range(len(order) + 1):
        # extents[first:last] are idle; the hole would end where extents[last] starts
        end = order[last].offset if last < len(order) else arena_size
        while True:
            start = order[first - 1].end if first else 0
            if end - start - moved < size:
                break
            if moved < best_bytes:
                best, best_bytes = (first, last), moved
            if first == last:
                break
            moved -= order[first].size
            first += 1
        if last < len(order):
            if order[last].in_use:
                first, moved = last + 1, 0
            else:
                moved += order[last].size
    return best


def use_huge_pages(memory: NDArray[np.uint8]) -> None:
    """Asks Linux for pages of 2 MiB; without them the first use of each 4 KiB is a fault."""
    _advise(memory, MADV_HUGEPAGE)


def _advise(memory: NDArray[np.uint8], advice: int) -> bool:
    """Linux' ``madvise``; False where it is refused, or there is none."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "madvise"):
        return False
    size = ctypes.c_size_t(memory.nbytes)
    return libc.madvise(ctypes.c_void_p(memory.ctypes.data), size, advice) == 0
