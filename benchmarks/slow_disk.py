"""A disk whose reads share a line of so many bytes a second: a vLLM plugin, for servers to be measured.

The file that ``RATE`` names holds the rate, which may change while a server runs.
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


class SlowSource:
    """An open record; its reads end when the line has carried as much.

    Attributes:
        line: of all sources: when it is free again.
    """

    line, free_at = threading.Lock(), 0.0

    def __init__(self, source: Source, bytes_per_s: float) -> None:
        self.num_bytes, self._source, self._bytes_per_s = source.num_bytes, source, bytes_per_s

    def read(self, offset: int, into: memoryview) -> int:
        count = self._source.read(offset, into)
        with SlowSource.line:
            now = time.perf_counter()
            SlowSource.free_at = max(SlowSource.free_at, now) + count / self._bytes_per_s
            left = SlowSource.free_at - now
        time.sleep(left)
        return count

    def close(self) -> None:
        self._source.close()


def register() -> None:
    """Called by vLLM in each of its processes."""
    path = Path(os.environ[RATE])
    stock = DiskTier.open

    def opened(tier: DiskTier, key: Any) -> Any:
        source = stock(tier, key)
        return None if source is None else SlowSource(source, float(path.read_text()))

    setattr(DiskTier, "open", opened)  # noqa: B010
