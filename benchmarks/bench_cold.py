"""A server that has seen nothing, stock against blending: the same requests to both, driven by vLLM's
own ``bench serve`` client, with what each third of them took.

A chunk of a request was seen before with the given probability (then drawn by Zipf's law among those
seen so far), else it is new. The prefix cache is on in both servers; nothing is warmed up but the
model. While one is measured the other is stopped. The last line is one JSON object.

    python benchmarks/bench_cold.py --seen 0 0.6 --concurrency 8
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import re
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import psutil
import torch
from harness import hardware, print_table, samples
from served import (
    SEPARATOR,
    documents,
    get,
    log_of,
    model_of,
    parser_of,
    plugin_environment,
    post,
    reset_prefix_cache,
    run_client,
    server,
    wait_for,
)

REUSED = re.compile(r'vllm:blend_prompt_tokens_total\{.*source="reused".*\} (\S+)')


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--requests", type=int, default=60, help="of each trace (60)")
    parser.add_argument("--chunks", type=int, default=5, help="documents a request (5)")
    parser.add_argument("--chunk-tokens", type=int, nargs=2, default=[300, 500], metavar=("FROM", "TO"))
    parser.add_argument("--seen", type=float, nargs="+", default=[0, 0.3, 0.6, 0.9])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[8])
    parser.add_argument("--output-tokens", type=int, default=16, help="a request (16)")
    parser.add_argument("--settings", type=json.loads, default={}, help="of the server, as JSON")
    parser.add_argument("--server-args", default="--dtype float32 --max-model-len 8192")
    parser.add_argument("--blend-first", action="store_true", help="start that server first")
    parser.add_argument("--logs", type=pathlib.Path, help="leave the servers' logs there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run(options, pathlib.Path(folder))


def run(options: argparse.Namespace, folder: pathlib.Path) -> None:
    """Starts both servers and prints what they did."""
    model = model_of(options, folder)
    settings = {"ram_gb": 4, "log_requests": False, "separator": SEPARATOR, "report_sizes": True}
    config = json.dumps({"vllm_blend": settings | options.settings})
    rows, results = [], []
    with ExitStack() as stack:
        urls, processes = start_both(
            stack, model, options.server_args, config, folder, options.logs, options.blend_first
        )
        total = options.requests * options.chunks * len(options.seen) * len(options.concurrency)
        corpus = iter(documents(total, options.chunk_tokens, pathlib.Path(model)))
        for seed, (seen, concurrency) in enumerate(
            (seen, concurrency) for seen in options.seen for concurrency in options.concurrency
        ):
            prompts = trace(corpus, options.requests, options.chunks, seen, seed)
            step = -(-len(prompts) // 3)
            for third in range(3):
                part = prompts[third * step : (third + 1) * step]
                for kind in sorted(urls, reverse=bool(third % 2)):
                    reset_prefix_cache(urls[kind])
                    before = cpu_seconds(processes[kind])
                    with suspended([processes[other] for other in urls if other != kind]):
                        found = measure(urls[kind], kind, model, part, concurrency, options)
                    spent = cpu_seconds(processes[kind]) - before
                    found |= {
                        "cpu_s_per_request": spent / len(part),
                        "server": kind,
                        "seen": seen,
                        "at_a_time": concurrency,
                        "third": third + 1,
                    }
                    print(json.dumps(found), flush=True)
                    results.append(found)
        for seen in options.seen:
            for concurrency in options.concurrency:
                rows += table_rows(results, seen, concurrency)
    print(f"\n{hardware()}; {options.shape or model}; {torch.get_num_threads()} threads\n")
    head = [
        "seen before",
        "at a time",
        "third",
        "requests/s",
        "of stock's",
        "CPU s a request",
        "of stock's",
        "TTFT p50 (s)",
        "of stock's",
    ]
    print_table([*head, "TTFT p95 (s)", "of stock's", "tokens reused"], rows)
    print(json.dumps({"hardware": hardware(), "requests": options.requests, "results": results}))


def start_both(
    stack: ExitStack,
    model: str,
    server_args: str,
    config: str,
    folder: pathlib.Path,
    logs: pathlib.Path | None = None,
    blend_first: bool = False,
) -> tuple[dict[str, str], dict[str, psutil.Process]]:
    """Starts a stock and a blending server; their addresses and processes.

    On some machines the one that starts second computes the same more slowly, whichever it is:
    ``blend_first`` is for a second run that tells the two apart.
    """
    urls, processes = {}, {}
    # a server that is stopped for minutes in the middle of a step is not to take that for a failure
    os.environ.setdefault("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "3600")
    kinds = [
        ("stock", [], {"VLLM_PLUGINS": ""}),
        ("blend", ["--additional-config", config], plugin_environment(folder)),
    ]
    for kind, arguments, environment in reversed(kinds) if blend_first else kinds:
        arguments = [*server_args.split(), *arguments]
        up = stack.enter_context(server(model, arguments, environment, log_of(kind, logs)))
        urls[kind], processes[kind] = wait_for(kind, up), psutil.Process(up.process.pid)
    for url in urls.values():  # kernels that are compiled at first use
        post(f"{url}/v1/completions", {"model": model, "prompt": "word " * 500, "max_tokens": 2})
    return urls, processes


def cpu_seconds(process: psutil.Process) -> float:
    """What a server's processes have used so far: it varies less than time where others work, too."""
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(one.user + one.system for one in times)


