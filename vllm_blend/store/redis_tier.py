"""Records in Redis, shared by every process and machine that reaches it.

    PREFIX:chunk:DIGEST   a record
    PREFIX:used           sorted set: digest, time of last use
    PREFIX:sizes          hash: digest, bytes
    PREFIX:bytes          sum of the sizes

What is accounted for is what is there: a record and its size are written in one transaction, old
records make room in it, and whoever finds that the server has removed a record by itself, or holds one
that nobody counted, corrects that. All of it is by scripts in the server and by its clock, so the
budget and the order of use are the same for all who share it. Needs the extra ``redis`` and a server of
version 5 or later.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError, RedisError, WatchError
from redis.retry import Retry

from vllm_blend.store.keys import DIGEST_VERSION, ChunkKey
from vllm_blend.store.record import Layout, Reason, Record, Rejected, token_ids_in
from vllm_blend.store.secrets import check_address
from vllm_blend.store.tier import RecordIds, Stats, TierError

LARGEST = 512 << 20
"""Bytes of one value: Redis' ``proto-max-bulk-len``, unless it was raised."""

PIECE = 2 << 20
"""Bytes that are asked for at a time."""

WRITE_TRIES = 3
"""Of a chunk that another process writes or removes at the same time."""

APPEARED = 2048
"""Records that were used lately and are looked at at a time, for those of other processes."""

HEADS = 256
"""Of those, how many are read at a time."""

NAMED = 100_000
"""Records that are known not to be news."""

HEAD_BYTES, LARGEST_HEAD = 1 << 14, 1 << 22
"""What is read of a record for its token ids; and where these, or the header, are longer than that."""

MARK = 128
"""Bytes by which a record is known from one of the same chunk that has scores."""

READ_SIZE = 4 << 20
"""Of one read of the socket. An answer that is read at once comes five times as fast (2.1 GB/s, one
core, loopback) as one that redis-py puts together from pieces of its default, 64 KiB (0.35 GB/s)."""

COUNT = """
local function count(digest, size)  -- a record of so many bytes was used; of 0: it is gone
  local before = redis.call('HGET', KEYS[2], digest) or 0
  if size > 0 then
    local now = redis.call('TIME')
    redis.call('HSET', KEYS[2], digest, size)
    redis.call('ZADD', KEYS[1], now[1] .. '.' .. string.format('%06d', now[2]), digest)
  else
    redis.call('HDEL', KEYS[2], digest)
    redis.call('ZREM', KEYS[1], digest)
  end
  return redis.call('INCRBY', KEYS[3], size - before)
end
"""
"""KEYS of these scripts: used, sizes, bytes. ARGV: prefix of records, a digest, and more. Their answers
begin with what was evicted, all bytes and all entries."""

# ARGV[3]: bytes of the record's beginning
OPEN = f"""{COUNT}
local record = ARGV[1] .. ARGV[2]
local size = redis.call('STRLEN', record)
local counted = tonumber(redis.call('HGET', KEYS[2], ARGV[2]) or 0)
if size > 0 or counted > 0 then
  pcall(count, ARGV[2], size)  -- a server without memory is still read
end
local start, bytes = redis.call('GETRANGE', record, 0, ARGV[3] - 1), redis.call('GET', KEYS[3])
return {{0, tonumber(bytes or 0), redis.call('ZCARD', KEYS[1]), start, size, counted}}
"""

# before the record is set, in the same transaction. ARGV[3], ARGV[4]: its size, the budget
RESERVE = f"""{COUNT}
local bytes, evicted = count(ARGV[2], tonumber(ARGV[3])), 0
while bytes > tonumber(ARGV[4]) do
  local oldest = redis.call('ZRANGE', KEYS[1], 0, 0)[1]
  if not oldest or oldest == ARGV[2] then break end
  redis.call('UNLINK', ARGV[1] .. oldest)
  bytes = count(oldest, 0)
  evicted = evicted + 1
end
return {{evicted, bytes, redis.call('ZCARD', KEYS[1])}}
"""

REMOVE = f"""{COUNT}
redis.call('UNLINK', ARGV[1] .. ARGV[2])
return {{0, count(ARGV[2], 0), redis.call('ZCARD', KEYS[1])}}
"""


