"""Pipeline stages: a step that blends is the same in all of them, or a full prefill in all.

Each stage chooses the step's rows from the plan, which all have, and hands on hidden states of all
rows: 0 where none were computed, which no stage reads. A stage learns nothing of the later ones before
it has run, so the stages agree once a step has ended (``Blending.settle``): each waits for all others,
and where one failed, or had other rows, all compute the step again, in full, the first stage first.
Only then is KV kept. So a step that blends or keeps KV has the stages for itself; others overlap, as
vLLM's do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from vllm.forward_context import ForwardContext, override_forward_context

from vllm_blend.core import pipeline
from vllm_blend.core.stage_clock import StageClock
from vllm_blend.core.step import BlendStep, StepRequest
from vllm_blend.core.tensor_parallel import broadcast_rank0
from vllm_blend.core.window_news import WindowNews
from vllm_blend.model.guard import digest
from vllm_blend.model.rows import Hidden, Inputs, placed


@dataclass(eq=False)
class StageRun:
    """What a stage has run of a step; where there are no others, the whole model.

    Attributes:
        step: None: it could not be planned, or has nothing left to do.
        to_blend: ids of the requests that have a plan to blend.
        context: vLLM's forward context, of all rows.
        shift: added to the positions of every row.
        output: of all rows; None: ``error`` came before.
        error: why the stage did not blend, or None.
        choice: digest of the rows that the host chose.
        blended, clock: what was done, and when.
    """

    step: BlendStep | None
    to_blend: Sequence[str]
    inputs: Inputs
    context: ForwardContext
    shift: int
    output: Hidden | None = None
    error: Exception | None = None
    choice: int = 0
    blended: list[WindowNews] = field(default_factory=list)
    clock: StageClock | None = None

    @property
    def failed(self) -> Sequence[str]:
        """Ids of the requests that do not blend where it fails."""
        return self.to_blend if self.step is None else [r.request_id for r in self.step.blended]

    def in_full(self) -> Hidden:
        """The model's own forward of all rows; of several stages, with the hidden states that the one
        before sends meanwhile, and on to the next."""
        inputs = self.inputs
        if inputs.intermediate_tensors is not None:
            pipeline.receive_into(inputs.intermediate_tensors)
        with override_forward_context(replace(self.context, moe_layer_index=0)):
            output = self.alone()
        if not pipeline.is_last_stage():
            pipeline.send(output)
        return output

    def alone(self) -> Hidden:
        """This stage's forward of all rows."""
        positions = self.inputs.positions
        # in place: a graph reads positions where vLLM's runner keeps them
        with placed(positions, positions + self.shift if self.shift else None):
            return self.inputs.run()


def digest_of(step: BlendStep | None) -> int:
    """Of what all ranks must have in common; in scripts the ranks name requests as they like."""
    requests = [] if step is None else step.requests
    return digest(
        (r.row, r.position, r.num_rows, [(lo, hi) for _, lo, hi in r.windows]) for r in requests
    )


def digest_of_choice(chosen: dict[StepRequest, torch.Tensor]) -> int:
    """Of the rows that the host has chosen; the others are the first rank's."""
    return digest(index.tolist() for index in chosen.values() if index.device.type == "cpu")


def first_ranks(chosen: dict[StepRequest, torch.Tensor]) -> dict[StepRequest, torch.Tensor]:
    """The first rank's choice; how many it has of a window may differ too."""
    found = {}
    for request in chosen:
        mask = torch.zeros(request.num_chunk_rows, dtype=torch.int32, device=request.device)
        mask[chosen[request].to(request.device)] = 1
        found[request] = broadcast_rank0(mask).cpu().nonzero().flatten()
    return found
