"""From an engine to its model and its requests.

``OutputProcessor.request_states``   read, to abort what is left of a step that failed (``abort_all``),
    and for the order of a batch (``running``).
    Goes when ``LLM.generate`` aborts its requests where it raises, and tells their ids before they run.
``GPUModelRunner.input_batch`` (the V1 runner)   read, for the requests of a step's logits
    (``of_this_step``).
    Goes with the first of these.
``CompilationConfig.static_forward_context``   its identity is an engine's: all copies of a
    configuration hold the same dict, that of the model's attention layers. (``instance_id`` is none: an
    engine that has its process to itself gets another one at the end of its start.)
    Goes when a worker can hand its model to a plugin.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from vllm_blend.compat.version import why_not_patched

if TYPE_CHECKING:
    from vllm.config import VllmConfig


_models: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Each is a ``model/blending.py`` ``Blending`` of this process, by its engine. It holds the engine's
configuration, so no other has that number while it is here."""


def blend_model(llm: Any) -> Any:
    """The inner model of an in-process ``vllm.LLM``: the object that has ``cache_fuse_metadata``.

    The same as ``llm.llm_engine.model_executor.driver_worker.model_runner.model.model``; of a model
    that takes images, that of its language model.

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
    blending = getattr(outer, "blending", None)
    if blending is None:
        raise RuntimeError(why_not_patched(type(outer).__name__))
    if blending.unsupported is not None:
        raise RuntimeError(blending.unsupported)
    return blending.inner


def register_model(vllm_config: VllmConfig, blending: Any) -> None:
    """Makes ``model_of`` find this engine's model."""
    _models[_engine(vllm_config)] = blending


def model_of(vllm_config: VllmConfig) -> Any:
    """This engine's ``Blending`` in this process, or None."""
    return _models.get(_engine(vllm_config))


def _engine(vllm_config: VllmConfig) -> int:
    return id(vllm_config.compilation_config.static_forward_context)


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
