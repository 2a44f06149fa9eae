"""KV that a GPU's prefills leave behind, reused by the next request: eager, and with graphs."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from asking import REPORT, drain, outputs, prompt_of, report, scheduler
from engines import make_engine, tiny_model

pytestmark = pytest.mark.gpu

ROUNDING = 0.1
"""Of bfloat16 here, in log-probabilities; wrong KV makes ten times as much."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Narrower weights than others': the model does not amplify rounding."""
    return tiny_model("qwen3", tmp_path_factory.mktemp("qwen3"), initializer_range=0.08)


def apart(found: Any, plain: Any) -> float:
    """How far the first token's log-probabilities are apart at most; infinite where the likeliest
    tokens are others."""
    one, other = found.outputs[0].logprobs[0], plain.outputs[0].logprobs[0]
    common = [abs(one[token].logprob - other[token].logprob) for token in one if token in other]
    return max(common) if len(common) > 10 else math.inf


@pytest.mark.covers("server: chunks kept from requests (harvest)", backend="{backend}", family="qwen3")
@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("backend", ["FLASH_ATTN", "XFORMERS"])
def test_the_second_request_reuses_what_the_first_computed(
    folder: Path, backend: str, eager: bool
) -> None:
    """Exact in the same prompt; then beside chunks that are new, in a blended one."""
    if backend == "XFORMERS" and find_spec("xformers") is None:
        pytest.skip("xformers is not installed")
    options: dict[str, Any] = dict(dtype="bfloat16", enforce_eager=eager, enable_prefix_caching=True)
    options |= dict(gpu_memory_utilization=0.3, max_num_batched_tokens=1024, max_num_seqs=8)
    options |= dict(attention_backend=backend)
    settings = {"vllm_blend": {"ram_gb": 0.1}}
    with make_engine(folder, additional_config=settings, **options) as engine:
        drain(engine)
        prompt, spans = prompt_of(engine, [1, 2, 3])
        (plain,) = outputs(engine, [prompt], [None], logprobs=20)
        scheduler(engine).reset_prefix_cache()
        (first,) = outputs(engine, [prompt], [{"spans": spans} | REPORT], logprobs=20)
        assert apart(first, plain) < ROUNDING
        field = {"spans": spans, "recomp_ratio": 0.0} | REPORT
        scheduler(engine).reset_prefix_cache()
        (second,) = outputs(engine, [prompt], [field], logprobs=20)
        told = report(second)
        assert (told["reused_tokens"], told["harvested_chunks"]) == (300, 3)
        assert apart(second, plain) < ROUNDING
        assert all(
            tensor.device.type == "cpu" and tensor.is_pinned() == torch.cuda.is_available()
            for kv in engine.model.blending.chunks._chunks.values()
            for layer in kv.layers
            for tensor in layer
        )
        with torch.inference_mode():
            for kv in engine.model.blending.chunks._chunks.values():
                for _, v in kv.layers:
                    v.neg_()
        scheduler(engine).reset_prefix_cache()
        (wrong,) = outputs(engine, [prompt], [field], logprobs=20)
        assert apart(wrong, plain) > 10 * ROUNDING
        mixed, places = prompt_of(engine, [3, 4, 1, 5], head=9)
        (found,) = outputs(engine, [mixed], [{"spans": places} | REPORT])
        assert (report(found)["reused_tokens"], report(found)["missed_chunks"]) == (200, 2)
        scheduler(engine).reset_prefix_cache()
        (again,) = outputs(engine, [mixed], [{"spans": places} | REPORT])
        told = report(again)
        rows = [at for start, end in told["recomputed_spans"] for at in range(start, end)]
        assert (told["reused_tokens"], told["recomputed_tokens"]) == (400, len(rows)) and rows
        assert {*rows} <= {at for start, end in places for at in range(start, end)}


@pytest.mark.parametrize("eager", [True, False])
def test_no_kernel_is_compiled_for_another_length(
    folder: Path, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes a second, in which all requests wait."""
    from triton import knobs

    settings = {"vllm_blend": {"ram_gb": 0.2, "policy": "ahead*static", "background_share": 0}}
    options: dict[str, Any] = dict(max_num_batched_tokens=1024, max_num_seqs=8, enforce_eager=eager)
    options |= dict(gpu_memory_utilization=0.3, enable_prefix_caching=True, dtype="bfloat16")
    compiled: list[str] = []

    def note(fn: Any, **_: Any) -> None:
        if "vllm_blend" in fn.module:
            compiled.append(fn.name)

    with make_engine(folder, additional_config=settings, **options) as engine:
        drain(engine)

        def answer(numbers: list[int], size: int, head: int) -> int:
            prompt, spans = prompt_of(engine, numbers, size, head)
            (found,) = outputs(engine, [prompt], [{"spans": spans} | REPORT])
            scheduler(engine).reset_prefix_cache()
            return int(report(found)["reused_tokens"])

        assert answer([1, 2, 3], 100, 5) == 0  # computed and kept
        assert answer([3, 1, 2], 100, 5) == 300
        monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", note)
        for size in range(101, 118):
            first = 10 * size
            assert answer([first, first + 1], size, size % 5 + 1) == 0
            assert answer([first + 1, first, first + 2], size, 3 + size % 2) == 2 * size
        assert not compiled


def test_of_what_is_kept_few_layers_are_on_the_gpu_at_once(tmp_path: Path) -> None:
    """A prompt's chunks go to host memory layer by layer, and nothing of them stays behind."""
    layers, size, count = 16, 1000, 4
    folder = tiny_model("qwen3", tmp_path, num_hidden_layers=layers, max_position_embeddings=8192)
    settings = {"vllm_blend": {"ram_gb": 1, "policy": "random", "stand_in": ""}}
    options: dict[str, Any] = dict(max_model_len=8192, max_num_batched_tokens=8192, max_num_seqs=8)
    options |= dict(gpu_memory_utilization=0.3)
    with make_engine(folder, dtype="bfloat16", additional_config=settings, **options) as engine:
        drain(engine)

        def memory(numbers: list[int], kept: bool) -> tuple[int, int]:
            """What a prompt's prefill takes beyond what was there, at most and afterwards."""
            prompt, spans = prompt_of(engine, numbers, size=size)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            outputs(engine, [prompt], [{"spans": spans} if kept else None])
            drain(engine)
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before

        memory([1, 2, 3, 4], kept=True)  # what is made at first use
        plain, _ = memory([5, 6, 7, 8], kept=False)
        found, left = memory([9, 10, 11, 12], kept=True)
        assert len(engine.model.blending.chunks) >= 2 * count
        shape = engine.model.blending.kv_shape
        num_bytes = 2 * math.prod(shape.of(size * count)) * shape.dtype.itemsize  # K and V of a layer
        print(f"{(found - plain) / num_bytes:.1f} layers, {left / num_bytes:.1f} left")
        assert found - plain < 5 * num_bytes and left < num_bytes
