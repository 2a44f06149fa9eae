"""What the engine's side touches of vLLM: hooks, renderer, admission, scheduler, prefix cache."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_blend.compat.member import Member, each

_SCHEDULER = "v1.core.sched.scheduler"
_MANAGER = "v1.core.kv_cache_manager"
_ENGINE = "v1.engine.core"
_RUNNER = "v1.worker.gpu_model_runner"
_RUNNER_2 = "v1.worker.gpu.model_runner"
_HF = "renderers.hf"
_CONNECTOR = "distributed.kv_transfer.kv_connector.v1.base"

WRAPPED: Mapping[str, tuple[Member, ...]] = {
    "server/scheduler/kv_connectors.py": (
        Member(
            _CONNECTOR,
            "KVConnectorBase_V1.get_num_new_matched_tokens",
            "self, request, num_computed_tokens",
        ),
        Member(
            _CONNECTOR,
            "KVConnectorBase_V1.update_state_after_alloc",
            "self, request, blocks, num_external_tokens",
        ),
        Member(_CONNECTOR, "KVConnectorBase_V1.build_connector_meta", "self, scheduler_output"),
        Member(_CONNECTOR, "KVConnectorBase_V1.on_new_request", "self, request"),
        Member(_CONNECTOR, "KVConnectorBase_V1.request_finished", "self, request, block_ids"),
        Member(_CONNECTOR, "SupportsHMA.request_finished_all_groups", "self, request, block_ids"),
        Member(
            _CONNECTOR,
            "KVConnectorBase_V1.register_finished_partial_tail",
            "self, request, block_ids, partial_tail_offloads",
        ),
    ),
    "plugin/hooks.py": (
        Member(
            "engine.arg_utils", "EngineArgs.create_engine_config", "self, usage_context=, headless="
        ),
        Member("engine.arg_utils", "EngineArgs.from_cli_args", "cls, args"),
        Member(
            "model_executor.models.registry",
            "ModelRegistry.resolve_model_cls",
            "self, architectures, model_config",
        ),
        Member(
            "v1.engine.input_processor",
            "InputProcessor.process_inputs",
            "self, request_id, prompt, params, supported_tasks, arrival_time=, lora_request=, "
            "tokenization_kwargs=, trace_headers=, priority=, data_parallel_rank=, resumable=, "
            "session_id=, kv_hints=",
        ),
        Member(
            "v1.engine.output_processor",
            "OutputProcessor.process_outputs",
            "self, engine_core_outputs, engine_core_timestamp=, iteration_stats=, weight_version=",
        ),
        Member(_ENGINE, "EngineCoreProc._handle_shutdown", "self"),
        Member(_ENGINE, "EngineCoreProc._process_input_queue", "self"),
        Member(_ENGINE, "EngineCore.collective_rpc", "self, method, timeout=, args=, kwargs="),
        Member(_ENGINE, "EngineCore.wake_up", "self, tags="),
        Member(
            _ENGINE, "EngineCore.reset_prefix_cache", "self, reset_running_requests=, reset_connector="
        ),
        Member(
            "renderers.online_renderer",
            "OnlineRenderer.preprocess_chat",
            "self, request, messages, default_template, default_template_content_format, "
            "default_template_kwargs, tool_dicts=, parser=, *, skip_mm_cache=",
        ),
        Member(
            "renderers.online_renderer",
            "OnlineRenderer.preprocess_cmpl",
            "self, request, prompts, *, skip_mm_cache=",
        ),
        Member(
            _RUNNER,
            "GPUModelRunner._model_forward",
            "self, input_ids=, positions=, intermediate_tensors=, inputs_embeds=, **model_kwargs",
        ),
        Member("plugins", "load_endpoint_plugins", "supported_tasks="),
        Member(
            "entrypoints.openai.chat_completion.serving",
            "OpenAIServingChat.chat_completion_stream_generator",
            "self, request, result_generator, request_id, model_name, conversation, tokenizer, "
            "request_metadata, chat_template_kwargs=, mm_token_counts=",
        ),
        Member(
            "entrypoints.openai.completion.serving",
            "OpenAIServingCompletion.completion_stream_generator",
            "self, request, engine_inputs, result_generator, request_id, created_time, model_name, "
            "num_prompts, tokenizer, request_metadata",
        ),
        Member(_RUNNER_2, "GPUModelRunner.gather_batch_req_state", "self, scheduler_output, dummy_run"),
        Member("v1.worker.gpu_worker", "Worker.execute_model", "self, scheduler_output"),
        Member("v1.worker.gpu_worker", "Worker.sample_tokens", "self, grammar_output"),
        Member("v1.worker.gpu_worker", "Worker.compile_or_warm_up_model", "self"),
        Member("v1.worker.cpu_worker", "CPUWorker.compile_or_warm_up_model", "self"),
    ),
}
"""Methods that another is put around."""

OVERRIDDEN: Mapping[str, tuple[Member, ...]] = {
    "server/scheduler/scheduler.py": (
        Member("v1.core.sched.async_scheduler", "AsyncScheduler"),
        Member(
            _SCHEDULER,
            "Scheduler.__init__",
            "self, vllm_config, kv_cache_config, structured_output_manager, block_size, "
            "hash_block_size=, mm_registry=, include_finished_set=, log_stats=",
        ),
        Member(_SCHEDULER, "Scheduler.add_request", "self, request"),
        Member(_SCHEDULER, "Scheduler._handle_blocked_waiting_request", "self, request"),
        Member(_SCHEDULER, "Scheduler.schedule", "self, throttle_prefills="),
        Member(_SCHEDULER, "Scheduler.has_requests", "self"),
        Member(_SCHEDULER, "Scheduler.finish_requests", "self, request_ids, finished_status"),
        Member(
            _SCHEDULER, "Scheduler.update_from_output", "self, scheduler_output, model_runner_output"
        ),
    ),
    "server/scheduler/kv_connectors.py": (
        Member(_SCHEDULER, "Scheduler._connector_finished", "self, request"),
    ),
    "server/scheduler/step_room.py": (
        Member(
            _SCHEDULER,
            "Scheduler._reserve_prefill_lookahead",
            "self, request, num_computed_tokens, num_new_tokens",
        ),
    ),
    "server/chunks/prefix_cache.py": (
        Member(
            _MANAGER,
            "KVCacheManager.get_computed_blocks",
            "self, request",
            newer={"0.33": "self, request, max_cache_hit_length="},
        ),
    ),
    "server/frontend/renderer.py": (
        Member(_HF, "HfRenderer.__init__", "self, config, tokenizer"),
        Member(_HF, "HfRenderer.render_messages", "self, messages, params"),
        Member(_HF, "HfRenderer.render_messages_async", "self, messages, params"),
        Member(_HF, "HfRenderer.render_prompts", "self, prompts"),
        Member(_HF, "HfRenderer.render_prompts_async", "self, prompts"),
        Member(_HF, "HfRenderer._tokenize_prompt", "self, prompt, params"),
        Member(_HF, "HfRenderer._process_tokens", "self, prompt, *, skip_mm_cache="),
        Member(_HF, "HfRenderer._process_tokens_async", "self, prompt, *, skip_mm_cache="),
    ),
}
"""What subclasses and mixins have their own of."""

CALLED: Mapping[str, tuple[Member, ...]] = {
    "server/scheduler/scheduler.py": (
        Member(_SCHEDULER, "Scheduler.get_num_unfinished_requests", "self"),
    ),
    "server/chunks/prefix_cache.py": (
        Member("utils.hashing", "get_hash_fn_by_name", "hash_fn_name"),
        Member(
            "v1.core.kv_cache_utils",
            "get_request_block_hasher",
            "hash_block_size, caching_hash_fn",
            newer={"0.33": "hash_block_size, caching_hash_fn, num_hash_lookahead_tokens="},
        ),
        Member("config.vllm", "VllmConfig.num_hash_lookahead_tokens", since="0.33"),
        Member(_MANAGER, "KVCacheManager.prefix_cache_lookup_enabled", "self, request"),
        Member(_MANAGER, "KVCacheManager.record_prefix_cache_stats", "self, request, num_hits"),
        Member(_MANAGER, "KVCacheManager.evict_blocks", "self, block_ids"),
        Member(_MANAGER, "KVCacheManager.get_block_ids", "self, request_id"),
        Member("v1.request", "Request.update_block_hashes", "self"),
    ),
    "server/internal/internal_requests.py": (
        Member(
            "v1.request",
            "Request.__init__",
            "self, request_id, prompt_token_ids, sampling_params, pooling_params, client_index=, "
            "arrival_time=, prompt_embeds=, prompt_is_token_ids=, mm_features=, lora_request=, "
            "cache_salt=, priority=, trace_headers=, block_hasher=, resumable=, session_id=, "
            "reasoning_ended=, reasoning_parser_kwargs=, abort_immediately=, kv_hints=",
        ),
    ),
    "server/chunks/chunk_contexts.py": (
        Member("tokenizers.registry", "cached_tokenizer_from_config", "model_config, **kwargs"),
    ),
    "server/frontend/admission.py": (
        Member("exceptions", "VLLMValidationError.__init__", "self, message, *, parameter=, value="),
    ),
    "server/frontend/renderer.py": (
        Member(_HF, "HfRenderer._build_tokens_prompt", "token_ids, prompt, *, offset_mapping="),
    ),
    "plugin/hooks.py": (
        Member("renderers.chat_utils", "load_chat_template", "chat_template, *, is_literal="),
        Member(_ENGINE, "EngineCoreProc.is_running", "self"),
        Member(_ENGINE, "EngineCoreProc.has_work", "self"),
    ),
    "plugin/worker_messages.py": (Member("v1.outputs", "AsyncModelRunnerOutput.get_output", "self"),),
}
"""Functions and methods."""

READ: Mapping[str, tuple[Member, ...]] = {
    "server/scheduler/kv_connectors.py": (
        Member(_SCHEDULER, "Scheduler.connector"),
        *each(
            "v1.core.sched.output",
            "SchedulerOutput",
            "scheduled_cached_reqs",
            "scheduled_spec_decode_tokens",
            "scheduled_encoder_inputs",
            "preempted_req_ids",
            "new_block_ids_to_zero",
        ),
        Member("v1.core.sched.output", "CachedRequestData.req_ids"),
    ),
    "compat/kv_connectors.py": (
        Member("distributed.kv_transfer.kv_transfer_state", "_KV_CONNECTOR_AGENT"),
        Member("v1.worker.gpu.kv_connector", "KVConnector.set_disabled", "self, disabled"),
        Member(_CONNECTOR, "KVConnectorBase_V1.get_loaded_kv_cache_group_ids", "self, request"),
        Member(
            "distributed.kv_transfer.kv_connector.v1.multi_connector", "MultiConnector.sub_connectors"
        ),
    ),
    "server/scheduler/scheduler.py": (
        *each(
            _SCHEDULER,
            "Scheduler",
            "kv_cache_manager",
            "log_stats",
            "requests",
            "vllm_config",
            "pause_state",
        ),
        Member(_MANAGER, "KVCacheManager.enable_caching"),
        Member("v1.core.sched.interface", "PauseState.UNPAUSED"),
        Member("config.parallel", "ParallelConfig.data_parallel_index"),
        *each(
            "v1.request",
            "Request",
            "request_id",
            "sampling_params",
            "prompt_token_ids",
            "cache_salt",
            "resumable",
            "num_output_tokens",
            "lora_request",
        ),
        *each(
            "v1.core.sched.output",
            "SchedulerOutput",
            "num_scheduled_tokens",
            "total_num_scheduled_tokens",
        ),
        *each("v1.engine", "EngineCoreOutputs", "outputs"),
        *each("v1.engine", "EngineCoreOutput", "request_id", "finish_reason", "kv_transfer_params"),
    ),
    "server/scheduler/switching.py": (Member("v1.request", "RequestStatus.FINISHED_ABORTED"),),
    "server/scheduler/step_room.py": (
        *each(
            _SCHEDULER,
            "Scheduler",
            "max_num_scheduled_tokens",
            "max_num_running_reqs",
            "num_spec_tokens",
        ),
        Member("v1.request", "RequestStatus.RUNNING"),
        *each("v1.request", "Request", "num_tokens", "num_prompt_tokens", "mm_features", "status"),
        Member("v1.request", "Request.skip_reading_prefix_cache"),
        *each(
            "config.scheduler",
            "SchedulerConfig",
            "enable_chunked_prefill",
            "long_prefill_token_threshold",
        ),
    ),
    "server/chunks/prefix_cache.py": (
        Member("v1.core.kv_cache_utils", "BlockHash"),
        Member("config.cache", "CacheConfig.prefix_caching_hash_algo"),
        Member("v1.request", "Request.block_hashes"),
        Member(_MANAGER, "KVCacheManager.kv_cache_config"),
    ),
    "server/frontend/admission.py": (
        *each(
            "v1.engine",
            "EngineCoreRequest",
            "prompt_token_ids",
            "prompt_embeds",
            "sampling_params",
            "resumable",
            "cache_salt",
        ),
    ),
    "server/frontend/renderer.py": (
        Member("renderers.params", "ChatParams.chat_template_kwargs"),
        *each(
            "renderers.params",
            "TokenizeParams",
            "truncate_prompt_tokens",
            "return_token_offsets",
            "do_lower_case",
            "add_special_tokens",
        ),
    ),
    "plugin/hooks.py": (
        Member("engine.arg_utils", "EngineArgs.additional_config"),
        Member("renderers.registry", "RENDERER_REGISTRY.renderers"),
        Member("v1.engine.input_processor", "InputProcessor.vllm_config"),
        Member("v1.engine.output_processor", "OutputProcessor.request_states"),
        *each(_ENGINE, "EngineCore", "scheduler", "model_executor"),
        *each(_ENGINE, "EngineCoreProc", "input_queue", "process_input_queue_block"),
        Member("v1.engine", "EngineCoreRequestType.WAKEUP"),
        Member("v1.executor.abstract", "Executor.is_sleeping"),
        *each("config.scheduler", "SchedulerConfig", "scheduler_cls", "async_scheduling"),
        Member("platforms", "current_platform"),
    ),
}
"""Classes, attributes, fields and settings."""

TABLE = (WRAPPED, OVERRIDDEN, CALLED, READ)
