"""Every method of vLLM that is wrapped: what, why, and when it can go.

vLLM is patched through its registries where it has them. What is left is here:

``GPUModelRunner._model_forward``   wrapped, so that a step knows which rows belong to which request.
    vLLM documents the method as overridable, but offers no way to name a runner class.
    Goes when the V1 runner has a per-model state hook, as the V2 runner does (``step_requests.py``).
``ModelRegistry.resolve_model_cls``   wrapped, so that any model is built as a subclass that can blend.
    Registering each architecture anew would do it too, but vLLM then inspects each in a new process.
    Goes when plugins may be handed the model that vLLM has built.
``Worker.compile_or_warm_up_model``   wrapped, so that the model is probed before the first request.
    Goes when plugins may run at the end of an engine's start.
``InputProcessor.process_inputs``   wrapped, so that a plan is checked before its request is queued, and
    the request gets a cache salt before its blocks are hashed.
    Goes when vLLM has an admission hook for plugins.
``OnlineRenderer.preprocess_chat``, ``preprocess_cmpl``   wrapped, so that the renderer knows what the
    request whose text it renders asks for.
    Goes when vLLM hands the request, or its extra arguments, to the renderer.
``EngineArgs.create_engine_config``   wrapped, so that an engine that is to blend gets its scheduler
    class, and one that cannot is refused before its model loads.
    Goes when plugins may amend an engine's configuration.
``EngineArgs.from_cli_args``   wrapped, so that an engine that is to blend knows the chat template of
    its server. vLLM's configuration of an engine has no word of it.
    Goes when it has.
``OutputProcessor.process_outputs``   wrapped, so that the API server counts what was reused, and keeps
    what only a request's first output tells with vLLM's ``RequestState``.
    Goes when an engine's plugin can send figures of its own to the API server's metrics.
``EngineCore.blend_operation``   added, so that the API server can ask the engine what an operator asks
    (``operations.py``).
    Goes when an engine's plugin can have utilities of its own.
``load_endpoint_plugins``   wrapped, so that a setting adds our routes to the API server. vLLM loads
    endpoint plugins only where VLLM_PLUGINS names them, which then leaves out all others.
    Goes when an engine's configuration may name them.
``OpenAIServingChat.chat_completion_stream_generator``,
``OpenAIServingCompletion.completion_stream_generator``   wrapped, so that streams tell what was reused.
    Goes when vLLM's streams have ``kv_transfer_params``, as its other answers do.
``EngineCoreProc._handle_shutdown``   wrapped, so that an engine that is to end computes no chunks that
    no request waits for, and that its process ends soon (``process_end.py``).
    Goes when vLLM tells its scheduler of a shutdown.
``EngineCoreProc._process_input_queue``   wrapped, so that an engine that waits to be idle for long
    enough is woken then. vLLM's waits for a message where its scheduler has nothing to do now.
    Goes when a scheduler can tell when it is to be asked again.
``EngineCore.collective_rpc``, ``EngineCore.wake_up``, ``EngineCore.reset_prefix_cache``   wrapped: the
    model's weights may be others afterwards (``weights.py``).
    Goes when vLLM tells of new weights, however they came.
``Worker.execute_model``, ``Worker.sample_tokens``   wrapped, so that the scheduler and the
    model's process can tell each other what they must know (``worker_messages.py``), and pipeline
    stages end a step together (``model/stages.py``).
    Goes when vLLM's messages between them have room for a plugin's data.

What is read, and what only engines on CUDA need, is in ``compat/``.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import uuid
from typing import TYPE_CHECKING, Any

from vllm_blend.compat import cuda
from vllm_blend.compat.engine_access import model_of, register_model
from vllm_blend.compat.support import check_policy, report_unsupported, why_unsupported
from vllm_blend.core.cache_fuse_metadata import flagged_plan
from vllm_blend.core.plans import EXTRA_ARG, BlendPlan, CollectPlan
from vllm_blend.plugin.process_end import end_without_collection
from vllm_blend.plugin.step_requests import batch_of, begin, prefills_of
from vllm_blend.plugin.worker_messages import with_messages
from vllm_blend.server.config import CONFIG_KEY, ServerSettings
from vllm_blend.server.frontend.admission import admit as admit_request
from vllm_blend.server.frontend.admission import (
    check_can_blend,
    check_text_alone,
    count_reports,
    keep_brought_apart,
)
from vllm_blend.server.frontend.asked import asked_by

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_blend.model.blending import Blending

logger = logging.getLogger("vllm.vllm_blend")  # below vLLM's logger, so its handlers apply


def install_front_hooks() -> None:
    """In every process: the admission of requests, marked chunks, what was reused, an engine's end, a
    backend's name."""
    from vllm import plugins
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.renderers.online_renderer import OnlineRenderer
    from vllm.renderers.registry import RENDERER_REGISTRY
    from vllm.v1.engine.core import EngineCore, EngineCoreProc
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.output_processor import OutputProcessor

    _wrap(EngineArgs, "create_engine_config", _configure)
    _wrap(EngineArgs, "from_cli_args", _with_template)
    _wrap(type(ModelRegistry), "resolve_model_cls", _blendable)
    _wrap(InputProcessor, "process_inputs", _admit)
    _wrap(OutputProcessor, "process_outputs", _count_reports)
    _wrap(plugins, "load_endpoint_plugins", _with_routes)
    _wrap(EngineCoreProc, "_handle_shutdown", _stop_background)
    _wrap(EngineCoreProc, "_process_input_queue", _sleep_while_idle)
    EngineCore.blend_operation = _operate
    for name in ("collective_rpc", "wake_up", "reset_prefix_cache"):
        _wrap(EngineCore, name, _then_check_weights)
    for name in ("preprocess_chat", "preprocess_cmpl"):
        _wrap(OnlineRenderer, name, _render)
    # not by register(), which warns of every replacement
    RENDERER_REGISTRY.renderers["hf"] = ("vllm_blend.server.frontend.renderer", "BlendRenderer")
    cuda.register_xformers()