@contextmanager
def suspended(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """Stops servers meanwhile: an idle one that blends uses the machine."""
    trees = [tree for process in processes for tree in (process, *process.children(recursive=True))]
    for process in trees:
        process.suspend()
    try:
        yield
    finally:
        for process in trees:
            process.resume()


def trace(corpus: Any, count: int, chunks: int, seen: float, seed: int) -> list[str]:
    """Prompts whose documents were in an earlier one with probability ``seen``."""
    choose = random.Random(seed)
    questions = [sample["query"] for sample in samples()]
    past: list[str] = []
    prompts = []
    for _ in range(count):
        drawn: dict[str, None] = {}
        while len(drawn) < chunks:
            if len(past) > chunks and choose.random() < seen:
                weights = [1 / rank for rank in range(1, len(past) + 1)]
                drawn[choose.choices(past, weights)[0]] = None
            else:
                drawn[next(corpus)] = None
        past += [text for text in drawn if text not in past]
        parts = ["Read the documents.\n\n", *(f"{text}\n\n" for text in drawn)]
        prompts.append(SEPARATOR.join([*parts, f"Question: {choose.choice(questions)}\nAnswer:"]))
    return prompts


def measure(
    url: str, kind: str, model: str, prompts: list[str], concurrency: int, options: argparse.Namespace
) -> dict[str, Any]:
    """What some requests took, and what share of their tokens was reused."""
    before = reused_tokens(url)
    sent = prompts if kind == "blend" else [prompt.replace(SEPARATOR, "") for prompt in prompts]
    limits = ["--max-concurrency", str(concurrency), "--save-detailed"]
    blend: dict[str, Any] | None = {} if kind == "blend" else None
    found = run_client(url, model, sent, limits, options.output_tokens, blend)
    assert found["completed"] == len(prompts), found
    reused = reused_tokens(url) - before
    ttfts = sorted(found["ttfts"])
    return {
        "requests": len(prompts),
        "seconds": found["duration"],
        "tokens": found["total_input_tokens"],
        "requests_per_s": found["request_throughput"],
        "ttft_p50_s": statistics.median(ttfts),
        "ttft_p95_s": ttfts[int(0.95 * (len(ttfts) - 1))],
        "reused_share": reused / found["total_input_tokens"],
    }


def reused_tokens(url: str) -> float:
    """The blending server's counter of reused tokens."""
    return sum(float(value) for value in REUSED.findall(get(f"{url}/metrics")))


def table_rows(results: list[dict[str, Any]], seen: float, concurrency: int) -> list[list[str]]:
    """A row for each third, and one for all: the blending server, and how it stands to stock."""
    rows = []
    for third in (1, 2, 3):
        of = {
            r["server"]: r
            for r in results
            if (r["seen"], r["at_a_time"], r["third"]) == (seen, concurrency, third)
        }
        blend, stock = of["blend"], of["stock"]
        row = [f"{seen:.0%}", str(concurrency), str(third)]
        for name in ("requests_per_s", "cpu_s_per_request", "ttft_p50_s", "ttft_p95_s"):
            row += [f"{blend[name]:.3g}", f"{blend[name] / stock[name]:.2f}"]
        rows.append([*row, f"{blend['reused_share']:.0%}"])
    alike = [r for r in results if (r["seen"], r["at_a_time"]) == (seen, concurrency)]
    row = [f"{seen:.0%}", str(concurrency), "all"]
    for value in (throughput, cpu_of):
        blend_all, stock_all = (
            value([r for r in alike if r["server"] == kind]) for kind in ("blend", "stock")
        )
        row += [f"{blend_all:.3g}", f"{blend_all / stock_all:.3f}"]
    rows.append([*row, *[""] * 5])
    return rows


def throughput(results: list[dict[str, Any]]) -> float:
    """Requests a second, of several parts of a trace."""
    return float(sum(r["requests"] for r in results) / sum(r["seconds"] for r in results))


def cpu_of(results: list[dict[str, Any]]) -> float:
    """CPU seconds a request, of several parts of a trace."""
    total = sum(r["requests"] * r["cpu_s_per_request"] for r in results)
    return float(total / sum(r["requests"] for r in results))


if __name__ == "__main__":
    main()
