"""Resident memory of a blending server and of stock vLLM under the same slow load, on a CPU.

    python benchmarks/bench_memory.py --minutes 60 --rate 3

Both servers of a tiny model get the same well-formed requests of ``fuzz_requests.py`` at the same time,
a fixed number a second: blended ones (stock gets them without their ``blend`` field), plain ones, and
clients that hang up. Each has one thread. A line a minute tells the memory of each process; plain
answers must not differ. It ends with a table and a JSON object, and exit code 1 if an answer differed
or failed, a step failed to blend, or a process died.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pathlib
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import aiohttp
import psutil
from fuzz_requests import ordinary_request
from fuzz_server import (
    ARGUMENTS,
    HEADERS,
    SETTINGS,
    TIMEOUT_S,
    answer_of,
    learn,
    lives,
    processes_of,
    send,
    steps_failed,
)
from harness import hardware, print_table
from served import log_of, server, wait_for
from tiny_model import make_tiny_model

SAMPLE_S = 60.0
ROLES = ("API server", "engine core", "model's process")
LONG = ["--max-model-len", "2048"]
"""The longest of these prompts fits."""
THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
"""Of each server; beside it the core that its model's thread is bound to."""


class Load:
    """The requests, and what came of them.

    Args:
        urls: of the servers: stock's, and the one that blends.
        known: stock's answers to plain requests, by number.
    """

    def __init__(self, urls: dict[str, str], known: dict[int, Any], seed: int) -> None:
        self.urls, self.known, self.seed = urls, known, seed
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.bad: list[dict[str, Any]] = []

    async def run(self, rate: float, seconds: float) -> None:
        """Sends ``rate`` requests a second to each server, whether or not earlier ones are answered."""
        timeout, start = aiohttp.ClientTimeout(total=TIMEOUT_S), time.monotonic()
        async with AsyncExitStack() as stack:
            sessions = {
                name: await stack.enter_async_context(
                    aiohttp.ClientSession(
                        url,
                        headers=HEADERS,
                        timeout=timeout,
                        connector=aiohttp.TCPConnector(limit=0, force_close=True),  # no stale ones
                    )
                )
                for name, url in self.urls.items()
            }
            under_way: set[asyncio.Task[None]] = set()
            for number in range(round(rate * seconds)):
                await asyncio.sleep(max(0.0, start + number / rate - time.monotonic()))
                for name, session in sessions.items():
                    task = asyncio.create_task(self.ask(name, session, number))
                    under_way.add(task)
                    task.add_done_callback(under_way.discard)
            await asyncio.gather(*under_way)

    async def ask(self, name: str, session: aiohttp.ClientSession, number: int) -> None:
        asked = ordinary_request(self.seed, number, list(self.known))
        if name == "stock":
            asked.body.pop("vllm_xargs", None)
        try:
            outcome, answer = await asyncio.wait_for(send(session, asked), asked.abort_s)
        except TimeoutError:
            outcome, answer = "hung up", ""
        self.outcomes[name, outcome] += 1
        right = outcome == "hung up" or (outcome == "200" and self.is_right(asked.plain, answer))
        if not right:
            self.bad.append(
                {"server": name, "number": number, "outcome": outcome, "answer": answer[:400]}
            )

    def is_right(self, plain: int | None, answer: str) -> bool:
        return plain is None or answer_of(json.loads(answer)) == self.known[plain]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--rate", type=float, default=3, help="requests a second, to each server")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=pathlib.Path, help="a folder for the servers' logs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = str(make_tiny_model(pathlib.Path(folder)))
        config = ["--additional-config", json.dumps({"vllm_blend": SETTINGS})]
        servers = {}
        for core, (name, more) in enumerate({"stock": [], "blend": config}.items()):
            bound = THREAD | {"VLLM_CPU_OMP_THREADS_BIND": str(core % (psutil.cpu_count() or 1))}
            environment = bound | ({"VLLM_PLUGINS": ""} if name == "stock" else {})
            log = log_of(name, options.log)
            servers[name] = stack.enter_context(
                server(model, [*ARGUMENTS, *LONG, *more], environment, log)
            )
        for name, one in servers.items():
            wait_for(name, one)
        urls = {name: one.url for name, one in servers.items()}
        load = Load(urls, asyncio.run(learn(urls["stock"])), options.seed)
        processes = {
            (name, role): process
            for name, one in servers.items()
            for role, process in zip(ROLES, processes_of(one).values(), strict=True)
        }
        rows = asyncio.run(watch(load, processes, options))
        dead = [" ".join(key) for key, process in processes.items() if not lives(process)]
        failed = steps_failed(servers["blend"])
    sys.exit(tell(options, load, rows, dead, failed))


async def watch(
    load: Load, processes: dict[tuple[str, str], psutil.Process], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Memory of the processes in MiB, each minute of the load, by ``"server process"``."""
    task = asyncio.create_task(load.run(options.rate, options.minutes * 60))
    start, rows = time.monotonic(), list[dict[str, Any]]()
    while True:
        row: dict[str, Any] = {"minute": len(rows), "requests": sum(load.outcomes.values()) // 2}
        for key, process in processes.items():
            row[" ".join(key)] = process.memory_info().rss >> 20 if lives(process) else 0
        rows.append(row)
        print(json.dumps(row), flush=True)
        if task.done():
            await task
            return rows
        left = start + len(rows) * SAMPLE_S - time.monotonic()
        await asyncio.wait({task}, timeout=max(0.0, left))


def tell(
    options: argparse.Namespace,
    load: Load,
    rows: list[dict[str, Any]],
    dead: list[str],
    steps_failed: int,
) -> int:
    print(f"\n{hardware()}; {options.rate:g} requests a second to each server\n")
    shown = rows[:: max(1, len(rows) // 6)]
    shown += [] if shown[-1] is rows[-1] else [rows[-1]]
    print_table(list(rows[0]), [list(row.values()) for row in shown])
    print(f"\nfailed or different: {len(load.bad)}, dead: {dead}, steps failed: {steps_failed}")
    for one in load.bad[:5]:
        print(json.dumps(one))
    outcomes = {" ".join(key): count for key, count in sorted(load.outcomes.items())}
    print(json.dumps({"outcomes": outcomes, "bad": len(load.bad), "dead": dead, "rows": rows}))
    return int(bool(load.bad or dead or steps_failed))


if __name__ == "__main__":
    main()
