"""Faults in one of an engine's workers: ``LLM(worker_extension_cls="failing_worker.Faults")``."""

from __future__ import annotations

from functools import cached_property
from importlib import import_module
from typing import Any

import torch

from vllm_blend.compat.engine_access import model_of
from vllm_blend.model.guard import Guard
from vllm_blend.model.select import early

undo: list[Any] = []


class Faults:
    """Methods for ``collective_rpc``."""

    rank: int
    vllm_config: Any

    def fail_at(self, rank: int, place: str, nth: int) -> None:
        """On one rank the ``nth`` call of ``module:Class.name`` raises, and none behind it."""
        if self.rank != rank:
            return
        module, _, path = place.partition(":")
        owner: Any = import_module(module)
        *holders, name = path.split(".")
        for holder in holders:
            owner = getattr(owner, holder)
        there = getattr(owner, name)
        stock = there.func if isinstance(there, cached_property) else there
        calls = 0

        def fails(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == nth:
                raise MemoryError("none left")
            return stock(*args, **kwargs)

        setattr(owner, name, property(fails) if stock is not there else fails)
        undo.append((lambda: setattr(owner, name, there), lambda: calls))

    def choose_others(self, rank: int) -> None:
        """One rank chooses as many other rows, before layer 0."""
        if self.rank != rank:
            return
        stock, calls = early.choose, 0

        def others(*args: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return torch.arange(len(stock(*args)))

        early.choose = others
        undo.append((lambda: setattr(early, "choose", stock), lambda: calls))

    def mend(self) -> int:
        """Undoes it; how often it was called."""
        count = 0
        while undo:
            put_back, calls = undo.pop()
            put_back()
            count += calls()
        return count

    def forgive(self) -> None:
        """Forgets failures."""
        guard = Guard()
        guard.catches = True
        model_of(self.vllm_config).guard = guard

    def chunks(self) -> list[bytes]:
        """Keys of the chunks that this rank has."""
        return sorted(model_of(self.vllm_config).chunks._chunks)

    def is_open(self) -> bool:
        """Whether the engine blends."""
        found: bool = model_of(self.vllm_config).guard.is_open
        return found

    def num_chunks(self) -> int:
        """How many chunks this rank holds."""
        return len(model_of(self.vllm_config).chunks)

    def flush(self) -> None:
        """Waits until the store has written what it was given."""
        model_of(self.vllm_config).chunks.tiers.store.flush()
