"""Weights that are replaced in a running engine: nothing of the old ones is reused.

vLLM has many ways to replace them (``reload_weights``, a weight transfer, an extension's own method,
sleep and then any of these). All are calls of the engine to its workers, after which this looks at the
parameters themselves. (What the probe found depends on the model's configuration, which stays.)
"""

from __future__ import annotations

import logging
from typing import Any

from vllm_blend.compat.engine_access import model_of
from vllm_blend.core.pipeline import all_reduce_min
from vllm_blend.plugin.step_requests import drop_plans
from vllm_blend.store.fingerprint import parameters_digest

logger = logging.getLogger("vllm.vllm_blend")


def note_weights(worker: Any) -> None:
    """At an engine's start: what later digests are compared with, and which weights the files' are."""
    blending = model_of(worker.vllm_config)
    if blending is not None:
        blending.first_weights = blending.weights = parameters_digest(blending.model)


def renew(worker: Any) -> bool:
    """In each rank: forgets the old weights' KV if the parameters are others than they were.

    Returns:
        Whether they are; the same in all ranks.
    """
    blending = model_of(worker.vllm_config)
    if blending is None or blending.unsupported is not None:
        return False
    digest = parameters_digest(blending.model)
    if all_reduce_min([int(digest == blending.weights)]) == [1]:
        return False
    blending.weights = digest
    is_first = all_reduce_min([int(digest == blending.first_weights)]) == [1]
    blending.chunks.renew("" if is_first else digest)
    drop_plans(worker.model_runner)
    return True


def check_weights(core: Any) -> None:
    """In the engine: asks the workers, and tells the scheduler if the weights were replaced."""
    replaced = getattr(core.scheduler, "weights_replaced", None)
    if replaced is None or core.model_executor.is_sleeping:
        return
    if any(core.model_executor.collective_rpc(renew)):
        logger.info("vllm_blend: the model has other weights; its chunks are computed anew.")
        replaced()
