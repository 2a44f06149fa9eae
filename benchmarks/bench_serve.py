"""A server under a RAG-like load, stock against blending, driven by vLLM's own ``bench serve`` client.

A trace: 100 documents, 6 of them in each request by Zipf's law, a question behind them. Each server is
started in turn and sees the same trace twice: one request after the other (TTFT), then all at once
(throughput). The blending server has seen every document once before ("warm"); the prefix cache
is on in both. Needs pandas, as vLLM's client does. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from harness import hardware, print_table, samples, texts

from vllm_blend import embedded_model

SEPARATOR = "<|chunk|>"
CLIENT = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=pathlib.Path, help="model folder (default: SmolLM2-135M)")
    parser.add_argument("--requests", type=int, default=40, help="in the trace (40)")
    parser.add_argument("--documents", type=int, default=100, help="in the corpus (100)")
    parser.add_argument("--chunks", type=int, default=6, help="documents a request (6)")
    parser.add_argument("--output-tokens", type=int, default=16, help="a request (16)")
    parser.add_argument("--ratio", type=float, default=0.16, help="recomp_ratio (0.16)")
    parser.add_argument("--server-args", default="--dtype float32", help="for both servers")
    options = parser.parse_args()

    model = str(options.model or embedded_model())
    corpus = documents(options.documents)
    prompts = trace(corpus, options.requests, options.chunks)
    config = {"vllm_blend": {"recomp_ratio": options.ratio, "ram_gb": 8, "log_requests": False}}
    servers: dict[str, tuple[list[str], dict[str, str]]] = {
        "stock": ([], {"VLLM_PLUGINS": ""}),
        f"blend {options.ratio:.0%}": (["--additional-config", json.dumps(config)], {}),
    }
    rows, results = [], []
    for name, (arguments, environment) in servers.items():
        blends = bool(arguments)
        with server(model, [*options.server_args.split(), *arguments], environment) as url:
            if blends:
                warm(url, model, corpus)
            sent = prompts if blends else [prompt.replace(SEPARATOR, "") for prompt in prompts]
            for load, concurrency in (("one by one", 1), ("all at once", None)):
                reset_prefix_cache(url)
                found = run_client(url, model, sent, concurrency, options.output_tokens)
                figures = {
                    "ttft_p50_ms": found["median_ttft_ms"],
                    "ttft_p99_ms": found["p99_ttft_ms"],
                    "tpot_p50_ms": found["median_tpot_ms"],
                    "requests_per_s": found["request_throughput"],
                }
                rows.append([name, load, *(f"{value:.4g}" for value in figures.values())])
                results.append({"server": name, "load": load, **figures})
    print(f"\n{hardware()}; {model}\n")
    header = ["server", "load", "TTFT p50 (ms)", "TTFT p99 (ms)", "time per token (ms)", "requests/s"]
    print_table(header, rows)
    print(json.dumps({"hardware": hardware(), "requests": options.requests, "results": results}))


def documents(count: int) -> list[str]:
    """Texts of the inputs; beyond them, the same with their sentences in another order."""
    found = [text for sample in samples() for text in texts(sample)]
    shuffle = random.Random(0).shuffle
    for text in list(found) * (count // len(found)):
        sentences = re.split(r"(?<=[.!?])\s+", text)
        shuffle(sentences)
        found.append(" ".join(sentences))
    return found[:count]


def trace(corpus: list[str], count: int, chunks: int) -> list[str]:
    """Prompts over documents drawn by Zipf's law (exponent 1), without repetition in a prompt."""
    choose = random.Random(1)
    weights = [1 / rank for rank in range(1, len(corpus) + 1)]
    questions = [sample["query"] for sample in samples()]
    prompts = []
    for _ in range(count):
        drawn: dict[int, None] = {}
        while len(drawn) < chunks:
            drawn[choose.choices(range(len(corpus)), weights)[0]] = None
        parts = ["Read the documents.\n\n", *(f"{corpus[at]}\n\n" for at in drawn)]
        prompts.append(SEPARATOR.join([*parts, f"Question: {choose.choice(questions)}\nAnswer:"]))
    return prompts


@contextmanager
def server(model: str, arguments: list[str], environment: dict[str, str]) -> Iterator[str]:
    """An OpenAI server, up while it lasts; yields its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "8192", *arguments]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
        **os.environ,
        "VLLM_LOGGING_LEVEL": "WARNING",
        **environment,
    }
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        url = f"http://127.0.0.1:{port}"
        try:
            while process.poll() is None and not responds(f"{url}/health"):
                time.sleep(1)
            if process.poll() is not None:
                log.seek(0)
                raise RuntimeError(f"the server ended: {log.read()[-3000:].decode(errors='replace')}")
            yield url
        finally:
            process.terminate()
            process.wait(60)


def responds(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def post(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method="POST")
    with urllib.request.urlopen(request, timeout=600) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def reset_prefix_cache(url: str) -> None:
    post(f"{url}/reset_prefix_cache")


def warm(url: str, model: str, corpus: list[str]) -> None:
    """Shows the server every document, until it knows them all."""
    missed = 1
    while missed:
        missed = 0
        for start in range(0, len(corpus), 10):
            parts = [f"{text}\n\n" for text in corpus[start : start + 10]]
            body = {
                "model": model,
                "prompt": SEPARATOR.join(["Read.\n\n", *parts, "Why?"]),
                "max_tokens": 1,
                "vllm_xargs": {"blend": '{"report": true}'},
            }
            report = post(f"{url}/v1/completions", body)["kv_transfer_params"]["blend"]
            missed += report["missed_chunks"] or bool(report["why_not"])
        print(f"warming: {missed} documents missed", flush=True)


def run_client(
    url: str, model: str, prompts: list[str], concurrency: int | None, output_tokens: int
) -> dict[str, Any]:
    """vLLM's ``bench serve`` on the prompts; its result."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "trace.jsonl"
        path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        command = [sys.executable, "-c", CLIENT, "--model", model, "--base-url", url]
        command += ["--dataset-name", "custom", "--dataset-path", str(path), "--disable-shuffle"]
        command += ["--skip-chat-template", "--custom-output-len", str(output_tokens), "--ignore-eos"]
        command += ["--num-prompts", str(len(prompts)), "--save-result", "--result-dir", folder]
        command += ["--result-filename", "result.json", "--temperature", "0"]
        if concurrency is not None:
            command += ["--max-concurrency", str(concurrency)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads((pathlib.Path(folder) / "result.json").read_text())
    return found


if __name__ == "__main__":
    main()
