"""A step that fails to blend is a full prefill, on all ranks of a model.

The ranks meet in the model's collective operations, so one that fails between two of them must not stay
away from the next. What a rank does by itself it therefore ``attempt``s: an error is kept, and the step
goes on with values that nobody will use. Before the rows run, and after, the ranks ``agree``: where one
failed, all of them raise ``StepFailed`` there, and compute the step in full. Pipeline stages agree once
a step has ended (``stages.py``).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeVar
from zlib import crc32

from vllm_blend.core import pipeline, tensor_parallel
from vllm_blend.core.kv import ChunkLost
from vllm_blend.core.step import MAX_FAILURES

logger = logging.getLogger("vllm.vllm_blend")
T = TypeVar("T")


class StepFailed(Exception):
    """A step failed to blend, here or on another rank; its ``__cause__`` is this rank's error, or None.

    Attributes:
        kind: a number for the error's type, the same on all ranks.
    """

    def __init__(self, kind: int) -> None:
        super().__init__("the step failed to blend on another rank")
        self.kind = kind


class NewsFailed(Exception):
    """What the scheduler told a rank, or was to be told, is lost: they may know different chunks."""


class Guard:
    """Of one engine, on one rank. In a script failures are raised: its author can do something about
    them.

    Attributes:
        catches: failures are caught, as a server needs it.
        is_open: the engine blends. Once it has failed too often, only the operator lets it again.
        prefilled: ids of requests whose step was computed in full instead, until they are taken.
    """

    def __init__(self) -> None:
        self.catches = False
        self.is_open = True
        self.prefilled: list[str] = []
        self._error: Exception | None = None
        self._failures: Counter[int] = Counter()
        self._closed = False
        self._disordered = False

    def note(self, error: Exception) -> None:
        """Something has failed on this rank: the others are told when they agree next."""
        self._error = self._error or error

    def attempt(self, do: Callable[[], T], otherwise: T) -> T:
        """What ``do`` returns; ``otherwise`` where it raises, or something before it did.

        For what a rank does by itself: ``do`` holds no collective operation.
        """
        if self._error is None:
            try:
                return do()
            except Exception as error:
                self._error = error
        return otherwise

    def agree(self, plan: int = 0, choice: int = 0, all_stages: bool = False) -> bool:
        """Waits for the other ranks, which must call it too.

        Args:
            plan, choice: digests of what this rank is about to do, or has done.
            all_stages: those of all pipeline stages; else this stage's.

        Returns:
            Whether all ranks have made the same choice.

        Raises:
            StepFailed: on every rank, if something failed on one of them since they last agreed, or if
                their plans differ.
        """
        error, self._error = self._error, None
        kind, same = 0 if error is None else _kind(error), True
        ranks = pipeline if all_stages else tensor_parallel
        if ranks.num_ranks() > 1:
            least = ranks.all_reduce_min([-kind, plan, -plan, choice, -choice])
            kind, same = -least[0], least[3] == -least[4]
            if not kind and least[1] != -least[2]:
                error = RuntimeError("the ranks have different chunks")
                kind = _kind(error)
        if kind:
            raise StepFailed(kind) from (error.__cause__ if isinstance(error, StepFailed) else error)
        return same

    def caught(self, error: Exception) -> None:
        """To be called in an ``except`` clause: notes the error, or raises it where none is caught.

        All ranks call it with what ``agree`` raised; an error that comes from elsewhere is raised where
        there are several, since the others may be waiting for this one.
        """
        failed = isinstance(error, StepFailed)
        cause = error.__cause__ if failed else error
        if not self.catches or not (failed or pipeline.num_ranks() == 1):
            raise cause or error
        kind = error.kind if isinstance(error, StepFailed) else _kind(error)
        self._disordered |= kind == NEWS_FAILED
        if kind == CHUNK_LOST:
            logger.warning("vllm_blend: %s; the step is computed in full", cause or error)
            return
        self._failures[kind] += 1
        if self._failures[kind] == 1 and cause is not None:  # those that follow are counted
            logger.error(
                "vllm_blend: a step failed to blend, so all of it is computed.", exc_info=cause
            )
        if self._failures[kind] >= MAX_FAILURES and self.is_open:
            self.is_open, self._closed = False, True
            logger.error(
                "vllm_blend: blending is off until the operator switches it on, or the engine is "
                "started again, since it failed %d times (%s). Requests are served by full prefill.",
                self._failures[kind],
                error if cause is None else f"{type(cause).__name__}: {cause}",
            )

    def switch(self, on: bool) -> None:
        """Blends from now on, whatever failed before, or not. To be called on all ranks."""
        self.is_open, self._closed = on, False
        self._failures.clear()

    def refuse(self, request_ids: Iterable[str]) -> None:
        """Requests that have a plan come though blending is off: whoever gave it is told again."""
        self.prefilled += request_ids
        self._closed = True

    def take_closed(self) -> bool:
        """Whether somebody is to be told that blending is off, since this was last called."""
        closed, self._closed = self._closed, False
        return closed

    def take_disordered(self) -> bool:
        """Whether what a rank knows of chunks may be wrong, since this was last called; the same on all
        ranks."""
        disordered, self._disordered = self._disordered, False
        return disordered

    def take_prefilled(self) -> tuple[str, ...]:
        """The requests since this was last called."""
        taken, self.prefilled = tuple(self.prefilled), []
        return taken


def digest(values: Iterable[object]) -> int:
    """A number for ``values``, the same in every process; 0 where there is but one rank."""
    return crc32(repr(list(values)).encode()) if pipeline.num_ranks() > 1 else 0


def _kind(error: Exception) -> int:
    """Of an error, by its type's name; not 0."""
    if isinstance(error, StepFailed):
        return error.kind
    return crc32(type(error).__name__.encode()) + 1


NEWS_FAILED = _kind(NewsFailed())
CHUNK_LOST = _kind(ChunkLost())
"""A tier's failure, of which the store keeps count, and none of blending."""
