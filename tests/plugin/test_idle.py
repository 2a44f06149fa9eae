"""An engine that only waits to be idle for long enough does not step until then."""

from __future__ import annotations

import queue
import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState

from vllm_blend.plugin.hooks import install_front_hooks

WAKEUP = (EngineCoreRequestType.WAKEUP, None)


class Core(EngineCoreProc):
    """vLLM's own loop over a scheduler that would have it step on."""

    def __init__(self, seconds: float) -> None:
        install_front_hooks()
        self.asked = 0
        self.handled: list[Any] = []
        self.scheduler: Any = SimpleNamespace(has_requests=lambda: True, idles_for=self._idles_for)
        self.input_queue = queue.Queue()
        self.aborts_queue = queue.Queue()
        self.shutdown_state = EngineShutdownState.RUNNING
        self.engines_running, self.batch_queue, self.process_input_queue_block = False, None, True
        self.seconds = seconds

    def _idles_for(self) -> float:
        self.asked += 1
        return self.seconds

    def _handle_client_request(self, *message: Any) -> None:
        self.handled.append(message)


def test_a_request_ends_the_sleep() -> None:
    core = Core(seconds=3600)
    threading.Timer(0.1, core.input_queue.put, (WAKEUP,)).start()
    core._process_input_queue()
    assert (core.handled, core.asked) == ([WAKEUP], 1)


def test_so_does_the_time() -> None:
    core = Core(seconds=0.01)
    core._process_input_queue()
    assert (core.handled, core.asked) == ([], 1)


def test_requests_that_have_come_are_all_taken() -> None:
    core = Core(seconds=3600)
    for _ in range(3):
        core.input_queue.put(WAKEUP)
    core._process_input_queue()
    assert core.handled == [WAKEUP] * 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("engines_running", True),  # of data parallel replicas, which step together
        ("batch_queue", deque([None])),  # steps that have begun
        ("process_input_queue_block", False),
        ("shutdown_state", EngineShutdownState.REQUESTED),
    ],
)
def test_an_engine_that_must_go_on_does(name: str, value: object) -> None:
    core = Core(seconds=3600)
    setattr(core, name, value)
    core._process_input_queue()
    assert core.asked == 0


def test_so_does_a_scheduler_of_vllms_own() -> None:
    core = Core(seconds=3600)
    del core.scheduler.idles_for
    core._process_input_queue()
    assert core.handled == []
