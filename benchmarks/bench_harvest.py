"""What keeping a prompt's chunks costs its prefill: the same engine, with chunks marked and without.

    python benchmarks/bench_harvest.py                        # a GPU, Mistral-7B's shape
    python benchmarks/bench_harvest.py --shape tiny --dtype float32 --chunk-tokens 30 40    # a CPU

Prompts of random tokens, never seen before, so that nothing is reused: the price that cold traffic
pays. ``--at-once`` prompts are sent together, in turns without and with chunks, of the same lengths.
Shown are medians of the rounds, and seconds of the process's CPU a prompt; the last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import tempfile
import time
from functools import partial
from statistics import median
from typing import Any

from harness import hardware, print_table
from timeline import timeline

OUTPUT_TOKENS = 16
PLAIN_TOKENS = 20
"""Tokens before the chunks, and after them."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="mistral-7b", help="of ttft_shapes.py, with dummy weights")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--eager", action="store_true", help="no torch.compile, no CUDA graphs")
    parser.add_argument("--chunks", type=int, default=5, help="of a prompt (5)")
    parser.add_argument(
        "--chunk-tokens", type=int, nargs=2, default=[900, 1250], metavar=("FROM", "TO")
    )
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8, 24], help="prompts of a round")
    parser.add_argument("--repeat", type=int, default=5, help="rounds (5)")
    parser.add_argument(
        "--timeline", action="store_true", help="on a GPU: what it did in a round of each"
    )
    parser.add_argument("--ram-gb", type=float, default=40, help="for chunks (40)")
    options = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from ttft_shapes import make_llm, write_config

    with tempfile.TemporaryDirectory() as folder:
        write_config(options.shape, pathlib.Path(folder))
        settings = {"vllm_blend": {"ram_gb": options.ram_gb, "log_requests": False}}
        llm = make_llm(folder, 16384, options, additional_config=settings)
    results = run(llm, options)
    rows = [
        [
            found["at_once"],
            f"{1e3 * found['plain_s']:.0f} ms",
            f"{1e3 * found['kept_s']:.0f} ms",
            f"{found['ratio']:.3f}",
            f"{found['plain_cpu_s']:.3f}",
            f"{found['kept_cpu_s']:.3f}",
        ]
        for found in results
    ]
    print(f"\n{hardware()}; {options.shape}\n")
    head = ["prompts at once", "plain", "chunks kept", "ratio", "CPU s a prompt, plain", "chunks kept"]
    print_table(head, rows)
    if options.timeline:
        kinds = [*results[0]["timelines"][0]]
        print_table(
            ["prompts at once", "chunks", *(f"{kind} (ms)" for kind in kinds)],
            [
                [
                    found["at_once"],
                    "kept" if kept else "plain",
                    *(f"{line[kind]:.1f}" for kind in kinds),
                ]
                for found in results
                for kept, line in enumerate(found["timelines"])
            ],
        )
    print(json.dumps({"hardware": hardware(), "shape": options.shape, "results": results}))


def run(llm: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds of a round without and with chunks, for each number of prompts."""
    choose = random.Random(0)
    for kept in (False, True, True):  # kernels that are compiled at first use
        seconds(llm, prompts_of(choose, sizes_of(choose, max(options.at_once) // 4 + 1, options)), kept)
    results = []
    for at_once in options.at_once:
        times: dict[bool, list[float]] = {False: [], True: []}
        cpu: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(options.repeat):
            sizes = sizes_of(choose, at_once, options)
            for kept in (False, True) if turn % 2 else (True, False):
                prompts = prompts_of(choose, sizes)
                before = time.process_time()
                times[kept].append(seconds(llm, prompts, kept))
                cpu[kept].append((time.process_time() - before) / at_once)
        plain, with_chunks = median(times[False]), median(times[True])
        found: dict[str, Any] = {"at_once": at_once, "plain_s": plain, "kept_s": with_chunks}
        found |= {"plain_cpu_s": median(cpu[False]), "kept_cpu_s": median(cpu[True])}
        if options.timeline:
            sizes = sizes_of(choose, at_once, options)
            of_rounds = [
                timeline(partial(seconds, llm, prompts_of(choose, sizes), kept))
                for kept in (False, True)
            ]
            found |= {"timelines": of_rounds}
        results.append(found | {"ratio": with_chunks / plain})
        print(json.dumps(results[-1]), flush=True)
    return results


Prompt = tuple[list[int], list[list[int]]]
"""Token ids, and where the chunks are."""


def sizes_of(choose: random.Random, count: int, options: argparse.Namespace) -> list[list[int]]:
    """Lengths of the chunks of so many prompts."""
    return [
        [choose.randint(*options.chunk_tokens) for _ in range(options.chunks)] for _ in range(count)
    ]


def prompts_of(choose: random.Random, sizes: list[list[int]]) -> list[Prompt]:
    """Prompts of random tokens with chunks of these lengths."""
    return [_prompt(choose, of_chunks) for of_chunks in sizes]


def _prompt(choose: random.Random, sizes: list[int]) -> Prompt:
    def tokens(count: int) -> list[int]:
        return [choose.randrange(10, 300) for _ in range(count)]

    ids, spans = tokens(PLAIN_TOKENS), []
    for size in sizes:
        spans.append([len(ids), len(ids) + size])
        ids += tokens(size)
    return ids + tokens(PLAIN_TOKENS), spans


def seconds(llm: Any, prompts: list[Prompt], kept: bool) -> float:
    """How long it takes to answer prompts that are sent at once."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=0,
            max_tokens=OUTPUT_TOKENS,
            ignore_eos=True,
            detokenize=False,
            extra_args={"blend": {"spans": spans}} if kept else None,
        )
        for _, spans in prompts
    ]
    start = time.perf_counter()
    llm.generate([{"prompt_token_ids": ids} for ids, _ in prompts], params, use_tqdm=False)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
