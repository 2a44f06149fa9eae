"""What is supported on a CPU and not on a GPU yet is refused there by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from vllm_blend.compat.support import check_policy, why_unsupported
from vllm_blend.core.settings import BlendSettings


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"enable_lora": True}, None),
        ({"kv_cache_dtype": "fp8"}, None),
        ({"kv_cache_dtype": "fp8_e4m3"}, None),
        pytest.param(
            {"kv_cache_dtype": "fp8_e5m2"},
            "kv_cache_dtype fp8_e5m2 on a GPU (fp8_e4m3 is supported there)",
            marks=pytest.mark.covers("KV cache in fp8 (e5m2)", backend="FLASH_ATTN", refused=True),
        ),
        ({}, None),
    ],
)
def test_what_a_gpu_cannot_do_yet_is_refused_there(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], sentence: str | None
) -> None:
    arguments = EngineArgs(model=str(tiny("llama")), enforce_eager=True, **options)
    config = arguments.create_engine_config()
    assert why_unsupported(config) is None
    monkeypatch.setattr(config.device_config, "device_type", "cuda")
    found = why_unsupported(config)
    assert (sentence is None) == (found is None)
    assert sentence is None or (sentence in str(found))


@pytest.mark.covers("KV cache in other quantized types", refused=True)
def test_another_quantized_cache_is_refused(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineArgs(model=str(tiny("llama")), enforce_eager=True).create_engine_config()
    monkeypatch.setattr(config.cache_config, "cache_dtype", "int8_per_token_head")
    assert "blending does not support kv_cache_dtype int8_per_token_head;" in str(
        why_unsupported(config)
    )


def test_policies_with_a_check_layer_need_an_engine_without_lora(tiny: Any) -> None:
    model = str(tiny("llama"))
    plain = EngineArgs(model=model, enforce_eager=True).create_engine_config()
    check_policy(plain, BlendSettings(policy="hkvd"))
    lora = EngineArgs(model=model, enforce_eager=True, enable_lora=True).create_engine_config()
    check_policy(lora, BlendSettings(policy="ahead*static"))
    with pytest.raises(ValueError, match="an engine with LoRA can choose rows before layer 0 only"):
        check_policy(lora, BlendSettings(policy="hkvd"))


@pytest.mark.covers("policies that need more than the plan, with pipeline parallelism", refused=True)
def test_pipeline_stages_choose_from_the_plan_alone(tiny: Any) -> None:
    model = str(tiny("llama"))
    config = EngineArgs(model=model, pipeline_parallel_size=2).create_engine_config()
    assert why_unsupported(config) is None
    for policy in ("static", "random", "heads", "static*random"):
        check_policy(config, BlendSettings(policy=policy))
    for policy in ("ahead", "ahead*static", "hkvd", "static*query"):
        with pytest.raises(ValueError, match="plan alone, so allowed: heads, random, static, and"):
            check_policy(config, BlendSettings(policy=policy))
    settings = {"vllm_blend": {}}
    with pytest.raises(ValueError, match="policy is 'ahead\\*static'; the stages of pipeline"):
        EngineArgs(
            model=model, pipeline_parallel_size=2, additional_config=settings
        ).create_engine_config()


@pytest.mark.covers("pipeline parallelism in a script", refused=True)
def test_pipeline_parallelism_is_a_servers(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = str(tiny("llama"))
    config = EngineArgs(model=model, pipeline_parallel_size=2).create_engine_config()
    monkeypatch.setattr(config.parallel_config, "distributed_executor_backend", "external_launcher")
    assert "pipeline parallelism in a script (external_launcher)" in str(why_unsupported(config))


@pytest.mark.covers("pipeline parallelism with --enforce-eager", backend="CPU_ATTN", refused=True)
def test_pipeline_parallelism_on_a_cpu_needs_compiled_models(tiny: Any) -> None:
    """vLLM makes the buffers of later stages where it warms up a compiled model, and nowhere else."""
    eager = EngineArgs(model=str(tiny("llama")), pipeline_parallel_size=2, enforce_eager=True)
    assert "leave out --enforce-eager" in str(why_unsupported(eager.create_engine_config()))


@pytest.mark.covers("{feature}", refused=True)
@pytest.mark.parametrize(
    ("feature", "part", "changes"),
    [
        ("context parallelism", "parallel_config", {"prefill_context_parallel_size": 2}),
        ("context parallelism", "parallel_config", {"decode_context_parallel_size": 2}),
        ("dual-batch overlap", "parallel_config", {"enable_dbo": True}),
        ("pooling models", "model_config", {"runner_type": "pooling"}),
        ("LoRA in a multimodal model", "", {"lora_config": 1, "model_config.multimodal_config": 1}),
        (
            "speculative decoding with a draft model",
            "",
            {"speculative_config": SimpleNamespace(method="eagle")},
        ),
    ],
)
def test_what_is_refused_everywhere(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, feature: str, part: str, changes: dict[str, Any]
) -> None:
    config = EngineArgs(model=str(tiny("llama")), enforce_eager=True).create_engine_config()
    assert why_unsupported(config) is None
    for name, value in changes.items():
        owner, _, name = name.rpartition(".")
        monkeypatch.setattr(getattr(config, owner or part) if owner or part else config, name, value)
    assert f"blending does not support {feature}" in str(why_unsupported(config))
