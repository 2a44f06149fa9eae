"""The index against a plain list in the order of use."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from vllm_blend.store.index import Index
from vllm_blend.store.record import PAGE


def digest(number: int) -> bytes:
    return number.to_bytes(16, "little")


class Machine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.index, self.model = Index(), list[tuple[bytes, int]]()

    @rule(number=st.integers(0, 30), size=st.integers(0, 10 * PAGE))
    def put(self, number: int, size: int) -> None:
        self.index.put(digest(number), size)
        self.model = [one for one in self.model if one[0] != digest(number)]
        self.model.append((digest(number), (size + PAGE - 1) // PAGE * PAGE))

    @rule(number=st.integers(0, 30))
    def remove(self, number: int) -> None:
        assert self.index.remove(digest(number)) == dict(self.model).get(digest(number), 0)
        self.model = [one for one in self.model if one[0] != digest(number)]

    @rule(count=st.integers(1, 5))
    def evict(self, count: int) -> None:
        for found, size in self.model[:count]:
            assert self.index.oldest() == found
            assert self.index.remove(found) == size
        self.model = self.model[count:]

    @invariant()
    def agree(self) -> None:
        assert self.index.digests() == [found for found, _ in self.model]
        assert len(self.index) == len(self.model)
        assert self.index.num_bytes == sum(size for _, size in self.model)
        assert all(found in self.index for found, _ in self.model)
        assert digest(31) not in self.index
        assert self.index.oldest() == next((found for found, _ in self.model), None)


TestIndex = Machine.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
