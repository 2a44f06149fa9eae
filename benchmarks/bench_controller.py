"""The loading controller on a real engine: its choice against fixed ratios, tier by tier.

Chunks lie on a disk tier whose reads are throttled, and are loaded anew for every request. Each
request is answered with everything loaded at fixed ratios, by full prefill, and as the controller
decides; the methods take turns. Times are medians; "of the best" is the median of the rounds'
quotients. Printed is also the cheapest of some storages for a target, by their prices. Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; the default takes most of the memory

from harness import QUESTION, documents, hardware, print_table
from slow_disk import Line, SlowSource
from tqdm import tqdm
from vllm import LLM, SamplingParams

from vllm_blend import Blender, embedded_model
from vllm_blend.api.load_control import PacedBlender, PacedOutput
from vllm_blend.store import ChunkKey, ChunkStore, DiskTier
from vllm_blend.store.controller import Decision, Offer, recommend
from vllm_blend.store.load_time import LoadTime

PARAMS = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
OFFERS = {"RAM": [20e9, 3.0], "NVMe": [3e9, 0.1], "network disk": [4e8, 0.05], "objects": [1e8, 0.02]}
"""Bytes a second, and dollars for a GB and month: examples, not quotes."""


class ThrottledDisk(DiskTier):
    """A disk tier whose reads share a ``line``, each after ``latency_s``."""

    latency_s = 0.0
    line = Line()

    def open(self, key: ChunkKey) -> Any:
        source = super().open(key)
        time.sleep(self.latency_s)
        return None if source is None else SlowSource(source, self.line)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=pathlib.Path, help="model folder (default: SmolLM2-135M)")
    parser.add_argument("--tokens", type=int, default=1000, help="of a prompt's chunks (1000)")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[25, 50, 100, 200, 400, 1000, 10_000], help="MB/s"
    )
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.15, 0.3, 0.5, 0.75, 1.0])
    parser.add_argument("--floor", type=float, default=0.15, help="no ratio below it (0.15)")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="of opening a chunk (0)")
    parser.add_argument("--repeat", type=int, default=5, help="counted runs of each (5)")
    parser.add_argument(
        "--offers", type=json.loads, default=OFFERS, help="JSON: name to [bytes a second, price]"
    )
    options = parser.parse_args()
    longest = options.tokens + 512
    llm = LLM(
        model=str(options.model or embedded_model()),
        dtype="float32",
        max_model_len=longest,
        max_num_batched_tokens=longest,
        enable_prefix_caching=False,
        enforce_eager=True,
    )
    with tempfile.TemporaryDirectory(prefix="chunks-") as folder:
        tier = ThrottledDisk(folder, 1 << 40, fsync=False)
        with ChunkStore([tier], host_bytes=1 << 30, write_behind_bytes=1 << 34) as store:
            blender = Blender(llm, store=store)
            texts = documents(blender.tokenizer, options.tokens)
            blender.chunks(texts)
            paced = PacedBlender(blender, floor=options.floor)
            print(f"\n{hardware()}; {llm.llm_engine.model_config.model}\n")
            tier.latency_s = options.latency_ms / 1e3
            results = []
            for rate in tqdm(options.rates, unit="rate"):
                results.append(sweep(paced, tier, texts, rate * 1e6, options))
                tqdm.write(str(results[-1]))
            print_table(list(results[0]), [list(result.values()) for result in results])
            print()
            choices = cheapest(paced, options)
            print_table(list(choices[0]), [list(choice.values()) for choice in choices])
    print()
    print(json.dumps({"hardware": hardware(), "sweep": results, "cheapest": choices}))


def sweep(
    paced: PacedBlender,
    tier: ThrottledDisk,
    texts: Sequence[list[int]],
    bytes_per_s: float,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """One row: every method at one rate."""
    tier.line.bytes_per_s = bytes_per_s
    every, none = (True,) * len(texts), (False,) * len(texts)
    fixed = {
        f"{ratio:.0%}": Decision(ratio, every, 0, 0, 0, "fixed")
        for ratio in options.ratios
        if ratio >= options.floor
    } | {"full prefill": Decision(1.0, none, 0, 0, 0, "fixed")}
    decisions = fixed | {"controller": None}
    ask = partial(paced.generate, texts, QUESTION, PARAMS)
    for _ in range(3):  # the tier's rate is learned
        forget(paced, texts)
        ask(decision=fixed[next(iter(fixed))])
    seconds: dict[str, list[float]] = {name: [] for name in decisions}
    answers: list[PacedOutput] = []
    for _ in range(options.repeat):
        for name, decision in decisions.items():
            forget(paced, texts)
            start = time.perf_counter()
            answer = ask(decision=decision)
            seconds[name].append(time.perf_counter() - start)
            if name == "controller":
                answers.append(answer)
    times = {name: median(values) for name, values in seconds.items()}
    best = min(fixed, key=lambda name: times[name])
    quotients = [a / b for a, b in zip(seconds["controller"], seconds[best], strict=True)]
    ratio = median(answer.decision.ratio for answer in answers)
    loaded = sum(answers[-1].decision.load)
    return {
        "MB/s": f"{bytes_per_s / 1e6:.0f}",
        **{name: f"{times[name]:.2f} s" for name in fixed},
        "controller": f"{times['controller']:.2f} s",
        "expected": f"{median(answer.decision.ttft_s for answer in answers):.2f} s",
        "it chose": f"{loaded} of {len(texts)} loaded, {ratio:.0%}" if loaded else "full prefill",
        "of the best": f"{median(quotients):.2f} ({best})",
    }


def forget(paced: PacedBlender, texts: Sequence[list[int]]) -> None:
    """The chunks lie on disk alone."""
    assert paced.store.flush(600)
    for ids in paced.blender.token_ids(texts):
        paced.store.discard(paced.blender.key(ids))


def cheapest(paced: PacedBlender, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What to buy for a hundred million tokens, by target."""
    shape = paced.blender.model.blending.kv_shape
    token_bytes = 2 * shape.num_layers * shape.num_kv_heads * shape.head_size * shape.dtype.itemsize
    offers = [Offer(name, LoadTime(0, rate), price) for name, (rate, price) in options.offers.items()]
    rows = []
    for target in (None, 0.7, 1.0, 2.0):
        found = recommend(
            offers,
            paced.controller,
            num_tokens=options.tokens,
            num_other_tokens=32,
            bytes_per_token=token_bytes,
            stored_tokens=10**8,
            target_s=target,
        )
        rows.append(
            {
                "target": "load hidden" if target is None else f"{target} s",
                "storage": found.offer.name,
                "expected TTFT": f"{found.ttft_s:.2f} s",
                "a month": f"{found.price:.0f}",
                "why": found.reason,
            }
        )
    return rows


if __name__ == "__main__":
    main()
