"""Time to first token with chunks loaded through the store, from host memory and from a local disk.

python benchmarks/bench_loader.py --folders /on/the/disk        # Mistral-7B's shape, 8k tokens, 16%
python benchmarks/bench_loader.py --shape tiny --tokens 300     # a look that it works, on a CPU
python benchmarks/bench_loader.py --plot FILE.json docs/loader.png    # the time line of a run

Weights are dummies. Every round asks for other chunks, in turn with their KV on the GPU, in the store's
GPU memory, in its host memory (looking them up counts), and on disk: fetched whole before the request
starts, or layer by layer beside it. Before each read from disk the page cache forgets its files
(fadvise, or /proc/sys/vm/drop_caches where that is not enough; what stayed is printed). "load" is the
store's load alone, "device" the disk read by plain threads to aligned memory, the best of some numbers
of threads and sizes of reads; both read the files that the requests read. Medians; the last line is
JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from statistics import median
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; the default takes most of the memory

import torch
from harness import hardware, print_table
from loader_trace import Trace, TracedDisk, draw, layer_hooks, watched
from raw_disk import DROP, PIECES, device_rate, drop_page_cache, file_system, resident
from tqdm import tqdm
from ttft_shapes import CHUNKS, QUESTION_TOKENS, SHAPES, Bench, make_llm, write_config

from vllm_blend import BlendSettings
from vllm_blend.core.kv import StoredKV
from vllm_blend.core.plans import BlendPlan, ChunkSpan
from vllm_blend.store import ChunkKey, ChunkStore, ModelKey

THREADS = (CHUNKS, 16)
"""Numbers of threads that the device is read with."""

AT_HAND = "KV on the GPU" if torch.cuda.is_available() else "KV at hand"


class Loader:
    """Sets of chunks in a store over a disk; one set makes one prompt.

    Args:
        sets: how many, so that rounds do not read the same files.
    """

    def __init__(
        self, bench: Bench, store: ChunkStore, tier: TracedDisk, num_tokens: int, sets: int
    ) -> None:
        self.bench, self.store, self.tier = bench, store, tier
        size = (num_tokens - QUESTION_TOKENS) // CHUNKS
        model = ModelKey("bench", "{}", bench.model.blending.kv_shape)
        self.prompts = [bench.tokens(num_tokens, seed) for seed in range(sets)]
        self.keys = [
            [model.chunk(prompt[size * i : size * (i + 1)]) for i in range(CHUNKS)]
            for prompt in self.prompts
        ]
        start = time.perf_counter()
        for keys in tqdm(self.keys, desc="chunks written", unit="set"):
            for key in keys:
                store.put(key, self.random_kv(key))
            assert store.flush(600), "the disk is too slow to write to"
        self.write_s = (time.perf_counter() - start) / sets
        self.at_hand = [self.random_kv(key) for key in self.keys[0]]
        self.num_bytes = sum(kv.num_bytes for kv in self.at_hand)

    def random_kv(self, key: ChunkKey) -> StoredKV:
        shape = key.model.shape
        both = self.bench.random((shape.num_layers, 2, *shape.of(key.num_tokens)))
        return StoredKV(tuple((pair[0], pair[1]) for pair in both))

    def paths(self, number: int) -> list[pathlib.Path]:
        return [self.tier._path(key.digest) for key in self.keys[number]]

    def to_disk(self, number: int) -> None:
        """Leaves a set's KV on the disk alone."""
        self.forget(number)
        drop_page_cache(self.paths(number))

    def forget(self, number: int) -> None:
        for key in self.keys[number]:
            self.store.discard(key)

    def to_host(self, number: int) -> None:
        """Brings a set's KV to host memory, and to no faster one."""
        self.forget(number)
        self.store.prefetch(self.keys[number])
        assert self.store.flush(600)

    def to_gpu(self, number: int) -> None:
        """Brings it to the store's GPU memory, which holds one set."""
        self.to_host(number)
        self.fetch(number)  # what is found in host memory is copied later
        assert self.store.flush(600)
        assert all(self.store.locate(key) == "gpu" for key in self.keys[number])

    def fetch(self, number: int, layerwise: bool = False) -> list[StoredKV]:
        found = self.store.get_many(self.keys[number], layerwise=layerwise)
        assert all(kv is not None for kv in found)
        return [kv for kv in found if kv is not None]

    def ask(self, number: int, ratio: float, kvs: Sequence[StoredKV]) -> None:
        size = kvs[0].num_tokens
        spans = tuple(ChunkSpan(size * i, kv) for i, kv in enumerate(kvs))
        plan = BlendPlan(spans, BlendSettings(recomp_ratio=ratio))
        self.bench.run(self.prompts[number], plan)

    def traced(self, number: int, ratio: float) -> Trace:
        """One request whose KV comes from disk, with all that happens in it."""
        self.to_disk(number)
        trace = Trace(CHUNKS, self.bench.num_layers)
        with trace.recording(self.tier), layer_hooks(self.bench.model.layers, trace):
            kvs = self.fetch(number, layerwise=True)
            self.ask(number, ratio, [watched(kv, i, trace) for i, kv in enumerate(kvs)])
        return trace


