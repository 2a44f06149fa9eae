"""Requests to a blending engine in process, and what it tells of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engines import Engine

from vllm_blend.core.plans import ChunkIds
from vllm_blend.server.chunks.chunk_registry import chunk_key

REPORT = {"report": True}


def scheduler(engine: Engine) -> Any:
    return engine.llm.llm_engine.engine_core.engine_core.scheduler


def drain(engine: Engine) -> None:
    """Steps until the engine's own requests are done."""
    core = engine.llm.llm_engine.engine_core.engine_core
    while core.scheduler.has_requests():
        core.step_fn()


def outputs(
    engine: Engine,
    prompts: list[list[int]],
    fields: list[Any],
    cache_salt: str | None = None,
    adapters: Sequence[Any] | None = None,
    **params: Any,
) -> list[Any]:
    from vllm import SamplingParams

    options: dict[str, Any] = dict(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    each = [
        SamplingParams(**(options | params), extra_args=None if field is None else {"blend": field})
        for field in fields
    ]
    tokens = [{"prompt_token_ids": ids, "cache_salt": cache_salt} for ids in prompts]
    found: list[Any] = engine.llm.generate(tokens, each, use_tqdm=False, lora_request=adapters)
    return found


def answer(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


def report(output: Any) -> dict[str, Any]:
    found: dict[str, Any] = output.kv_transfer_params["blend"]
    return found


def key_of(engine: Engine, prompt: list[int], span: Sequence[int]) -> bytes:
    """Names a chunk of a prompt, computed after what the prompt's first chunk is."""
    start, end = span
    context = scheduler(engine).blend_internal.contexts.first
    return chunk_key(ChunkIds("", tuple(prompt[start:end]), context))


def prompt_of(
    engine: Engine, seeds: list[int], size: int = 100, head: int = 5
) -> tuple[list[int], list[list[int]]]:
    """A prompt of random chunks, and their spans."""
    prompt = engine.ids(head, 99)
    spans = []
    for seed in seeds:
        spans.append([len(prompt), len(prompt) + size])
        prompt += engine.ids(size, seed)
    return prompt + engine.ids(12, 98), spans
