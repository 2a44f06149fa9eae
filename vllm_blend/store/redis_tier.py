"""Records in Redis, shared by every process and machine that reaches it.

    PREFIX:chunk:DIGEST   a record
    PREFIX:used           sorted set: digest, time of last use
    PREFIX:sizes          hash: digest, bytes
    PREFIX:bytes          sum of the sizes

Room is accounted for, and old records are removed, by a script in the server, so the budget and the
order of use are the same for all who share it. Needs the extra ``redis``.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError, RedisError
from redis.retry import Retry

from vllm_blend.store.keys import DIGEST_VERSION, ChunkKey
from vllm_blend.store.record import Layout, Reason, Record, Rejected
from vllm_blend.store.tier import Stats, TierError

LARGEST = 512 << 20
"""Bytes of one value: Redis' ``proto-max-bulk-len``, unless it was raised."""

PIECE = 2 << 20
"""Bytes that are asked for at a time."""

MARK = 128
"""Bytes by which a record is known from one of the same chunk that has scores."""

READ_SIZE = 4 << 20
"""Of one read of the socket. An answer that is read at once comes five times as fast (2.1 GB/s, one
core, loopback) as one that redis-py puts together from pieces of its default, 64 KiB (0.35 GB/s)."""

# KEYS: used, sizes, bytes. ARGV: prefix of records, now, budget, digest, size, digests of pinned chunks
RESERVE = """
for i = 6, #ARGV do redis.call('ZADD', KEYS[1], 'XX', ARGV[2], ARGV[i]) end
local before = redis.call('HGET', KEYS[2], ARGV[4]) or 0
redis.call('HSET', KEYS[2], ARGV[4], ARGV[5])
redis.call('ZADD', KEYS[1], ARGV[2], ARGV[4])
local bytes = redis.call('INCRBY', KEYS[3], ARGV[5] - before)
local evicted = 0
while bytes > tonumber(ARGV[3]) do
  local oldest = redis.call('ZRANGE', KEYS[1], 0, 0)[1]
  if not oldest or oldest == ARGV[4] then break end
  bytes = redis.call('INCRBY', KEYS[3], -(redis.call('HGET', KEYS[2], oldest) or 0))
  redis.call('HDEL', KEYS[2], oldest)
  redis.call('ZREM', KEYS[1], oldest)
  redis.call('UNLINK', ARGV[1] .. oldest)
  evicted = evicted + 1
end
return {evicted, bytes, redis.call('ZCARD', KEYS[1])}
"""

# KEYS: used, sizes, bytes. ARGV: prefix of records, digest
REMOVE = """
local size = redis.call('HGET', KEYS[2], ARGV[2]) or 0
redis.call('HDEL', KEYS[2], ARGV[2])
redis.call('ZREM', KEYS[1], ARGV[2])
redis.call('UNLINK', ARGV[1] .. ARGV[2])
return {0, redis.call('INCRBY', KEYS[3], -size), redis.call('ZCARD', KEYS[1])}
"""


class RedisTier:
    """Records in a Redis server.

    Args:
        url: e.g. ``redis://127.0.0.1:6379/0``.
        budget_bytes: of all records under ``prefix``, whoever wrote them.
        prefix: of every key.
        timeout_s: of one command; a server that does not answer in time is left alone for a while.
    """

    def __init__(
        self, url: str, budget_bytes: int, *, prefix: str = "vllm_blend", timeout_s: float = 5.0
    ) -> None:
        self.name = "redis"
        self.quick = False
        self.stats = Stats()
        self.pins: Collection[bytes] = frozenset()
        self.budget_bytes = budget_bytes
        base = f"{prefix}:v{DIGEST_VERSION}"
        self._chunk = f"{base}:chunk:"
        self._keys = [f"{base}:used", f"{base}:sizes", f"{base}:bytes"]
        self._usage = {"entries": 0, "bytes": 0}
        self._client = redis.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=min(timeout_s, 1.0),
            socket_read_size=READ_SIZE,
            retry=Retry(NoBackoff(), 0),  # a request must not wait; the store pauses the tier instead
        )
        self._reserve = self._client.register_script(RESERVE)
        self._remove = self._client.register_script(REMOVE)

    def contains(self, key: ChunkKey) -> bool:
        with _errors():
            return bool(self._client.exists(self._chunk + key.digest.hex()))

    def open(self, key: ChunkKey) -> RedisSource | None:
        name, layout = key.digest.hex(), Layout.of(key, scored=True)  # it has the longer preamble
        with _errors():
            pipeline = self._client.pipeline(transaction=False)
            pipeline.getrange(self._chunk + name, 0, layout.preamble_bytes - 1)
            pipeline.strlen(self._chunk + name)
            pipeline.zadd(self._keys[0], {name: time.time()}, xx=True)
            pipeline.zscore(self._keys[0], name)
            preamble, size, _, used = pipeline.execute()
        if size == 0:
            if used is not None:  # the server evicted it by itself, or its writer died
                self.discard(key)
                raise Rejected(Reason.GONE)
            return None
        return RedisSource(self._client, self._chunk + name, preamble, size)

    def write(self, record: Record) -> None:
        name, size = record.key.digest.hex(), record.num_bytes
        if size > min(self.budget_bytes, LARGEST):
            raise TierError("too_large", f"{size} bytes", pause=False)
        pins = [digest.hex() for digest in list(self.pins)]
        with _errors():
            stored: Any = self._client.getrange(self._chunk + name, 0, len(record.head) - 1)
            if not record.adds_to(stored):
                return
            self._count(self._reserve(self._keys, [*self._args(), name, size, *pins]))
            # one that another process has just written may have scores
            self._client.set(self._chunk + name, b"".join(record.parts), nx=not record.scored)

    def discard(self, key: ChunkKey) -> None:
        with _errors():
            self._count(self._remove(self._keys, [self._chunk, key.digest.hex()]))

    def usage(self) -> dict[str, int]:
        return dict(self._usage)

    def close(self) -> None:
        self._client.close()

    def _args(self) -> list[Any]:
        return [self._chunk, time.time(), self.budget_bytes]

    def _count(self, result: Any) -> None:
        evicted, num_bytes, entries = result
        if evicted:
            self.stats.add("evictions", evicted)
        self._usage = {"entries": entries, "bytes": num_bytes}


class RedisSource:
    """A record in Redis; each read is a command, and asks whether the record is still the same."""

    def __init__(self, client: Any, name: str, preamble: bytes, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._client = client
        self._name = name
        self._preamble = preamble

    def read(self, offset: int, into: memoryview) -> int:
        if offset + into.nbytes <= len(self._preamble):
            into[:] = self._preamble[offset : offset + into.nbytes]
            return into.nbytes
        done = 0
        while done < into.nbytes:
            end = offset + min(done + PIECE, into.nbytes)
            with _errors():
                pipeline = self._client.pipeline(transaction=False)
                pipeline.getrange(self._name, offset + done, end - 1)
                pipeline.getrange(self._name, 0, MARK - 1)
                data, mark = pipeline.execute()
            if mark != self._preamble[:MARK]:
                raise Rejected(Reason.GONE, "replaced or removed")
            if not data:
                break
            into[done : done + len(data)] = data
            done += len(data)
        return done

    def close(self) -> None:
        """Nothing is held open."""


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except (RedisError, OSError) as error:
        kind = "no_space" if isinstance(error, OutOfMemoryError) else type(error).__name__
        raise TierError(kind, str(error)) from error
