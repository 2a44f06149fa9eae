"""What a disk gives to plain reads, with nothing else done: a loader's ceiling."""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path

PIECES = (1 << 20, 4 << 20, 8 << 20)
"""Bytes of one read: which is fastest depends on the device."""

DROP = ["fadvise"]
"""How the page cache was dropped the last time."""


def drop_page_cache(paths: Sequence[Path]) -> None:
    """Makes the next reads come from the device, as far as the system lets."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    DROP[0] = "fadvise"
    if not resident(paths) <= 0.01:  # unknown, too
        try:
            Path("/proc/sys/vm/drop_caches").write_text("1")
            DROP[0] = "fadvise and drop_caches"
        except OSError:
            return


def resident(paths: Sequence[Path]) -> float:
    """The share of the files' pages that lies in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = held = 0
    for path in paths:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as memory:
            count = -(-len(memory) // mmap.PAGESIZE)
            flags = (ctypes.c_ubyte * count)()
            first = ctypes.c_char.from_buffer(memory)
            failed = libc.mincore(ctypes.byref(first), ctypes.c_size_t(len(memory)), flags)
            del first
            if not failed:
                pages += count
                held += sum(flag & 1 for flag in flags)
    return held / pages if pages else float("nan")


def file_system(folder: str) -> str:
    """The type of the file system that a folder is on."""
    best, kind = "", "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, name, *_ = line.split()
        if os.path.realpath(folder).startswith(place.rstrip("/") + "/") and len(place) > len(best):
            best, kind = place, name
    return kind


def device_rate(paths: Sequence[Path], num_threads: int, piece: int) -> float:
    """GB/s of reading files ``piece`` bytes at a time, by threads, past the page cache if possible."""
    pieces: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    files = [_open(path) for path in paths]
    for offset in range(0, max(path.stat().st_size for path in paths), piece):
        for file, path in zip(files, paths, strict=True):
            if offset < path.stat().st_size:
                pieces.put((file, offset))
    total = [0] * num_threads
    buffers = [mmap.mmap(-1, piece) for _ in range(num_threads)]  # whole pages
    for buffer in buffers:
        buffer.write(bytes(piece))

    def work(number: int) -> None:
        while True:
            try:
                file, offset = pieces.get_nowait()
            except queue.Empty:
                return
            total[number] += os.preadv(file, [buffers[number]], offset)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(num_threads)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - start
    for file in files:
        os.close(file)
    assert sum(total) == sum(path.stat().st_size for path in paths), "a read was cut short"
    return sum(total) / seconds / 1e9


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return os.open(path, os.O_RDONLY)
