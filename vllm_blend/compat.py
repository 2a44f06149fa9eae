"""Every touch of vLLM's private parts: what, why, and when it can go.

vLLM is patched through its registries where it has them. What is left is here:

``GPUModelRunner._model_forward``   wrapped, so that a step knows which rows belong to which request.
    vLLM documents the method as overridable, but offers no way to name a runner class.
    Goes when the V1 runner has a per-model state hook, as the V2 runner does (``models/state.py``).
``ModelRegistry.resolve_model_cls``   wrapped, so that any model is built as a subclass that can blend.
    Registering each architecture anew would do it too, but vLLM then inspects each in a new process.
    Goes when plugins may be handed the model that vLLM has built.
``Worker.compile_or_warm_up_model``   wrapped, so that the model is probed before the first request.
    Goes when plugins may run at the end of an engine's start.
``compilation_config.static_forward_context``   read, for the model's attention layers.
    Goes when vLLM names them elsewhere.
``InputProcessor.process_inputs``   wrapped, so that a plan is checked before its request is queued, and
    the request gets a cache salt before its blocks are hashed.
    Goes when vLLM has an admission hook for plugins.
``EngineArgs.create_engine_config``   wrapped, so that an engine that is to blend gets its scheduler
    class, and one that cannot is refused before its model loads.
    Goes when plugins may amend an engine's configuration.
``OutputProcessor.process_outputs``   wrapped, so that the API server counts what was reused.
    Goes when an engine's plugin can send figures of its own to the API server's metrics.
``Worker.execute_model``, ``Worker.sample_tokens``   wrapped, so that the scheduler and the
    model's process can tell each other what they must know (``server/mail.py``).
    Goes when vLLM's messages between them have room for a plugin's data.
``OutputProcessor.request_states``   read, to abort what is left of a step that failed (``abort_all``),
    and for the order of a batch (``running``).
    Goes when ``LLM.generate`` aborts its requests where it raises, and tells their ids before they run.
``GPUModelRunner.input_batch`` (the V1 runner)   read, for the requests of a step's logits
    (``of_this_step``).
    Goes with the first of these.

What only engines on CUDA need is in ``compat_cuda.py``.
"""

from __future__ import annotations

import functools
import logging
import uuid
import weakref
from collections.abc import Callable, Mapping
from copy import copy
from typing import TYPE_CHECKING, Any

import torch

from vllm_blend import compat_cuda
from vllm_blend.core import (
    EXTRA_ARG,
    BlendPlan,
    BlendStep,
    CollectPlan,
    KeyedPlan,
    StepRequest,
)
from vllm_blend.door import flagged_plan
from vllm_blend.plugin import why_not_patched
from vllm_blend.server.admission import admit as admit_wish
from vllm_blend.server.admission import check_can_blend, count_reports
from vllm_blend.server.config import ServerSettings
from vllm_blend.server.mail import NEWS, News, Orders

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_blend.models.blending import Blending

logger = logging.getLogger("vllm.vllm_blend")  # below vLLM's logger, so its handlers apply

_models: weakref.WeakValueDictionary[str, Blending] = weakref.WeakValueDictionary()
"""Of the models of this process, by their engine's ``VllmConfig.instance_id``."""


# --- what an engine must be like -----------------------------------------------------------------


