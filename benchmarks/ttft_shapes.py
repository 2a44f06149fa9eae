"""Time to first token at real models' shapes, with dummy weights: ``bench_ttft.py --device cuda``.

KV of the chunks lies on the GPU or in pinned host memory; a blended time then includes its way to the
GPU. ``--prefix-caching``: with vLLM's prefix cache, for which the host hashes every prompt; "prefix
hit" is then stock vLLM that finds the first chunk, a sixth of the prompt.

The floor is what must be computed, at rates measured in the same run (cuBLAS, vLLM's FlashAttention on
the whole prompt): the kept rows in all layers, where a check layer chooses them one whole layer and V
of the next; or the copies from pinned memory, if they take longer. It leaves out vLLM's own time around
the layers, norms and activations, and the choice; ``--profile`` shows where those go.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cached_property, partial
from itertools import pairwise, product
from multiprocessing import get_context
from statistics import median
from typing import Any

import torch
from harness import hardware, measure, print_table
from host_marks import host_marks
from timeline import timeline
from vllm import LLM, SamplingParams

from vllm_blend import BlendSettings, blend_model
from vllm_blend.core.kv import StoredKV
from vllm_blend.core.layers import BlockLayers
from vllm_blend.core.plans import BlendPlan, ChunkSpan
from vllm_blend.store.fp8 import Fp8Layers

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
    "qwen3-30b-a3b": dict(
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        vocab_size=151936,
        num_hidden_layers=48,
        num_key_value_heads=4,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        rope_theta=1e6,
        rms_norm_eps=1e-6,
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
GPU_MEMORY = {"qwen3-30b-a3b": 0.92}
"""Share of the GPU's memory that engines take, where it is not 0.8."""

QUESTION_TOKENS = 64
CHUNKS = 6


def main(options: argparse.Namespace) -> None:
    """Runs every shape with every attention backend; prints a table and a JSON line a shape."""
    for shape in options.shape:
        rows: list[list[Any]] = []
        results: list[dict[str, Any]] = []
        with tempfile.TemporaryDirectory() as folder:
            write_config(shape, pathlib.Path(folder))
            for backend in options.attention_backend:
                # a process each: one that has ended leaves the next engine all of the GPU
                with ProcessPoolExecutor(1, get_context("spawn")) as process:
                    found = process.submit(run_shape, shape, folder, backend, options).result()
                rows += found[0]
                results += found[1]
        header = ["tokens", "backend", "method", "TTFT", "speedup", "floor", "TTFT / floor"]
        print_table(header, sorted(rows, key=lambda row: row[0]))
        print(json.dumps({"shape": shape, "hardware": hardware(), "results": results}))


def write_config(shape: str, folder: pathlib.Path) -> pathlib.Path:
    """Makes ``folder`` a model folder of this shape, without weights."""
    (folder / "config.json").write_text(json.dumps(COMMON | SHAPES[shape]))
    return folder


def make_llm(folder: str, longest: int, options: argparse.Namespace, **more: Any) -> LLM:
    """An engine of dummy weights that prefills ``longest`` tokens in one step."""
    return LLM(
        model=folder,
        load_format="dummy",
        dtype=options.dtype,
        skip_tokenizer_init=True,
        max_model_len=longest,
        max_num_batched_tokens=longest,
        max_num_seqs=16,
        enforce_eager=options.eager,
        disable_log_stats=True,
        **({"gpu_memory_utilization": 0.8} | more),
    )


