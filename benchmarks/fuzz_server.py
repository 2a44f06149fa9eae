"""Badly formed and ordinary requests to a blending server of a tiny model, on a CPU.

    python benchmarks/fuzz_server.py --requests 2000 --seed 1 --concurrency 32

Requests come from ``fuzz_requests.py``, each from ``--seed`` and its number: fields with wrong types
and values, marks, odd text, five tenants, all endpoints, streams, clients that hang up. Among them are
plain requests, whose answers were learned from the same server without blending, and must not differ.
It ends with a table, a JSON object, and exit code 1 if there was an answer of 500 or more, none at all,
a process that died, a step that failed to blend, or a plain answer that differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pathlib
import re
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import aiohttp
import psutil
from fuzz_requests import MODEL, Request, plain_request, request
from harness import hardware, print_table
from served import Server, get, log_of, server, wait_for
from tiny_model import make_tiny_model

from vllm_blend.server.config import CLIENT_FIELDS

PLAIN = 40
"""Plain requests whose answers are known."""
NEAR_TIE = 0.02
"""Plain requests with tokens nearer to each other than this are left out: rounding may swap them."""
TIMEOUT_S = 180.0
HEADERS = {"Content-Type": "application/json"}
FAILED = (b"failed to blend", b"blending is off")
"""What the log says where blending fails: such a request is answered, so nothing else tells."""
SHOWN = 5
"""Failures that are printed."""
PARTS = 10
"""Parts of the run, at whose ends memory is read."""
SETTINGS = {"ram_gb": 0.02, "log_requests": False, "client_fields": list(CLIENT_FIELDS)}
ARGUMENTS = "--dtype float32 --enforce-eager --max-model-len 1024 --max-num-seqs 64".split()  # noqa: SIM905
ARGUMENTS += ["--served-model-name", MODEL, "--disable-uvicorn-access-log"]

Answer = tuple[str, list[int]]
"""Text and token ids."""


@dataclass
class Found:
    """What came of the requests.

    Attributes:
        outcomes: requests by endpoint and outcome.
        failed: what must not be, with what was sent.
        differ: plain requests whose answers are not stock's: number, answer.
        memory: bytes of each process, at the start and after each part of the run.
        blended: requests by what blending did of them, as the server counts them.
        steps_failed: lines of the log that say so.
    """

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    failed: list[dict[str, Any]] = field(default_factory=list)
    differ: list[dict[str, Any]] = field(default_factory=list)
    memory: list[dict[str, int]] = field(default_factory=list)
    blended: dict[str, int] = field(default_factory=dict)
    steps_failed: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--settings", type=json.loads, default={}, help="more of the server's, as JSON")
    parser.add_argument("--server-args", default="", help="more of both servers' arguments")
    parser.add_argument("--log", type=pathlib.Path, help="a folder for the servers' logs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_tiny_model(pathlib.Path(folder)))
        own = [*ARGUMENTS, *options.server_args.split()]
        with server(model, own, {"VLLM_PLUGINS": ""}, log_of("stock", options.log)) as stock:
            wait_for("stock", stock)
            known = asyncio.run(learn(stock.url))
        settings = SETTINGS | options.settings
        if "store" in settings:
            del settings["ram_gb"]
        config = json.dumps({"vllm_blend": settings})
        arguments = [*own, "--additional-config", config]
        with server(model, arguments, {}, log_of("blend", options.log)) as blending:
            wait_for("blend", blending)
            processes = processes_of(blending)
            start = time.monotonic()
            found = asyncio.run(fuzz(blending.url, options, known, processes))
            seconds = time.monotonic() - start
            found.blended, found.steps_failed = blended(blending), steps_failed(blending)
            dead = [name for name, process in processes.items() if not lives(process)]
    sys.exit(tell(options, found, dead, seconds))


def processes_of(blending: Server) -> dict[str, psutil.Process]:
    """The server's processes by name; those that a server has for its semaphores are left out."""
    parent = psutil.Process(blending.process.pid)
    named = {f"{process.name()} {process.pid}": process for process in parent.children(recursive=True)}
    return {"API server": parent} | {
        name: process
        for name, process in named.items()
        if "resource_tracker" not in " ".join(process.cmdline())
    }


def blended(server: Server) -> dict[str, int]:
    """Requests by what blending did of them, as ``/metrics`` tells."""
    if server.process.poll() is not None:
        return {}
    lines = re.findall(r'blend_requests_total{.*result="(\w+)".*} (\S+)', get(f"{server.url}/metrics"))
    return {result: int(float(count)) for result, count in lines}


def steps_failed(server: Server) -> int:
    """Lines of the log that tell of blending that failed."""
    with open(f"/proc/self/fd/{server.log.fileno()}", "rb") as log:  # the server's place in it stays
        return sum(any(word in line for word in FAILED) for line in log)


# --- answers of stock vLLM ------------------------------------------------------------------------


