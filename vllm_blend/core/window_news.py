"""What a step did of a request's window, to be read once the step has ended.

Where the client asked which tokens were recomputed, rows that a GPU has chosen are copied behind the
step, to pinned memory. They are read once vLLM has waited for the step's tokens, so the host never
waits for the device because of them.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from vllm_blend.core.plans import BlendPlan
from vllm_blend.core.step import Blended, StepRequest


class WindowNews:
    """Holds no stored KV.

    Args:
        kept: which of the request's ``chunk_rows`` were computed, ascending, ``[num_kept]`` int64.
        is_heard: the scheduler hears this process; others need no copy.

    Attributes:
        counts: what is known at once.
    """

    def __init__(self, request: StepRequest, kept: torch.Tensor, is_heard: bool = True) -> None:
        self.counts = Blended(
            request.request_id, request.position, request.num_chunk_rows, kept.numel()
        )
        self._kept: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        plan = request.plan
        if not (is_heard and isinstance(plan, BlendPlan) and plan.tells_rows):
            return
        self._places = [(start, end) for _, start, end in request.windows]
        self._kept = kept
        if kept.is_cuda:
            self._kept = torch.empty(kept.shape, dtype=kept.dtype, device="cpu", pin_memory=True)
            self._kept.copy_(kept, non_blocking=True)
            self._copied = torch.cuda.current_stream(kept.device).record_event()

    def read(self) -> Blended:
        """On CUDA only after the step has ended."""
        if self._kept is None:
            return self.counts
        if self._copied is not None:
            self._copied.synchronize()  # it has passed, as a rule: the step's tokens are there
        parts = [torch.arange(start, end, device="cpu") for start, end in self._places]
        return replace(self.counts, recomputed_spans=stretches(torch.cat(parts)[self._kept]))


def stretches(positions: torch.Tensor) -> tuple[tuple[int, int], ...]:
    """Ascending positions, ``[num_positions]`` int64, as ``[start, end)`` without gaps."""
    if not positions.numel():
        return ()
    is_first = torch.ones(positions.shape, dtype=torch.bool, device="cpu")
    is_first[1:] = positions.diff() != 1
    is_last = is_first.roll(-1)  # the first one is a first
    starts, ends = positions[is_first].tolist(), (positions[is_last] + 1).tolist()
    return tuple(zip(starts, ends, strict=True))
