"""A step that fails to blend is a full prefill: what was caught, and when that is enough."""

from __future__ import annotations

import logging
from collections import Counter

from vllm_blend.core.tensor_parallel import num_ranks

logger = logging.getLogger("vllm.vllm_blend")

MAX_FAILURES = 3
"""Failures of one kind until an engine blends no more."""


class Guard:
    """Of one engine.

    In a script failures are raised: its author can do something about them. With several
    tensor-parallel ranks they are raised too: the other ranks would wait in a collective operation for
    one that computes something else.

    Attributes:
        catches: failures are caught, as a server needs it.
        is_open: the engine blends. Once it has failed too often, only a restart lets it again.
        prefilled: ids of requests whose step was computed in full instead, until they are taken.
    """

    def __init__(self) -> None:
        self.catches = False
        self.is_open = True
        self.prefilled: list[str] = []
        self._failures: Counter[str] = Counter()

    def caught(self, error: Exception) -> None:
        """To be called in an ``except`` clause: notes the error, or raises it where none is caught."""
        if not self.catches or num_ranks() > 1:
            raise error
        kind = type(error).__name__
        self._failures[kind] += 1
        if self._failures[kind] == 1:  # those that follow are counted
            logger.error(
                "vllm_blend: a step failed to blend, so all of it is computed.", exc_info=error
            )
        if self._failures[kind] >= MAX_FAILURES and self.is_open:
            self.is_open = False
            logger.error(
                "vllm_blend: blending is off until the engine is started again, since it failed %d "
                "times (%s: %s). Requests are served by full prefill.",
                self._failures[kind],
                kind,
                error,
            )

    def take_prefilled(self) -> tuple[str, ...]:
        """The requests since this was last called."""
        taken, self.prefilled = tuple(self.prefilled), []
        return taken
