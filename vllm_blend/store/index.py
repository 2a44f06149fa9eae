"""Which chunks a tier holds, and in which order they were used."""

from __future__ import annotations

from collections import OrderedDict

from vllm_blend.store.record import PAGE


class Index:
    """Digests and sizes, least recently used first. Not thread-safe: its tier's lock guards it.

    About 200 bytes of memory a chunk.

    Attributes:
        num_bytes: what the chunks take in their tier, in whole pages.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._sizes: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._sizes

    def put(self, digest: bytes, num_bytes: int) -> None:
        """Adds a chunk, or changes its size; it is the most recently used one now."""
        self.remove(digest)
        self._sizes[digest] = size = -(-num_bytes // PAGE) * PAGE
        self.num_bytes += size

    def remove(self, digest: bytes) -> int:
        """Removes a chunk; returns its bytes, 0 if it was not there."""
        size = self._sizes.pop(digest, 0)
        self.num_bytes -= size
        return size

    def oldest(self) -> bytes | None:
        """The least recently used chunk."""
        return next(iter(self._sizes), None)

    def digests(self) -> list[bytes]:
        """Every chunk's digest, least recently used first."""
        return list(self._sizes)
