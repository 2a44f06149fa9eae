"""Requests to a blending engine in process, and what it tells of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engines import Engine, make_engine

from vllm_blend.core.plans import ChunkIds
from vllm_blend.server.chunks.chunk_registry import chunk_key

REPORT = {"report": True}


def scheduler(engine: Engine) -> Any:
    return engine.llm.llm_engine.engine_core.engine_core.scheduler


@contextmanager
def blending_engine(folder: Path) -> Iterator[Engine]:
    """An engine that blends its clients' requests, with its prefix cache; gone when it ends."""
    settings = {"vllm_blend": {"ram_gb": 0.05, "stand_in": ""}}
    with make_engine(folder, enable_prefix_caching=True, additional_config=settings) as engine:
        drain(engine)
        yield engine


@contextmanager
def cutting_engine(folder: Path, num_tokens: int, **settings: Any) -> Iterator[Engine]:
    """One that computes so many tokens a step, so that it cuts longer prefills."""
    with make_engine(
        folder,
        enable_prefix_caching=True,
        enable_chunked_prefill=True,
        max_num_batched_tokens=num_tokens,
        max_num_seqs=4,
        additional_config={"vllm_blend": settings},
    ) as engine:
        drain(engine)
        yield engine


def with_known_chunks(
    engine: Any, policy: str
) -> tuple[list[list[int]], dict[str, Any], list[list[int]]]:
    """A prompt of three chunks that are known and a plain one, what to ask for of the first, and the
    answers of full prefill to both."""
    prompt, spans = prompt_of(engine, [1, 2, 3])
    other, _ = prompt_of(engine, [4])
    full = [answer(output) for output in outputs(engine, [prompt, other], [None, None])]
    field = {"spans": spans, "policy": policy, "recomp_ratio": 0.1} | REPORT
    outputs(engine, [prompt], [field])
    drain(engine)
    scheduler(engine).reset_prefix_cache()
    return [prompt, other], field, full


def drain(engine: Engine) -> None:
    """Steps until the engine's own requests are done."""
    core = engine.llm.llm_engine.engine_core.engine_core
    idles_for = getattr(core.scheduler, "idles_for", float)  # vLLM's own has none
    while idles_for() or core.scheduler.has_requests() or core.batch_queue:
        core.step_fn()


def come_to_waiting(engine: Engine) -> None:
    """Lets vLLM's scheduler come to the requests that wait, without room for any."""
    state = engine.llm.llm_engine.engine_core.engine_core.scheduler
    for request_id in list(state.blend_waiting):
        assert state._handle_blocked_waiting_request(state.requests[request_id])


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