def run_shape(
    shape: str, folder: str, backend: str, options: argparse.Namespace
) -> tuple[list[list[Any]], list[dict[str, Any]]]:
    """Rows of the table and of the JSON line, from one engine."""
    longest = max(options.tokens) + 1
    llm = make_llm(
        folder,
        longest,
        options,
        enable_prefix_caching=options.prefix_caching,  # only "prefix hit" reads it
        attention_backend=backend,
        gpu_memory_utilization=GPU_MEMORY.get(shape, 0.8),
    )
    bench = Bench(llm, options.prefix_caching)
    backend = bench.model.layers[0].self_attn.attn.attn_backend.get_name()
    print(f"{shape}, {backend}, {hardware()}")
    dense = hasattr(bench.model.layers[1].mlp, "gate_up_proj")
    rates = Rates(bench) if bench.device.type == "cuda" and dense else None
    rows: list[list[Any]] = []
    results: list[dict[str, Any]] = []
    lines: list[tuple[int, str, dict[str, float]]] = []
    for num_tokens in options.tokens:
        methods = bench.methods(num_tokens, options.ratios, options.policies, options.kv)
        times = measure(methods, options.repeat, f"{num_tokens} tokens")
        for name, seconds in times.items():
            speedup = median(s / b for s, b in zip(times["stock"], seconds, strict=True))
            ratio = bench.ratio_of(name)
            kept = num_tokens if ratio is None else bench.num_kept(num_tokens, ratio)
            ttft = median(seconds)
            result = dict(tokens=num_tokens, backend=backend, method=name, rows=kept)
            result |= dict(ttft_s=ttft, speedup=speedup)
            row = [num_tokens, backend, name, f"{ttft * 1e3:.1f} ms", f"{speedup:.2f}x", "", ""]
            if rates is not None and ratio is not None:
                copied = bench.copied(name.split()[-1])
                floor = rates.floor(num_tokens, kept, bench.settings[name], copied)
                row[-2:] = [f"{floor * 1e3:.1f} ms", f"{ttft / floor:.2f}"]
                result |= dict(floor_s=floor)
            rows.append(row)
            results.append(result)
        for name in options.profile:
            lines.append((num_tokens, name, timeline(methods[name])))
        for name in options.marks:
            marks = host_marks(methods[name], options.repeat, bench.device.type == "cuda")
            print(f"\n{num_tokens} tokens, {name}: ms since the request")
            print_table(["", "host", "device"], [[n, f"{h:.2f}", f"{d:.2f}"] for n, h, d in marks])
        bench.forget()
    if lines:
        print("\nWhere a step's milliseconds go, by torch's profiler:")
        cells = [[n, name, *(f"{ms:.1f}" for ms in parts.values())] for n, name, parts in lines]
        print_table(["tokens", "method", *lines[0][2]], cells)
    llm.llm_engine.engine_core.shutdown()
    return rows, results


