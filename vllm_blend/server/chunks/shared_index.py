"""Indexes of several owners within one budget."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from vllm_blend.server.chunks.token_index import SequenceIndex, Windows


class SharedIndex:
    """An index of known token sequences for each owner, who finds its own alone.

    What is over the budget is taken from the owner that holds most, the least recently found first.

    Args:
        max_tokens: of all owners.
        max_owners: beyond that the one that was not asked for longest is forgotten.
    """

    def __init__(self, max_tokens: int, max_owners: int) -> None:
        self.max_tokens, self.max_owners = max_tokens, max_owners
        self.num_tokens = 0
        self._indexes: OrderedDict[Hashable, SequenceIndex] = OrderedDict()

    def __contains__(self, owner: Hashable) -> bool:
        return owner in self._indexes

    def get(self, owner: Hashable) -> SequenceIndex | None:
        """The index of an owner, to find something in; None: it has none."""
        if owner in self._indexes:
            self._indexes.move_to_end(owner)
        return self._indexes.get(owner)

    def open(self, owner: Hashable) -> list[Hashable]:
        """Makes an index for an owner, if it has none; returns the owners that are forgotten for it."""
        self._indexes.setdefault(owner, SequenceIndex(self.max_tokens))
        self._indexes.move_to_end(owner)
        gone = []
        while len(self._indexes) > self.max_owners:
            name, index = self._indexes.popitem(last=False)
            self.num_tokens -= index.num_tokens
            gone.append(name)
        return gone

    def add(self, owner: Hashable, key: Hashable, windows: Windows) -> list[Hashable]:
        """Makes a sequence known to its owner; returns the owners that are forgotten for it."""
        gone = self.open(owner)
        index = self._indexes[owner]
        before = index.num_tokens
        index.add(key, windows)
        self.num_tokens += index.num_tokens - before
        while self.num_tokens > self.max_tokens:
            most = max(self._indexes.values(), key=lambda one: one.num_tokens)
            before = most.num_tokens
            most.remove_oldest()
            self.num_tokens += most.num_tokens - before
        return gone

    def drop(self, owner: Hashable) -> None:
        """Forgets an owner; one that is not known is no error."""
        if (index := self._indexes.pop(owner, None)) is not None:
            self.num_tokens -= index.num_tokens

    def remove(self, owner: Hashable, key: Hashable) -> None:
        """Forgets a sequence; one that is not known is no error."""
        if (index := self._indexes.get(owner)) is not None:
            before = index.num_tokens
            index.remove(key)
            self.num_tokens += index.num_tokens - before