def install_model_hooks(blending: Blending, vllm_config: VllmConfig) -> None:
    """In the model's process: the runner's forward, the worker's outputs, the end of its start."""
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    register_model(vllm_config, blending)
    _wrap(GPUModelRunner, "_model_forward", _forward_with_step)
    for name in ("execute_model", "sample_tokens"):
        _wrap(Worker, name, with_messages)
    workers: list[Any] = [Worker]
    if current_platform.is_cpu():  # on a GPU its import stands in for parts of torch
        from vllm.v1.worker.cpu_worker import CPUWorker

        workers.append(CPUWorker)
    for worker in workers:
        _wrap(worker, "compile_or_warm_up_model", _probe)
    _wrap(GPUModelRunnerV2, "gather_batch_req_state", cuda.keep_plans_off_decode_graphs)


def _wrap(owner: Any, name: str, around: Any) -> None:
    """Puts ``around(stock, self, ...)`` in a method's place; a class method's ``self`` is the class.

    ``owner`` may be a module: ``self`` is then the function's first argument.
    """
    found = inspect.getattr_static(owner, name)
    is_of_class = isinstance(found, classmethod)
    stock = found.__func__ if is_of_class else found
    if getattr(stock, "vllm_blend", False):
        return

    @functools.wraps(stock)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(stock, self, *args, **kwargs)

    method.vllm_blend = True  # type: ignore[attr-defined]
    setattr(owner, name, classmethod(method) if is_of_class else method)


def _blendable(stock: Any, registry: Any, *args: Any, **kwargs: Any) -> Any:
    """The class that a model is built of, with a blend path."""
    from vllm_blend.plugin.attach import blendable

    model_class, architecture = stock(registry, *args, **kwargs)
    return blendable(model_class, install_model_hooks), architecture


def _probe(stock: Any, worker: Any, *args: Any, **kwargs: Any) -> Any:
    """Probes the model once the engine is about to serve."""
    from vllm_blend.model.probe import probe
    from vllm_blend.plugin.weights import note_weights

    result = stock(worker, *args, **kwargs)
    blending = model_of(worker.vllm_config)
    if blending is not None and blending.unsupported is None:
        blending.unsupported = probe(worker, blending)
        blending.guard.switch(True)  # no scheduler hears of what fails in a probe: the verdict says it
        if blending.unsupported is not None:
            report_unsupported(worker.vllm_config, blending.unsupported)
    if blending is not None and ServerSettings.of(worker.vllm_config) is not None:
        note_weights(worker)
        end_without_collection()
    return result


