"""The store's speed: the index at a million chunks, cold start, and reads and writes of each tier.

python benchmarks/bench_store.py                    # the index, host memory and disk
python benchmarks/bench_store.py --files 1000000    # cold start over as many files, too (needs 5 GB)
python benchmarks/bench_store.py --redis redis://127.0.0.1:6379/0
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import hardware, print_table
from raw_disk import PIECES, device_rate, drop_page_cache

from vllm_blend.core.kv import KVShape, StoredKV
from vllm_blend.store import ChunkStore, DiskTier, ModelKey
from vllm_blend.store.index import Index
from vllm_blend.store.keys import ChunkKey
from vllm_blend.store.record import Layout, Record, checksum
from vllm_blend.store.tier import Tier

MODEL = ModelKey("bench", "{}", KVShape(32, 8, 128, torch.bfloat16))
"""The shape of Mistral-7B: 128 KiB a token."""


def best(run: Callable[[], Any], repeats: int) -> float:
    """Seconds of the fastest of some runs."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def resident_bytes() -> int:
    """Of this process' memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def bench_index(count: int) -> dict[str, float]:
    """Memory, build and lookup of an index."""
    rng = np.random.default_rng(0)
    index, before = Index(), resident_bytes()
    start = time.perf_counter()
    for row in rng.integers(0, 256, (count, 16), dtype=np.uint8):
        index.put(row.tobytes(), 64 << 20)
    build_s, memory = time.perf_counter() - start, resident_bytes() - before
    digests = index.digests()
    some = [bytes(bytearray(digests[i])) for i in rng.integers(0, count, 100_000)]
    del digests

    def put_all() -> None:
        for one in some:
            index.put(one, 64 << 20)

    def evict() -> None:
        for _ in range(min(count, 100_000)):
            oldest = index.oldest()
            assert oldest is not None
            index.remove(oldest)

    absent = [bytes(row) for row in rng.integers(0, 256, (100_000, 16), dtype=np.uint8)]
    return {
        "chunks": count,
        "bytes a chunk": round(memory / count),
        "memory MB": round(memory / 1e6, 1),
        "build s": round(build_s, 2),
        "lookup us": round(best(lambda: [one in index for one in some], 3) * 10, 2),
        "lookup of an absent one us": round(best(lambda: [one in index for one in absent], 3) * 10, 2),
        "put us": round(best(put_all, 3) * 10, 2),
        "evict us": round(best(evict, 1) / min(count, 100_000) * 1e6, 2),
    }


def bench_cold_start(count: int) -> dict[str, float]:
    """A folder of ``count`` records listed again, as a new process does."""
    with tempfile.TemporaryDirectory(prefix="chunks-") as folder:
        rng = np.random.default_rng(0)
        for number in range(256):
            (Path(folder) / "v1" / f"{number:02x}").mkdir(parents=True)
        for row in rng.integers(0, 256, (count, 16), dtype=np.uint8):
            name = row.tobytes().hex()
            Path(folder, "v1", name[:2], f"{name}.safetensors").touch()
        start = time.perf_counter()
        tier = DiskTier(folder, 1 << 60)
        seconds = time.perf_counter() - start
        assert tier.usage()["entries"] == count
    return {"files": count, "cold start s": round(seconds, 2)}


def chunk(num_tokens: int, seed: int) -> tuple[ChunkKey, StoredKV]:
    generator = torch.Generator().manual_seed(seed)
    key = MODEL.chunk(torch.randint(0, 30_000, (num_tokens,), generator=generator).tolist())
    size = (32, 2, *MODEL.shape.of(num_tokens))
    both = torch.randint(0, 2**15, size, dtype=torch.int16, generator=generator)
    pairs = both.view(torch.bfloat16)
    return key, StoredKV(tuple((pair[0], pair[1]) for pair in pairs))


def records(folder: str) -> list[Path]:
    return list(Path(folder).rglob("*.safetensors"))


def bench_tier(name: str, tier: Tier, folder: str | None, num_tokens: int, count: int) -> list[Any]:
    """GB/s of writes, and of loads one after the other and all at once; latency of one layer."""
    chunks = [chunk(num_tokens, seed) for seed in range(count)]
    num_bytes = Layout.of(chunks[0][0]).payload_bytes
    host_bytes = (count + 1) * num_bytes
    with ChunkStore([tier], host_bytes=host_bytes, write_behind_bytes=1 << 40) as store:
        start = time.perf_counter()
        for key, kv in chunks:
            store.put(key, kv)
        put_us = (time.perf_counter() - start) / count * 1e6
        store.flush(600)
        write_s = time.perf_counter() - start

        def forget() -> None:
            for key, _ in chunks:
                store.discard(key)
            if folder is not None:
                drop_page_cache(records(folder))

        forget()
        start = time.perf_counter()
        assert all(store.get(key) is not None for key, _ in chunks)
        one_s = time.perf_counter() - start
        forget()
        start = time.perf_counter()
        assert all(kv is not None for kv in store.get_many([key for key, _ in chunks]))
        all_s = time.perf_counter() - start
        forget()
        start = time.perf_counter()
        late = store.get(chunks[0][0], layerwise=True)
        assert late is not None
        _ = late.layers[0]
        first_ms = (time.perf_counter() - start) * 1e3
        store.flush()
        hit_us = best(lambda: store.get(chunks[0][0]), 1000) * 1e6
    total = count * num_bytes / 1e9
    rates = [f"{total / seconds:.2f}" for seconds in (write_s, one_s, all_s)]
    return [name, *rates, f"{first_ms:.1f}", f"{put_us:.0f}", f"{hit_us:.0f}"]


def bench_parts(num_tokens: int) -> dict[str, float]:
    """What bounds every tier: checksums and copies, GB/s."""
    key, kv = chunk(num_tokens, 0)
    record = Record.of(key, kv)
    layer = memoryview(bytes(Layout.of(key).layer_bytes))
    target = torch.empty(kv.num_bytes, dtype=torch.uint8)
    source = torch.ones(kv.num_bytes, dtype=torch.uint8)
    return {
        "checksum GB/s": round(
            len(layer) / best(lambda: checksum(key, 0, memoryview(layer)), 50) / 1e9, 2
        ),
        "copy GB/s": round(target.nbytes / best(lambda: target.copy_(source), 10) / 1e9, 2),
        "record GB/s": round(record.num_bytes / best(lambda: Record.of(key, kv), 5) / 1e9, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--chunks", type=int, default=1_000_000, help="of the index")
    parser.add_argument("--files", type=int, default=0, help="of the cold start; 0: left out")
    parser.add_argument("--folder", help="on the disk to measure; default: the temporary folder")
    parser.add_argument("--redis", metavar="URL", help="measure a Redis, too; its records are removed")
    parser.add_argument("--tokens", type=int, default=512, help="of a chunk")
    parser.add_argument("--count", type=int, default=16, help="chunks")
    arguments = parser.parse_args()
    print(hardware())
    results: dict[str, Any] = {"index": bench_index(arguments.chunks)}
    if arguments.files:
        results["cold start"] = bench_cold_start(arguments.files)
    results["parts"] = bench_parts(arguments.tokens)
    for name, values in results.items():
        print_table([name, ""], list(values.items()))
    rows = []
    for direct in (True, False):
        with tempfile.TemporaryDirectory(prefix="chunks-", dir=arguments.folder) as folder:
            tier: Tier = DiskTier(folder, 1 << 40, direct=direct)
            name = "disk" if direct else "disk, page cache"
            rows.append(bench_tier(name, tier, folder, arguments.tokens, arguments.count))
            drop_page_cache(records(folder))
            rate = device_rate(records(folder), 16, PIECES[-1])
            results[f"device read GB/s, {name}"] = round(rate, 2)
    if arguments.redis:
        from vllm_blend.store import RedisTier

        tier = RedisTier(arguments.redis, 1 << 40, prefix="bench")
        rows.append(bench_tier("redis", tier, None, arguments.tokens, arguments.count))
    size_mb = Layout.of(chunk(arguments.tokens, 0)[0]).num_bytes / 1e6
    print(f"{arguments.count} chunks of {arguments.tokens} tokens, {size_mb:.0f} MB each")
    header = ["tier", "write GB/s", "get GB/s", "get_many GB/s", "first layer ms", "put us", "hit us"]
    print_table(header, rows)
    print(f"the disk alone: {results['device read GB/s, disk']} GB/s")
    results["tiers"] = [dict(zip(header, row, strict=True)) for row in rows]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
