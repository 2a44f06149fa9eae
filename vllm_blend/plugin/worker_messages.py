"""A worker's part of what the scheduler and the model's process tell each other.

The messages are in ``server/messages.py``. Where one is lost by an error, the two may know different
chunks: all ranks then forget theirs and tell the scheduler, which forgets its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING, Any

from vllm_blend.compat.engine_access import model_of
from vllm_blend.core.pipeline import num_ranks, num_stages
from vllm_blend.model.guard import NewsFailed, StepFailed
from vllm_blend.plugin.step_requests import drop_plans, settle
from vllm_blend.server.messages import EVENTS, WorkerCommands, WorkerEvents

if TYPE_CHECKING:
    from vllm_blend.core.stage_clock import StageClock
    from vllm_blend.core.step import Blended
    from vllm_blend.core.window_news import WindowNews
    from vllm_blend.model.blending import Blending

logger = logging.getLogger("vllm.vllm_blend")


def with_messages(stock: Any, worker: Any, *args: Any, **kwargs: Any) -> Any:
    """Takes the scheduler's commands before a step, ends it with the other pipeline stages, and sends
    events with its output."""
    blending = model_of(worker.vllm_config)
    if blending is not None and args:
        _take(worker, blending, WorkerCommands.of(args[0]))
    output = stock(worker, *args, **kwargs)
    if blending is not None:
        settle(blending)
    if blending is None or output is None:
        return output
    events = _events(worker, blending)
    return output if events is None else add_events(output, events)


def _take(worker: Any, blending: Blending, commands: WorkerCommands) -> None:
    """Does what the scheduler asks for; all ranks are asked for the same."""
    if commands == WorkerCommands():
        return
    try:
        blending.chunks.apply(commands)
    except Exception as error:
        blending.guard.note(_news_failed(error))
    if num_stages() == 1:  # else the stages tell each other at the end of the next step that blends
        _agree(worker, blending)


def _agree(worker: Any, blending: Blending) -> None:
    """Lets the ranks know what failed on one of them."""
    try:
        blending.guard.agree()
    except StepFailed as error:
        blending.guard.caught(error)
        _forget(worker, blending)


def _forget(worker: Any, blending: Blending) -> None:
    """Forgets the chunks, if the scheduler may know others."""
    if blending.guard.take_disordered():
        blending.chunks.forget()
        drop_plans(worker.model_runner)


def _events(worker: Any, blending: Blending) -> Callable[[], WorkerEvents] | None:
    """What the scheduler is to know of a step, to be called once the step has ended."""
    guard = blending.guard
    clocks, blended = blending.take_clocks(), blending.take_blended()
    _forget(worker, blending)  # a rank's news failed, which the step's ranks have told each other
    collected: WorkerEvents | None = None
    try:
        collected = blending.chunks.collect_events()
    except Exception as error:
        guard.note(_news_failed(error))
        if num_ranks() == 1:  # else the others learn of it in the next step that blends
            _agree(worker, blending)
    prefilled, closed = guard.take_prefilled(), guard.take_closed()
    forgotten = blending.chunks.take_forgotten()
    if not (collected or clocks or blended or prefilled or closed or forgotten):
        return None

    def events() -> WorkerEvents:
        found = collected or WorkerEvents()
        found.blended = [_read(window) for window in blended]
        found.prefilled, found.closed = prefilled, closed
        found.forgotten = forgotten
        for clock in clocks:
            found.seconds |= _seconds(clock)
        return found

    return events


def _read(window: WindowNews) -> Blended:
    """What a step did of a window; without its rows where a GPU's copy of them cannot be read."""
    try:
        return window.read()
    except Exception:
        logger.exception("vllm_blend: which rows a step recomputed could not be read.")
        return window.counts


def _seconds(clock: StageClock) -> dict[str, dict[str, float]]:
    """Of a step's stages; none where a GPU's events cannot be read."""
    try:
        return clock.seconds()
    except Exception:
        logger.exception("vllm_blend: a step's stages could not be timed.")
        return {}


def _news_failed(error: Exception) -> NewsFailed:
    failed = NewsFailed(f"{type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed


def add_events(output: Any, events: Callable[[], WorkerEvents]) -> Any:
    """The output of a step with its events, which are asked for once the step has ended."""
    from vllm.v1.outputs import AsyncModelRunnerOutput

    if not isinstance(output, AsyncModelRunnerOutput):
        output = copy(output)  # vLLM may hand out one and the same empty output
        setattr(output, EVENTS, events())
        return output
    stock = output.get_output

    def get_output() -> Any:
        return add_events(stock(), events)

    output.get_output = get_output
    return output
