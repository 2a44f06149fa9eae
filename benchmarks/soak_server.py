"""An engine that learns from its traffic for a long time, with tiers that are all too small.

    python benchmarks/soak_server.py --requests 20000

A tiny model in process; documents by Zipf's law, whose favourites change; KV is kept from requests' own
prefills, in host memory, on disk and in Redis, each of which evicts. By tenths of the run: resident
memory, open files, what the tiers hold, and the time of a batch. After each hundredth, chunks in memory
and in the tiers are compared with what the model computes of their tokens: the first layer's K and V of
all, every layer's of those that stood first in a prompt. It ends with a JSON object, and exit code 1 if
a KV was wrong, or a tier beyond its budget.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; the default takes most of the memory
# oneDNN compiles a kernel for each number of rows; 1,024 of them coming and going hide what else grows
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")

import psutil
import torch
from bench_shared import tier
from harness import hardware, print_table
from tiny_model import VOCAB, make_tiny_model

from vllm_blend.core.kv import StoredKV
from vllm_blend.core.plans import ChunkIds
from vllm_blend.server.chunks.chunk_contexts import HARVESTED_FIRST

DOCUMENTS, FAVOURITES = 4000, 600
"""Documents in all, and of those the ones that are asked for at a time."""
BATCH, SAMPLED = 16, 8
"""Requests at once; chunks that are compared at a time, from memory and from the tiers each."""
HOST_GB, TIER_GB = 0.012, {"disk": 0.03, "redis": 0.06}
HEAD = 5
"""The token that every prompt begins with."""
CLOSE = 1e-3
"""K and V of two programs differ by less, relative to their mean; those of two chunks by 1 or so."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tiers = {name: stack.enter_context(tier(name, folder)) for name in TIER_GB}
        for name, values in tiers.items():
            values["budget_gb"] = TIER_GB[name]
        model = str(make_tiny_model(folder))
        sys.exit(Soak(model, {"host_gb": HOST_GB} | tiers, options.seed).run(options.requests))


