"""What keeping KV in fp8 costs: KL of the question to full prefill over the ten inputs, by scale.

Last line: JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
from statistics import mean, median

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; the default takes most of the memory

import torch
from harness import hardware, print_table, samples, texts
from tqdm import tqdm
from vllm import LLM

from vllm_blend import Blender, BlendSettings, embedded_model
from vllm_blend.api.prompts import Chunk
from vllm_blend.cli.eval.logits import agreement, kl_divergence, suffix_logits
from vllm_blend.core.kv import StoredKV

SCALES: dict[str, tuple[int, ...] | None] = {
    "not kept in fp8": None,
    "a scale per head": (0, 2),
    "per token and head": (2,),
    "per head and channel": (0,),
}
"""The axes of ``[num_tokens, num_kv_heads, head_size]`` that share a scale."""


def through_fp8(tensor: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    """What is left of K or V."""
    scale = (tensor.float().abs().amax(axes, keepdim=True) / 448).clamp(min=1e-12)
    return ((tensor / scale).to(torch.float8_e4m3fn).float() * scale).to(tensor.dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=pathlib.Path, help="model folder (default: SmolLM2-135M)")
    parser.add_argument("--scales", nargs="+", default=list(SCALES), choices=SCALES)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.0, 0.16])
    options = parser.parse_args()
    llm = LLM(
        model=str(options.model or embedded_model()),
        dtype="float32",
        max_model_len=4096,
        max_num_batched_tokens=4096,
        enable_prefix_caching=False,
        enforce_eager=True,
    )
    blender = Blender(llm)
    names = [(name, ratio) for ratio in options.ratios for name in options.scales]
    found: dict[tuple[str, float], list[tuple[float, float]]] = {name: [] for name in names}
    errors: dict[str, list[float]] = {name: [] for name in options.scales}
    for sample in tqdm(samples(), unit="input"):
        chunks = blender.chunks(texts(sample))
        full = suffix_logits(blender, blender.prompt(chunks, sample["query"]), blend=False)
        for name in options.scales:
            axes = SCALES[name]
            kept = [Chunk(chunk.token_ids, kv_through(chunk, axes)) for chunk in chunks]
            errors[name] += [relative_error(*both) for both in zip(kept, chunks, strict=True)]
            prompt = blender.prompt(kept, sample["query"])
            for ratio in options.ratios:
                settings = BlendSettings(recomp_ratio=ratio)
                logits = suffix_logits(blender, prompt, settings=settings)
                found[name, ratio].append((kl_divergence(full, logits), agreement(full, logits)))
    rows = []
    for name, ratio in names:
        kl, same = zip(*found[name, ratio], strict=True)
        row = [f"{ratio:.0%}", name, f"{median(errors[name]):.4f}", f"{mean(kl):.4f}"]
        rows.append([*row, f"{median(kl):.4f}", f"{mean(same):.3f}"])
    header = ["ratio", "KV", "error of K and V", "KL mean", "KL median", "same first choice"]
    print(f"\n{hardware()}; {llm.llm_engine.model_config.model}\n")
    print_table(header, rows)
    print(json.dumps([dict(zip(header, row, strict=True)) for row in rows]))


def kv_through(chunk: Chunk, axes: tuple[int, ...] | None) -> StoredKV:
    assert chunk.kv is not None
    if axes is None:
        return chunk.kv
    return StoredKV(tuple((through_fp8(k, axes), through_fp8(v, axes)) for k, v in chunk.kv.layers))


def relative_error(kept: Chunk, exact: Chunk) -> float:
    """Over all layers, K and V together."""
    assert kept.kv is not None and exact.kv is not None
    pairs = [
        (a.double(), b.double())
        for left, right in zip(kept.kv.layers, exact.kv.layers, strict=True)
        for a, b in zip(left, right, strict=True)
    ]
    wrong = sum(float((a - b).square().sum()) for a, b in pairs)
    return float((wrong / sum(float(b.square().sum()) for _, b in pairs)) ** 0.5)


if __name__ == "__main__":
    main()
