"""An engine that only waits to be idle for long enough does not step until then, and is woken then."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from asking import drain, outputs, prompt_of, scheduler
from engines import make_engine
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState

from vllm_blend.plugin import operations
from vllm_blend.plugin.hooks import install_front_hooks
from vllm_blend.server.internal import background_prefill

WAKEUP = (EngineCoreRequestType.WAKEUP, None)
ABORT = (EngineCoreRequestType.ABORT, [])
REQUEST = (EngineCoreRequestType.ADD, None)
WARM = (EngineCoreRequestType.UTILITY, None)


class Core(EngineCoreProc):
    """vLLM's own loop, over a scheduler that has work in so many seconds, or once a request comes."""

    def __init__(self, seconds: float) -> None:
        install_front_hooks()
        self.begins_at = time.monotonic() + seconds
        self.handled: list[Any] = []
        self.scheduler: Any = SimpleNamespace(
            has_requests=lambda: not self._idles_for(), idles_for=self._idles_for
        )
        self.input_queue = queue.Queue()
        self.aborts_queue = queue.Queue()
        self.shutdown_state = EngineShutdownState.RUNNING
        self.engines_running, self.batch_queue, self.process_input_queue_block = False, None, True
        self._idle_state_callbacks = []

    def _idles_for(self) -> float:
        return max(0.0, self.begins_at - time.monotonic())

    def _handle_client_request(self, *message: Any) -> None:
        self.handled.append(message)
        if message == REQUEST:
            self.begins_at = 0.0
        if message == WARM:
            assert self.blend_operation("warm", {}) == {"asked": 1}  # type: ignore[attr-defined]


def no_alarm_is_set() -> bool:
    return not any(
        isinstance(thread, threading.Timer) and not thread.finished.is_set()
        for thread in threading.enumerate()
    )


def test_a_request_ends_the_wait() -> None:
    core = Core(seconds=3600)
    client = threading.Timer(0.1, core.input_queue.put, (REQUEST,))
    client.start()
    core._process_input_queue()
    client.join()
    assert core.handled == [REQUEST] and no_alarm_is_set()


def test_so_does_the_time() -> None:
    core = Core(seconds=0.05)
    core._process_input_queue()
    assert core.handled == [WAKEUP] and core.scheduler.has_requests()


def test_a_message_that_brings_no_work_does_not() -> None:
    core = Core(seconds=0.1)
    core.input_queue.put(ABORT)
    core._process_input_queue()
    assert core.handled == [ABORT, WAKEUP] and core.scheduler.has_requests()


def test_requests_that_have_come_are_all_taken() -> None:
    core = Core(seconds=3600)
    for _ in range(3):
        core.input_queue.put(REQUEST)
    core._process_input_queue()
    assert core.handled == [REQUEST] * 3 and no_alarm_is_set()


def test_what_an_operator_asks_for_is_done_once_the_engine_is_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It comes in vLLM's wait for a message, which began with nothing to do."""
    core = Core(seconds=3600)
    core.scheduler.idles_for = lambda: 0.0

    def warm(*_: object) -> dict[str, Any]:
        core.begins_at, core.scheduler.idles_for = time.monotonic() + 0.05, core._idles_for
        return {"asked": 1}

    monkeypatch.setattr(operations, "operate", warm)
    for _ in range(3):
        core.input_queue.put(WARM)
    core._process_input_queue()
    assert core.handled == [WARM] * 3 + [WAKEUP] and core.scheduler.has_requests()
    assert core.input_queue.empty() and no_alarm_is_set()  # there was one, for all three


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
    assert core.handled == [] and no_alarm_is_set()


def test_so_does_a_scheduler_of_vllms_own() -> None:
    core = Core(seconds=0)
    del core.scheduler.idles_for
    core._process_input_queue()
    assert core.handled == []


@pytest.mark.parametrize("num_batches", [1, 2])
def test_an_engine_takes_no_step_while_it_waits_to_be_idle(tiny: Any, num_batches: int) -> None:
    """Nor where steps are scheduled before the one before has ended, as on a GPU: what is scheduled
    ends, and nothing takes its place."""
    settings = {"vllm_blend": {"stand_in": "", "harvest": False}}
    with make_engine(tiny("llama"), additional_config=settings) as engine:
        drain(engine)
        core, state = engine.llm.llm_engine.engine_core.engine_core, scheduler(engine)
        if num_batches > 1:
            core.batch_queue, core.batch_queue_size = deque(maxlen=num_batches), num_batches
            core.step_fn = core.step_with_batch_queue
        prompt, spans = prompt_of(engine, [1, 2])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(background_prefill, "GAP_S", 3600.0)
            outputs(engine, [prompt], [{"spans": spans}])
            for _ in range(2 * num_batches):  # the model's process learns that the request has ended
                core.step_fn()
            assert state.blend_internal.num_waiting == 2 and state.idles_for() > 3000
            assert not state.has_requests() and not core.batch_queue
            patch.setattr(state, "schedule", lambda *_: pytest.fail("a step"))
            core.step_fn()
        drain(engine)
        assert (state.blend_internal.num_waiting, len(state.blend_chunks)) == (0, 2)