class Rates:
    """What this GPU takes for the parts of a layer, in seconds; the floor is made of these."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.num_layers = bench, bench.num_layers
        attn, mlp = bench.model.layers[1].self_attn, bench.model.layers[1].mlp
        self.attn = attn
        self.weights = [p.weight for p in (attn.qkv_proj, attn.o_proj, mlp.gate_up_proj, mlp.down_proj)]

    def products(self, num_rows: int) -> float:
        return sum(self.product(num_rows, weight) for weight in self.weights)

    def product(self, num_rows: int, weight: torch.Tensor) -> float:
        x = torch.randn(num_rows, weight.shape[1], dtype=weight.dtype, device=weight.device)
        return self.seconds(lambda: torch.nn.functional.linear(x, weight))

    def attention(self, num_tokens: int) -> float:
        """Of all rows of a prompt."""
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

        size, dtype, device = self.attn.attn.head_size, self.weights[0].dtype, self.weights[0].device
        heads = (self.attn.num_heads, self.attn.num_kv_heads, self.attn.num_kv_heads)
        q, k, v = (torch.randn(num_tokens, n, size, dtype=dtype, device=device) for n in heads)
        starts = torch.tensor([0, num_tokens], dtype=torch.int32, device=device)
        lens: dict[str, Any] = dict(cu_seqlens_q=starts, max_seqlen_q=num_tokens)
        lens |= dict(cu_seqlens_k=starts, max_seqlen_k=num_tokens)
        version = get_flash_attn_version()
        return self.seconds(
            lambda: flash_attn_varlen_func(q=q, k=k, v=v, causal=True, fa_version=version, **lens)
        )

    def floor(self, num_tokens: int, num_kept: int, settings: BlendSettings, copied: float) -> float:
        """Seconds of a blend's first token, if nothing else took time; ``copied``: that share of the
        bytes that its KV has in the model's type is."""
        attention = self.attention(num_tokens)
        kept = self.products(num_kept) + attention * num_kept / num_tokens
        copies = num_tokens * self.copy * copied
        if settings.early:
            return max(copies, self.num_layers * kept)
        v = self.product(num_tokens, self.weights[0][-self.attn.kv_size :])
        first = self.products(num_tokens) + attention + v
        return max(copies, first + (self.num_layers - 1) * kept)

    @cached_property
    def copy(self) -> float:
        """Of the KV of a token, from pinned memory."""
        shape = self.bench.model.blending.kv_shape
        there = self.bench.random((2, *shape.of(2048)))
        here = torch.empty_like(there, device="cpu", pin_memory=True)
        return self.num_layers * self.seconds(lambda: there.copy_(here, non_blocking=True)) / 2048

    @staticmethod
    def seconds(call: Callable[[], object]) -> float:
        """Of the device; the median of ten calls in a row, after two."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(13)]
        for mark in marks:
            call()
            mark.record()
        torch.cuda.synchronize()
        return median(a.elapsed_time(b) for a, b in pairwise(marks[2:])) / 1e3


class Bench:
    """Prompts of random tokens over random KV, on one engine."""

    def __init__(self, llm: Any, prefix_caching: bool = False) -> None:
        self.llm, self.prefix_caching = llm, prefix_caching
        self.settings: dict[str, BlendSettings] = {}  # by method
        self.model = blend_model(llm)
        self.num_layers = self.model.blending.kv_shape.num_layers
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

    def methods(
        self, num_tokens: int, ratios: list[float], policies: list[str], places: list[str]
    ) -> dict[str, Callable[[], object]]:
        """What is measured, by name; ``places``: where stored KV is."""
        token_ids = self.tokens(num_tokens, num_tokens)
        found: dict[str, Callable[[], object]] = {"stock": partial(self.run, token_ids)}
        first = (num_tokens - QUESTION_TOKENS) // CHUNKS
        if self.prefix_caching:
            self.run(token_ids[:first])
            found["prefix hit"] = partial(self.prefix_hit, token_ids[:first], num_tokens)
        for place in places if self.device.type == "cuda" else ["host"]:
            spans = self.spans(num_tokens, place)
            for policy, ratio in product(policies, ratios):
                settings = BlendSettings(recomp_ratio=ratio, policy=policy)
                name = f"{policy} {ratio:.0%}, KV {place}"
                self.settings[name] = settings
                found[name] = partial(self.blended, token_ids, spans, settings)
        return found

    def blended(
        self, token_ids: list[int], spans: tuple[ChunkSpan, ...], settings: BlendSettings
    ) -> None:
        self.run(token_ids, BlendPlan(spans, settings))  # anew: a plan keeps which rows were chosen

    def prefix_hit(self, prefix: list[int], num_tokens: int) -> None:
        self._tails += 1
        self.run(prefix + self.tokens(num_tokens - len(prefix), 10**6 + self._tails), fresh=False)

    def spans(self, num_tokens: int, place: str) -> tuple[ChunkSpan, ...]:
        """Chunks of random KV, each in memory of its own, as a store keeps them."""
        size = (num_tokens - QUESTION_TOKENS) // CHUNKS
        spans = []
        for chunk in range(CHUNKS):
            layers = self.narrow(size) if place == "fp8" else self.wide(size, place)
            scores = torch.rand(size, generator=torch.Generator().manual_seed(chunk))
            spans.append(ChunkSpan(chunk * size, StoredKV(layers, scores)))
        return tuple(spans)

    def wide(self, num_tokens: int, place: str) -> BlockLayers:
        """A chunk in the model's type."""
        shape = self.model.blending.kv_shape
        block = torch.empty(
            (self.num_layers, 2, *shape.of(num_tokens)),
            dtype=shape.dtype,
            device=self.device if place == "gpu" else "cpu",
            pin_memory=place == "pinned",
        )
        for layer in block:
            layer.copy_(self.random(layer.shape))
        return BlockLayers(block)

    def narrow(self, num_tokens: int) -> Fp8Layers:
        """A chunk in eight bits, in pinned memory."""
        shape = self.model.blending.kv_shape
        row = 2 * num_tokens * shape.num_kv_heads * (4 + shape.head_size)
        memory = torch.empty(self.num_layers * row, dtype=torch.uint8, device="cpu", pin_memory=True)
        layers = Fp8Layers(memory, shape, num_tokens)
        for layer in range(self.num_layers):
            layers.write(layer, *self.random((2, *shape.of(num_tokens))))
        return layers

    def copied(self, place: str) -> float:
        """How many bytes come from the host, as a share of those in the model's type."""
        shape = self.model.blending.kv_shape
        eight = (1 + 4 / shape.head_size) / shape.dtype.itemsize
        return {"gpu": 0.0, "pinned": 1.0, "fp8": eight, "host": 0.0}[place]

    def random(self, size: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(size, dtype=self.model.blending.kv_shape.dtype, device=self.device)

    def num_kept(self, num_tokens: int, ratio: float) -> int:
        reused = (num_tokens - QUESTION_TOKENS) // CHUNKS * CHUNKS
        return int(ratio * reused) + num_tokens - reused

    @staticmethod
    def ratio_of(method: str) -> float | None:
        return float(method.split()[1].rstrip("%,")) / 100 if "%" in method else None

    def forget(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