def methods(
    loader: Loader, ratio: float
) -> dict[str, tuple[Callable[[int], Any], Callable[[int], Any]]]:
    """What to do before a measurement, and what is measured; both are told the set's number."""
    ask, fetch, on_disk = partial(loader.ask, ratio=ratio), loader.fetch, loader.to_disk

    def through(direct: bool, measured: Callable[[int], Any]) -> Callable[[int], Any]:
        def run(number: int) -> None:
            loader.tier.direct = direct
            measured(number)

        return run

    def whole(number: int) -> None:
        ask(number, kvs=fetch(number))

    def layerwise(number: int) -> None:
        ask(number, kvs=fetch(number, layerwise=True))

    return {
        AT_HAND: (lambda number: None, lambda number: ask(number, kvs=loader.at_hand)),
        "the store's GPU memory": (loader.to_gpu, whole),
        "host memory": (loader.to_host, whole),
        "disk, whole first": (on_disk, through(True, whole)),
        "disk, layer by layer": (on_disk, through(True, layerwise)),
        "load": (on_disk, through(True, fetch)),
        "disk, layer by layer, page cache": (on_disk, through(False, layerwise)),
        "load, page cache": (on_disk, through(False, fetch)),
    }


def measure(
    loader: Loader, ratio: float, limit_s: float
) -> tuple[dict[str, list[float]], list[dict[str, float]]]:
    """Seconds of each method, and the device's GB/s by kind of read, for each round but the first."""
    found = methods(loader, ratio)
    seconds: dict[str, list[float]] = {name: [] for name in found}
    rates: list[dict[str, float]] = []
    began = time.perf_counter()
    for number in tqdm(range(len(loader.keys)), desc="rounds", unit="round"):
        if number > 3 and time.perf_counter() - began > limit_s:
            break
        for name, (before, run) in found.items():
            before(number)
            start = time.perf_counter()
            run(number)
            seconds[name].append(time.perf_counter() - start)
            loader.store.flush(600)
        rates.append({})
        for threads, piece in product(THREADS, PIECES):
            drop_page_cache(loader.paths(number))
            rate = device_rate(loader.paths(number), threads, piece)
            rates[-1][f"{threads} threads, {piece >> 20} MiB"] = rate
    return {name: values[1:] for name, values in seconds.items()}, rates[1:]