def _configure(stock: Any, engine_args: Any, *args: Any, **kwargs: Any) -> Any:
    """Gives an engine that is to blend its scheduler, or refuses the start with the reason."""
    config = stock(engine_args, *args, **kwargs)
    settings = ServerSettings.of(config)
    if settings is None:
        return config
    settings.blend.check_architecture([config.model_config.architecture])
    check_policy(config, settings.blend)
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
    scheduler.scheduler_cls = f"vllm_blend.server.scheduler.scheduler.{name}"
    return config


def _with_template(stock: Any, owner: Any, args: Any, *more: Any, **kwargs: Any) -> Any:
    """Tells an engine that is to blend the server's chat template, where its settings name none."""
    from vllm.renderers.chat_utils import load_chat_template

    engine_args = stock(owner, args, *more, **kwargs)
    config = engine_args.additional_config
    if not isinstance(config, dict) or not isinstance(config.get(CONFIG_KEY), dict):
        return engine_args
    settings = config[CONFIG_KEY]
    known = {
        "chat_template": settings.get("chat_template") or getattr(args, "chat_template", None),
        "chat_template_kwargs": settings.get("chat_template_kwargs")
        or getattr(args, "default_chat_template_kwargs", None),
    }
    if isinstance(known["chat_template"], str):
        known["chat_template"] = load_chat_template(known["chat_template"])
    known = {key: value for key, value in known.items() if value is not None}
    engine_args.additional_config = config | {CONFIG_KEY: settings | known}
    return engine_args


def _admit(stock: Any, processor: Any, *args: Any, **kwargs: Any) -> Any:
    """Gives a new request its plan or its ``BlendRequest``, or refuses it by ValueError."""
    request = stock(processor, *args, **kwargs)
    params = request.sampling_params
    if params is None:
        return request
    keep_brought_apart(request)
    plan = (params.extra_args or {}).get(EXTRA_ARG)
    blending = model_of(processor.vllm_config)
    if blending is not None and blending.unsupported is None and plan is None:
        length = len(request.prompt_token_ids or ())
        flags, old_kvs = blending.cache_fuse_metadata, blending.inner.old_kvs
        plan = flagged_plan(flags, old_kvs, length, blending.kv_shape)
    if isinstance(plan, BlendPlan | CollectPlan):
        _admit_plan(request, plan, blending)
    else:
        prompt = kwargs["prompt"] if "prompt" in kwargs else args[1]
        admit_request(processor.vllm_config, request, plan, prompt)
    return request


