"""A tier in memory whose every step a test can stop, slow down or break."""

from __future__ import annotations

import threading
from collections.abc import Callable

from vllm_blend.store.keys import ChunkKey
from vllm_blend.store.record import Record
from vllm_blend.store.tier import Stats, TierError


class FakeTier:
    def __init__(self, name: str = "fake", quick: bool = True) -> None:
        self.name = name
        self.quick = quick
        self.stats = Stats()
        self.budget_bytes = 1 << 40
        self.records: dict[bytes, bytearray] = {}
        self.opened = 0
        self.written: list[ChunkKey] = []
        self.failing = False
        self.gate = threading.Semaphore(10**9)  # reads and writes wait for it
        self.on_read: Callable[[int], None] = lambda offset: None

    def contains(self, key: ChunkKey) -> bool:
        return key.digest in self.records

    def open(self, key: ChunkKey) -> FakeSource | None:
        self.opened += 1
        self._fail()
        data = self.records.get(key.digest)
        return None if data is None else FakeSource(self, data)

    def write(self, record: Record) -> None:
        assert self.gate.acquire(timeout=60)
        self._fail()
        self.written.append(record.key)
        stored = bytes(self.records.get(record.key.digest, b"")[: len(record.head)])
        if record.adds_to(stored):
            self.records[record.key.digest] = bytearray(b"".join(record.parts))

    def discard(self, key: ChunkKey) -> None:
        self._fail()
        self.records.pop(key.digest, None)

    def usage(self) -> dict[str, int]:
        return {"entries": len(self.records)}

    def close(self) -> None:
        self.records.clear()

    def _fail(self) -> None:
        if self.failing:
            raise TierError("down")


class FakeSource:
    def __init__(self, tier: FakeTier, data: bytearray) -> None:
        self.num_bytes = len(data)
        self._tier = tier
        self._data = data

    def read(self, offset: int, into: memoryview) -> int:
        assert self._tier.gate.acquire(timeout=60)
        self._tier._fail()
        self._tier.on_read(offset)
        part = self._data[offset : offset + into.nbytes]
        into[: len(part)] = part
        return len(part)

    def close(self) -> None:
        pass