class RedisTier:
    """Records in a Redis server.

    Args:
        url: e.g. ``redis://127.0.0.1:6379/0``.
        budget_bytes: of all records under ``prefix``, whoever wrote them.
        prefix: of every key.
        timeout_s: of one command; a server that does not answer in time is left alone for a while.
        username: that the server knows; None: its default one.
        password: of that user; in settings ``{"env": NAME}`` or ``{"file": PATH}``. None: none.

    Raises:
        ValueError: if ``url`` has a user or a password in it, since it may be shown.
    """

    def __init__(
        self,
        url: str,
        budget_bytes: int,
        *,
        prefix: str = "vllm_blend",
        timeout_s: float = 5.0,
        username: str | None = None,
        password: str | None = None,
    ) -> None:
        check_address("url of redis", url)
        self.name = "redis"
        self.quick = False
        self.stats = Stats()
        self.budget_bytes = budget_bytes
        base = f"{prefix}:v{DIGEST_VERSION}"
        self._chunk = f"{base}:chunk:"
        self._keys = [f"{base}:used", f"{base}:sizes", f"{base}:bytes"]
        self._usage = {"entries": 0, "bytes": 0}
        self._told: OrderedDict[bytes, None] = OrderedDict()  # of `appeared`, and this process's own
        self._told_to = "-inf"  # the time up to which they are
        self._client = redis.Redis.from_url(
            url,
            username=username,
            password=password,
            socket_timeout=timeout_s,
            socket_connect_timeout=min(timeout_s, 1.0),
            socket_read_size=READ_SIZE,
            retry=Retry(NoBackoff(), 0),  # a request must not wait; the store pauses the tier instead
        )

    def contains(self, key: ChunkKey) -> bool:
        with _errors():
            return bool(self._client.exists(self._chunk + key.digest.hex()))

    def open(self, key: ChunkKey) -> RedisSource | None:
        layout = Layout.of(key, scored=True)  # it has the longer preamble
        with _errors():
            *counts, preamble, size, counted = self._eval(OPEN, key.digest, layout.preamble_bytes)
        self._count(counts)
        if size:
            return RedisSource(self._client, self._chunk + key.digest.hex(), preamble, size)
        if counted:  # the server has evicted it by itself
            raise Rejected(Reason.GONE)
        return None

    def write(self, record: Record) -> None:
        if record.num_bytes > min(self.budget_bytes, LARGEST):
            raise TierError("too_large", f"{record.num_bytes} bytes", pause=False)
        with _errors():
            for _ in range(WRITE_TRIES):
                with suppress(WatchError):  # another process has just written or removed it
                    self._write(record)
                    return
        raise TierError("contended", str(record.key), pause=False)

    def discard(self, key: ChunkKey) -> None:
        self.remove(key.digest)

    def remove(self, digest: bytes) -> None:
        """Removes a record by its name."""
        with _errors():
            self._count(self._eval(REMOVE, digest))

    def source(self, digest: bytes, num_bytes: int) -> RedisSource | None:
        """A record by its name, which does not count as its use; None: there is none.

        Args:
            num_bytes: that are read at once.
        """
        name = self._chunk + digest.hex()
        with _errors():
            start: Any = self._client.getrange(name, 0, num_bytes - 1)
            size: Any = self._client.strlen(name)
        return RedisSource(self._client, name, start, size) if size else None

    def appeared(self) -> list[RecordIds]:
        """Records that others have written, or used, since this was last asked; each once."""
        with _errors():
            used: Any = self._client.zrevrangebyscore(
                self._keys[0], "+inf", self._told_to, start=0, num=APPEARED, withscores=True
            )
            digests = [bytes.fromhex(name.decode()) for name, _ in used]
            new = [digest for digest in digests if digest not in self._told]
            found: list[RecordIds] = []
            for at in range(0, len(new), HEADS):
                found += self._ids_of(new[at : at + HEADS])
        self._told_to = repr(used[0][1]) if used else self._told_to
        for digest in reversed(digests):
            self._is_told(digest)
        return found

    def _ids_of(self, digests: list[bytes]) -> Iterator[RecordIds]:
        """Those of records that can be read."""
        names = [self._chunk + digest.hex() for digest in digests]
        pipeline = self._client.pipeline(transaction=False)
        for name in names:
            pipeline.getrange(name, 0, HEAD_BYTES - 1)
        for digest, name, data in zip(digests, names, pipeline.execute(), strict=True):
            ids = token_ids_in(data)
            if ids is None and len(data) == HEAD_BYTES:
                ids = token_ids_in(self._client.getrange(name, 0, LARGEST_HEAD - 1))  # type: ignore
            if ids is not None:
                yield digest, ids

    def _is_told(self, digest: bytes) -> None:
        self._told[digest] = None
        self._told.move_to_end(digest)
        while len(self._told) > NAMED:
            self._told.popitem(last=False)

    def counted(self) -> dict[bytes, tuple[float, int]]:
        """Time of last use and size of each record that is accounted for, by digest."""
        used, sizes, _ = self._keys
        with _errors():
            at: Any = self._client.zrange(used, 0, -1, withscores=True)
            of: Any = self._client.hgetall(sizes)
        return {bytes.fromhex(name.decode()): (when, int(of.get(name, 0))) for name, when in at}

    def stored(self) -> set[bytes]:
        """Digests of the records that are there, accounted for or not."""
        with _errors():
            names = [name.decode() for name in self._client.scan_iter(f"{self._chunk}*", count=1000)]
        return {bytes.fromhex(name.removeprefix(self._chunk)) for name in names}

    def recount(self, digest: bytes) -> None:
        """Accounts for a record as it is there, or is not."""
        with _errors():
            self._count(self._eval(OPEN, digest, 1)[:3])

    def usage(self) -> dict[str, int]:
        return dict(self._usage)

    def close(self) -> None:
        self._client.close()

    def _write(self, record: Record) -> None:
        """Raises WatchError if the record was changed meanwhile."""
        name, data = self._chunk + record.key.digest.hex(), b"".join(record.parts)
        with self._client.pipeline() as transaction:
            transaction.watch(name)
            stored: Any = transaction.getrange(name, 0, len(record.head) - 1)
            if record.adds_to(stored):
                transaction.multi()
                self._eval(RESERVE, record.key.digest, len(data), self.budget_bytes, client=transaction)
                transaction.set(name, data)
                counts, _ = transaction.execute()
                self._count(counts)
                self._is_told(record.key.digest)

    def _eval(self, script: str, digest: bytes, *args: int, client: Any = None) -> Any:
        on = client or self._client
        return on.eval(script, len(self._keys), *self._keys, self._chunk, digest.hex(), *args)

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
