"""Identities that a blended run must satisfy whatever the model; fp32, every family and SmolLM2."""

from __future__ import annotations

import pytest
import torch
from engines import Engine, relative_error

RATIOS = (0.0, 0.05, 0.16, 0.5, 1.0)


@pytest.fixture(scope="module")
def chunks(engine: Engine) -> list[list[int]]:
    return [engine.ids(count, seed) for seed, count in enumerate((61, 1, 130, 19))]


@pytest.fixture(scope="module")
def question(engine: Engine) -> list[int]:
    return engine.ids(9, seed=99)


@pytest.fixture(scope="module")
def prompt(chunks: list[list[int]], question: list[int]) -> list[int]:
    return sum(chunks, []) + question


@pytest.fixture(scope="module")
def full(engine: Engine, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    return engine.run(prompt)


@pytest.mark.covers("rows chosen at a check layer", backend="CPU_ATTN", family="{engine}")
@pytest.mark.parametrize("ratio", RATIOS)
def test_exact_kv_reproduces_full_prefill(
    engine: Engine,
    prompt: list[int],
    question: list[int],
    full: tuple[list[int], torch.Tensor],
    ratio: float,
) -> None:
    exact = engine.collect(prompt)
    with engine.blending(exact, len(question), recomp_ratio=ratio):
        tokens, logits = engine.run(prompt)
    kept = int(ratio * (len(prompt) - len(question))) + len(question)
    assert len(engine.flags["imp_indices"]) == kept
    assert tokens == full[0]
    assert relative_error(logits, full[1]) < 1e-4


def test_any_kv_at_ratio_one_is_full_prefill(
    engine: Engine,
    prompt: list[int],
    question: list[int],
    full: tuple[list[int], torch.Tensor],
) -> None:
    torch.manual_seed(0)
    noise = [[torch.randn_like(t) * 5 for t in layer] for layer in engine.collect(prompt)]
    with engine.blending(noise, len(question), recomp_ratio=1.0):
        tokens, logits = engine.run(prompt)
    assert tokens == full[0]
    assert relative_error(logits, full[1]) < 1e-4


def test_layer_0_key_of_a_chunk_rotates_to_its_place(
    engine: Engine, chunks: list[list[int]], prompt: list[int]
) -> None:
    alone, whole = engine.collect(chunks[2])[0], engine.collect(prompt)[0]
    start = len(chunks[0]) + len(chunks[1])
    end = start + len(chunks[2])
    rotary = engine.model.layers[0].self_attn.rotary_emb
    place = torch.arange(start, end)
    moved = rotary(place, alone[0].flatten(1).clone())[0]
    expected = rotary(place, whole[0][start:end].flatten(1).clone())[0]
    assert relative_error(moved, expected) < 1e-5
    assert relative_error(alone[1], whole[1][start:end]) < 1e-5
    unmoved = rotary(torch.arange(end - start), alone[0].flatten(1).clone())[0]
    assert relative_error(unmoved, expected) > 1e-2  # the rotation is not the identity


def test_stored_kv_is_bit_equal_after_use(
    engine: Engine, chunks: list[list[int]], prompt: list[int], question: list[int]
) -> None:
    old_kvs = engine.stored(chunks)
    before = [[tensor.clone() for tensor in layer] for layer in old_kvs]
    with engine.blending(old_kvs, len(question)):
        first = engine.run(prompt)
        second = engine.run(prompt)
    for layer, copy in zip(old_kvs, before, strict=True):
        for tensor, kept in zip(layer, copy, strict=True):
            assert torch.equal(tensor, kept)
    assert first[0] == second[0]
    assert torch.equal(first[1], second[1])


def test_two_check_layers_with_falling_ratios(
    engine: Engine,
    prompt: list[int],
    chunks: list[list[int]],
    question: list[int],
    full: tuple[list[int], torch.Tensor],
) -> None:
    gradual = dict(check_layers=[1, 3], recomp_ratios=[0.6, 0.2])
    with engine.blending(engine.collect(prompt), len(question), **gradual):
        tokens, logits = engine.run(prompt)
    num_chunk_tokens = len(prompt) - len(question)
    assert len(engine.flags["imp_indices"]) == int(0.2 * num_chunk_tokens) + len(question)
    assert tokens == full[0]
    assert relative_error(logits, full[1]) < 1e-4

    # with approximate KV the second choice is made among the rows of the first
    old_kvs = engine.stored(chunks)
    with engine.blending(old_kvs, len(question), recomp_ratio=0.6):
        engine.run(prompt, max_tokens=1)
        first = set(engine.flags["imp_indices"].tolist())
    with engine.blending(old_kvs, len(question), **gradual):
        engine.run(prompt, max_tokens=1)
        assert set(engine.flags["imp_indices"].tolist()) < first


def test_error_falls_as_the_ratio_rises(
    engine: Engine,
    chunks: list[list[int]],
    prompt: list[int],
    question: list[int],
    full: tuple[list[int], torch.Tensor],
) -> None:
    old_kvs = engine.stored(chunks)
    errors = []
    for ratio in (0.0, 0.5, 1.0):
        with engine.blending(old_kvs, len(question), recomp_ratio=ratio):
            _, logits = engine.run(prompt, max_tokens=1)
        errors.append(relative_error(logits, full[1][:1]))
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-4