def why_unsupported(vllm_config: VllmConfig) -> str | None:
    """Why an engine with this configuration cannot blend, as a sentence, or None."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    speculative = vllm_config.speculative_config
    config = model.hf_config
    reasons = {
        "pipeline_parallel_size > 1": parallel.pipeline_parallel_size > 1,
        "context parallelism": parallel.prefill_context_parallel_size > 1
        or parallel.decode_context_parallel_size > 1,
        "dual-batch overlap (enable_dbo)": parallel.enable_dbo,
        "LoRA": vllm_config.lora_config is not None,
        "speculative decoding with a draft model (EAGLE, MTP)": speculative is not None
        and speculative.method not in ("ngram", "suffix"),
        "a KV connector": vllm_config.kv_transfer_config is not None,
        "pooling models": model.runner_type == "pooling",
        "multimodal models": model.is_multimodal_model,
        "data parallelism with experts": parallel.data_parallel_size > 1
        and parallel.is_moe_model is not False,
        "dual chunk attention": bool(getattr(config, "dual_chunk_attention_config", None)),
        "ada_rms_norm_t_cond": bool(getattr(config, "ada_rms_norm_t_cond", False)),
        "bidirectional attention (is_causal=False)": not getattr(config, "is_causal", True),
        f"kv_cache_dtype {vllm_config.cache_config.cache_dtype}": vllm_config.cache_config.cache_dtype
        not in ("auto", "float16", "bfloat16", "float32"),
    } | compat_cuda.graph_reasons(vllm_config)
    found = [reason for reason, there in reasons.items() if there]
    if not found:
        return None
    return f"blending does not support {', '.join(found)}; start the engine without it"


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


# --- finding the model from an LLM ---------------------------------------------------------------


def blend_model(llm: Any) -> Any:
    """The inner model of an in-process ``vllm.LLM``: the object that has ``cache_fuse_metadata``.

    The same as ``llm.llm_engine.model_executor.driver_worker.model_runner.model.model``.

    Raises:
        RuntimeError: if the model runs in another process, was not patched, or cannot blend; the
            message says what to change.
    """
    executor = getattr(llm.llm_engine, "model_executor", None)
    if executor is None:
        raise RuntimeError(
            "the model runs in another process; set VLLM_ENABLE_V1_MULTIPROCESSING=0 before the "
            "LLM is made"
        )
    if not hasattr(executor, "driver_worker"):
        raise RuntimeError(
            "the model's ranks run in other processes; start this program once a rank, with torchrun, "
            'and make the LLM with distributed_executor_backend="external_launcher"'
        )
    outer = executor.driver_worker.model_runner.get_model()
    blending: Blending | None = getattr(outer, "blending", None)
    if blending is None:
        raise RuntimeError(why_not_patched(type(outer).__name__))
    if blending.unsupported is not None:
        raise RuntimeError(blending.unsupported)
    return blending.inner


def has_model(vllm_config: VllmConfig) -> bool:
    """Whether this engine's model has been built."""
    return vllm_config.instance_id in _models


# --- hooks ---------------------------------------------------------------------------------------


def install_front_hooks() -> None:
    """In every process: the admission of requests, marked chunks, what was reused, a backend's name."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.renderers.registry import RENDERER_REGISTRY
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.output_processor import OutputProcessor

    _wrap(EngineArgs, "create_engine_config", _configure)
    _wrap(type(ModelRegistry), "resolve_model_cls", _blendable)
    _wrap(InputProcessor, "process_inputs", _admit)
    _wrap(OutputProcessor, "process_outputs", _count_reports)
    # not by register(), which warns of every replacement
    RENDERER_REGISTRY.renderers["hf"] = ("vllm_blend.server.renderer", "BlendRenderer")
    compat_cuda.register_xformers()


def install_model_hooks(blending: Blending, vllm_config: VllmConfig) -> None:
    """In the model's process: the runner's forward, the worker's outputs, the end of its start."""
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    _models[vllm_config.instance_id] = blending
    _wrap(GPUModelRunner, "_model_forward", _forward_with_step)
    for name in ("execute_model", "sample_tokens"):
        _wrap(Worker, name, _with_mail)
    workers: list[Any] = [Worker]
    if current_platform.is_cpu():  # on a GPU its import stands in for parts of torch
        from vllm.v1.worker.cpu_worker import CPUWorker

        workers.append(CPUWorker)
    for worker in workers:
        _wrap(worker, "compile_or_warm_up_model", _probe)
    _wrap(GPUModelRunnerV2, "gather_batch_req_state", compat_cuda.keep_plans_off_decode_graphs)


