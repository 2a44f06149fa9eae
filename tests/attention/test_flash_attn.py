"""Blend attention on FLASH_ATTN without a GPU: its kernels' oracles stand in for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from paged import relative_error
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

from vllm_blend.attention import flash_attn, paged
from vllm_blend.attention.base import Fusion, LayerBlend, StoredSegments
from vllm_blend.attention.flash_attn import FlashAttentionBlendImpl, FlashAttentionBlendMetadata
from vllm_blend.attention.rotation import Rotation
from vllm_blend.ops.fp8 import FP8, quantize_oracle, widen_oracle
from vllm_blend.ops.segment_scatter import SegmentTables
from vllm_blend.ops.sparse_attention import run, sparse_attention_oracle

HEADS, KV_HEADS, SIZE, BLOCK_SIZE, NUM_TOKENS = 6, 2, 32, 16, 90
ROWS = [3, 4, 40, 41, 77, 89]


def impl_of(kv_cache_dtype: str, window: int, version: int) -> Any:
    impl: Any = object.__new__(FlashAttentionBlendImpl)
    impl.__dict__.update(
        head_size=SIZE,
        scale=SIZE**-0.5,
        num_kv_heads=KV_HEADS,
        num_queries_per_kv=HEADS // KV_HEADS,
        kv_cache_dtype=kv_cache_dtype,
        sliding_window=(window - 1, 0) if window else (-1, -1),
        logits_soft_cap=0,
        sinks=None,
        vllm_flash_attn_version=version,
    )
    angles = torch.rand(NUM_TOKENS, SIZE // 2) * 6.3
    rotation = Rotation(torch.cat([angles.cos(), angles.sin()], 1))
    impl.blend = LayerBlend(0, rotation, SimpleNamespace(step=None))  # type: ignore[arg-type]
    return impl


@pytest.fixture(params=["auto", "fp8"])
def kv_cache_dtype(request: pytest.FixtureRequest) -> str:
    torch.manual_seed(0)
    kind: str = request.param
    return kind


@pytest.fixture
def layer(kv_cache_dtype: str) -> Any:
    """One whose scales differ from one another, and whose cache is empty."""
    shape = (8, KV_HEADS, BLOCK_SIZE, 2 * SIZE)
    dtype = torch.float32 if kv_cache_dtype == "auto" else torch.uint8
    return SimpleNamespace(
        kv_cache=torch.zeros(shape, dtype=dtype),
        dtype=torch.float32,
        sliding_window=None,
        _q_scale=torch.tensor(0.013),
        _k_scale=torch.tensor(0.021),
        _v_scale=torch.tensor(0.008),
    )


TABLE = torch.tensor([[4, 1, 6, 0, 7, 2]], dtype=torch.int32)


def slots() -> torch.Tensor:
    at = torch.arange(NUM_TOKENS)
    return TABLE[0][at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE


def cached(impl: Any, layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V that the cache stands for, ``[num_tokens, num_kv_heads, head_size]``."""
    found = []
    for cache, scale in zip(impl.caches(layer.kv_cache), (layer._k_scale, layer._v_scale), strict=True):
        scale = scale if cache.dtype == FP8 else None
        wide = widen_oracle(cache, scale, torch.float32)
        found.append(wide[TABLE[0].long()].flatten(0, 1)[:NUM_TOKENS])
    return found[0], found[1]


@pytest.mark.parametrize("in_segments", [False, True])
def test_stored_kv_is_rounded_once_into_the_cache(
    kv_cache_dtype: str, layer: Any, in_segments: bool
) -> None:
    impl = impl_of(kv_cache_dtype, 0, 3)
    k, v = torch.randn(2, NUM_TOKENS, KV_HEADS, SIZE)
    positions = torch.arange(NUM_TOKENS)
    old_kv: Any = (k, v)
    if in_segments:
        tables = SegmentTables(1, NUM_TOKENS, device="cpu")
        tables.fill([(NUM_TOKENS, 0, 0)], [[(k.data_ptr(), v.data_ptr())]])
        old_kv = StoredSegments(tables, 0, slots())
    impl.fuse(layer, layer.kv_cache, Fusion(old_kv, positions, slots()))
    turned, found = impl.blend.rotation.rotate(k, positions), cached(impl, layer)
    if kv_cache_dtype == "auto":
        assert torch.equal(found[1], v)
        assert relative_error(found[0], turned) < 1e-6
        return
    for one, exact, scale in zip(found, (turned, v), (layer._k_scale, layer._v_scale), strict=True):
        nearest = quantize_oracle(exact, scale).float() * scale
        assert float((one != nearest).float().mean()) < 1e-3  # where rotations differ in a last bit
        assert 1e-3 < relative_error(one, exact) < 0.05


