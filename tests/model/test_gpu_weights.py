"""Quantized weights on a GPU (FLASH_ATTN): the identities, within what their kernels round.

What is allowed is a number, as on a CPU, and no more than what is measured: how far full prefill is
from itself where other last bits of K and V go to the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from engines import Engine, make_engine, relative_error, tiny_model
from quantize import FORMATS
from rounding import attends_as_stock, mean
from test_quantized import (
    QUESTION,
    REAL,
    check_identities,
    distances_to_full_prefill,
    first_logits,
    last_logits,
    texts,
)

pytestmark = pytest.mark.gpu

RATIOS = (0.0, 0.16, 1.0)
KINDS = [*product(FORMATS, ("float16", "bfloat16"))]
KINDS.remove(("int4 (GPTQ)", "bfloat16"))  # its kernels without Marlin are for float16
NEAR = 1.3
"""Times full prefill's distance to itself: no blend is farther, and their mean is nearer than that."""
SIZES = dict(hidden_size=256, intermediate_size=512, num_attention_heads=8, head_dim=32)
"""Multiples of 64 and 128, which the kernels for four bits want."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of narrower weights than others': it does not amplify rounding."""
    return tiny_model("llama", tmp_path_factory.mktemp("llama"), initializer_range=0.04, **SIZES)


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def weights(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    form, dtype = request.param
    quantized = FORMATS[form](folder, tmp_path_factory.mktemp("quantized"))
    with make_engine(quantized, dtype=dtype, gpu_memory_utilization=0.3) as engine:
        yield engine


@pytest.fixture(scope="module")
def distances(weights: Engine) -> tuple[float, float]:
    """Of blends with exact KV to full prefill, and of full prefill to itself; each in the mean."""
    blended, to_itself = map(mean, distances_to_full_prefill(weights))
    print(f"exact KV {blended:.4f}, full prefill to itself {to_itself:.4f}")
    return blended, to_itself


def error(engine: Engine, kvs: list[list[torch.Tensor]], ratio: float, policy: str) -> float:
    """Of a blended prompt's logits, against full prefill's."""
    prompt, full = first_logits(engine)
    with engine.blending(kvs, QUESTION, recomp_ratio=ratio, policy=policy):
        return relative_error(last_logits(engine, prompt), full)


def collected(engine: Engine) -> list[list[torch.Tensor]]:
    return engine.collect(first_logits(engine)[0])


@pytest.mark.covers("weights: {weights[0]}", backend="FLASH_ATTN", family="llama")
@pytest.mark.parametrize("policy", ["random", "ahead", "hkvd"])
def test_exact_kv_with_quantized_weights_is_full_prefill(
    weights: Engine, distances: tuple[float, float], policy: str
) -> None:
    exact = collected(weights)
    errors = [error(weights, exact, ratio, policy) for ratio in RATIOS]
    print(f"{policy}: {errors}")
    assert max(errors) < min(0.04, NEAR * distances[1])


def test_exact_kv_is_as_near_as_full_prefill_is_to_itself(distances: tuple[float, float]) -> None:
    blended, to_itself = distances
    assert blended < to_itself


def test_wrong_kv_with_quantized_weights_is_not(
    weights: Engine, distances: tuple[float, float]
) -> None:
    wrong = [[k.roll(7, 0), v.roll(7, 0)] for k, v in collected(weights)]
    assert error(weights, wrong, 0.0, "random") > max(0.1, NEAR * distances[1])


def test_any_kv_at_ratio_one_is_full_prefill(weights: Engine, distances: tuple[float, float]) -> None:
    torch.manual_seed(0)
    noise = [[torch.randn_like(t) for t in layer] for layer in collected(weights)]
    found = error(weights, noise, 1.0, "random")
    print(f"any KV: {found}")
    assert found < min(0.02, NEAR * distances[1])
    assert found == 0 or not attends_as_stock(weights)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("form", REAL)
def test_the_identities_of_a_real_model(form: str, dtype: str, smollm2: Path, tmp_path: Path) -> None:
    quantized = FORMATS[form](smollm2, tmp_path / "quantized")
    with make_engine(quantized, dtype=dtype, gpu_memory_utilization=0.3) as engine:
        check_identities(engine, texts(smollm2))
