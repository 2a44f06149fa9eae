"""Records in a store's tiers, whoever has written them, so that chunks are found there by content."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from itertools import islice

from vllm_blend.store import ChunkStore
from vllm_blend.store.tier import RecordIds

ASK_S = 0.5
"""The tiers are not asked more often."""

TENANTS = 1024
"""Of which it is remembered what they were told."""


class SharedRecords:
    """Digests and token ids, numbered as they were found. For one thread.

    Args:
        store: of the tiers.
        max_tokens: of all records; beyond that those that were found first are forgotten.
    """

    def __init__(self, store: ChunkStore, max_tokens: int) -> None:
        self._store, self._max_tokens = store, max_tokens
        self._records: deque[RecordIds] = deque()
        self._digests: set[bytes] = set()
        self._num_tokens = self._num_forgotten = 0
        self._is_listed = False
        self._asked_at = -ASK_S
        self._told: OrderedDict[str, int] = OrderedDict()  # tenants, and the number that comes next

    def update(self) -> None:
        """Reads what lies on disk, the first time; then what others have written since."""
        if not self._is_listed:
            listed, num_tokens = [], 0
            for digest, ids in self._store.token_ids():
                num_tokens += len(ids)
                if num_tokens > self._max_tokens:
                    break
                listed.append((digest, ids))
            self._add(listed)
            self._is_listed = True
        if time.monotonic() >= self._asked_at + ASK_S:
            self._asked_at = time.monotonic()
            for lane in self._store.lanes:
                self._add(lane.appeared())

    def tell(self, tenant: str, all_of_them: bool) -> list[RecordIds]:
        """Those that a tenant was not told yet, the last first.

        Args:
            all_of_them: also those that it was told.
        """
        first = 0 if all_of_them else self._told.pop(tenant, 0)
        self._told[tenant] = self._num_forgotten + len(self._records)
        while len(self._told) > TENANTS:
            self._told.popitem(last=False)
        return list(islice(self._records, max(0, first - self._num_forgotten), None))[::-1]

    def remove(self, digest: bytes) -> None:
        """A record is deleted; if it is written again it is found again."""
        for at, (other, ids) in enumerate(self._records if digest in self._digests else ()):
            if other == digest and ids:
                self._records[at] = digest, ()  # so that the others keep their numbers
                self._num_tokens -= len(ids)
                break
        self._digests.discard(digest)

    def _add(self, records: list[RecordIds]) -> None:
        """Adds those that are not known, the last of which was used least recently."""
        for digest, ids in reversed(records):
            if digest not in self._digests:
                self._records.append((digest, ids))
                self._digests.add(digest)
                self._num_tokens += len(ids)
        while self._num_tokens > self._max_tokens:
            digest, ids = self._records.popleft()
            self._digests.discard(digest)
            self._num_tokens -= len(ids)
            self._num_forgotten += 1
