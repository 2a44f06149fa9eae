"""Collecting: keeping the K and V that attention gets anyway, whatever computes them.

K comes rotated to its place; the layer's rotation is undone, so that it can stand anywhere.
"""

from __future__ import annotations

import torch

from vllm_blend.attention.rotation import Rotation
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
    """Hands K and V of the rows that are kept to their plans; all of these rows are computed.

    Args:
        frame: the rows that are computed; None: all of the step's.
        key, value: of those rows, ``[num_rows, num_kv_heads, head_size]``, K rotated.
    """
    for request, plan in step.collected:
        if plan.key is not None and plan.into is None:
            continue
        start = max(plan.start, request.position)
        end = min(plan.num_prompt_tokens, request.end)
        at = request.row + start - request.position if frame is None else frame.row_of(request, start)
        k, v = key[at : at + end - start], value[at : at + end - start]
        if not plan.as_written:
            k = rotation.undo(k, torch.arange(start, end, device=k.device))
        plan.write(layer, start, k, v)
