"""The same of records in Redis and in a bucket (``audit.py``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_blend.store.audit import Entry
from vllm_blend.store.tier import Source

if TYPE_CHECKING:
    from vllm_blend.store.redis_tier import RedisTier
    from vllm_blend.store.s3_tier import S3Tier

HEAD_BYTES = 1 << 16
"""Of a record in Redis, read at once; the rest comes piece by piece."""


class RedisShelf:
    """Records of a Redis tier."""

    def __init__(self, tier: RedisTier) -> None:
        self.name = "redis"
        self._tier = tier

    def entries(self) -> list[Entry]:
        return [Entry(digest, size, at) for digest, (at, size) in self._tier.counted().items()]

    def open(self, entry: Entry) -> Source | None:
        return self._tier.source(entry.digest, HEAD_BYTES)

    def remove(self, entry: Entry) -> None:
        self._tier.remove(entry.digest)

    def mend(self, dry: bool) -> list[str]:
        stored, counted = self._tier.stored(), self._tier.counted().keys()
        off = stored ^ counted
        if not dry:
            for digest in off:
                self._tier.recount(digest)
        uncounted, gone = len(stored - counted), len(counted - stored)
        done = [f"{uncounted} records that were not counted"] if uncounted else []
        return done + ([f"{gone} records that were counted and are gone"] if gone else [])

    def close(self) -> None:
        self._tier.close()


class S3Shelf:
    """Records of an S3 tier, as listed now."""

    def __init__(self, tier: S3Tier) -> None:
        self.name = "s3"
        self._tier = tier

    def entries(self) -> list[Entry]:
        return sorted(
            (Entry(digest, size, at) for digest, (at, size) in self._tier.listed().items()),
            key=lambda entry: entry.used_at,
        )

    def open(self, entry: Entry) -> Source | None:
        return self._tier.source(entry.digest)

    def remove(self, entry: Entry) -> None:
        self._tier.remove(entry.digest)

    def mend(self, dry: bool) -> list[str]:
        return []  # an object is there or not

    def close(self) -> None:
        self._tier.close()
