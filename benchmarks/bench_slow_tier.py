"""A server whose chunks lie in a slow tier: TTFT against the longer of load and compute.

    python benchmarks/bench_slow_tier.py --rates 25 50 100

One server computes chunks and writes them to a folder. For each rate another one reads them there, at
so many MB/s (``slow_disk.py``); it is asked once for each prompt, whose chunks it has never seen, and
then again with the chunks in memory, which is the compute. The load is the records' bytes at that rate.
The first prompt is not counted: the server learns from it how fast the tier is. Printed are medians.
Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import islice
from statistics import median
from typing import Any

from harness import QUESTION, hardware, print_table
from served import (
    SEPARATOR,
    documents,
    log_of,
    model_of,
    parser_of,
    plugin_environment,
    post,
    reset_prefix_cache,
    server,
    wait_for,
)
from slow_disk import RATE

ARGUMENTS = "--enforce-eager --max-num-seqs 8 --served-model-name model".split()  # noqa: SIM905
SERVER = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}
"""A CPU's model leaves one core to the loads and to the rest, as it does where vLLM is not told."""
HOST_GB = 2.0
SETTLE_S = 1.5
"""Until what was computed is written."""
START = (-1, 0.0)
INSTRUCTION = "Answer the question by these texts.\n\n"


def main() -> None:
    parser = parser_of((__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[50, 100, 200, 400], help="MB/s")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--policy", default="static")
    parser.add_argument("--ratio", type=float, default=0.16)
    parser.add_argument("--chunks", type=int, default=5, help="of a prompt")
    parser.add_argument("--chunk-tokens", type=int, default=400)
    parser.add_argument("--repeat", type=int, default=5, help="prompts at each rate")
    options = parser.parse_args()
    run(options)


def run(options: argparse.Namespace) -> None:
    with ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = model_of(options, folder)
        prompts = prompts_of(options, model)
        disk = {"folder": str(folder / "chunks"), "budget_gb": 8, "fsync": False}
        environment = plugin_environment(folder)
        with started(model, disk, options, environment) as up:
            url = wait_for("writer", up)
            sizes = {
                place: written(folder / "chunks", url, prompt) for place, prompt in prompts.items()
            }
        file = folder / "rate"
        environment |= slow_environment(folder, environment, file)
        first, found = prompts.pop(START), {}
        for rate in options.rates:
            file.write_text(str(rate * 1e6))
            with started(model, disk, options, environment) as up:
                url = wait_for("reader", up)
                warm_up(url, first)
                found[rate] = measure(
                    url, rate, {place: prompts[place] for place in prompts if place[1] == rate}, sizes
                )
    rows = [
        (f"{rate:g} MB/s", *(f"{median(t[i] for t in times):.3f}" for i in range(4)))
        + (f"{median(t[2] / max(t[:2]) for t in times):.2f}",)
        + (f"{median(t[2] / sum(t[:2]) for t in times):.2f}",)
        for rate, times in found.items()
    ]
    size = f"{options.chunks} chunks of some {options.chunk_tokens} tokens"
    print(f"\n{hardware()}; {size}, {options.policy}@{options.ratio}, {options.dtype}\n")
    print_table(
        ("tier", "load (s)", "compute (s)", "TTFT (s)", "waited (s)", "of the longer", "of the sum"),
        rows,
    )
    print(json.dumps({"policy": options.policy, "ratio": options.ratio, "times": found}))


@contextmanager
def started(
    model: str, disk: dict[str, Any], options: argparse.Namespace, environment: dict[str, str]
) -> Iterator[Any]:
    settings = {"policy": options.policy, "recomp_ratio": options.ratio, "log_requests": False}
    config = {"vllm_blend": settings | {"store": {"host_gb": HOST_GB, "disk": disk}}}
    longest = options.chunks * (options.chunk_tokens + 64) + 64
    arguments = [*ARGUMENTS, "--max-model-len", str(longest), "--dtype", options.dtype]
    arguments += ["--max-num-batched-tokens", str(longest)]
    arguments += ["--additional-config", json.dumps(config)]
    with server(model, arguments, environment | SERVER, log_of("", None)) as up:
        yield up


def prompts_of(options: argparse.Namespace, model: str) -> dict[tuple[int, float], str]:
    """A prompt for each turn and rate, and one for the start; each of chunks of its own."""
    places = [(turn, rate) for rate in options.rates for turn in range(options.repeat)]
    size = [options.chunk_tokens, options.chunk_tokens]
    texts = iter(documents((len(places) + 1) * options.chunks, size, pathlib.Path(model)))
    return {
        place: SEPARATOR.join([INSTRUCTION, *islice(texts, options.chunks), QUESTION])
        for place in [START, *places]
    }


def written(folder: pathlib.Path, url: str, prompt: str) -> int:
    """Bytes of a prompt's chunks on the disk, once the server has computed and written them."""

    def size() -> int:
        return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))

    before = size()
    ask(url, prompt)
    time.sleep(SETTLE_S)
    return size() - before


def slow_environment(
    folder: pathlib.Path, environment: Mapping[str, str], rate: pathlib.Path
) -> dict[str, str]:
    """What makes a server's disk slow: a plugin of vLLM's, beside this package's own."""
    info = folder / "slow_disk-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slow_disk\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nslow_disk = slow_disk:register\n")
    paths = [str(folder), str(pathlib.Path(__file__).parent), environment.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(paths), RATE: str(rate)}


def warm_up(url: str, prompt: str) -> None:
    """Prefills that tell the server how fast it is, and blended ones."""
    for _ in range(3):
        reset_prefix_cache(url)
        ask(url, prompt)
        reset_prefix_cache(url)
        ask(url, prompt, blend=False)


def measure(
    url: str,
    rate: float,
    prompts: Mapping[tuple[int, float], str],
    sizes: Mapping[tuple[int, float], int],
) -> list[tuple[float, ...]]:
    """Load, compute, TTFT and the wait before the prefill of each prompt, in seconds."""
    found: list[tuple[float, ...]] = []
    for place, prompt in prompts.items():
        reset_prefix_cache(url)
        cold, told = ask(url, prompt)
        load = sizes[place] / (rate * 1e6)
        if told["missed_chunks"] or not told["loaded_chunks"]:
            raise RuntimeError(f"at {rate:g} MB/s chunks were not loaded: {told}")
        warm = []
        for _ in range(3):
            reset_prefix_cache(url)
            warm.append(ask(url, prompt)[0])
        found.append((load, median(warm), cold, told["wait_seconds"]))
    return found


def ask(url: str, prompt: str, blend: bool = True) -> tuple[float, dict[str, Any]]:
    """Seconds until the first token, and the report."""
    field = {"separator": SEPARATOR, "report": True} if blend else "off"
    xargs = {"blend": json.dumps(field) if blend else field}
    text = prompt if blend else prompt.replace(SEPARATOR, " ")
    body = {"model": "model", "prompt": text, "max_tokens": 1, "temperature": 0, "vllm_xargs": xargs}
    start = time.perf_counter()
    answer = post(f"{url}/v1/completions", body)
    seconds = time.perf_counter() - start
    return seconds, (answer.get("kv_transfer_params") or {}).get("blend", {})


if __name__ == "__main__":
    main()
