"""Collecting: keeping the K and V that attention gets anyway, whatever computes them.

K comes rotated to its place; the layer's rotation is undone, so that it can stand anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from vllm_blend.attention.rotation import Rotation
from vllm_blend.core.step import BlendStep
from vllm_blend.core.tensor_parallel import all_reduce_sum
from vllm_blend.model.active_rows import ActiveRows
from vllm_blend.model.guard import Guard, StepFailed


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
            k = rotation.undo_run(k, start)
        plan.write(layer, start, k, v)


def keep(step: BlendStep, owners: Sequence[Any], chunks: Any, guard: Guard) -> None:
    """Keeps what a step has collected, on all ranks or none; a chunk that is not kept is missed.

    Args:
        owners: of each layer, the module that gets it as ``hack_kv`` where a script asks for that.
        chunks: a server's; it gets the chunks that are whole now, and the distances of those that were
            computed once more for their scores.
    """
    if not step.collected:
        return
    ended = []
    for request, plan in step.collected:
        plan.advance(request.position, request.end)
        if request.end >= plan.num_prompt_tokens:
            ended.append(plan)
    for plan in ended:
        if plan.on_model:
            for owner, kv in zip(owners, plan.kv, strict=True):
                if owner is not None:
                    owner.hack_kv = list(kv)
        if plan.key is None:
            continue
        parts = None
        if plan.scored:
            parts = guard.attempt(partial(chunks.distances, plan), None)
            none = torch.zeros(2 * len(owners), plan.num_tokens + 1, device="cpu")
            parts = all_reduce_sum(none if parts is None else parts)
        guard.attempt(partial(chunks.keep, plan, parts), None)
    try:
        guard.agree()
    except StepFailed as failed:
        guard.caught(failed)
        for _, plan in step.collected:
            plan.restart()
        chunks.drop([plan.key for plan in ended if plan.key is not None and not plan.scored])
