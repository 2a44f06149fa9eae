"""KV kept in fp8: how far it is from what it was, and that it is never taken for the other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from chunks import MODEL, SHAPE, make_key, make_kv, same
from engines import Engine
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load
from streams import Device
from tiers import FakeTier

from vllm_blend import Blender
from vllm_blend.core.kv import KVShape, StoredKV
from vllm_blend.core.plans import BlendPlan, ChunkSpan
from vllm_blend.core.stage_clock import StageClock
from vllm_blend.core.step import StepRequest
from vllm_blend.model import kv_loader
from vllm_blend.server.chunks.chunk_registry import bytes_per_token
from vllm_blend.store import ChunkStore, DiskTier, ModelKey
from vllm_blend.store.fp8 import Fp8Layers, narrow
from vllm_blend.store.keys import ChunkKey
from vllm_blend.store.record import Layout, Record, layers_in
from vllm_blend.store.streaming_layers import StreamingKV, StreamingLayers

FP8 = replace(MODEL, storage="fp8")


def kept(kv: StoredKV) -> StoredKV:
    """What fp8 leaves of it."""
    layers = []
    for k, v in kv.layers:
        k_scale, v_scale, k8, v8 = narrow(k, v)
        layers.append(((k8.float() * k_scale).to(k.dtype), (v8.float() * v_scale).to(v.dtype)))
    return StoredKV(tuple(layers))


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 4), st.sampled_from([2, 6, 64]), st.floats(-30, 30))
def test_the_error_is_that_of_three_bits(tokens: int, heads: int, size: int, power: float) -> None:
    generator = torch.Generator().manual_seed(tokens)
    k = torch.randn(tokens, heads, size, generator=generator) * 2.0**power
    found = kept(StoredKV(((k, -k),))).layers[0]
    largest = k.abs().amax(-1, keepdim=True)
    assert torch.all((found[0] - k).abs() <= k.abs() / 16 + largest / 448 * 2**-10)
    assert torch.equal(found[0], -found[1])


@pytest.mark.parametrize("special", [0.0, 3e38, 1e-38])
def test_extremes_stay_finite(special: float) -> None:
    k = torch.full((3, 2, 8), special)
    assert all(tensor.isfinite().all() for tensor in kept(StoredKV(((k, k),))).layers[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 19, 99])
def test_a_record_in_fp8(num_tokens: int, dtype: torch.dtype) -> None:
    model = replace(FP8, shape=KVShape(3, 1, 6, dtype))
    key = make_key(num_tokens=num_tokens, model=model)
    kv, layout = make_kv(key), Layout.of(key)
    data = b"".join(Record.of(key, kv).parts)
    assert len(data) == layout.num_bytes
    tensors = load(data)
    assert tensors["layers.1.k"].dtype == torch.float8_e4m3fn
    assert tensors["layers.1.k_scale"].shape == (num_tokens, 1, 1)
    memory = torch.frombuffer(bytearray(data[layout.preamble_bytes :]), dtype=torch.uint8)
    found = StoredKV(layers_in(memory, model.shape, num_tokens, "fp8"))
    found.check(model.shape, num_tokens)
    assert same(found, kept(kv))
    assert found.num_bytes == len(memory) and found.addresses(0) is None
    assert b"".join(Record.of(key, found).parts) == data  # not narrowed twice
    for part in ((0, 1), (num_tokens // 2, num_tokens)):
        assert same(found.tokens(*part), kept(kv).tokens(*part))
        assert found.tokens(*part).num_bytes == len(memory) // num_tokens * (part[1] - part[0])


def test_fp8_and_full_precision_do_not_find_each_other() -> None:
    ids = make_key().token_ids
    plain, small = (model.chunk(ids, context=(1,)) for model in (MODEL, FP8))
    assert plain.digest != small.digest
    tier = FakeTier()
    kv = make_kv(plain)
    with ChunkStore([tier], host_bytes=1 << 22) as store:
        store.put(small, kv)
        assert store.flush()
        assert store.get(plain) is None and store.locate(plain) is None
        store.put(plain, kv)
        assert store.flush()
        for key, expected in ((plain, kv), (small, kept(kv))):
            assert same(store.get(key), expected)  # from host memory
            store.discard(key)
            assert same(store.get(key), expected)  # from the tier
            store.discard(key)
            assert same(store.get(key, layerwise=True), expected)
        assert store.flush()  # no load is about to end
        # even under the other's name it is not taken
        tier.records[plain.digest] = tier.records[small.digest]
        store.discard(plain)
        assert store.get(plain) is None


def test_fp8_is_smaller_everywhere(tmp_path: Path) -> None:
    shape = replace(SHAPE, head_size=64)
    sizes = []
    for storage in ("auto", "fp8"):
        key = ModelKey("w", "{}", shape, storage=storage).chunk(range(500))
        with ChunkStore([DiskTier(tmp_path / storage, 1 << 30)], host_bytes=1 << 24) as store:
            store.put(key, make_kv(key))
            assert store.flush()
            stats = store.stats()
            sizes.append((stats["bytes.host"], stats["bytes.disk"], stats["bytes_written.disk"]))
    assert all(3 * small < large for large, small in zip(*sizes, strict=True))


@pytest.mark.parametrize("late", [False, True])
def test_a_gpu_gets_eight_bits_and_widens_them(monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """By stand-ins for streams; the second window is a part of a chunk."""
    shape = KVShape(5, 2, 8, torch.float32)
    key = make_key(num_tokens=9, model=replace(FP8, shape=shape))
    with ChunkStore(host_bytes=1 << 22) as store:
        store.put(key, make_kv(key))
        assert store.flush()
        kv = store.get(key)
    assert kv is not None
    expected = kept(make_kv(key))
    if late:
        streamed = StreamingLayers(kv.layers, "late", 60)
        for _ in range(5):
            streamed.arrive()
        kv = StreamingKV(streamed)
    device = Device(monkeypatch, "early")
    plan = BlendPlan((ChunkSpan(0, kv), ChunkSpan(9, kv)))
    request = StepRequest(plan, 0, 0, 14, torch.device("cpu"))
    stored = kv_loader.StoredLayers([request], torch.device("cpu"), 5, 0, StageClock())
    monkeypatch.setattr(Fp8Layers, "layer", None)  # nothing is widened before it is copied
    for layer in range(5):
        stored.read(layer)
        found = stored.old_kv(request, layer)
        for tensor, whole in zip(found, expected.layers[layer], strict=True):
            assert torch.equal(tensor, torch.cat([whole, whole[:5]]))
        stored.done(layer)
    assert len(device.launched) == 5 * (2 + 4)  # a whole chunk's K and V in one, and their scales
    assert len(device.widened) == 5  # a layer at once
    values = [target for target in device.launched if target.element_size() == 1]
    scales = [target for target in device.launched if target.element_size() == 4]
    assert sum(target.numel() for target in values) == 5 * 2 * 14 * 16
    assert sum(target.numel() for target in scales) == 5 * 2 * 14 * 2
    assert len(values) == len(scales) == 5 * 3


def test_a_servers_budget_is_of_what_is_kept() -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            get_num_kv_heads=lambda parallel: 2,
            get_head_size=lambda: 64,
            get_total_num_hidden_layers=lambda: 3,
            dtype=torch.bfloat16,
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=2),
    )
    shape = KVShape(3, 2, 64, torch.bfloat16)
    for storage in ("auto", "fp8"):
        key = ModelKey("w", "{}", shape, storage=storage).chunk(range(10))
        assert bytes_per_token(config, storage) == 2 * Layout.of(key).payload_bytes // 10


def test_bad_storage_is_refused() -> None:
    with pytest.raises(ValueError, match="storage is 'int4'; allowed: auto, fp8"):
        ChunkStore(host_bytes=0, storage="int4")
    with pytest.raises(ValueError, match="storage is ''"):
        replace(MODEL, storage="")


def test_an_engine_over_fp8(smollm2_engine: Engine, tmp_path: Path) -> None:
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    texts = [smollm2_engine.ids(60, seed) for seed in range(3)]
    question = smollm2_engine.ids(5, 9)
    with ChunkStore([DiskTier(tmp_path, 1 << 30)], host_bytes=1 << 26, storage="fp8") as store:
        blender = Blender(smollm2_engine.llm, store=store, stand_in="")
        blender.chunks(texts)
        assert store.flush()
        keys: list[ChunkKey] = [blender.key(ids) for ids in blender.token_ids(texts)]
        exact = Blender(smollm2_engine.llm, stand_in="")
        expected = [kept(chunk.kv) for chunk in exact.chunks(texts) if chunk.kv is not None]
        assert [same(chunk.kv, kv) for chunk, kv in zip(blender.chunks(texts), expected, strict=True)]
        answers = []
        for _ in ("host", "disk"):
            prompt = blender.prompt(blender.chunks(texts), question)
            answers.append(list(blender.generate(prompt, greedy).outputs[0].token_ids))
            del prompt
            for key in keys:
                store.discard(key)
        assert answers[0] == answers[1] and store.stats()["hits.disk"] == 3
