"""A server under a RAG-like load, stock against blending, driven by vLLM's own ``bench serve`` client.

A trace: 100 documents, 6 of them in each request by Zipf's law, a question after them. Both servers
are up, and take turns: the same trace one request after the other (TTFT), at given rates, some at a
time, then all at once (throughput). The blending server has seen every document once before ("warm");
the prefix cache is on in both. Needs pandas, as vLLM's client does for a trace of one's own. The last
line is one JSON object.

On a GPU: --shape mistral-7b --chunk-tokens 600 1300, a real model's shape with dummy weights.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import tempfile
import time
from contextlib import ExitStack
from itertools import product
from typing import Any

import torch
from harness import hardware, print_table, samples, sm_clock
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

MAX_ROUNDS = 30
"""How often a server is shown the documents; one that knows them sooner is shown them no more."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", choices=("stock", "blend"), help="one of the two servers")
    parser.add_argument(
        "--metrics", type=pathlib.Path, help="leave /metrics there after each load, and the logs"
    )
    parser.add_argument("--rates", type=float, nargs="*", default=[], help="requests a second")
    parser.add_argument(
        "--concurrency", type=int, nargs="*", default=[], help="requests at a time, beside 1 and all"
    )
    parser.add_argument(
        "--chunk-tokens", type=int, nargs=2, metavar=("FROM", "TO"), help="length of the documents"
    )
    parser.add_argument("--requests", type=int, default=40, help="in the trace (40)")
    parser.add_argument("--documents", type=int, default=100, help="in the corpus (100)")
    parser.add_argument("--chunks", type=int, default=6, help="documents a request (6)")
    parser.add_argument("--output-tokens", type=int, default=16, help="a request (16)")
    parser.add_argument(
        "--ratios", type=float, nargs="+", default=[0.16], help="recomp_ratio, in turns (0.16)"
    )
    parser.add_argument(
        "--policies", nargs="+", default=[None], help="each at every ratio (default: the server's)"
    )
    parser.add_argument(
        "--settings", type=json.loads, default={}, help="more of the blending server's, as JSON"
    )
    parser.add_argument("--together", action="store_true", help="leave out one request after the other")
    parser.add_argument(
        "--plain", action="store_true", help="also the blending server with blend off in each request"
    )
    parser.add_argument("--ram-gb", type=float, default=8, help="for chunks' KV (8)")
    parser.add_argument(
        "--gpus",
        nargs=2,
        metavar=("STOCK", "BLEND"),
        help="a GPU for each server, as CUDA_VISIBLE_DEVICES names it (default: they share one)",
    )
    parser.add_argument("--server-args", help="for both servers (default: --dtype, --max-model-len)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run(options, pathlib.Path(folder))


def run(options: argparse.Namespace, folder: pathlib.Path) -> None:
    """Starts the servers and prints what they did."""
    model = model_of(options, folder)
    if options.shape:
        server_args = "--load-format dummy --dtype bfloat16 --max-model-len 16384"
        if torch.cuda.is_available() and options.gpus is None:  # two servers on one GPU
            server_args += " --gpu-memory-utilization 0.45 --kv-cache-memory-bytes 12G"
    else:
        server_args = "--dtype float32 --max-model-len 8192"
    server_args = options.server_args or server_args
    corpus = documents(options.documents, options.chunk_tokens, pathlib.Path(model))
    prompts = trace(corpus, options.requests, options.chunks)
    settings = {"ram_gb": options.ram_gb, "log_requests": False, "separator": SEPARATOR}
    settings |= {"report_sizes": True} | options.settings
    if "store" in settings:  # it has sizes of its own
        del settings["ram_gb"]
    config = json.dumps({"vllm_blend": settings})
    servers: dict[str, tuple[list[str], dict[str, str]]] = {
        "stock": ([], {"VLLM_PLUGINS": ""}),
        "blend": (["--additional-config", config], plugin_environment(folder)),
    }
    rows, results, num_tokens = [], [], 0.0
    loads = {} if options.together else {"one by one": ["--max-concurrency", "1"]}
    loads |= {f"{rate:g} requests/s": ["--request-rate", str(rate)] for rate in options.rates}
    loads |= {f"{most} at a time": ["--max-concurrency", str(most)] for most in options.concurrency}
    loads |= {"all at once": []}
    with ExitStack() as stack:
        kinds = [options.only] if options.only else list(servers)
        up = {}
        for kind in kinds:
            arguments, environment = servers[kind]
            if options.gpus is not None:
                environment["CUDA_VISIBLE_DEVICES"] = options.gpus[kind == "blend"]
            log = log_of(kind, options.metrics)
            started = server(model, [*server_args.split(), *arguments], environment, log)
            up[kind] = stack.enter_context(started)
        urls = {kind: wait_for(kind, process) for kind, process in up.items()}
        if "blend" in urls:
            warm(urls["blend"], model, corpus, bool(settings.get("stand_in")))
        contenders: list[tuple[str, str, dict[str, Any] | str | None]] = []
        for kind in kinds:
            if kind == "stock":
                contenders.append(("stock", kind, None))
                continue
            for policy, ratio in product(options.policies, options.ratios):
                name = " ".join([policy or "blend", f"{ratio:.0%}"])
                asked = {"recomp_ratio": ratio} | ({"policy": policy} if policy else {})
                contenders.append((name, kind, asked))
            if options.plain:
                contenders.append(("blend off", kind, "off"))
        for load, limits in loads.items():
            for name, kind, blend in contenders:
                url = urls[kind]
                marked = isinstance(blend, dict)
                sent = prompts if marked else [p.replace(SEPARATOR, "") for p in prompts]
                reset_prefix_cache(url)
                clock = sm_clock()
                found = run_client(url, model, sent, limits, options.output_tokens, blend)
                clocks = f", SM clock {clock} and {sm_clock()} MHz" if clock else ""
                if options.metrics is not None:
                    text = get(f"{url}/metrics")
                    file = f"{name}-{load.split('/')[0]}".replace(" ", "-")
                    (options.metrics / file).write_text(text)
                num_tokens = found["total_input_tokens"] / options.requests
                figures = {
                    "ttft_p50_ms": found["median_ttft_ms"],
                    "ttft_p99_ms": found["p99_ttft_ms"],
                    "tpot_p50_ms": found["median_tpot_ms"],
                    "requests_per_s": found["request_throughput"],
                }
                rows.append([name, load, *(f"{value:.4g}" for value in figures.values())])
                told = ", ".join(f"{key} {value:.4g}" for key, value in figures.items())
                print(f"{name}, {load}: {found['duration']:.0f} s, {told}{clocks}", flush=True)
                results.append({"server": name, "load": load, **figures})
    what = options.shape or model
    print(f"\n{hardware()}; {what}; prompts of {num_tokens:.0f} tokens\n")
    header = ["server", "load", "TTFT p50 (ms)", "TTFT p99 (ms)", "time per token (ms)", "requests/s"]
    print_table(header, rows)
    facts = {"hardware": hardware(), "model": what, "requests": options.requests}
    print(json.dumps(facts | {"prompt_tokens": num_tokens, "results": results}))


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


def warm(url: str, model: str, corpus: list[str], first: bool) -> None:
    """Shows the server every document, until it knows them all.

    Args:
        first: where it keeps other KV of a prompt's first chunk: each document first as well.
    """
    # each document after another
    groups = [[corpus[at - 1], *corpus[at : at + 9]] for at in range(0, len(corpus), 9)]
    groups += [[text] for text in corpus] if first else []
    missed, computed, before = 1, 0, -1
    for _ in range(MAX_ROUNDS):
        if not missed and computed == before:
            return
        missed, before = 0, computed
        reset_prefix_cache(url)  # a prompt that is found whole there computes no chunk
        why_not = set()
        for group in groups:
            parts = [f"{text}\n\n" for text in group]
            body = {
                "model": model,
                "prompt": SEPARATOR.join(["Read.\n\n", *parts, "Why?"]),
                "max_tokens": 1,
                "vllm_xargs": {"blend": '{"report": true}'},
            }
            report = post(f"{url}/v1/completions", body)["kv_transfer_params"]["blend"]
            missed += report["missed_chunks"] or bool(report["why_not"])
            why_not.add(report["why_not"] or "")
            computed = report["computed_chunks"]
        told = "; ".join(filter(None, why_not))
        print(f"warming: {missed} documents missed, {computed} computed {told}".rstrip(), flush=True)
        time.sleep(2)  # an idle engine computes them at once
    raise RuntimeError(f"{missed} documents are still missed after they were sent {MAX_ROUNDS} times")


if __name__ == "__main__":
    main()
