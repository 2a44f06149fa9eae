"""Quantized paged caches and weights: the identities, within what eight bits are off themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Engine, make_engine, relative_error, tiny_model
from quantize import FORMATS
from rounding import mean, other_last_bits

LENGTH, QUESTION = 420, 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of narrower weights than others': it does not amplify rounding."""
    return tiny_model("llama", tmp_path_factory.mktemp("llama"), initializer_range=0.08)


def first_logits(engine: Engine) -> tuple[list[int], torch.Tensor]:
    """A prompt, and the logits that full prefill gives it."""
    prompt = engine.ids(LENGTH, 1)
    return prompt, last_logits(engine, prompt)


def last_logits(engine: Engine, prompt: list[int]) -> torch.Tensor:
    """Those of the prompt's last token; there are others where it runs in several windows."""
    return engine.run(prompt, max_tokens=1)[1][-1:]


# --- the paged cache in fp8 -------------------------------------------------------------------------

KINDS = {"fp8 (e4m3)": "fp8", "fp8 (e5m2)": "fp8_e5m2"}

HAS_AVX512 = torch.cpu._is_avx512_supported()
needs_avx512 = pytest.mark.skipif(not HAS_AVX512, reason="vLLM's fp8 cache needs AVX-512 on a CPU")


@pytest.fixture(scope="module")
def plain(folder: Path) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Over a cache of the model's type: logits; K and V of layer 0, which depend on no cache."""
    with make_engine(folder) as engine:
        prompt, logits = first_logits(engine)
        return logits, engine.collect(prompt)[0]


@pytest.fixture(scope="module")
def unrounded(plain: tuple[torch.Tensor, list[torch.Tensor]]) -> torch.Tensor:
    return plain[0]


@pytest.fixture(scope="module", params=KINDS)
def fp8(request: pytest.FixtureRequest, unrounded: torch.Tensor, folder: Path) -> Iterator[Engine]:
    # prompts are prefilled in two windows
    kind = KINDS[request.param]
    with make_engine(folder, kv_cache_dtype=kind, max_num_batched_tokens=256) as engine:
        yield engine


@needs_avx512
def test_a_cache_in_fp8_takes_a_byte_a_value(fp8: Engine) -> None:
    assert all(attn.kv_cache.dtype.itemsize == 1 for attn in fp8.model.blending.attns)


@pytest.mark.covers("KV cache in {fp8}", backend="CPU_ATTN", family="llama")
@needs_avx512
@pytest.mark.parametrize("policy", ["random", "ahead", "hkvd"])
@pytest.mark.parametrize("ratio", [0.0, 0.16, 1.0])
def test_exact_kv_over_a_cache_in_fp8_is_its_full_prefill(
    fp8: Engine, unrounded: torch.Tensor, policy: str, ratio: float
) -> None:
    prompt, full = first_logits(fp8)
    noise = relative_error(full, unrounded)
    assert noise > 1e-4  # else nothing was rounded
    exact = fp8.collect(prompt)
    with fp8.blending(exact, QUESTION, recomp_ratio=ratio, policy=policy):
        logits = last_logits(fp8, prompt)
    assert relative_error(logits, full) < noise / 100


@needs_avx512
def test_kv_that_is_kept_has_not_been_rounded(
    fp8: Engine, plain: tuple[torch.Tensor, list[torch.Tensor]]
) -> None:
    """So it is rounded once, however often it is reused."""
    kept = fp8.collect(fp8.ids(LENGTH, 1))[0]
    for found, expected in zip(kept, plain[1], strict=True):
        assert relative_error(found, expected) < 1e-6


@needs_avx512
def test_wrong_kv_over_a_cache_in_fp8_is_not(fp8: Engine, unrounded: torch.Tensor) -> None:
    prompt, full = first_logits(fp8)
    wrong = [[k.roll(7, 0), v.roll(7, 0)] for k, v in fp8.collect(prompt)]
    with fp8.blending(wrong, QUESTION, recomp_ratio=0.0, policy="random"):
        logits = last_logits(fp8, prompt)
    assert relative_error(logits, full) > relative_error(full, unrounded)


# --- weights ------------------------------------------------------------------------------------------


WITHOUT_AVX512 = "int8 (compressed-tensors)"
"""The one format for which vLLM's build for CPUs without AVX-512 has kernels."""


