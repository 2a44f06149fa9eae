"""When the host, and a GPU, come to which part of a step; without a profiler, which slows the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_blend.model.blending import Blending
from vllm_blend.model.graphs import RowGraphs
from vllm_blend.model.row_choice import RowChoice
from vllm_blend.model.rows import Inputs
from vllm_blend.plugin.step_requests import BlendModelState

PARTS: dict[str, tuple[type, str]] = {
    "schedule": (Scheduler, "schedule"),
    "update states": (GPUModelRunner, "_update_states"),
    "prepare inputs": (GPUModelRunner, "_prepare_inputs"),
    "attention metadata": (GPUModelRunner, "_build_attention_metadata"),
    "forward": (GPUModelRunner, "_model_forward"),
    "choice of rows": (RowChoice, "rows"),
    "rows prepared": (Blending, "_prepared"),
    "layers as graphs": (RowGraphs, "_replay"),
    "layers": (Inputs, "_run"),
    "sample": (GPUModelRunner, "_sample"),
    "bookkeeping": (GPUModelRunner, "_bookkeeping_sync"),
    "update from output": (Scheduler, "update_from_output"),
}


def of_second_runner() -> dict[str, tuple[type, str]]:
    """The same of vLLM's V2 runner, which engines on CUDA have; elsewhere its import stands in for
    parts of torch."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    return {
        "requests added": (GPUModelRunnerV2, "add_requests"),
        "inputs prepared": (GPUModelRunnerV2, "prepare_inputs"),
        "slots": (GPUModelRunnerV2, "prepare_attn"),
        "metadata prepared": (DefaultModelState, "prepare_attn"),
        "step planned": (BlendModelState, "prepare_inputs"),
        "model": (Blending, "forward"),
        "sampled": (GPUModelRunnerV2, "sample"),
        "sample tokens": (GPUModelRunnerV2, "sample_tokens"),
    }


class Marks:
    """What one call passes, in order: names, seconds of the host, events on the device."""

    def __init__(self, on_device: bool) -> None:
        self.on_device = on_device
        self.names: list[str] = []
        self._host: list[float] = []
        self._device: list[torch.cuda.Event] = []

    def __call__(self, name: str) -> None:
        if self.on_device:
            self._device.append(torch.cuda.Event(enable_timing=True))
            self._device[-1].record()
        self.names.append(name)
        self._host.append(time.perf_counter())

    def host_ms(self) -> list[float]:
        return [1e3 * (at - self._host[0]) for at in self._host]

    def device_ms(self) -> list[float]:
        """When the device had done all that was launched before each mark; 0 without one."""
        if not self.on_device:
            return [0.0] * len(self.names)
        torch.cuda.synchronize()
        return [self._device[0].elapsed_time(event) for event in self._device]


def host_marks(
    run: Callable[[], object], repeat: int, on_device: bool
) -> list[tuple[str, float, float]]:
    """Medians of ``repeat`` calls of ``run``: each mark's name, and milliseconds since the call began
    until the host came to it, and until the device did. Calls that pass other marks than the last are
    left out."""
    found = []
    for _ in range(repeat):
        marks = Marks(on_device)
        with marked(marks):
            marks("begin")
            run()
            marks("end")
        found.append((marks.names, marks.host_ms(), marks.device_ms()))
    names = found[-1][0]
    alike = [(host, device) for others, host, device in found if others == names]
    return [
        (name, median(host[i] for host, _ in alike), median(device[i] for _, device in alike))
        for i, name in enumerate(names)
    ]


@contextmanager
def marked(marks: Marks) -> Iterator[None]:
    """While it lasts, the begin and the end of each part is marked."""
    with ExitStack() as stack:
        parts = PARTS | of_second_runner() if marks.on_device else PARTS
        for name, (owner, method) in parts.items():
            stack.enter_context(
                patch.object(owner, method, _marking(getattr(owner, method), name, marks))
            )
        yield


def _marking(stock: Callable[..., Any], name: str, marks: Marks) -> Callable[..., Any]:
    def method(*args: Any, **kwargs: Any) -> Any:
        marks(f"{name}, begin")
        try:
            return stock(*args, **kwargs)
        finally:
            marks(f"{name}, end")

    return method
