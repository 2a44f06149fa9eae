"""The rows of a step that are chosen before layer 0, the same on all ranks of a stage."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from vllm_blend.core.step import BlendStep, StepRequest
from vllm_blend.core.tensor_parallel import broadcast_rank0
from vllm_blend.model.active_rows import ActiveRows
from vllm_blend.model.guard import Guard
from vllm_blend.model.select import early

Chosen = dict[StepRequest, torch.Tensor]
"""Which of its ``chunk_rows`` are computed, of each request that does not wait for a check layer."""


class RowChoice:
    """A step's choice. All ranks make it together.

    Args:
        frame: of the step, with what its questions attend to; None: it could not be made, as ``guard``
            knows.
        asked: the requests whose question was asked; their rows are chosen on the device.
    """

    def __init__(
        self, guard: Guard, step: BlendStep, frame: ActiveRows | None, asked: Sequence[StepRequest]
    ) -> None:
        self._guard, self._step, self._frame, self._asked = guard, step, frame, asked
        self._pointing = self._look() if asked else None

    def rows(self, nowhere: Collection[StepRequest] = ()) -> Chosen:
        """By each request's ratio, and twice as many of those that point ``nowhere``; on the host, but
        where the question was asked."""

        def choose() -> Chosen:
            frame = self._known_frame
            with frame.clock.stage("select"):
                return {
                    r: early.choose(r, frame.received.get(r), r in nowhere)
                    for r in self._step.blended
                    if r.settings.early
                }

        chosen = self._guard.attempt(choose, Chosen())
        for request in self._asked:
            count = early.num_chosen(request, request in nowhere)
            none = torch.zeros(count, dtype=torch.int64, device=request.device)
            chosen[request] = broadcast_rank0(chosen.get(request, none))
        return chosen

    def more_rows(self) -> Chosen | None:
        """``rows``, if any question points nowhere, else None. The host waits for the device here: what
        follows of ``rows`` is launched before."""
        if self._pointing is None or not any(flags := self._pointing.tolist()):
            return None
        return self.rows({r for r, flag in zip(self._asked, flags, strict=True) if flag})

    @property
    def _known_frame(self) -> ActiveRows:
        assert self._frame is not None
        return self._frame

    def _look(self) -> torch.Tensor:
        """Whether each question points nowhere, on the device, as rank 0 sees it."""
        frame = self._known_frame

        def look() -> torch.Tensor:
            found = [early.points_nowhere(r, frame.received[r]) for r in self._asked]
            return torch.stack(found).to(torch.int32)

        none = torch.zeros(len(self._asked), dtype=torch.int32, device=frame.device)
        return broadcast_rank0(self._guard.attempt(look, none))
