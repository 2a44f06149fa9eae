"""What an engine must be like to blend; everything else is refused by name at start-up.

``compilation_config.static_forward_context``   read, for the model's attention layers.
    Goes when vLLM names them elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_blend.compat.cuda import graph_reasons
from vllm_blend.core.settings import EARLY, PLANNED, BlendSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.vllm_blend")  # below vLLM's logger, so its handlers apply

CACHE_DTYPES = ("auto", "float16", "bfloat16", "float32")
FP8_CACHE_DTYPES = ("fp8", "fp8_e4m3", "fp8_e5m2")
"""vLLM's names for the paged cache's types."""


def why_unsupported(vllm_config: VllmConfig) -> str | None:
    """Why an engine with this configuration cannot blend, as a sentence, or None."""
    from vllm import envs
    from vllm.config.compilation import CompilationMode

    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    speculative = vllm_config.speculative_config
    config, device_type = model.hf_config, vllm_config.device_config.device_type
    cache_dtype = vllm_config.cache_config.cache_dtype
    reasons = {
        "pipeline parallelism without torch.compile on a CPU, where vLLM itself fails at the first "
        "request (leave out --enforce-eager)": parallel.pipeline_parallel_size > 1
        and device_type == "cpu"
        and vllm_config.compilation_config.mode == CompilationMode.NONE,
        "pipeline parallelism in a script (external_launcher)": parallel.pipeline_parallel_size > 1
        and parallel.distributed_executor_backend == "external_launcher",
        "pipeline parallelism with a KV connector": parallel.pipeline_parallel_size > 1
        and vllm_config.kv_transfer_config is not None,
        "context parallelism": parallel.prefill_context_parallel_size > 1
        or parallel.decode_context_parallel_size > 1,
        "dual-batch overlap (enable_dbo)": parallel.enable_dbo,
        "speculative decoding with a draft model (EAGLE, MTP)": speculative is not None
        and speculative.method not in ("ngram", "suffix"),
        "vLLM's legacy Ray executor, whose workers skip what blending wraps "
        "(VLLM_USE_RAY_V2_EXECUTOR_BACKEND=1 does not)": parallel.distributed_executor_backend == "ray"
        and not getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True),  # 0.33 has that one alone
        "vLLM's Rust front end (VLLM_USE_RUST_FRONTEND), which runs no plugins": bool(
            envs.VLLM_USE_RUST_FRONTEND
        ),
        "pooling models": model.runner_type == "pooling",
        "LoRA in a multimodal model": model.is_multimodal_model and vllm_config.lora_config is not None,
        "data parallelism with experts": parallel.data_parallel_size > 1
        and parallel.is_moe_model is not False,
        "dual chunk attention": bool(getattr(config, "dual_chunk_attention_config", None)),
        "ada_rms_norm_t_cond": bool(getattr(config, "ada_rms_norm_t_cond", False)),
        "bidirectional attention (is_causal=False)": not getattr(config, "is_causal", True),
        f"kv_cache_dtype {cache_dtype}": cache_dtype not in (*CACHE_DTYPES, *FP8_CACHE_DTYPES),
        f"kv_cache_dtype {cache_dtype} on a GPU (fp8_e4m3 is supported there)": cache_dtype
        == "fp8_e5m2"
        and device_type != "cpu",
    } | graph_reasons(vllm_config)
    found = [reason for reason, there in reasons.items() if there]
    if not found:
        return None
    return f"blending does not support {', '.join(found)}; start the engine without it"


def first_layer(vllm_config: VllmConfig) -> int:
    """Of this rank's pipeline stage, from 0."""
    start, _ = vllm_config.model_config.get_layers_start_end_indices(vllm_config.parallel_config)
    return int(start)


def check_policy(vllm_config: VllmConfig, settings: BlendSettings) -> None:
    """Raises ValueError if the policy needs the layer loop, and the engine has LoRA; or if it needs
    what other pipeline stages know."""
    if vllm_config.parallel_config.pipeline_parallel_size > 1 and not settings.policies <= PLANNED:
        raise ValueError(
            f"policy is {settings.policy!r}; the stages of pipeline parallelism choose rows from the "
            f"plan alone, so allowed: {', '.join(sorted(PLANNED))}, and products of them"
        )
    if vllm_config.lora_config is not None and not settings.early:
        raise ValueError(
            f"policy is {settings.policy!r}, which looks at a check layer; an engine with LoRA can "
            f"choose rows before layer 0 only, so allowed: {', '.join(sorted(EARLY))}, and products of "
            "them"
        )


def language_model(model: Any) -> Any:
    """Of a multimodal model of vLLM's what turns text into hidden states; else the model itself."""
    find = getattr(model, "get_language_model", None)
    return model if find is None else find()


def attention_layers(vllm_config: VllmConfig) -> dict[str, Any]:
    """The layers of the model that was built last that keep something of each token, by name."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers = vllm_config.compilation_config.static_forward_context
    return {name: layer for name, layer in layers.items() if isinstance(layer, AttentionLayerBase)}


def why_attention_unsupported(layers: Mapping[str, Any]) -> str | None:
    """Why these attention layers cannot blend, as a sentence, or None."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backend import AttentionType

    if not layers:
        return "blending needs attention over a paged cache; this model has none"
    for name, layer in layers.items():
        kind = type(layer).__name__
        if type(layer) is not Attention:
            return (
                f"blending does not support {kind} (layer {name}): its cache is not K and V of tokens"
            )
        if layer.attn_type != AttentionType.DECODER:
            return f"blending does not support attention of type {layer.attn_type} (layer {name})"
        if layer.kv_sharing_target_layer_name:
            return f"blending does not support layers that share another's KV cache (layer {name})"
        if getattr(layer.impl, "alibi_slopes", None) is not None:
            return f"blending does not support ALiBi (layer {name}); it needs rotary positions, or none"
        if layer.head_size != layer.head_size_v:
            return f"blending does not support different head sizes of K and V (layer {name})"
    if len({(layer.num_kv_heads, layer.head_size) for layer in layers.values()}) > 1:
        return "blending does not support layers with different KV heads or head sizes"
    return None


def report_unsupported(vllm_config: VllmConfig, reason: str) -> None:
    """Refuses start-up if the user asked for blending by configuration, else warns."""
    asked = vllm_config.additional_config
    if isinstance(asked, dict) and "vllm_blend" in asked:
        raise ValueError(f"additional_config asks for vllm_blend, but {reason}")
    logger.warning(
        "vllm_blend: %s. Other requests are served by stock vLLM; requests that ask for blending "
        "are refused.",
        reason,
    )
