"""Rows first: the model's own forward on the rows that were chosen before it.

rows     every token that no stored KV stands for, and the chunk tokens that the policy chose
step     input_ids[rows], positions[rows], a forward context that describes those rows in every
         layer -> the model's own forward, compiled or not; from CUDA graphs on a GPU
         (model/graphs.py)
layers   each attention op writes stored K, rotated to its place, and V to the slots that no row
         takes; then the rows attend over the paged cache
output   hidden states back at their places among all rows, for vLLM's runner
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import override_forward_context
from vllm.sequence import IntermediateTensors

from vllm_blend.compat.adapters import eager_descriptor
from vllm_blend.model.active_rows import ActiveRows

Hidden: TypeAlias = torch.Tensor | IntermediateTensors
"""What a forward gives of its rows: hidden states, ``[num_rows, hidden_size]``; in a pipeline stage but
the last, what the next one needs."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """What vLLM's runner calls the model with, for all rows of a step.

    Attributes:
        stock: the model's own forward.
        positions: ``[num_tokens]``, padding included; ``[num_dims, num_tokens]`` where a model with
            M-RoPE has several a token, which are the same for text.
        intermediate_tensors: what the pipeline stage before this one has given, or None.
        more: other arguments of the model.
    """

    stock: Callable[..., Any]
    input_ids: torch.Tensor | None
    positions: torch.Tensor
    intermediate_tensors: IntermediateTensors | None
    inputs_embeds: torch.Tensor | None
    more: dict[str, Any]

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[-1]

    def positions_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Those of some rows, with the strides that the model was compiled for."""
        if self.positions.dim() == 1:
            return self.positions[rows]
        size = len(self.positions), len(rows)
        found = torch.empty_strided(
            size, self.positions.stride(), dtype=self.positions.dtype, device=self.positions.device
        )
        return found.copy_(self.positions[:, rows])

    def run(self) -> Hidden:
        """The model's forward of all rows."""
        return self._run(self.input_ids, self.positions, self.intermediate_tensors, self.inputs_embeds)

    def run_on(self, frame: ActiveRows, attns: Sequence[Any]) -> Hidden:
        """The model's forward of a frame's rows, without CUDA graphs."""
        return self.prepared(frame, attns)()

    def prepared(self, frame: ActiveRows, attns: Sequence[Any]) -> Callable[[], Hidden]:
        """The same, to be called."""
        inputs = [
            None if tensor is None else tensor[frame.rows]
            for tensor in (self.input_ids, self.inputs_embeds)
        ]
        before = self.intermediate_tensors
        if before is not None:
            before = IntermediateTensors({name: t[frame.rows] for name, t in before.items()})
        changes = dict(
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            batch_descriptor=eager_descriptor(frame.num_rows),
            is_padding=None,
        )
        context, positions = frame.context(attns, **changes), self.positions_of(frame.rows)

        def run() -> Hidden:
            with override_forward_context(context):
                return self._run(inputs[0], positions, before, inputs[1])

        return run

    def _run(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None,
        inputs_embeds: torch.Tensor | None,
    ) -> Hidden:
        hidden: Hidden = self.stock(
            input_ids=input_ids,
            positions=positions,
            intermediate_tensors=intermediate_tensors,
            inputs_embeds=inputs_embeds,
            **self.more,
        )
        return hidden


@contextmanager
def placed(target: torch.Tensor | None, values: torch.Tensor | None) -> Iterator[None]:
    """While it lasts, ``target`` begins with ``values``."""
    if target is None or values is None:
        yield
        return
    place = target[: len(values)]
    before = place.clone()
    place.copy_(values)
    try:
        yield
    finally:
        place.copy_(before)


def scattered(frame: ActiveRows, hidden: Hidden, num_tokens: int) -> Hidden:
    """Hidden states of all rows, ``[num_tokens, hidden_size]``; 0 where none are computed."""
    if isinstance(hidden, IntermediateTensors):
        return IntermediateTensors(
            {name: _scattered(frame, rows, num_tokens) for name, rows in hidden.items()}
        )
    return _scattered(frame, hidden, num_tokens)


def copied(hidden: Hidden, first: int, end: int) -> torch.Tensor:
    """A copy of rows, ``[end - first, size]``; of a pipeline stage's output all that it has of them."""
    if isinstance(hidden, IntermediateTensors):
        return torch.cat([rows[first:end].flatten(1) for _, rows in sorted(hidden.items())], dim=1)
    return hidden[first:end].clone()


def _scattered(frame: ActiveRows, hidden: torch.Tensor, num_tokens: int) -> torch.Tensor:
    output = hidden.new_zeros(num_tokens, hidden.shape[1])
    return output.index_copy_(0, frame.rows, hidden)
