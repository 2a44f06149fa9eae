"""Collecting: keeping the K and V that attention gets anyway, whatever computes them.

K comes rotated to its place; the layer's rotation is undone, so that it can stand anywhere.
"""

from __future__ import annotations

import torch

from vllm_blend.attention.rotation import Rotation
from vllm_blend.core.plans import CollectPlan
from vllm_blend.core.step import BlendStep
from vllm_blend.model.active_rows import ActiveRows


def collect(
    step: BlendStep,
    frame: ActiveRows | None,
    layer: int,
    rotation: Rotation,
    key: torch.Tensor,
    value: torch.Tensor,
) -> None:
    """Hands K and V of the step's collected requests to their plans.

    Args:
        frame: the rows that are computed; None: all of the step's.
        key, value: of those rows, ``[num_rows, num_kv_heads, head_size]``, K rotated.
    """
    for request in step.collected:
        plan = request.plan
        assert isinstance(plan, CollectPlan)
        if plan.key is not None and plan.into is None:
            continue
        # a prefix whose KV is there is not computed
        position = max([request.position, *(end for _, _, end in request.windows)])
        count = request.end - position
        if not count:
            continue
        # of all rows of the step those of a prefix too are computed
        whole = request.row + position - request.position
        at = whole if frame is None else frame.first_row(request)
        k, v = key[at : at + count], value[at : at + count]
        if not plan.as_written:
            k = rotation.undo(k, torch.arange(position, request.end, device=k.device))
        plan.write(layer, position, k, v)
