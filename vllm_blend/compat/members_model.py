"""What the model's side touches of vLLM: runners, forward context, attention, ops, ranks."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_blend.compat.member import GONE, Member, each

_RUNNER = "v1.worker.gpu_model_runner"
_RUNNER_2 = "v1.worker.gpu.model_runner"
_STATE_2 = "v1.worker.gpu.model_states.interface"
_DEFAULT_2 = "v1.worker.gpu.model_states.default"
_REGISTRY = "v1.attention.backends.registry"
_BACKEND = "v1.attention.backend"
_CONTEXT = "forward_context"
_GROUPS = "distributed.parallel_state"
_FORWARD = (
    "self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=, "
    "output_block_scale="
)

OVERRIDDEN: Mapping[str, tuple[Member, ...]] = {
    "plugin/step_requests.py": (
        Member(_STATE_2, "ModelState.__init__", "self, vllm_config, model, encoder_cache, device"),
        Member(_STATE_2, "ModelState.remove_request", "self, req_id"),
        Member(_DEFAULT_2, "DefaultModelState.add_request", "self, req_index, new_req_data"),
        Member(_DEFAULT_2, "DefaultModelState.prepare_inputs", "self, input_batch, req_states"),
        Member(
            _STATE_2,
            "ModelState.postprocess_state",
            "self, idx_mapping, num_sampled, num_computed_tokens=",
        ),
    ),
    "attention/cpu.py": (
        Member("v1.attention.backends.cpu_attn", "CPUAttentionBackendImpl.forward", _FORWARD),
    ),
    "attention/flash_attn.py": (
        Member("v1.attention.backends.flash_attn", "FlashAttentionImpl.forward", _FORWARD),
    ),
    "attention/xformers.py": (
        Member(_BACKEND, "AttentionBackend.get_name", ""),
        Member(_BACKEND, "AttentionBackend.get_impl_cls", ""),
        Member(_BACKEND, "AttentionBackend.get_builder_cls", ""),
        Member(_BACKEND, "AttentionBackend.get_supported_kernel_block_sizes", "kv_cache_spec="),
        Member(_BACKEND, "AttentionBackend.supports_head_size", "cls, head_size"),
        Member(_BACKEND, "AttentionBackend.supports_sliding_window", "cls"),
        Member(_BACKEND, "AttentionBackend.supports_device_cpu_query_lens_mismatch", "cls"),
        Member(_BACKEND, "AttentionBackend.supports_compute_capability", "cls, capability"),
        Member(
            _BACKEND,
            "AttentionBackend.supports_combination",
            "cls, head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse, "
            "use_mm_prefix, device_capability",
        ),
        Member(_BACKEND, "AttentionBackend.validate_configuration"),
        *each(
            _BACKEND,
            "AttentionBackend",
            "supported_dtypes",
            "supported_kv_cache_dtypes",
            "forward_includes_kv_cache_update",
        ),
        Member(
            _BACKEND,
            "AttentionMetadataBuilder.__init__",
            "self, kv_cache_spec, layer_names, vllm_config, device",
        ),
        Member(
            _BACKEND,
            "AttentionMetadataBuilder.build",
            "self, common_prefix_len, common_attn_metadata, fast_build=",
        ),
        *each(
            _BACKEND,
            "AttentionMetadataBuilder",
            "_cudagraph_support",
            "_init_reorder_batch_threshold",
        ),
        Member(_BACKEND, "AttentionImpl.forward", _FORWARD),
        Member(
            _BACKEND,
            "AttentionImpl.__init__",
            "self, num_heads, head_size, scale, num_kv_heads=, alibi_slopes=, sliding_window=, "
            "kv_cache_dtype=, logits_soft_cap=, attn_type=, kv_sharing_target_layer_name=",
        ),
        *each(_BACKEND, "AttentionImpl", "num_heads", "head_size", "scale"),
    ),
}
"""What subclasses and mixins have their own of."""

CALLED: Mapping[str, tuple[Member, ...]] = {
    "plugin/step_requests.py": (
        Member("v1.worker.gpu.model_states", "resolve_model_state_cls", "vllm_config, model"),
    ),
    "model/active_rows.py": (
        Member(_CONTEXT, "override_forward_context", "forward_context"),
        Member(_CONTEXT, "get_forward_context", ""),
        Member(_CONTEXT, "is_forward_context_available", ""),
    ),
    "model/adapter_rows.py": (
        Member("lora.model_manager", "LoRAModelManager._set_adapter_mapping", "self, mapping"),
    ),
    "model/probe.py": (Member("v1.core.sched.output", "SchedulerOutput.make_empty", "cls"),),
    "attention/cpu.py": (
        Member(
            "v1.attention.backends.cpu_attn",
            "CPUAttentionBackendImpl.do_kv_cache_update",
            "self, layer, key, value, kv_cache, slot_mapping",
        ),
        Member(
            "_custom_ops",
            "rotary_embedding",
            "positions, query, key, head_size, cos_sin_cache, is_neox, rope_dim_offset=, inverse=",
        ),
        Member(
            "_custom_ops",
            "cpu_attn_get_scheduler_metadata",
            "num_reqs, num_heads, num_kv_heads, head_dim, seq_lens, dtype, query_start_loc, causal, "
            "sliding_window_size, isa, enable_kv_split, dynamic_causal=, kv_cache_dtype=",
        ),
    ),
    "attention/xformers.py": (
        Member(
            "_custom_ops",
            "reshape_and_cache_flash",
            "key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale",
        ),
        Member(_BACKEND, "max_decode_query_len"),
        Member("config", "get_current_vllm_config_or_none", ""),
    ),
    "compat/cuda.py": (
        Member(_REGISTRY, "register_backend", "backend, class_path=, is_mamba="),
        Member(_REGISTRY, "AttentionBackendEnum.is_overridden", "self"),
        Member(_REGISTRY, "AttentionBackendEnum.get_path", "self, include_classname="),
        Member("compilation.breakable_cudagraph", "is_breakable_cudagraph_enabled", ""),
        Member("config.compilation", "CUDAGraphMode.mixed_mode", "self"),
        Member("model_executor.custom_op", "CustomOp.forward_cuda", "self, *args, **kwargs"),
        Member("ir.op", "IrOp.set_priority", "self, priority"),
        Member("utils.torch_utils", "weak_ref_tensor", "tensor"),
    ),
    "core/pipeline.py": (
        Member("distributed", "get_pp_group", ""),
        Member(
            _GROUPS,
            "GroupCoordinator.send_tensor_dict",
            "self, tensor_dict, dst=, all_gather_group=, all_gather_tensors=",
        ),
        Member(
            _GROUPS,
            "GroupCoordinator.recv_tensor_dict",
            "self, src=, all_gather_group=, all_gather_tensors=",
        ),
    ),
    "compat/support.py": (
        Member("config.model", "ModelConfig.get_layers_start_end_indices", "self, parallel_config"),
    ),
    "server/chunks/chunk_registry.py": (
        Member("config.model", "ModelConfig.get_total_num_hidden_layers", "self"),
    ),
    "core/tensor_parallel.py": (
        Member("distributed", "get_tp_group", ""),
        Member("distributed", "tensor_model_parallel_all_reduce", "input_"),
        Member(_GROUPS, "model_parallel_is_initialized", ""),
        Member(_GROUPS, "GroupCoordinator.broadcast", "self, input_, src="),
        Member(_GROUPS, "GroupCoordinator.graph_capture", "self, graph_capture_context="),
    ),
}
"""Functions and methods."""

READ: Mapping[str, tuple[Member, ...]] = {
    "plugin/step_requests.py": (
        *each(
            _RUNNER,
            "GPUModelRunner",
            "vllm_config",
            "input_batch",
            "requests",
            "query_start_loc",
            "device",
            "cache_config",
            "kv_cache_config",
        ),
        *each(
            "v1.worker.gpu_input_batch",
            "InputBatch",
            "num_reqs",
            "req_ids",
            "num_computed_tokens_cpu",
            "num_prompt_tokens",
        ),
        Member("v1.worker.gpu_input_batch", "CachedRequestState.sampling_params"),
        Member("v1.worker.gpu_input_batch", "CachedRequestState.mm_features"),
        Member("v1.worker.gpu.mm.encoder_cache", "EncoderCache.mm_features"),
        Member(_RUNNER_2, "GPUModelRunner.model_state"),
        *each(
            "v1.worker.gpu.input_batch",
            "InputBatch",
            "req_ids",
            "query_start_loc_np",
            "num_computed_prefill_tokens_np",
            "is_prefilling_np",
            "idx_mapping_np",
        ),
        Member("v1.worker.gpu.states", "RequestState.prompt_len"),
    ),
    "model/active_rows.py": (
        *each(
            _CONTEXT,
            "ForwardContext",
            "attn_metadata",
            "slot_mapping",
            "moe_layer_index",
            "batch_descriptor",
            "cudagraph_runtime_mode",
            "is_padding",
        ),
    ),
    "model/adapter_rows.py": (
        Member("lora.model_manager", "LoRAModelManager._last_mapping"),
        Member("lora.layers", "LoRAMapping.index_mapping"),
    ),
    "store/adapters.py": each(
        "lora.request", "LoRARequest", "lora_int_id", "lora_name", "lora_path", "load_inplace"
    ),
    "model/graphs.py": (Member("config.compilation", "CUDAGraphMode.NONE"),),
    "compat/adapters.py": (Member(_CONTEXT, "BatchDescriptor.num_tokens"),),
    "model/probe.py": (
        *each(
            "v1.core.sched.output",
            "NewRequestData",
            "req_id",
            "prompt_token_ids",
            "mm_features",
            "sampling_params",
            "pooling_params",
            "block_ids",
            "num_computed_tokens",
            "lora_request",
            "prefill_token_ids",
        ),
        *each(
            "v1.core.sched.output",
            "SchedulerOutput",
            "scheduled_new_reqs",
            "num_common_prefix_blocks",
            "finished_req_ids",
        ),
        Member("envs", "VLLM_CACHE_ROOT"),
    ),
    "model/select/projection.py": (Member("model_executor.layers.linear", "UnquantizedLinearMethod"),),
    "attention/cpu.py": (
        *each(
            "v1.attention.backends.cpu_attn",
            "CPUAttentionMetadata",
            "num_actual_tokens",
            "slot_mapping",
            "block_table",
            "query_start_loc",
            "max_query_len",
            "seq_lens",
            "max_seq_len",
            "scheduler_metadata",
            "causal",
        ),
        *each(
            "v1.attention.backends.cpu_attn",
            "CPUAttentionBackendImpl",
            "alibi_slopes",
            "kv_cache_dtype",
            "logits_soft_cap",
            "sinks",
            "sliding_window",
            "is_fp8_kv_cache",
        ),
        Member("envs", "VLLM_CPU_ATTN_SPLIT_KV"),
    ),
    "attention/flash_attn.py": (
        *each(
            "v1.attention.backends.flash_attn",
            "FlashAttentionMetadata",
            "num_actual_tokens",
            "slot_mapping",
            "block_table",
            "query_start_loc",
            "seq_lens",
            "scheduler_metadata",
        ),
        *each(
            "v1.attention.backends.flash_attn",
            "FlashAttentionImpl",
            "kv_cache_dtype",
            "vllm_flash_attn_version",
            "sliding_window",
            "logits_soft_cap",
            "sinks",
            "num_queries_per_kv",
        ),
    ),
    "attention/xformers.py": (
        *each(
            _BACKEND,
            "CommonAttentionMetadata",
            "num_reqs",
            "num_actual_tokens",
            "query_start_loc",
            "query_start_loc_cpu",
            "seq_lens",
            "seq_lens_cpu_upper_bound",
            "block_table_tensor",
            "slot_mapping",
        ),
        Member(_BACKEND, "AttentionCGSupport.NEVER"),
        Member(_BACKEND, "AttentionType.DECODER"),
        Member(_BACKEND, "MultipleOf"),
        Member("model_executor.layers.attention.attention", "set_default_quant_scales"),
        Member("platforms.interface", "DeviceCapability"),
    ),
    "compat/support.py": (
        Member("model_executor.layers.attention_layer_base", "AttentionLayerBase"),
        *each(
            "model_executor.layers.attention",
            "Attention",
            "attn_backend",
            "attn_type",
            "impl",
            "kv_cache",
            "kv_sharing_target_layer_name",
            "head_size",
            "head_size_v",
            "num_kv_heads",
            "layer_name",
        ),
        Member("config.compilation", "CompilationConfig.static_forward_context"),
        Member("envs", "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", newer={"0.33": GONE}),
        Member("envs", "VLLM_USE_RUST_FRONTEND"),
        *each(
            "config.parallel",
            "ParallelConfig",
            "pipeline_parallel_size",
            "prefill_context_parallel_size",
            "decode_context_parallel_size",
            "data_parallel_size",
            "distributed_executor_backend",
            "enable_dbo",
            "is_moe_model",
        ),
        *each(
            "config.vllm",
            "VllmConfig",
            "additional_config",
            "kv_transfer_config",
            "lora_config",
            "speculative_config",
        ),
        *each("config.model", "ModelConfig", "runner_type", "is_multimodal_model", "hf_config"),
        Member("model_executor.models.interfaces", "SupportsMultiModal.get_language_model", "self"),
        Member("config.cache", "CacheConfig.cache_dtype"),
    ),
    "compat/engine_access.py": (
        Member("v1.engine.output_processor", "OutputProcessor.request_states"),
        Member("config.compilation", "CompilationConfig.static_forward_context"),
    ),
    "compat/cuda.py": (
        Member(_REGISTRY, "AttentionBackendEnum.CUSTOM"),
        Member("compilation.breakable_cudagraph", "is_breakable_cudagraph_enabled", ""),
        Member("config.compilation", "CompilationMode.STOCK_TORCH_COMPILE"),
        Member("model_executor.custom_op", "CustomOp._forward_method"),
        Member("ir.ops", "rms_norm"),
        Member("ir.ops", "fused_add_rms_norm"),
        *each(
            "v1.worker.gpu.model_runner",
            "BatchReqState",
            "has_prefill",
            "req_ids",
            "is_prefilling_np",
            "decode_graph_eligible",
        ),
        Member("vllm_flash_attn.flash_attn_interface", "flash_attn_varlen_func"),
    ),
    "core/pipeline.py": (
        Member("sequence", "IntermediateTensors"),
        Member("sequence", "IntermediateTensors.tensors"),
    ),
    "core/tensor_parallel.py": (
        Member(_GROUPS, "GraphCaptureContext"),
        *each(_GROUPS, "GroupCoordinator", "world_size", "rank_in_group", "cpu_group"),
    ),
}
"""Classes, attributes, fields and settings."""

TABLE = (OVERRIDDEN, CALLED, READ)
