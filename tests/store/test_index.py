"""The index against a plain dictionary in the order of use."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from vllm_blend.store import index as index_module
from vllm_blend.store.index import PAGE, Index


def digest(number: int, crowded: bool = False) -> bytes:
    """16 bytes; crowded ones fall into few slots, so that they stand in each other's way."""
    low = number % 3 if crowded else number * 0x9E3779B97F4A7C15 % 2**64
    return low.to_bytes(8, "little") + number.to_bytes(8, "little")


class Machine(RuleBasedStateMachine):
    @initialize(crowded=st.booleans(), start=st.integers(0, 200))
    def begin(self, crowded: bool, start: int) -> None:
        self.index, self.model, self.crowded = Index(), OrderedDict[bytes, int](), crowded
        for number in range(start):
            self.put(number, number)

    def digest(self, number: int) -> bytes:
        return digest(number, self.crowded)

    @rule(number=st.integers(0, 300), size=st.integers(0, 10 * PAGE))
    def put(self, number: int, size: int) -> None:
        self.index.put(self.digest(number), size)
        self.model[self.digest(number)] = -(-size // PAGE)
        self.model.move_to_end(self.digest(number))

    @rule(numbers=st.sets(st.integers(0, 300), max_size=100))
    def put_all(self, numbers: set[int]) -> None:
        digests = [self.digest(number) for number in sorted(numbers)]
        array = np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, 16)
        self.index.put_all(array, np.full(len(digests), PAGE, dtype=np.int64))
        for one in digests:
            self.model.setdefault(one, 1)

    @rule(number=st.integers(0, 300))
    def touch(self, number: int) -> None:
        assert self.index.touch(self.digest(number)) == (self.digest(number) in self.model)
        if self.digest(number) in self.model:
            self.model.move_to_end(self.digest(number))

    @rule(number=st.integers(0, 300))
    def remove(self, number: int) -> None:
        assert self.index.remove(self.digest(number)) == self.model.pop(self.digest(number), 0)

    @rule(count=st.integers(1, 50))
    def evict(self, count: int) -> None:
        for _ in range(min(count, len(self.model))):
            oldest = self.index.oldest()
            assert oldest == next(iter(self.model))
            self.index.remove(oldest)
            self.model.popitem(last=False)

    @rule(ahead=st.integers(0, 5))
    def run_out_of_ticks(self, ahead: int) -> None:
        self.index._tick = max(self.index._tick, index_module.LAST_TICK - ahead)

    @invariant()
    def agree(self) -> None:
        assert len(self.index) == len(self.model)
        assert self.index.num_pages == sum(self.model.values())
        assert sorted(self.index.digests()) == sorted(self.model)
        assert all(one in self.index for one in self.model)
        assert self.digest(301) not in self.index
        assert self.index.oldest() == next(iter(self.model), None)


TestIndex = Machine.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_memory_a_chunk() -> None:
    index = Index()
    count = 500_000
    digests = np.random.default_rng(0).integers(0, 256, (count, 16), dtype=np.uint8)
    index.put_all(digests, np.full(count, 64 << 20, dtype=np.int64))
    assert len(index) == count
    assert index.num_bytes == count * (64 << 20)
    assert all(digest.tobytes() in index for digest in digests[::997])
    assert index.oldest() == digests[0].tobytes()
    assert index.memory / count - 16 < 20  # beside the digest
