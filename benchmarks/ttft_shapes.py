"""Time to first token at real models' shapes, with dummy weights: ``bench_ttft.py --device cuda``.

KV of the chunks lies on the GPU or in pinned host memory; a blended time then includes its way to the
GPU. "prefix hit" is stock vLLM that finds the first chunk, a sixth of the prompt, in its prefix cache.
"at the floor": full prefill, if only the rows that blending computes cost time.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import tempfile
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from harness import hardware, measure, print_table
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

from vllm_blend import BlendSettings, blend_model
from vllm_blend.core import BlendPlan, ChunkSpan, StoredKV

COMMON = dict(
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    hidden_size=4096,
    intermediate_size=14336,
    hidden_act="silu",
    rms_norm_eps=1e-5,
    max_position_embeddings=65536,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    bos_token_id=1,
    eos_token_id=2,
)
SHAPES: dict[str, dict[str, Any]] = {
    "mistral-7b": dict(
        architectures=["MistralForCausalLM"],
        model_type="mistral",
        vocab_size=32000,
        rope_theta=1e6,
        sliding_window=None,
    ),
    "llama-3-8b": dict(
        architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=128256, rope_theta=5e5
    ),
    "tiny": dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        vocab_size=320,
        num_hidden_layers=3,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
    ),
}
QUESTION_TOKENS = 64
CHUNKS = 6


def main(options: argparse.Namespace) -> None:
    """Runs every shape with every attention backend; prints a table and a JSON line a shape."""
    for shape in options.shape:
        rows, results = [], []
        with tempfile.TemporaryDirectory() as folder:
            config = pathlib.Path(folder) / "config.json"
            config.write_text(json.dumps(COMMON | SHAPES[shape]))
            for backend in options.attention_backend:
                found = run_shape(shape, folder, backend, options)
                rows += found[0]
                results += found[1]
                cleanup_dist_env_and_memory()  # for the next engine
        header = ["tokens", "backend", "method", "TTFT", "speedup", "at the floor"]
        print_table(header, sorted(rows, key=lambda row: row[0]))
        print(json.dumps({"shape": shape, "hardware": hardware(), "results": results}))


def run_shape(
    shape: str, folder: str, backend: str, options: argparse.Namespace
) -> tuple[list[list[Any]], list[dict[str, Any]]]:
    """Rows of the table and of the JSON line, from one engine."""
    longest = max(options.tokens) + 1
    llm = LLM(
        model=folder,
        load_format="dummy",
        dtype=options.dtype,
        skip_tokenizer_init=True,
        max_model_len=longest,
        max_num_batched_tokens=longest,
        max_num_seqs=16,
        enable_prefix_caching=True,  # only "prefix hit" reads it
        enforce_eager=options.eager,
        attention_backend=backend,
        gpu_memory_utilization=0.8,
        disable_log_stats=True,
    )
    bench = Bench(llm)
    backend = bench.model.layers[0].self_attn.attn.attn_backend.get_name()
    print(f"{shape}, {backend}, {hardware()}")
    rows: list[list[Any]] = []
    results: list[dict[str, Any]] = []
    for num_tokens in options.tokens:
        methods = bench.methods(num_tokens, options.ratios)
        times = measure(methods, options.repeat, f"{num_tokens} tokens")
        for name, seconds in times.items():
            speedup = median(s / b for s, b in zip(times["stock"], seconds, strict=True))
            ratio = bench.ratio_of(name)
            kept = num_tokens if ratio is None else bench.num_kept(num_tokens, ratio)
            layers = bench.num_layers
            floor = layers / (1 + (layers - 1) * kept / num_tokens)
            at_floor = "" if ratio is None else f"{floor:.2f}x"
            ttft = median(seconds)
            rows.append(
                [num_tokens, backend, name, f"{ttft * 1e3:.1f} ms", f"{speedup:.2f}x", at_floor]
            )
            one = dict(tokens=num_tokens, backend=backend, method=name, ttft_s=ttft)
            results.append(one | dict(speedup=speedup, rows=kept))
        bench.forget()
    llm.llm_engine.engine_core.shutdown()
    return rows, results


class Bench:
    """Prompts of random tokens over random KV, on one engine."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.model = blend_model(llm)
        self.num_layers = self.model.kv_shape.num_layers
        self.vocab = llm.llm_engine.vllm_config.model_config.get_vocab_size()
        self.device = next(self.model.parameters()).device
        self._tails = 0

    def tokens(self, count: int, seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(10, self.vocab, (count,), generator=generator).tolist()

    def run(self, token_ids: list[int], plan: Any = None, fresh: bool = True) -> None:
        """One request's first token; ``fresh``: without the prefix cache."""
        params = SamplingParams(
            temperature=0,
            max_tokens=1,
            detokenize=False,
            ignore_eos=True,
            skip_reading_prefix_cache=fresh,
            extra_args=None if plan is None else {"blend": plan},
        )
        self.llm.generate([{"prompt_token_ids": token_ids}], params, use_tqdm=False)

    def methods(self, num_tokens: int, ratios: list[float]) -> dict[str, Callable[[], object]]:
        token_ids = self.tokens(num_tokens, num_tokens)
        found: dict[str, Callable[[], object]] = {"stock": partial(self.run, token_ids)}
        first = (num_tokens - QUESTION_TOKENS) // CHUNKS
        self.run(token_ids[:first])
        found["prefix hit"] = partial(self.prefix_hit, token_ids[:first], num_tokens)
        for place in ("gpu", "pinned") if self.device.type == "cuda" else ("host",):
            spans = self.spans(num_tokens, place)
            for ratio in ratios:
                plan = BlendPlan(spans, BlendSettings(recomp_ratio=ratio))
                found[f"blend {ratio:.0%}, KV {place}"] = partial(self.run, token_ids, plan)
        return found

    def prefix_hit(self, prefix: list[int], num_tokens: int) -> None:
        self._tails += 1
        self.run(prefix + self.tokens(num_tokens - len(prefix), 10**6 + self._tails), fresh=False)

    def spans(self, num_tokens: int, place: str) -> tuple[ChunkSpan, ...]:
        """Chunks of random KV; on the host all layers share one tensor, to save memory and time."""
        shape = self.model.kv_shape
        size = (num_tokens - QUESTION_TOKENS) // CHUNKS
        spans = []
        for chunk in range(CHUNKS):
            if place == "gpu":
                layers = tuple(
                    (self.random(shape.of(size)), self.random(shape.of(size)))
                    for _ in range(self.num_layers)
                )
            else:
                k = self.random(shape.of(size)).cpu()
                k = k.pin_memory() if place == "pinned" else k
                layers = ((k, k),) * self.num_layers
            spans.append(ChunkSpan(chunk * size, StoredKV(layers)))
        return tuple(spans)

    def random(self, size: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(size, dtype=self.model.kv_shape.dtype, device=self.device)

    def num_kept(self, num_tokens: int, ratio: float) -> int:
        reused = (num_tokens - QUESTION_TOKENS) // CHUNKS * CHUNKS
        return int(ratio * reused) + num_tokens - reused

    @staticmethod
    def ratio_of(method: str) -> float | None:
        return float(method.split()[1].rstrip("%,")) / 100 if method.startswith("blend") else None

    def forget(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