async def _render(stock: Any, renderer: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Renders a request's text, with the renderer told what the request asks for."""
    with asked_by(request):
        return await stock(renderer, request, *args, **kwargs)


def _admit_plan(request: Any, plan: BlendPlan | CollectPlan, blending: Blending | None) -> None:
    params = request.sampling_params
    if blending is None or blending.unsupported is not None:
        raise ValueError(blending.unsupported if blending else "this engine's model cannot blend")
    if request.resumable:
        raise ValueError("a prompt that is streamed cannot be blended; send it whole")
    config = blending.vllm_config
    if config.kv_transfer_config is not None and ServerSettings.of(config) is None:
        raise ValueError(
            "this engine has a KV connector, which must not see blended requests as others: start it "
            f"""with additional_config={{"{CONFIG_KEY}": {{}}}}, whose scheduler keeps them apart"""
        )
    check_can_blend(request)
    check_text_alone(request)
    plan.check(request.prompt_token_ids, blending.kv_shape)
    _check_adapter(request, plan, blending)
    if isinstance(plan, BlendPlan) and blending.loop is None:
        plan.settings.check_architecture([type(blending.model).__name__.removeprefix("Blend")])
    if isinstance(plan, BlendPlan):
        check_policy(blending.vllm_config, plan.settings)
    params.extra_args = (params.extra_args or {}) | {EXTRA_ARG: plan}
    if isinstance(plan, CollectPlan):
        params.skip_reading_prefix_cache = True  # else only the tail would be computed
    else:
        # approximate KV must not be found by an exact request through the prefix cache
        request.cache_salt = f"{request.cache_salt or ''}blend-{uuid.uuid4().hex}"


def _with_routes(stock: Any, supported_tasks: Any) -> list[Any]:
    """The API server's endpoint plugins, ours among them; called once, in its process alone."""
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

    from vllm_blend.server.frontend.routes import BlendRoutes
    from vllm_blend.server.frontend.streams import with_reports

    _wrap(OpenAIServingChat, "chat_completion_stream_generator", with_reports)
    _wrap(OpenAIServingCompletion, "completion_stream_generator", with_reports)
    return [*stock(supported_tasks), BlendRoutes()]


def _check_adapter(request: Any, plan: BlendPlan | CollectPlan, blending: Blending) -> None:
    """Raises ValueError if the plan's KV is not of the request's adapter."""
    lora_request = request.lora_request
    if why := blending.adapters.why_unknown(lora_request):
        raise ValueError(why)
    digest = blending.adapters.digest(lora_request)
    if plan.adapter != digest:
        name = "no adapter" if lora_request is None else f"the adapter {lora_request.lora_name!r}"
        raise ValueError(
            f"adapter of the plan is {plan.adapter!r}, but the request has {name} ({digest!r}): KV is "
            "reused with the adapter that computed it alone"
        )


def _count_reports(stock: Any, processor: Any, outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
    """Takes the engine's figures from the outputs, but where the client asked for them."""
    count_reports(outputs, processor.request_states)
    return stock(processor, outputs, *args, **kwargs)


def _stop_background(stock: Any, core: Any) -> Any:
    """Once the engine is to end, its scheduler computes no chunks that no request waits for."""
    stop = getattr(core.scheduler, "stop_background", None)
    if stop is not None and not core.is_running():
        stop()
        end_without_collection()
    return stock(core)


def _sleep_while_idle(stock: Any, core: Any) -> Any:
    """Before an engine's next step: where it waits to be idle for long enough, vLLM's own wait for a
    message ends by then."""
    _set_alarm(core)
    try:
        return stock(core)
    finally:
        _end_alarm(core)


def _set_alarm(core: Any) -> None:
    """Wakes an engine that waits to be idle, once it was for long enough; it has one alarm at most."""
    from vllm.v1.engine import EngineCoreRequestType

    _end_alarm(core)
    idles_for = getattr(core.scheduler, "idles_for", None)
    # an engine in its client's process has no queue
    waits = getattr(core, "process_input_queue_block", False) and not core.has_work()
    if idles_for is None or not waits or not (seconds := idles_for()):
        return
    seconds += 0.001  # woken too early, it would wait for the next message
    alarm = threading.Timer(seconds, core.input_queue.put, [(EngineCoreRequestType.WAKEUP, None)])
    alarm.daemon = True
    alarm.start()
    core.blend_alarm = alarm


def _end_alarm(core: Any) -> None:
    if (alarm := getattr(core, "blend_alarm", None)) is not None:
        alarm.cancel()


def _then_check_weights(stock: Any, core: Any, *args: Any, **kwargs: Any) -> Any:
    """After a call that may have replaced the model's weights."""
    from vllm_blend.plugin.weights import check_weights

    result = stock(core, *args, **kwargs)
    check_weights(core)
    return result


def _operate(core: Any, name: str, values: dict[str, Any]) -> dict[str, Any]:
    """Does what an operator asks of the engine."""
    from vllm_blend.plugin.operations import operate

    try:
        return operate(core, name, values)
    finally:
        _set_alarm(core)  # in vLLM's wait for a message: there may be something to wait for now


def _forward_with_step(stock: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs one forward step, with the step's plan on the model if any request has one."""
    blending = model_of(runner.vllm_config)
    if blending is None or blending.unsupported is not None:
        return stock(runner, *args, **kwargs)
    begin(blending, prefills_of(runner), batch_of(runner))
    try:
        return stock(runner, *args, **kwargs)
    finally:
        blending.end()
