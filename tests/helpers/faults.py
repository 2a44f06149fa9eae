"""Faults, in any number: each function breaks something so many times and returns what it counted.

A function fails (AssertionError) if one wrong KV was served, or if serving did not go on.
``test_faults.py`` runs them in short form, ``benchmarks/soak_store.py`` in full.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from chunks import make_key, make_kv, same
from servers import Proxy, RedisServer, redis_binary

from vllm_blend.core.kv import StoredKV
from vllm_blend.store import ChunkStore, DiskTier
from vllm_blend.store.keys import ChunkKey
from vllm_blend.store.record import Layout, Record

BUDGET = 1 << 30
SIZE = Layout.of(make_key()).num_bytes
fork = multiprocessing.get_context("fork")


@lru_cache(maxsize=4096)
def chunk(seed: int) -> tuple[ChunkKey, StoredKV]:
    key = make_key(seed)
    return key, make_kv(key)


def ask(store: ChunkStore, seed: int, counts: Counter[str]) -> bool:
    """One request: reuse the chunk, checked, or compute it."""
    key, expected = chunk(seed)
    kv = store.get(key)
    if kv is None:
        counts["misses"] += 1
        store.put(key, expected)
        return False
    assert same(kv, expected), f"wrong KV served for chunk {key}"
    counts["hits"] += 1
    return True


def add_reasons(store: ChunkStore, counts: Counter[str]) -> None:
    wanted = "rejected.", "failures.", "misses.", "writes_dropped.", "skipped."
    counts.update({name: n for name, n in store.stats().items() if name.startswith(wanted)})


@contextmanager
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="chunks-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def kills(count: int) -> Counter[str]:
    """Writers killed (SIGKILL) at any moment of their writing: chunks, then the same with scores."""
    counts: Counter[str] = Counter()
    keys = [chunk(seed)[0] for seed in range(64)]
    records = [[Record.of(key, make_kv(key, scored)) for scored in (False, True)] for key in keys]
    rng = random.Random(0)

    def write(path: Path, first: int, ready: Any) -> None:
        tier = DiskTier(path, BUDGET)
        ready.set()
        for number in range(first, first + 10**6):
            tier.discard(keys[number % len(keys)])
            for record in records[number % len(keys)]:
                tier.write(record)

    with folder() as path:
        for kill in range(count):
            ready = fork.Event()
            writer = fork.Process(target=write, args=(path, rng.randrange(64), ready))
            writer.start()
            assert ready.wait(60)
            time.sleep(rng.uniform(0, 0.02))
            os.kill(writer.pid or 0, signal.SIGKILL)
            writer.join()
            counts["kills"] += 1
            counts["half-written files"] += len(list(path.rglob("*.tmp")))
            with ChunkStore([DiskTier(path, BUDGET)], host_bytes=0) as store:
                assert not list(path.rglob("*.tmp"))
                for seed in rng.sample(range(64), 8):
                    key = keys[seed]
                    kv = store.get(key)
                    assert kv is None or same(kv, make_kv(key, kv.scores is not None))
                    counts["absent" if kv is None else "whole"] += 1
                    counts["with scores"] += kv is not None and kv.scores is not None
                assert not [n for n in store.stats() if n.startswith("rejected.")], store.stats()
                if kill % 100 == 99:
                    counts["files"] = len(list(path.rglob("*.safetensors")))
    return counts


def flips(count: int) -> Counter[str]:
    """One random bit of a record on disk flipped; then the chunk is asked for."""
    counts: Counter[str] = Counter()
    rng = random.Random(0)
    key = make_key(0, num_tokens=99)  # its layers are read past the page cache
    expected = make_kv(key), make_kv(key, scored=True)
    with folder() as path, ChunkStore([DiskTier(path, BUDGET, fsync=False)], host_bytes=0) as store:
        for number in range(count):
            store.put(key, expected[number % 2])
            assert store.flush()
            (file,) = path.rglob("*.safetensors")
            data = bytearray(file.read_bytes())
            bit = rng.randrange(8 * len(data))
            data[bit // 8] ^= 1 << bit % 8
            file.write_bytes(data)
            assert store.get(key) is None, f"a record with bit {bit} flipped was served"
            counts["flips"] += 1
            assert store.flush()
        add_reasons(store, counts)
    return counts


def truncations(count: int) -> Counter[str]:
    """A record on disk cut, or grown, to a random length."""
    counts: Counter[str] = Counter()
    rng = random.Random(0)
    key = make_key(0, num_tokens=99)  # its layers are read past the page cache
    expected, size = (make_kv(key), make_kv(key, scored=True)), Layout.of(key).num_bytes
    assert size == Layout.of(key, scored=True).num_bytes
    with folder() as path, ChunkStore([DiskTier(path, BUDGET, fsync=False)], host_bytes=0) as store:
        for number in range(count):
            store.put(key, expected[number % 2])
            assert store.flush()
            (file,) = path.rglob("*.safetensors")
            os.truncate(file, rng.choice([rng.randrange(size), size + rng.randrange(1, 9999)]))
            assert store.get(key) is None
            counts["truncations"] += 1
            assert store.flush()
        add_reasons(store, counts)
    return counts


@contextmanager
def small_disk(size: str) -> Iterator[Path | None]:
    """A tmpfs, or None where there is no right to mount one."""
    with folder() as path:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
        if subprocess.run(mount, capture_output=True).returncode:
            yield None
            return
        try:
            yield path
        finally:
            subprocess.run(["umount", "-l", str(path)], check=True)


def full_disk(count: int) -> Counter[str]:
    """A disk much smaller than its budget says."""
    counts: Counter[str] = Counter()
    rng = random.Random(0)
    with small_disk("128k") as path:
        if path is None:
            return Counter(skipped=1)
        with ChunkStore([DiskTier(path, BUDGET)], host_bytes=4 * SIZE) as store:
            for _ in range(count):
                ask(store, rng.randrange(30), counts)
                store.flush()
            add_reasons(store, counts)
            counts |= Counter({"evictions.disk": store.stats()["evictions.disk"]})
            assert not list(path.rglob("*.tmp"))
    return counts


def read_only(count: int) -> Counter[str]:
    """A folder that can be read and not written."""
    counts: Counter[str] = Counter()
    rng = random.Random(0)
    with small_disk("1m") as path:
        if path is None:
            return Counter(skipped=1)
        with ChunkStore([DiskTier(path, BUDGET)], host_bytes=4 * SIZE) as store:
            for seed in range(15):
                ask(store, seed, counts)
        subprocess.run(["mount", "-o", "remount,ro", str(path)], check=True)
        counts.clear()
        with ChunkStore([DiskTier(path, BUDGET)], host_bytes=4 * SIZE) as store:
            for _ in range(count):
                ask(store, rng.randrange(30), counts)
            assert store.flush()
            add_reasons(store, counts)
            assert store.stats()["hits.disk"] > 0
    return counts


def two_processes(count: int) -> Counter[str]:
    """Two processes that write, read and evict in one folder."""
    results: Any = fork.Queue()

    def work(path: Path, seed: int) -> None:
        counts: Counter[str] = Counter()
        rng = random.Random(seed)
        tier = DiskTier(path, 20 * (SIZE + 4096), fsync=False)
        with ChunkStore([tier], host_bytes=4 * SIZE) as store:
            for step in range(count):
                ask(store, rng.randrange(60), counts)
                if step % 50 == 49:
                    assert store.flush()  # on a slow disk nothing might be written until the end
                    tier.refresh()
            add_reasons(store, counts)
            counts["hits.disk"] = store.stats().get("hits.disk", 0)
        results.put(counts)

    with folder() as path:
        workers = [fork.Process(target=work, args=(path, seed)) for seed in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(600)
            assert worker.exitcode == 0
        counts = results.get(timeout=60) + results.get(timeout=60)
        tier = DiskTier(path, BUDGET)
        counts["files at the end"] = tier.usage()["entries"]
        assert counts["files at the end"] <= 2 * 20
    return counts


def redis_restarts(count: int) -> Counter[str]:
    """A Redis that is killed and started again while requests are served."""
    from vllm_blend.store.redis_tier import RedisTier

    binary = redis_binary()
    if binary is None:
        return Counter(skipped=1)
    counts: Counter[str] = Counter()
    done = threading.Event()
    rng = random.Random(0)
    with folder() as path:
        server = RedisServer(binary, path)
        server.start()
        with ChunkStore(
            [RedisTier(server.url, BUDGET, timeout_s=1)], host_bytes=4 * SIZE, timeout_s=20
        ) as store:

            def serve() -> None:
                mine = random.Random(1)
                while not done.is_set():
                    ask(store, mine.randrange(40), counts)
                    store.lanes[0]._reads._last_s = store.lanes[0]._writes._last_s = 0.1

            thread = threading.Thread(target=serve)
            thread.start()
            for _ in range(count):
                time.sleep(rng.uniform(0.05, 0.3))
                server.kill()
                time.sleep(rng.uniform(0, 0.2))
                server.start()
                counts["restarts"] += 1
                before = store.stats().get("hits.redis", 0)
                for _ in range(600):
                    if store.stats().get("hits.redis", 0) > before:
                        break
                    assert thread.is_alive(), "serving stopped"
                    time.sleep(0.05)
                else:
                    raise AssertionError("Redis was not used again after its restart")
            done.set()
            thread.join(60)
            add_reasons(store, counts)
            counts["hits.redis"] = store.stats()["hits.redis"]
        server.kill()
    return counts


def s3_failures(count: int, endpoint: str) -> Counter[str]:
    """An S3 that answers 500, does not answer, or breaks off in the middle, in turn."""
    import boto3

    from vllm_blend.store.s3_tier import S3Tier

    counts: Counter[str] = Counter()
    rng = random.Random(0)
    name = f"faults-{os.getpid()}-{count}"
    boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket=name)
    proxy = Proxy(endpoint)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    tier = S3Tier(name, BUDGET, endpoint_url=proxy.url, timeout_s=0.2)
    assert tier.wait_listed()
    with ChunkStore([tier], host_bytes=4 * SIZE, timeout_s=20) as store:
        for step in range(count):
            lane = store.lanes[0]
            proxy.mode = ["pass", "500", "pass", "hang", "pass", "cut"][step % 6]
            counts[f"mode {proxy.mode}"] += 1
            lane._reads.worked()  # no pauses, so that every mode is met
            lane._writes.worked()
            for _ in range(8):
                ask(store, rng.randrange(30), counts)
            proxy.released.set()
            assert store.flush()
            proxy.released.clear()
        add_reasons(store, counts)
        counts["hits.s3"] = store.stats().get("hits.s3", 0)
    proxy.released.set()
    proxy.shutdown()
    proxy.server_close()
    return counts


def soak(count: int, endpoint: str, chunks: int = 2000) -> Counter[str]:
    """Requests over many chunks, a few of them popular, with eviction in every tier.

    Nothing is broken, so that nothing may fail. Memory, files and latency are counted after each fifth
    of the requests.
    """
    import boto3

    from vllm_blend.store.redis_tier import RedisTier
    from vllm_blend.store.s3_tier import S3Tier

    binary = redis_binary()
    if binary is None:
        return Counter(skipped=1)
    counts: Counter[str] = Counter()
    rng = random.Random(0)
    name = f"soak-{os.getpid()}-{count}"
    boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket=name)
    part = chunks * (SIZE + 4096) // 20
    with folder() as path:
        server = RedisServer(binary, path)
        server.start()
        tiers: list[Any] = [
            DiskTier(path / "kv", 3 * part, fsync=False),
            RedisTier(server.url, 4 * part, timeout_s=PATIENCE_S),
            S3Tier(name, 5 * part, endpoint_url=endpoint, timeout_s=PATIENCE_S),
        ]
        with ChunkStore(tiers, host_bytes=2 * part, timeout_s=60) as store:
            for key, _ in map(chunk, range(chunks)):
                assert len(key.digest) == 16  # made before memory is counted
            seconds: list[float] = []
            for step in range(1, count + 1):
                popular = rng.random() < 0.5
                start = time.perf_counter()
                ask(store, rng.randrange(chunks // 20 if popular else chunks), counts)
                seconds.append(time.perf_counter() - start)
                if step % 20 == 0:
                    assert store.flush()
                if step % max(count // 5, 1) == 0:
                    assert store.flush()
                    counts |= levels(step, path, sorted(seconds))
                    seconds.clear()
            stats = store.stats()
            for number, tier in enumerate(("host", "disk", "redis", "s3"), start=2):
                for what in ("hits", "evictions", "entries", "bytes"):
                    counts[f"{what}.{tier}"] = stats.get(f"{what}.{tier}", 0)
                assert stats[f"bytes.{tier}"] <= number * part
            counts |= Counter({name: n for name, n in stats.items() if name.endswith(".gone")})
            wrong = "rejected.", "failures.", "skipped.", "writes_dropped.", "misses.un", "list_failed"
            bad = {n for n in stats if n.startswith(wrong) and not n.endswith(".gone")}
            assert not bad, {name: stats[name] for name in bad}
        server.kill()
    return counts


PATIENCE_S = 60.0
"""Servers that share two cores with their clients and with other work may answer late."""


def levels(step: int, path: Path, seconds: list[float]) -> Counter[str]:
    """Of the process and of a folder, and latencies, ascending."""
    return Counter(
        {
            f"{step:6} latency us p50": round(1e6 * seconds[len(seconds) // 2]),
            f"{step:6} latency us p99": round(1e6 * seconds[len(seconds) * 99 // 100]),
            f"{step:6} resident KiB": resident_kib(),
            f"{step:6} handles": len(os.listdir("/proc/self/fd")),
            f"{step:6} threads": threading.active_count(),
            f"{step:6} files": sum(file.is_file() for file in path.rglob("*")),
        }
    )


def resident_kib() -> int:
    """Of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1])
    raise RuntimeError("no VmRSS in /proc/self/status")