def _wrap(owner: type, name: str, around: Any) -> None:
    stock = getattr(owner, name)
    if getattr(stock, "vllm_blend", False):
        return

    @functools.wraps(stock)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(stock, self, *args, **kwargs)

    method.vllm_blend = True  # type: ignore[attr-defined]
    setattr(owner, name, method)


def _blendable(stock: Any, registry: Any, *args: Any, **kwargs: Any) -> Any:
    """The class that a model is built of, with a blend path."""
    from vllm_blend.models.attach import blendable

    model_class, architecture = stock(registry, *args, **kwargs)
    return blendable(model_class), architecture


def _probe(stock: Any, worker: Any, *args: Any, **kwargs: Any) -> Any:
    """Probes the model once the engine is about to serve."""
    from vllm_blend.models.probe import probe

    result = stock(worker, *args, **kwargs)
    blending = _models.get(worker.vllm_config.instance_id)
    if blending is not None and blending.unsupported is None:
        blending.unsupported = probe(worker, blending)
        if blending.unsupported is not None:
            report_unsupported(worker.vllm_config, blending.unsupported)
    return result


def _configure(stock: Any, engine_args: Any, *args: Any, **kwargs: Any) -> Any:
    """Gives an engine that is to blend its scheduler, or refuses the start with the reason."""
    config = stock(engine_args, *args, **kwargs)
    settings = ServerSettings.of(config)
    if settings is None:
        return config
    settings.blend.check_architecture([config.model_config.architecture])
    scheduler = config.scheduler_config
    if scheduler.scheduler_cls is not None:
        reason: str | None = (
            f"blending brings its own scheduler; leave out scheduler_cls={scheduler.scheduler_cls}"
        )
    else:
        reason = why_unsupported(config)
    if reason is not None:
        report_unsupported(config, reason)
    name = "BlendAsyncScheduler" if scheduler.async_scheduling else "BlendSyncScheduler"
    scheduler.scheduler_cls = f"vllm_blend.server.scheduler.{name}"
    return config


def _admit(stock: Any, processor: Any, *args: Any, **kwargs: Any) -> Any:
    """Gives a new request its plan or its wish, or refuses it with ValueError before it is queued."""
    request = stock(processor, *args, **kwargs)
    params = request.sampling_params
    if params is None:
        return request
    plan = (params.extra_args or {}).get(EXTRA_ARG)
    blending = _models.get(processor.vllm_config.instance_id)
    if blending is not None and blending.unsupported is None and plan is None:
        length = len(request.prompt_token_ids or ())
        flags, old_kvs = blending.cache_fuse_metadata, blending.inner.old_kvs
        plan = flagged_plan(flags, old_kvs, length, blending.kv_shape)
    if isinstance(plan, BlendPlan | CollectPlan):
        _admit_plan(request, plan, blending)
    else:
        prompt = kwargs["prompt"] if "prompt" in kwargs else args[1]
        admit_wish(processor.vllm_config, request, plan, prompt)
    return request


def _admit_plan(request: Any, plan: BlendPlan | CollectPlan, blending: Blending | None) -> None:
    params = request.sampling_params
    if blending is None or blending.unsupported is not None:
        raise ValueError(blending.unsupported if blending else "this engine's model cannot blend")
    check_can_blend(request)
    plan.check(request.prompt_token_ids, blending.kv_shape)
    if isinstance(plan, BlendPlan) and blending.loop is None:
        plan.settings.check_architecture([type(blending.model).__name__.removeprefix("Blend")])
    params.extra_args = (params.extra_args or {}) | {EXTRA_ARG: plan}
    if isinstance(plan, CollectPlan):
        params.skip_reading_prefix_cache = True  # else only the tail would be computed
    else:
        # approximate KV must not be found by an exact request through the prefix cache
        request.cache_salt = f"{request.cache_salt or ''}blend-{uuid.uuid4().hex}"