class Soak:
    """The engine, its requests and what is seen of it.

    Args:
        model: its folder.
        store: settings.
    """

    def __init__(self, model: str, store: dict[str, Any], seed: int) -> None:
        from transformers import LlamaForCausalLM
        from vllm import LLM

        blend = {"store": store, "log_requests": False}
        self.llm: Any = LLM(
            model,
            dtype="float32",
            enforce_eager=True,
            max_model_len=1024,
            max_num_seqs=BATCH,
            enable_prefix_caching=True,
            additional_config={"vllm_blend": blend},
        )
        core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.cache = core.model_executor.driver_worker.model_runner.model.blending.chunks
        self.store = self.cache.tiers.store
        self.reference = Reference(LlamaForCausalLM.from_pretrained(model))
        self.choose = random.Random(seed)
        self.reused: Counter[str] = Counter()
        self.compared: Counter[str] = Counter()
        self.wrong: list[str] = []

    def run(self, num_requests: int) -> int:
        """All requests; prints what was seen, and returns the exit code."""
        tenth, rows = max(BATCH, num_requests // 10), []
        rows.append(self.row(0, [0.0]))
        seconds: list[float] = []
        sent, compared_at = 0, 0
        while sent < num_requests:
            seconds.append(self.batch(sent / num_requests))
            sent += BATCH
            if sent >= compared_at + num_requests // 100:
                compared_at = sent
                self.compare()
            if sent >= len(rows) * tenth:
                rows.append(self.row(sent, seconds))
                seconds = []
        return self.tell(sent, rows)

    def batch(self, done: float) -> float:
        """Some requests at once; the seconds they took.

        Args:
            done: the share of the run that is over.
        """
        from vllm import SamplingParams

        prompts, params = [], []
        for _ in range(BATCH):
            prompt, spans = [HEAD], []
            for number in self.documents(done):
                ids = document(number)
                spans.append([len(prompt), len(prompt) + len(ids)])
                prompt += ids
            prompts.append({"prompt_token_ids": prompt + random_ids(self.choose, 10)})
            field = {"spans": spans, "report": True}
            params.append(SamplingParams(temperature=0, max_tokens=2, extra_args={"blend": field}))
        started = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        took = time.perf_counter() - started
        for output in outputs:
            told = output.kv_transfer_params["blend"]
            self.reused["prompt"] += len(output.prompt_token_ids)
            self.reused["reused"] += told["reused_tokens"]
            self.reused["loaded"] += told["loaded_chunks"]
        return took

    def documents(self, done: float) -> list[int]:
        """One to four; the favourites move through all documents as the run goes on."""
        first = int(done * (DOCUMENTS - FAVOURITES))
        weights = [1 / rank for rank in range(1, FAVOURITES + 1)]
        count = self.choose.randint(1, 4)
        drawn = self.choose.choices(range(FAVOURITES), weights, k=count)
        return [first + number for number in dict.fromkeys(drawn)]

    def compare(self) -> None:
        """Compares chunks in memory, and in any tier, with what the model computes of their tokens."""
        registry = self.scheduler.blend_chunks
        known = [key for key in self.cache._chunks if key in registry]
        for key in self.choose.sample(known, min(SAMPLED, len(known))):
            self.check(registry.chunk(key), self.cache._chunks[key], "memory")
        below = list(self.store.token_ids())
        for _, ids in self.choose.sample(below, min(SAMPLED, len(below))):
            for context in self.scheduler.blend_internal.contexts.known:
                chunk = ChunkIds("", ids, context)
                if (kv := self.store.get(self.cache.tiers._key(chunk))) is not None:
                    self.check(chunk, kv, "tiers")

    def check(self, chunk: ChunkIds, kv: StoredKV, where: str) -> None:
        expected = self.reference(chunk.token_ids)
        exact = chunk.context == HARVESTED_FIRST
        for layer, pair in enumerate(expected if exact else expected[:1]):
            for found, right in zip(kv.layers[layer], pair, strict=True):
                apart = (found - right).abs().max() / right.abs().mean()
                if not apart < CLOSE:
                    self.wrong.append(f"{where}, layer {layer}, {chunk.context[:3]}: {apart:.3g}")
        self.compared[f"{where}, {'all layers' if exact else 'first layer'}"] += 1

    # --- what is told -----------------------------------------------------------------------------

    def row(self, sent: int, seconds: Sequence[float]) -> dict[str, Any]:
        """What is seen now: bytes, counts, and milliseconds of a batch since the last row."""
        self.store.flush()
        process, stats = psutil.Process(), self.store.stats()
        held = {f"{name}_mb": stats[f"bytes.{name}"] / 1e6 for name in ("host", *TIER_GB)}
        ordered = sorted(seconds)
        return {
            "requests": sent,
            "rss_mb": process.memory_info().rss / 1e6,
            "files": process.num_fds(),
            "chunks": len(self.cache),
            **held,
            "batch_p50_ms": 1e3 * statistics.median(ordered),
            "batch_p95_ms": 1e3 * ordered[int(0.95 * (len(ordered) - 1))],
        }

    def tell(self, sent: int, rows: list[dict[str, Any]]) -> int:
        stats = self.store.stats()
        evicted = {name: stats[f"evictions.{name}"] for name in ("host", *TIER_GB)}
        over = [row for row in rows if any(row[f"{n}_mb"] > 1e3 * gb for n, gb in TIER_GB.items())]
        print(f"\n{hardware()}; {sent} requests of {BATCH} at once\n")
        print_table(list(rows[0]), [[f"{value:.0f}" for value in row.values()] for row in rows])
        share = self.reused["reused"] / self.reused["prompt"]
        print(f"\nreused {share:.1%} of all tokens; {self.reused['loaded']} chunks came from the tiers")
        print(f"evicted {evicted}; compared {dict(self.compared)}; wrong {self.wrong[:5]}")
        told = {"requests": sent, "reused_share": share, "evicted": evicted, "wrong": len(self.wrong)}
        print(json.dumps(told | {"compared": self.compared, "rows": rows}))
        return int(bool(self.wrong or over) or not all(evicted.values()) or not self.compared)


class Reference:
    """K before RoPE and V of each layer, by transformers, of tokens after ``HEAD``."""

    def __init__(self, model: Any) -> None:
        self.model, self.seen = model.eval(), list[torch.Tensor]()
        for layer in model.model.layers:
            for part in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                part.register_forward_hook(lambda module, args, output: self.seen.append(output))
        self.heads = model.config.num_key_value_heads

    @torch.no_grad()
    def __call__(self, token_ids: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        self.seen.clear()
        self.model.model(torch.tensor([[HEAD, *token_ids]]))
        parts = [one[0, 1:].unflatten(-1, (self.heads, -1)) for one in self.seen]
        return list(zip(parts[::2], parts[1::2], strict=True))


def document(number: int) -> list[int]:
    choose = random.Random(f"document {number}")
    return random_ids(choose, choose.randint(60, 160))


def random_ids(choose: random.Random, size: int) -> list[int]:
    return [choose.randrange(300, VOCAB) for _ in range(size)]


if __name__ == "__main__":
    main()
