"""How long a step spends in the stages of blending: load, select, fuse. Where the question is asked,
what that pass loads and fuses counts as select too.

On a CPU by the host's clock, since there an op has ended when its call returns. On CUDA by events in
the stage's own stream; they are read once vLLM has waited for the step's tokens, so the host never
waits for the device because of them. Loads from host memory run beside the compute: their time is the
copies'.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from vllm_blend.core.plans import BlendPlan
from vllm_blend.core.step import BlendStep

Seconds = dict[str, dict[str, float]]
"""By request id, then by stage."""


class StageClock:
    """Measures one step, if any of its requests is to be timed; else it costs nothing."""

    def __init__(self, step: BlendStep | None = None, device: torch.device | None = None) -> None:
        blended = step.blended if step is not None else []
        num_rows = sum(request.num_chunk_rows for request in blended)
        self._shares = {
            request.request_id: request.num_chunk_rows / num_rows
            for request in blended
            if isinstance(request.plan, BlendPlan) and request.plan.timed
        }
        self._by_events = device is not None and device.type == "cuda"
        self._marks: list[tuple[str, Any, Any]] = []

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Measures what is done while it lasts, on the current stream."""
        return self._measure(name) if self._shares else nullcontext()

    @contextmanager
    def _measure(self, name: str) -> Iterator[None]:
        start = self._mark()
        yield
        self._marks.append((name, start, self._mark()))

    def _mark(self) -> Any:
        if not self._by_events:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> Seconds:
        """The step's times, divided among its requests by their chunk rows.

        On CUDA only after the step has ended.
        """
        totals: dict[str, float] = defaultdict(float)
        for name, start, end in self._marks:
            if self._by_events:
                end.synchronize()  # it has passed, as a rule: the step's tokens are there
                totals[name] += start.elapsed_time(end) / 1e3
            else:
                totals[name] += end - start
        return {
            request_id: {name: share * total for name, total in totals.items()}
            for request_id, share in self._shares.items()
        }