@pytest.mark.parametrize(("window", "version"), [(0, 3), (0, 4), (20, 3)])
def test_rows_attend_over_the_cache(
    kv_cache_dtype: str, layer: Any, window: int, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With FlashAttention 3's part where it helps, and without."""
    impl = impl_of(kv_cache_dtype, window, version)
    key, value = torch.randn(2, NUM_TOKENS, KV_HEADS, SIZE)
    query, output = torch.randn(len(ROWS), HEADS, SIZE), torch.zeros(len(ROWS), HEADS, SIZE)
    for cache, new, scale in zip(
        impl.caches(layer.kv_cache), (key, value), (layer._k_scale, layer._v_scale), strict=True
    ):
        rounded = quantize_oracle(new, scale) if cache.dtype == FP8 else new
        cache[slots() // BLOCK_SIZE, slots() % BLOCK_SIZE] = rounded
    q = query
    if kv_cache_dtype == "fp8":  # as vLLM's layer hands it over
        q = quantize_oracle(query, layer._q_scale)
        query = widen_oracle(q, layer._q_scale, torch.float32)
    metadata = impl.at(
        FlashAttentionBlendMetadata(*[None] * len(FlashAttentionMetadata.__dataclass_fields__)),
        torch.tensor(ROWS),
        torch.tensor([0, len(ROWS)], dtype=torch.int32),
        TABLE,
    )
    assert (metadata.tiles is None) == (version != 3 or window > 0)
    asked: list[tuple[Any, ...]] = []

    def sparse(
        q: Any, k: Any, v: Any, at: Any, starts: Any, table: Any, out: Any, scale: float, window: int,
        tiles: Any, prefix_lse: Any = None, **options: Any
    ) -> None:  # fmt: skip
        run(q, k, v, at, starts, table, out, scale, window, **options)

    def dense(*args: Any) -> torch.Tensor:
        asked.append(args[8:])
        return torch.zeros(HEADS, len(ROWS))

    monkeypatch.setattr(flash_attn.sparse, "launch", sparse)
    monkeypatch.setattr(flash_attn, "flash_attention_3", dense)
    impl.attend(layer, q, layer.kv_cache, metadata, output)
    k, v = cached(impl, layer)
    expected = sparse_attention_oracle(
        query, k[None], v[None], torch.tensor(ROWS), torch.tensor([0, len(ROWS)]),
        torch.tensor([[0]]), scale=impl.scale, sliding_window=window,
    )  # fmt: skip
    assert relative_error(output, expected) < 1e-5
    scales: tuple[Any, ...] = (None, None, None)
    if kv_cache_dtype == "fp8":
        scales = (layer._q_scale, layer._k_scale, layer._v_scale)
    assert asked == ([] if metadata.tiles is None else [(scales,)])


def test_the_question_is_heard_over_the_cache(
    kv_cache_dtype: str, layer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[dict[str, Any]] = []

    def receive(query: torch.Tensor, *_: Any, **more: Any) -> None:
        heard.append(dict(query=query) | more)

    monkeypatch.setattr(paged, "received_attention", receive)
    impl = impl_of(kv_cache_dtype, 0, 3)
    query = torch.randn(len(ROWS), HEADS, SIZE)
    if kv_cache_dtype == "fp8":
        query = quantize_oracle(query, layer._q_scale)
    rows = torch.tensor([5, 0, 0])
    received = paged.Received([impl.asked(layer, query, rows, TABLE)] * 2)  # two layers, alike
    received.add_to(torch.zeros(NUM_TOKENS), slice(0, 3), 0, torch.tensor([9, 3, -1]))
    (call,) = heard
    assert torch.equal(call.pop("query").float(), query.float()[rows].expand(2, -1, -1, -1))
    for name, scale in dict(q_scale=layer._q_scale, k_scale=layer._k_scale).items():
        if kv_cache_dtype == "fp8":
            assert torch.equal(call.pop(name), scale.reshape(1, -1).expand(2, -1))
    assert call == dict(scale=impl.scale, sliding_window=0, softcap=0.0)