def report(loader: Loader, seconds: dict[str, list[float]], rates: list[dict[str, float]]) -> Any:
    """Prints what was measured; returns it for the last line."""
    took = {name: median(values) for name, values in seconds.items()}
    by_reads = {name: median(rate[name] for rate in rates) for name in rates[0]}
    device = max(by_reads.values())
    compute = took[AT_HAND]
    rows = []
    for name, value in took.items():
        spread = f"{1e3 * min(seconds[name]):.1f} to {1e3 * max(seconds[name]):.1f}"
        row = [name, f"{1e3 * value:.1f} ms", spread, "", "", ""]
        load = took["load, page cache" if name.endswith("page cache") else "load"]
        if name.startswith("load"):
            rate = loader.num_bytes / value / 1e9
            row[3:5] = [f"{rate:.2f} GB/s", f"{rate / device:.0%}"]
        elif "layer by layer" in name:
            rate = loader.num_bytes / value / 1e9
            row[3:] = [f"{rate:.2f} GB/s", f"{rate / device:.0%}", f"{value / max(load, compute):.3f}"]
        elif name in ("host memory", "the store's GPU memory"):
            row[5] = f"{value / compute:.3f}"
        rows.append(row)
    print_table(["", "median", "range, ms", "rate", "of the device's", "of max(load, compute)"], rows)
    of_reads = [f"{rate:.2f} GB/s ({name})" for name, rate in by_reads.items()]
    print(f"{len(rates)} rounds; device: {', '.join(of_reads)}")
    return {
        "ttft_s": took,
        "seconds": seconds,
        "device_gb_s": by_reads,
        "loader_gb_s": loader.num_bytes / took["load"] / 1e9,
        "loader_share": loader.num_bytes / took["load"] / 1e9 / device,
        "tier_over_gpu": took["the store's GPU memory"] / compute,
        "host_over_gpu": took["host memory"] / compute,
        "disk_over_max": took["disk, layer by layer"] / max(took["load"], compute),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="mistral-7b")
    parser.add_argument("--dtype", default="bfloat16", help="of the model (bfloat16)")
    parser.add_argument("--tokens", type=int, default=8192, help="of a prompt (8192)")
    parser.add_argument("--ratio", type=float, default=0.16, help="recomputed share (0.16)")
    parser.add_argument("--repeat", type=int, default=5, help="rounds, after one that is not kept (5)")
    parser.add_argument(
        "--limit-s", type=float, default=600, help="fewer rounds, but 3, beyond it (600)"
    )
    parser.add_argument(
        "--folders", nargs="+", default=[None], help="on the disks to measure; default: a temporary one"
    )
    parser.add_argument("--eager", action="store_true", help="without torch.compile and graphs")
    parser.add_argument("--timeline", metavar="FILE.json", help="one request's time line, first disk")
    parser.add_argument("--plot", nargs=2, metavar=("FILE.json", "IMAGE"), help="draw a time line")
    options = parser.parse_args()
    if options.plot:
        draw(*options.plot)
        return
    with tempfile.TemporaryDirectory() as folder:
        config = write_config(options.shape, pathlib.Path(folder))
        llm = make_llm(str(config), options.tokens + 1, options)
    bench = Bench(llm)
    kept = bench.num_kept(options.tokens, options.ratio)
    print(
        f"\n{options.shape}, {options.tokens} tokens, {options.ratio:.0%} ({kept} rows); {hardware()}"
    )
    results = []
    for number, folder in enumerate(options.folders):
        with tempfile.TemporaryDirectory(prefix="chunks-", dir=folder) as place:
            results.append(run(bench, place, options, None if number else options.timeline))
    llm.llm_engine.engine_core.shutdown()
    kind = {"shape": options.shape, "tokens": options.tokens, "ratio": options.ratio}
    print()
    print(json.dumps(kind | {"hardware": hardware(), "disks": results}))


def run(bench: Bench, folder: str, options: argparse.Namespace, timeline: str | None) -> dict[str, Any]:
    """Measures one disk."""
    tier = TracedDisk(folder, 1 << 40)
    sets = options.repeat + 1
    shape = bench.model.blending.kv_shape
    per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_size * shape.dtype.itemsize
    set_bytes = options.tokens * per_token + CHUNKS * 4096
    memory = {"host_bytes": (sets + 1) * set_bytes, "gpu_bytes": set_bytes}
    with ChunkStore([tier], **memory, write_behind_bytes=1 << 40) as store:
        loader = Loader(bench, store, tier, options.tokens, sets)
        loader.to_disk(0)
        stayed = f"{resident(loader.paths(0)):.0%} of it stayed in the page cache"
        where = f"{file_system(folder)}; {DROP[0]}: {stayed}"
        size = loader.num_bytes / 1e9
        print(f"\n{size:.3f} GB of KV a prompt, written in {loader.write_s:.2f} s; {where}")
        seconds, rates = measure(loader, options.ratio, options.limit_s)
        result = report(loader, seconds, rates)
        tier.direct = True
        trace = loader.traced(sets - 1, options.ratio)
        if timeline:
            what = f"{options.shape}, {options.tokens} tokens, {options.ratio:.0%} recomputed"
            trace.save(timeline, f"{what}; {hardware().split(',')[0]}; disk: {where.split(';')[0]}")
        rejected = {name: n for name, n in store.stats().items() if name.startswith("rejected")}
        assert not rejected, rejected
    return result | {"disk": where, "bytes": loader.num_bytes, "write_s": loader.write_s}


if __name__ == "__main__":
    main()
