"""The OpenAI server, as users start it: a process of its own, the stock client, SmolLM2 on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
from servers import free_port

from vllm_blend.server.config import CLIENT_FIELDS

INPUTS = Path(__file__).parents[2] / "inputs"
NAME = "smollm2"
START_SECONDS = 300
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 10}


def sample(number: int) -> tuple[list[str], str]:
    """Three chunks of an input, and its question."""
    values = json.loads((INPUTS / f"{number}.json").read_text())
    return [values[str(at)] for at in range(3)], values["query"]


def disk(folder: Path) -> dict[str, Any]:
    return {"disk": {"folder": str(folder / "chunks"), "budget_gb": 1, "fsync": False}}


def command_of(
    model: Path, port: int, tiers: dict[str, Any], arguments: Sequence[str] = (), **settings: Any
) -> list[str]:
    """Starts a server with a store."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", NAME, "--port", str(port), "--host", "127.0.0.1"]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "4096", *arguments]
    trusting = {"parts": True, "report_sizes": True, "client_fields": list(CLIENT_FIELDS)}
    config = {"vllm_blend": {"store": {"host_gb": 0.5} | tiers} | trusting | settings}
    return command + ["--additional-config", json.dumps(config)]


@contextmanager
def serving(
    model: Path,
    folder: Path,
    tiers: dict[str, Any],
    arguments: Sequence[str] = (),
    tracebacks: Sequence[str] = (),
    **settings: Any,
) -> Iterator[str]:
    """A server with a store, up while it lasts; its address.

    Args:
        tracebacks: what each of the log's says; there are no others.
    """
    port = free_port()
    command = command_of(model, port, tiers, arguments, **settings)
    log = folder / "log.txt"
    with running(command, log) as server:
        wait_for(f"http://127.0.0.1:{port}/health", server, log)
        yield f"http://127.0.0.1:{port}"
        told = log.read_text()
        assert told.count("Traceback") == len(tracebacks), told[-5000:]
        assert all(text in told for text in tracebacks)


@contextmanager
def running(command: Sequence[str], log: Path, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """A server's process, not up yet; it ends with the context.

    Args:
        variables: more of its environment.
    """
    with log.open("w") as out:
        server = subprocess.Popen(command, env=environment() | variables, stdout=out, stderr=out)
        try:
            yield server
        finally:
            server.terminate()
            server.wait(60)


def environment() -> dict[str, str]:
    """Of a server: with processes of its own, and vLLM's endpoints for development."""
    found = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    return found | {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_SERVER_DEV_MODE": "1"}


def wait_for(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and server.poll() is None:
        try:
            if httpx.get(address, timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-5000:])


def connect(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=300)


def xargs(field: Any) -> dict[str, Any]:
    return {"vllm_xargs": {"blend": field if isinstance(field, str) else json.dumps(field)}}


def chat(client: openai.OpenAI, texts: list[str], question: str, **extra: Any) -> Any:
    parts: Any = [{"type": "text", "text": text} for text in [*texts, question]]
    return client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": parts}], extra_body=extra, **GREEDY
    )


def warm(client: openai.OpenAI, texts: list[str], question: str) -> dict[str, Any]:
    """Asks until all chunks are known and scored; the last answer's report."""
    for _ in range(60):
        report: dict[str, Any] = reported(chat(client, texts, question, **xargs({"report": True})))
        if not (report["missed_chunks"] or report["waiting_chunks"]):
            return report
        time.sleep(0.5)
    raise AssertionError(report)


def reported(answer: Any) -> dict[str, Any]:
    found: dict[str, Any] = answer.model_extra["kv_transfer_params"]["blend"]
    return found


def text_of(answer: Any) -> str:
    choice = answer.choices[0]
    text: str = choice.message.content if hasattr(choice, "message") else choice.text
    return text


def reset_prefix_cache(url: str) -> None:
    assert httpx.post(f"{url}/reset_prefix_cache", timeout=30).status_code == 200