def quantizes_to_fp8() -> bool:
    """Whether vLLM's op takes arguments; else it is a name without a kernel."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    return bool(torch.ops._C.static_scaled_fp8_quant.default._schema.arguments)


def needs_kernels(form: str) -> None:
    """Skips where vLLM has none for a CPU."""
    if not HAS_AVX512 and form != WITHOUT_AVX512:
        pytest.skip(f"vLLM's kernels for weights in {form} need AVX-512 on a CPU")
    if form == "fp8" and not quantizes_to_fp8():
        pytest.skip("this build of vLLM declares its op that quantizes to fp8, and has none")


@pytest.fixture(scope="module", params=FORMATS)
def weights(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    needs_kernels(request.param)
    quantized = FORMATS[request.param](folder, tmp_path_factory.mktemp("quantized"))
    with make_engine(quantized, dtype="bfloat16") as engine:
        yield engine


@pytest.mark.covers("weights: {weights}", backend="CPU_ATTN", family="llama")
@pytest.mark.parametrize("policy", ["random", "ahead", "hkvd"])
def test_exact_kv_with_quantized_weights_is_full_prefill(weights: Engine, policy: str) -> None:
    prompt, full = first_logits(weights)
    exact = weights.collect(prompt)
    for ratio in (0.0, 0.16, 1.0):
        with weights.blending(exact, QUESTION, recomp_ratio=ratio, policy=policy):
            logits = last_logits(weights, prompt)
        assert relative_error(logits, full) < 0.04  # 0.007 with weights in bfloat16


def distances_to_full_prefill(
    engine: Engine, prompts: Sequence[list[int]] | None = None
) -> tuple[list[float], list[float]]:
    """Relative errors of the logits after four prompts, random ones if none are given: blended with
    exact KV by three policies at three ratios; and of full prefill where other last bits of K and V go
    to the cache."""
    blended, to_itself = [], []
    for prompt in prompts or [engine.ids(LENGTH, seed) for seed in range(1, 5)]:
        full = last_logits(engine, prompt)
        assert torch.equal(last_logits(engine, prompt), full)  # the same each time, if nothing differs
        for seed in range(4):
            with other_last_bits(engine, seed):
                to_itself.append(relative_error(last_logits(engine, prompt), full))
        exact = engine.collect(prompt)
        for policy in ("random", "ahead", "hkvd"):
            for ratio in (0.0, 0.16, 1.0):
                with engine.blending(exact, QUESTION, recomp_ratio=ratio, policy=policy):
                    blended.append(relative_error(last_logits(engine, prompt), full))
    return blended, to_itself


def test_exact_kv_is_as_near_as_full_prefill_is_to_itself(weights: Engine) -> None:
    """In the mean: a last bit may change an input that is in eight bits by a whole step."""
    blended, to_itself = distances_to_full_prefill(weights)
    print(f"exact KV {mean(blended):.4f}, full prefill to itself {mean(to_itself):.4f}")
    assert mean(blended) < mean(to_itself)


def test_wrong_kv_with_quantized_weights_is_not(weights: Engine) -> None:
    prompt, full = first_logits(weights)
    wrong = [[k.roll(7, 0), v.roll(7, 0)] for k, v in weights.collect(prompt)]
    with weights.blending(wrong, QUESTION, recomp_ratio=0.0, policy="random"):
        logits = last_logits(weights, prompt)
    assert relative_error(logits, full) > 0.1


def test_any_kv_at_ratio_one_is_full_prefill(weights: Engine) -> None:
    prompt, full = first_logits(weights)
    torch.manual_seed(0)
    noise: Any = [[torch.randn_like(t) for t in layer] for layer in weights.collect(prompt)]
    with weights.blending(noise, QUESTION, recomp_ratio=1.0, policy="random"):
        logits = last_logits(weights, prompt)
    assert relative_error(logits, full) < 0.02


# --- weights of a real model ------------------------------------------------------------------------

REAL = ("int4 (compressed-tensors)", "int8 (compressed-tensors)", "fp8")
"""Formats whose kernels take SmolLM2's sizes."""


def texts(folder: Path) -> list[list[int]]:
    """Four prompts of a text, as the model in ``folder`` reads it."""
    from transformers import AutoTokenizer

    from vllm_blend.core.stand_in import text

    ids: list[int] = AutoTokenizer.from_pretrained(folder).encode(text())
    prompts = [ids[start : start + LENGTH] for start in range(0, 4 * LENGTH, LENGTH)]
    assert all(len(prompt) == LENGTH for prompt in prompts)
    return prompts


def check_identities(engine: Engine, prompts: Sequence[list[int]]) -> None:
    """Exact KV, and any KV where all is computed, are in the mean nearer to full prefill than it is to
    itself, wrong KV is not; and where all is computed, the KV that is given changes nothing."""
    blended, to_itself = distances_to_full_prefill(engine, prompts)
    print(f"exact KV {mean(blended):.4f} (at most {max(blended):.4f}),", end=" ")
    print(f"full prefill to itself {mean(to_itself):.4f} ({max(to_itself):.4f})")
    torch.manual_seed(0)
    wrong_errors, computed_errors = [], []
    for prompt in prompts:
        exact = engine.collect(prompt)
        wrong = [[k.roll(7, 0), v.roll(7, 0)] for k, v in exact]
        noise = [[torch.randn_like(t) for t in layer] for layer in exact]
        found = []
        for kvs, ratio in ((wrong, 0.0), (exact, 1.0), (noise, 1.0)):
            with engine.blending(kvs, QUESTION, recomp_ratio=ratio, policy="random"):
                found.append(last_logits(engine, prompt))
        full = last_logits(engine, prompt)
        wrong_errors.append(relative_error(found[0], full))
        computed_errors.append(relative_error(found[2], full))
        assert relative_error(found[2], found[1]) < 1e-5
    print(f"any KV, all rows computed {mean(computed_errors):.4f}; wrong KV {mean(wrong_errors):.4f}")
    assert max(mean(blended), mean(computed_errors)) < mean(to_itself)
    assert mean(wrong_errors) > 2 * mean(to_itself)


@pytest.mark.slow
@pytest.mark.parametrize("form", REAL)
def test_the_identities_of_a_real_model(form: str, smollm2: Path, tmp_path: Path) -> None:
    needs_kernels(form)
    with make_engine(FORMATS[form](smollm2, tmp_path / "quantized"), dtype="bfloat16") as engine:
        check_identities(engine, texts(smollm2))
