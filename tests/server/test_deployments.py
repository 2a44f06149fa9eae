"""The five deployments of docs/serve.md: each is started by its own line there, and reuses chunks."""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest
from servers import RedisServer, free_port
from serving import connect, running, wait_for, xargs

from vllm_blend.cli import vllm_command

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"<!-- deployments -->\n```console\n(.*?)```", re.S)
LINES = BLOCK.findall((ROOT / "docs/serve.md").read_text())[0].splitlines()
NAMES = (
    "one engine",
    "a disk",
    "tensor parallelism",
    "pipeline parallelism",
    "data parallelism, Redis",
)
TEXTS = (
    "Ada Lindqvist came from Uppsala. She founded the bakery on Mill Street in 1921, and left it.\n\n",
    "In winter the river freezes, and the ferry to the island stops until March, when it thaws.\n\n",
)
QUESTION = "When was the bakery founded?"


@contextmanager
def started(line: str, model: Path, folder: Path, redis: RedisServer) -> Iterator[str]:
    """The server of a line, on this machine: a CPU's two cores, ports and folders of its own."""
    line = line.replace("/var/cache/chunks", str(folder / "chunks"))
    line = line.replace("redis://127.0.0.1:6379/0", redis.url)
    program, subcommand, name, *arguments = shlex.split(line)
    assert (program, subcommand, name) == ("vllm", "serve", "MODEL")
    port, log = free_port(), folder / "log.txt"
    command = [sys.executable, "-m", vllm_command.__name__, "serve", str(model), *arguments]
    command += ["--port", str(port), "--host", "127.0.0.1", "--max-model-len", "2048"]
    if "--pipeline-parallel-size" not in arguments:  # which vLLM cannot do on a CPU without compilation
        command.append("--enforce-eager")
    # a rank wants a NUMA node of its own, and all memory that is left
    variables = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with running(command, log, **variables) as server:
        wait_for(f"http://127.0.0.1:{port}/health", server, log)
        yield f"http://127.0.0.1:{port}"
        assert "Traceback" not in log.read_text()


def ask(client: openai.OpenAI, texts: tuple[str, ...]) -> int:
    """Tokens reused of a chat with these texts."""
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[
            {
                "role": "user",
                "content": [{"type": "text", "text": text} for text in (*texts, QUESTION)],
            }
        ],
        max_tokens=4,
        temperature=0,
        extra_body=xargs(json.dumps({"report": True})),
    )
    assert answer.choices[0].message.content
    return int(answer.model_extra["kv_transfer_params"]["blend"]["reused_tokens"])  # type: ignore[index]


@pytest.mark.parametrize("at", range(len(NAMES)), ids=NAMES)
@pytest.mark.covers("a server, started as the docs say", backend="CPU_ATTN", family="Llama")
def test_deployment(
    at: int, smollm2: Path, model: Path, tmp_path: Path, redis_server: RedisServer
) -> None:
    assert len(LINES) == len(NAMES)
    folder = model if NAMES[at] == "tensor parallelism" else smollm2  # which has nine heads
    with started(LINES[at], folder, tmp_path, redis_server) as url, connect(url) as client:
        assert ask(client, TEXTS) == 0
        end = time.monotonic() + 60
        while not (reused := ask(client, TEXTS[::-1])) and time.monotonic() < end:
            time.sleep(1)
        assert reused > 40
