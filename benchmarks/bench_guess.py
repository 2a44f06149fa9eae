"""Can a tenant tell by time whether another one has sent a text? Times to first token, on a CPU.

    python benchmarks/bench_guess.py --repeat 60

Two tenants have sent the same documents to a blending server. A third sends prompts over those, and, in
turns, over documents that nobody has sent. The difference of the medians stands with a bootstrap
interval; beside it the same of a tenant that did send them, which shows what the clock can see. The
client has a core of its own, the server one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from typing import Any

from harness import hardware, print_table
from served import log_of, post, server, wait_for

from vllm_blend import embedded_model

SIZE, CHUNKS, POOL = 200, 2, 24
"""Tokens of a document, documents of a prompt, and documents that were sent."""
ARGUMENTS = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"]
SETTINGS = {"ram_gb": 3, "log_requests": False, "report_sizes": True}
"""With memory for all: where it is short, the tenant that holds most makes room."""
SETTLE_S = 180.0
"""What is computed in the background for what was sent is done by then."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", help="a folder (default: SmolLM2-135M)")
    parser.add_argument("--repeat", type=int, default=60)
    options = parser.parse_args()
    model = options.model or str(embedded_model())
    arguments = [*ARGUMENTS, "--additional-config", json.dumps({"vllm_blend": SETTINGS})]
    arguments += ["--served-model-name", "model"]
    *others, own = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, others)  # of the server's processes
    environment = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": str(others[0])}
    environment["VLLM_CPU_KVCACHE_SPACE"] = "1"
    with server(model, arguments, environment, log_of("blend", None)) as blending:
        wait_for("blend", blending)
        os.sched_setaffinity(0, {own})
        found = measure(blending.url, options.repeat)
    print(f"\n{hardware()}; {options.repeat} prompts of each kind, {CHUNKS * SIZE} tokens\n")
    rows = []
    for who, (sent, unsent) in found.items():
        low, high = interval(sent, unsent)
        least, most = (1e3 * statistics.median(times) for times in (sent, unsent))
        rows.append((who, f"{least:.2f}", f"{most:.2f}", f"{least - most:.2f} [{low:.2f}, {high:.2f}]"))
    head = ("asked by", "sent documents, ms", "unsent, ms", "difference, ms [95%]")
    print_table(head, rows)
    print(json.dumps({"repeat": options.repeat, "rows": rows}))


def measure(url: str, repeat: int) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds to the first token over sent and unsent documents, by who asks."""
    choose, numbers = random.Random(0), iter(range(10**6, 10**9))
    for tenant in ("first", "second"):
        for _ in range(2):
            for at in range(0, POOL, CHUNKS):
                ask(url, range(at, at + CHUNKS), tenant)
    settle(url)
    found: dict[str, tuple[list[float], list[float]]] = {}
    for tenant, who in (("third", "a tenant that sent none"), ("first", "a tenant that sent them")):
        times: tuple[list[float], list[float]] = [], []
        for round_ in range(repeat):
            # a guess makes its text the guesser's own: each time under another salt
            salt = f"{tenant} {round_}" if tenant == "third" else tenant
            kinds = [0, 1] if choose.random() < 0.5 else [1, 0]
            for kind in kinds:
                known = choose.sample(range(POOL), CHUNKS)
                docs = known if kind == 0 else [next(numbers) for _ in range(CHUNKS)]
                times[kind].append(ask(url, docs, salt))
                time.sleep(0.05)  # no background work of the last one beside the next
        found[who] = times
    return found


def settle(url: str) -> None:
    """Waits until nothing is left to be computed in the background."""
    end = time.monotonic() + SETTLE_S
    while True:
        answer = post(f"{url}/v1/completions", body_of(range(1), "first", report=True))
        if not (waiting := answer["kv_transfer_params"]["blend"]["waiting_chunks"]):
            return
        if time.monotonic() > end:
            raise SystemExit(f"{waiting} chunks still wait to be computed")
        time.sleep(2)


def ask(url: str, documents: Any, tenant: str) -> float:
    """Seconds that a prompt over documents takes, to its one token."""
    body = body_of(documents, tenant)
    started = time.perf_counter()
    post(f"{url}/v1/completions", body)
    return time.perf_counter() - started


def body_of(documents: Any, tenant: str, **field: Any) -> dict[str, Any]:
    """A request for one token after documents."""
    prompt, spans = [5], []
    for number in documents:
        choose = random.Random(number)
        spans.append([len(prompt), len(prompt) + SIZE])
        prompt += [choose.randrange(1000, 40_000) for _ in range(SIZE)]
    prompt.append(6)
    body = {"model": "model", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    return body | {"cache_salt": tenant, "vllm_xargs": {"blend": json.dumps({"spans": spans} | field)}}


def interval(sent: list[float], unsent: list[float], count: int = 2000) -> tuple[float, float]:
    """Of the difference of the medians, 95%, in milliseconds, by bootstrap."""
    choose = random.Random(1)
    found = sorted(
        statistics.median(choose.choices(sent, k=len(sent)))
        - statistics.median(choose.choices(unsent, k=len(unsent)))
        for _ in range(count)
    )
    return 1e3 * found[count // 40], 1e3 * found[-count // 40]


if __name__ == "__main__":
    main()
