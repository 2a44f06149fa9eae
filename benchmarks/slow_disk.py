"""Disks whose reads share a line of so many bytes a second; a vLLM plugin, for servers to be measured.

The file that ``RATE`` names holds a server's rate, which may change while it runs.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from vllm_blend.store import DiskTier
from vllm_blend.store.tier import Source

RATE = "SLOW_DISK_RATE_FILE"
"""The environment's variable."""


class Line:
    """What reads share: ``bytes_per_s`` in all, which may change."""

    def __init__(self, bytes_per_s: float = 1e12) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_at, self._lock = 0.0, threading.Lock()

    def transfer(self, num_bytes: int) -> None:
        """Returns when the line has carried as much."""
        with self._lock:
            self._free_at = max(self._free_at, time.perf_counter()) + num_bytes / self.bytes_per_s
            left = self._free_at - time.perf_counter()
        if left > 0:
            time.sleep(left)


class SlowSource:
    """An open record whose bytes come over a line."""

    def __init__(self, source: Source, line: Line) -> None:
        self.num_bytes, self._source, self._line = source.num_bytes, source, line

    def read(self, offset: int, into: memoryview) -> int:
        count = self._source.read(offset, into)
        self._line.transfer(count)
        return count

    def close(self) -> None:
        self._source.close()


def register() -> None:
    """Called by vLLM in each of its processes."""
    path, line, stock = Path(os.environ[RATE]), Line(), DiskTier.open

    def opened(tier: DiskTier, key: Any) -> Any:
        source = stock(tier, key)
        line.bytes_per_s = float(path.read_text())
        return None if source is None else SlowSource(source, line)

    setattr(DiskTier, "open", opened)  # noqa: B010
