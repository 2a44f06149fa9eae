"""Replicas of ``--data-parallel-size``: a chunk that one has computed is reused by the others."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from servers import free_port
from serving import command_of, connect, disk, reported, running, wait_for, xargs

from vllm_blend.cli import vllm_command

pytestmark = pytest.mark.slow

REPLICAS = 2
CHUNK_TOKENS = 200
REUSED = re.compile(r'vllm:blend_prompt_tokens_total\{engine="(\d+)",.*source="reused".*\} (\S+)')


def ids(seed: int, size: int) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(1000, 40_000) for _ in range(size)]


@contextmanager
def servers(model: Path, folder: Path, options: Sequence[Sequence[str]]) -> Iterator[list[str]]:
    """A ``vllm serve`` for each list of options, all with one folder of chunks; their addresses."""
    with ExitStack() as stack:
        started = []
        for number, one in enumerate(options):
            port, log = free_port(), folder / f"log{number}.txt"
            command = command_of(model, port, disk(folder), [*one, "--shutdown-timeout", "5"])
            at = command.index("--model")
            command[1:at] = ["-m", vllm_command.__name__, "serve"]
            server = stack.enter_context(running(command, log))
            started.append((f"http://127.0.0.1:{port}", server, log))
        for url, server, log in started:
            wait_for(f"{url}/health", server, log)
        yield [url for url, _, _ in started]


def reused_by_engine(urls: Sequence[str]) -> dict[tuple[str, str], float]:
    """Tokens that were reused, by server and engine."""
    found: dict[tuple[str, str], float] = {}
    for url in urls:
        for engine, count in REUSED.findall(httpx.get(f"{url}/metrics", timeout=30).text):
            found[url, engine] = float(count)
    return found


def ask(url: str, chunk: list[int], seed: int) -> int:
    """Tokens reused of a prompt that has the chunk amid others."""
    prompt = ids(seed, 20)
    field = {"report": True, "spans": [[20, 20 + CHUNK_TOKENS]]}
    answer = connect(url).completions.create(
        model="smollm2",
        prompt=[*prompt, *chunk, *ids(seed + 1, 5)],
        max_tokens=2,
        temperature=0,
        extra_body=xargs(field),
    )
    return int(reported(answer)["reused_tokens"])


def check_all_reuse(urls: Sequence[str], engines: int) -> None:
    """Asks for chunks until each engine has reused chunks; the second request of any finds them."""
    misses, asked = 0, 0
    for number in range(12):
        chunk = ids(100 + number, CHUNK_TOKENS)
        assert ask(urls[number % len(urls)], chunk, 1000 + 10 * number) == 0
        time.sleep(2)  # to be written, and seen by the other engines
        for again in range(4):
            url = urls[(number + again) % len(urls)]
            misses += ask(url, chunk, 5000 + 100 * number + 10 * again) < CHUNK_TOKENS
            asked += 1
    reused = reused_by_engine(urls)
    print(f"{misses} of {asked} missed; reused tokens by server and engine: {reused}")
    assert len(reused) == engines and min(reused.values()) >= 3 * CHUNK_TOKENS
    assert misses == 0


@pytest.mark.covers("data parallelism, vLLM's own balancer", backend="CPU_ATTN", family="Llama")
def test_two_engines_behind_two_api_servers(smollm2: Path, tmp_path: Path) -> None:
    options = ["--data-parallel-size", str(REPLICAS), "--api-server-count", "2"]
    with servers(smollm2, tmp_path, [options]) as urls:
        check_all_reuse(urls, REPLICAS)


@pytest.mark.covers("data parallelism, a balancer before it", backend="CPU_ATTN", family="Llama")
def test_two_servers_that_share_a_folder(smollm2: Path, tmp_path: Path) -> None:
    """As vLLM wants it for dense models: instances of their own, and no ``--data-parallel`` option."""
    with servers(smollm2, tmp_path, [[], []]) as urls:
        check_all_reuse(urls, REPLICAS)
