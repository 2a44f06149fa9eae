"""Attention on a CPU: what stands in vLLM's paged cache is found again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform

from vllm_blend.attention.cpu import CPUBlendImpl

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="needs vLLM's CPU ops")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("head_size", "count"), [(64, 1), (64, 200), (80, 128)])
def test_keys_are_read_back_from_the_paged_cache(
    dtype: torch.dtype, head_size: int, count: int
) -> None:
    """In whatever order the kernel keeps them on this processor."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    num_kv_heads, block_size, num_tokens = 3, 128, 200
    config = VllmConfig()
    config.model_config = SimpleNamespace(dtype=dtype)  # type: ignore[assignment]
    with set_current_vllm_config(config):
        impl = CPUBlendImpl(6, head_size, 1.0, num_kv_heads, None, None, "auto")
    cache = torch.zeros(5, num_kv_heads, block_size, 2 * head_size, dtype=dtype)
    isa = _get_attn_isa(dtype, block_size, head_size)
    layer = SimpleNamespace(kv_cache=cache, isa=isa, _k_scale_float=1.0, _v_scale_float=1.0)
    key, value = torch.randn(2, num_tokens, num_kv_heads, head_size).to(dtype)
    table, places = torch.tensor([4, 1]), torch.arange(num_tokens)
    slots = table[places // block_size] * block_size + places % block_size
    impl.do_kv_cache_update(layer, key, value, cache, slots)  # type: ignore[arg-type]
    assert torch.equal(impl.cached_keys(layer, table, count), key[:count])


@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM's fp8 needs AVX-512")
@pytest.mark.parametrize("kind", ["fp8", "fp8_e5m2"])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_keys_are_read_back_from_a_paged_cache_in_fp8(kind: str, scale: float) -> None:
    """As far as eight bits go: what is read is what was written, less than one step from it."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    num_kv_heads, block_size, head_size, num_tokens = 3, 128, 64, 200
    config = VllmConfig()
    config.model_config = SimpleNamespace(dtype=torch.float32)  # type: ignore[assignment]
    with set_current_vllm_config(config):
        impl = CPUBlendImpl(6, head_size, 1.0, num_kv_heads, None, None, kind)
    cache = torch.zeros(5, num_kv_heads, block_size, 2 * head_size, dtype=torch.uint8)
    isa = _get_attn_isa(torch.float32, block_size, head_size, kind)
    layer = SimpleNamespace(
        kv_cache=cache, isa=isa, dtype=torch.float32, _k_scale_float=scale, _v_scale_float=scale
    )
    key, value = torch.randn(2, num_tokens, num_kv_heads, head_size)
    table, places = torch.tensor([4, 1]), torch.arange(num_tokens)
    slots = table[places // block_size] * block_size + places % block_size
    impl.do_kv_cache_update(layer, key, value, cache, slots)  # type: ignore[arg-type]
    found, expected = impl.cached_keys(layer, table, 150), key[:150]
    dtype, bits = (torch.float8_e5m2, 2) if kind == "fp8_e5m2" else (torch.float8_e4m3fn, 3)
    assert torch.equal((found / scale).to(dtype).float() * scale, found)
    least = 2.0**-9 * scale  # where a step does not shrink any more
    assert bool(((found - expected).abs() <= (expected.abs() / 2**bits).clamp(min=least)).all())
