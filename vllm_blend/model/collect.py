"""Collecting: keeping the K and V that attention gets anyway, whatever computes them.

K comes rotated to its place; the layer's rotation is undone, so that it can stand anywhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_blend.attention.base import LayerBlend
from vllm_blend.attention.rotation import Angles, Rotation
from vllm_blend.core.pipeline import sum_of_stages
from vllm_blend.core.plans import CollectPlan, Copies, LaunchCopies
from vllm_blend.core.static_scores import scores_of
from vllm_blend.core.step import BlendStep
from vllm_blend.core.tensor_parallel import all_reduce_sum
from vllm_blend.model.active_rows import ActiveRows
from vllm_blend.model.guard import Guard, StepFailed

BLOCK = 16
"""Rows of a block of the GPU memory in which a layer's rows wait to be copied."""

STAGES = 3
"""Layers whose rows wait at most: compute goes on when those of the second one before are copied."""


class Part(NamedTuple):
    """Rows ``[first, end)`` of a step, which stand at ``start`` and after in the prompt."""

    plan: CollectPlan
    start: int
    first: int
    end: int


class Collecting:
    """The rows of a step whose K and V are kept; all of these rows are computed.

    Args:
        frame: the rows that are computed; None: all of the step's.
        num_rows: how many K and V come of each layer, with padding.
        device: of K and V.
        staged: they go through memory of their own, where they wait to be copied; None: on a GPU.
    """

    def __init__(
        self,
        step: BlendStep,
        frame: ActiveRows | None,
        num_rows: int,
        device: torch.device,
        staged: bool | None = None,
    ) -> None:
        self._for = step, frame, _choices(frame)
        self._device = device
        self._parts: list[Part] = []
        self._runs: dict[tuple[int, int, int], Angles] = {}
        for request, plan in step.collected:
            if plan.key is not None and plan.into is None:
                continue
            start = max(plan.start, request.position)
            end = min(plan.num_prompt_tokens, request.end)
            row = start + request.shift
            row = row if frame is None else frame.row_of(request, start)
            self._parts.append(Part(plan, start, row, row + end - start))
        if staged is None:
            staged = device.type == "cuda" and not any(part.plan.as_written for part in self._parts)
        self._staged = staged
        self._launch_copies: LaunchCopies | None = None
        if self._staged:
            self._stage(num_rows)
            self._prepare_copies()

    def fits(self, step: BlendStep, frame: ActiveRows | None) -> bool:
        """Whether these are the rows of a step's next layer: at a check layer others are chosen."""
        return self._for == (step, frame, _choices(frame))

    def _stage(self, num_rows: int) -> None:
        """Gives each row that is kept a slot, in the rows' order."""
        both = np.zeros((2, num_rows), dtype=np.int64)
        positions, slots = both
        slots[:] = -1
        for _, start, first, end in self._parts:
            positions[first:end] = np.arange(start, start + end - first)
            slots[first:end] = 0
        kept = np.flatnonzero(slots == 0)
        slots[kept] = np.arange(len(kept))
        self._parts = [
            Part(p, at, int(slots[row]), int(slots[row]) + end - row) for p, at, row, end in self._parts
        ]
        self._num_blocks = -(-len(kept) // BLOCK)
        tables = torch.from_numpy(both)
        tables = tables.pin_memory() if self._device.type == "cuda" else tables
        self._positions, self._slots = tables.to(self._device, non_blocking=True)
        self._rows = torch.arange(num_rows, device=self._device)
        self._angles: dict[int, torch.Tensor] = {}
        self._waiting: deque[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = deque()

    def _prepare_copies(self) -> None:
        """Leaves to ``write`` the parts that are not copied beside the compute."""
        copies: Copies | None = None
        parts, written = [], []
        for part in self._parts:
            plan, start, first, end = part
            into = None if plan.into is None else plan.into.copied(start - plan.start, end - first)
            if into is None:
                written.append(part)
            else:
                copies, places = into
                parts.append((places, first))
        self._parts = written
        if copies is not None:
            self._launch_copies = copies.prepared(parts)

    def layer(self, layer: int, rotation: Rotation, key: torch.Tensor, value: torch.Tensor) -> None:
        """Hands K and V of the rows that are kept to their plans.

        Args:
            key, value: of all rows, ``[num_rows, num_kv_heads, head_size]``, K rotated.
        """
        if self._staged and (self._parts or self._launch_copies is not None):
            both = self._unrotated(rotation, key, value)
            if self._launch_copies is not None:
                self._launch_copies(layer, both)
            if self._parts:
                key, value = both
        for plan, start, first, end in self._parts:
            k, v = key[first:end], value[first:end]
            if not self._staged and not plan.as_written:
                k = rotation.undo_by(k, self._back(rotation, start, end - first))
            plan.write(layer, start, k, v)

    def _back(self, rotation: Rotation, start: int, count: int) -> Angles:
        """Of a run of positions, which is the same in all layers."""
        run = id(rotation.table), start, count
        if run not in self._runs:
            positions = torch.arange(start, start + count, device=self._device)
            self._runs[run] = rotation.back(positions)
        return self._runs[run]

    def _unrotated(self, rotation: Rotation, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """K before RoPE and V of the rows that are kept, by one kernel, in memory of their own:
        ``[2, num_slots, num_kv_heads, head_size]``."""
        from vllm_blend.ops.shift_scatter import launch  # needs Triton

        table = id(rotation.table)
        if table not in self._angles:
            self._angles[table] = rotation.inverse(self._positions)
        if len(self._waiting) < STAGES:
            size = 2, self._num_blocks, BLOCK, *key.shape[1:]
            both = torch.empty(size, dtype=key.dtype, device=key.device)
            self._waiting.append((both[0], both[1], both.flatten(1, 2)))
        else:
            self._waiting.rotate(-1)
        k, v, both = self._waiting[-1]
        angles = self._angles[table]
        launch(key, value, self._rows, self._slots, angles, k, v, rotation.is_neox_style)
        return both


class Handed(NamedTuple):
    """K and V of all rows of a layer, ``[num_rows, num_kv_heads, head_size]``, and whose they are."""

    step: BlendStep
    frame: ActiveRows | None
    layer: LayerBlend
    key: torch.Tensor
    value: torch.Tensor


class Layers:
    """Hands a step's layers to its ``Collecting``. The first one waits for the second: a GPU gets the
    rest of it before the host prepares what is kept.

    Args:
        begin: gives a server's plan a place for the K and V that come from a device.
    """

    def __init__(self, begin: Callable[[CollectPlan, torch.device], None]) -> None:
        self._begin = begin
        self._now: Collecting | None = None
        self._first: Handed | None = None

    def hand_over(self, layer: Handed) -> None:
        """Takes a layer."""
        if self._now is None and self._first is None and layer.frame is None:
            # copies, since compiled code uses their memory again behind attention
            self._first = layer._replace(key=layer.key.clone(), value=layer.value.clone())
            return
        self.end()
        self._collect(layer)

    def end(self) -> None:
        """Hands over what waits; of a model of one layer nothing else does."""
        first, self._first = self._first, None
        if first is not None:
            self._collect(first)

    def clear(self) -> None:
        """Lets go of the step, and of what a forward that failed left."""
        self._now = self._first = None

    def _collect(self, handed: Handed) -> None:
        step, frame, layer, key, value = handed
        if self._now is None or not self._now.fits(step, frame):
            for _, plan in step.collected:
                if plan.key is not None and plan.into is None:
                    self._begin(plan, key.device)
            self._now = Collecting(step, frame, len(key), key.device)
        self._now.layer(layer.index, layer.rotation, key, value)


def _choices(frame: ActiveRows | None) -> int:
    return 0 if frame is None else frame.num_choices


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
        scores = None
        if plan.scored:
            parts = guard.attempt(partial(chunks.distances, plan), None)
            none = torch.zeros(2 * len(owners), plan.num_tokens + 1, device="cpu")
            scores = sum_of_stages(scores_of(all_reduce_sum(none if parts is None else parts)))
        guard.attempt(partial(chunks.keep, plan, scores), None)
    try:
        guard.agree(all_stages=True)
    except StepFailed as failed:
        guard.caught(failed)
        for _, plan in step.collected:
            plan.restart()
        chunks.drop([plan.key for plan in ended if plan.key is not None and not plan.scored])