def abort_all(llm: Any) -> None:
    """Clears an in-process engine after a step that failed, so that it can be used again."""
    engine = llm.llm_engine
    engine.abort_request(list(engine.output_processor.request_states), internal=True)
    llm.reset_prefix_cache()  # blocks are hashed before they are filled


def running(llm: Any) -> list[str]:
    """Ids of an in-process engine's unfinished requests, oldest first, as the model has them."""
    return list(llm.llm_engine.output_processor.request_states)


def of_this_step(llm: Any) -> list[str]:
    """Those of the requests of the step that runs, in the order of its rows of logits."""
    runner = llm.llm_engine.model_executor.driver_worker.model_runner
    if hasattr(runner, "model_state"):  # the V2 runner
        return list(runner.model_state.step_req_ids)
    return list(runner.input_batch.req_ids)


def _count_reports(stock: Any, processor: Any, outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
    """Takes the engine's figures from the outputs, but where the client asked for them."""
    count_reports(outputs)
    return stock(processor, outputs, *args, **kwargs)


def _forward_with_step(stock: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs one forward step, with the step's plan on the model if any request has one."""
    blending = _models.get(runner.vllm_config.instance_id)
    if blending is None or blending.unsupported is not None:
        return stock(runner, *args, **kwargs)
    blending.step = _plan_step(runner, blending)
    try:
        return stock(runner, *args, **kwargs)
    finally:
        blending.step = None  # it holds stored KV


def _with_mail(stock: Any, worker: Any, *args: Any, **kwargs: Any) -> Any:
    """Takes the scheduler's orders before a step, and sends news with its output."""
    blending = _models.get(worker.vllm_config.instance_id)
    if blending is not None and args:
        blending.chunks.obey(Orders.of(args[0]))
    output = stock(worker, *args, **kwargs)
    if blending is None or output is None:
        return output
    news = blending.take_news()
    return output if news is None else add_news(output, news)


def add_news(output: Any, news: Callable[[], News]) -> Any:
    """The output of a step with news, which are asked for once the step has ended."""
    from vllm.v1.outputs import AsyncModelRunnerOutput

    if not isinstance(output, AsyncModelRunnerOutput):
        output = copy(output)  # vLLM may hand out one and the same empty output
        setattr(output, NEWS, news())
        return output
    stock = output.get_output

    def get_output() -> Any:
        return add_news(stock(), news)

    output.get_output = get_output
    return output


def _plan_step(runner: Any, blending: Blending) -> BlendStep | None:
    """The step's requests that are in prefill and have a plan; None where there are none."""
    batch = runner.input_batch
    num_reqs = batch.num_reqs
    computed = batch.num_computed_tokens_cpu[:num_reqs]
    prefill = (computed < batch.num_prompt_tokens[:num_reqs]).nonzero()[0]
    start = runner.query_start_loc.np
    requests = []
    for index in prefill.tolist():
        params = runner.requests[batch.req_ids[index]].sampling_params
        plan = (params.extra_args or {}).get(EXTRA_ARG) if params is not None else None
        if isinstance(plan, KeyedPlan):
            plan = params.extra_args[EXTRA_ARG] = blending.chunks.resolve(
                plan, batch.req_ids[index], int(computed[index])
            )
        if plan is not None:
            requests.append(
                StepRequest(
                    plan=plan,
                    row=int(start[index]),
                    position=int(computed[index]),
                    num_rows=int(start[index + 1] - start[index]),
                    device=torch.device(runner.device),
                    request_id=batch.req_ids[index],
                    num_prompt_tokens=int(batch.num_prompt_tokens[index]),
                )
            )
    if not requests:
        return None
    starts = start[: num_reqs + 1].tolist()
    return BlendStep(requests, starts, runner.cache_config.cache_dtype)