async def learn(url: str) -> dict[int, Answer]:
    """Answers to plain requests, of those in which no token is a near tie."""
    known: dict[int, Answer] = {}
    async with aiohttp.ClientSession(url, headers=HEADERS) as session:
        for number in count():
            if len(known) == PLAIN:
                return known
            asked = plain_request(number)
            chat = "messages" in asked.body
            asked.body |= {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
            async with session.post(asked.path, data=json.dumps(asked.body)) as response:
                answer = await response.json()
            assert response.status == 200, answer
            if min(gaps(answer["choices"][0]["logprobs"])) > NEAR_TIE:
                known[number] = answer_of(answer)
    raise AssertionError("count() has an end")


def gaps(logprobs: dict[str, Any]) -> list[float]:
    """How far the best token is before the next, at each place."""
    if "content" in logprobs:
        tops = [[top["logprob"] for top in place["top_logprobs"]] for place in logprobs["content"]]
    else:
        tops = [list(place.values()) for place in logprobs["top_logprobs"]]
    ordered = [sorted(top, reverse=True) for top in tops]
    return [top[0] - top[1] if len(top) > 1 else 0.0 for top in ordered]


def answer_of(answer: dict[str, Any]) -> Answer:
    choice = answer["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return text, choice["token_ids"]


# --- the run --------------------------------------------------------------------------------------


async def fuzz(
    url: str,
    options: argparse.Namespace,
    known: dict[int, Answer],
    processes: dict[str, psutil.Process],
) -> Found:
    """Sends all requests, ``--concurrency`` at a time."""
    found, numbers = Found(), iter(range(options.requests))
    marks = [options.requests * part // PARTS for part in range(PARTS)]
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        url, headers=HEADERS, timeout=timeout, connector=connector
    ) as session:

        async def client() -> None:
            for number in numbers:
                while marks and number >= marks[0]:
                    found.memory.append(memory_of(processes))
                    del marks[0]
                asked = request(options.seed, number, list(known))
                try:
                    outcome, answer = await asyncio.wait_for(send(session, asked), asked.abort_s)
                except TimeoutError:
                    outcome, answer = "hung up", ""
                judge(found, known, number, asked, outcome, answer)

        await asyncio.gather(*(client() for _ in range(options.concurrency)))
        for number in known:  # when all is over, too
            asked = plain_request(number)
            outcome, answer = await send(session, asked)
            judge(found, known, number, asked, outcome, answer)
    found.memory.append(memory_of(processes))
    return found


async def send(session: aiohttp.ClientSession, asked: Request) -> tuple[str, str]:
    """What came of a request: a status, or what was there instead of one; and the answer."""
    try:
        async with session.post(asked.path, data=json.dumps(asked.body)) as response:
            answer = await response.text()
    except asyncio.CancelledError:
        raise
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        return type(error).__name__, str(error)
    if response.status != 200 or not asked.body.get("stream"):
        return str(response.status), answer
    for line in answer.splitlines():
        if line.startswith("data: {") and (told := json.loads(line[6:]).get("error")):
            return f"200, then {told.get('code')}", answer
    return "200", answer


def judge(
    found: Found,
    known: dict[int, Answer],
    number: int,
    asked: Request,
    outcome: str,
    answer: str,
) -> None:
    """Counts an outcome; notes what must not be."""
    found.outcomes[asked.path, outcome] += 1
    sent = {"number": number, "path": asked.path, "outcome": outcome, "answer": answer[:600]}
    refused = outcome.split()[-1].startswith("4")
    if not (outcome in ("200", "hung up") or refused):
        found.failed.append(sent | {"body": json.dumps(asked.body)[:1500]})
    elif asked.plain is not None and outcome != "hung up":
        right = outcome == "200" and answer_of(json.loads(answer)) == known[asked.plain]
        if not right:
            found.differ.append(sent | {"plain": asked.plain, "expected": known[asked.plain]})


def lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def memory_of(processes: dict[str, psutil.Process]) -> dict[str, int]:
    return {
        name: process.memory_info().rss if lives(process) else 0 for name, process in processes.items()
    }


# --- what is told ---------------------------------------------------------------------------------


def tell(options: argparse.Namespace, found: Found, dead: list[str], seconds: float) -> int:
    """Prints what was found; the exit code."""
    print(f"\n{hardware()}; {options.requests} requests in {seconds:.0f} s\n")
    print_table(
        ("endpoint", "outcome", "requests"),
        [(path, outcome, found.outcomes[path, outcome]) for path, outcome in sorted(found.outcomes)],
    )
    print()
    print_table(
        ("resident memory, MB", "start", *(f"{part}/{PARTS}" for part in range(1, PARTS)), "end"),
        [(name, *(round(read[name] / 1e6) for read in found.memory)) for name in found.memory[0]],
    )
    print(f"\nby what blending did: {found.blended}")
    bad = {"failed": len(found.failed), "dead": len(dead), "differ": len(found.differ)}
    bad["steps failed"] = found.steps_failed
    print("\n" + ", ".join(f"{name}: {number}" for name, number in bad.items()))
    for one in [*found.failed[:SHOWN], *found.differ[:SHOWN]]:
        print(json.dumps(one, indent=2))
    counts = {f"{path} {outcome}": number for (path, outcome), number in found.outcomes.items()}
    told = {"seed": options.seed, "requests": options.requests, "seconds": round(seconds, 1)}
    print(json.dumps(told | bad | {"outcomes": counts, "memory": found.memory, "dead": dead}))
    return int(any(bad.values()))


if __name__ == "__main__":
    main()
