"""A key changes with everything that changes the numbers, and with nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chunks import MODEL, SHAPE, make_key
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from vllm_blend.store.fingerprint import model_key, weights_fingerprint
from vllm_blend.store.keys import ModelKey

IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20)


@pytest.mark.parametrize(
    "change",
    [
        dict(weights="v"),
        dict(rope='{"rope_theta": 5}'),
        dict(kv_dtype="fp8"),
        dict(storage="fp8"),
        dict(quantization="awq"),
        dict(tp_size=2),
        dict(tp_size=2, tp_rank=1),
        dict(shape=replace(SHAPE, dtype=torch.bfloat16)),
        dict(shape=replace(SHAPE, num_kv_heads=1, head_size=16)),
    ],
)
def test_the_model_is_part_of_the_key(change: dict[str, Any]) -> None:
    other = replace(MODEL, **change)
    assert other.digest != MODEL.digest
    assert other.chunk([1, 2]).digest != MODEL.chunk([1, 2]).digest


def test_keys_are_the_same_in_every_process() -> None:
    assert MODEL.digest.hex() == "d2e492cfb73958ce3091337ead1d1149"
    assert MODEL.chunk([1, 2], [3], "salt").digest.hex() == "8dbdf01deaa9ebcb83ef87fc3aee00e6"


@settings(deadline=None)
@given(IDS, IDS, st.text(max_size=5), IDS, IDS, st.text(max_size=5))
def test_two_chunks_have_one_key_only_if_all_is_equal(
    ids: list[int], context: list[int], salt: str, ids_2: list[int], context_2: list[int], salt_2: str
) -> None:
    one, two = MODEL.chunk(ids, context, salt), MODEL.chunk(ids_2, context_2, salt_2)
    equal = (ids, context, salt) == (ids_2, context_2, salt_2)
    assert (one.digest == two.digest) == equal
    assert MODEL.chunk(ids, context, salt).digest == one.digest
    assert MODEL.chunk(context + ids, (), salt).digest != one.digest  # a token changed sides
    assert len(one.digest) == 16


def test_bad_keys_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="token_ids is empty"):
        MODEL.chunk([])
    for ids in ([-1], [2**31]):
        with pytest.raises(ValueError, match="outside of 0 to"):
            _ = MODEL.chunk(ids).digest
    with pytest.raises(ValueError, match="weights is empty"):
        ModelKey("", "{}", SHAPE)
    with pytest.raises(ValueError, match="tp_rank is 2; allowed: 0 to tp_size - 1 = 1"):
        replace(MODEL, tp_size=2, tp_rank=2)


def test_salts_and_prints_hide_the_tenant() -> None:
    key = make_key(salt="tenant-a")
    assert key.digest != make_key(salt="tenant-b").digest
    assert "tenant" not in str(key)


def test_the_fingerprint_sees_every_tensor(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.arange(5000, dtype=torch.float32) + i for i in range(4)}

    def fingerprint(name: str, values: dict[str, torch.Tensor]) -> str:
        (tmp_path / name).mkdir()
        save_file(values, tmp_path / name / "model.safetensors")
        return weights_fingerprint(tmp_path / name)

    first = fingerprint("first", tensors)
    assert fingerprint("copy", tensors) == first
    changed = {name: tensor.clone() for name, tensor in tensors.items()}
    changed["t2"] += 1
    assert fingerprint("changed", changed) != first
    assert fingerprint("renamed", {f"x{name}": t for name, t in tensors.items()}) != first
    assert weights_fingerprint(tmp_path / "first" / "model.safetensors") == first
    (tmp_path / "model.gguf").write_bytes(bytes(10_000))
    assert weights_fingerprint(tmp_path / "model.gguf") != first
    with pytest.raises(FileNotFoundError, match="has no weights"):
        weights_fingerprint(tmp_path / "empty")


def test_an_engine_s_configuration_is_in_its_key(tmp_path: Path) -> None:
    save_file({"t": torch.ones(4)}, tmp_path / "model.safetensors")

    def key(config: dict[str, Any], load_format: str = "auto", seed: int = 0) -> ModelKey:
        model = SimpleNamespace(
            model=str(tmp_path),
            revision=None,
            quantization=None,
            seed=seed,
            hf_config=SimpleNamespace(to_dict=lambda: config),
        )
        vllm_config: Any = SimpleNamespace(
            model_config=model,
            load_config=SimpleNamespace(load_format=load_format),
            cache_config=SimpleNamespace(cache_dtype="auto"),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
        )
        return model_key(vllm_config, SHAPE)

    rope = {"rope_theta": 10000.0, "rope_type": "default"}
    first = key({"rope_parameters": rope, "hidden_size": 4})
    assert json.loads(first.rope) == {"rope_parameters": rope}
    assert key({"hidden_size": 4, "rope_parameters": rope, "_name_or_path": "elsewhere"}) == first
    assert key({"rope_parameters": rope | {"rope_theta": 5.0}, "hidden_size": 4}) != first
    assert key({"rope_parameters": rope, "hidden_size": 5}) != first
    dummies = {key({}, "dummy", seed).digest for seed in (0, 0, 1)}
    assert len(dummies) == 2
