"""CUDA streams and events without a GPU: what is launched runs later, in any order they allow."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from vllm_blend.core.layers import widen
from vllm_blend.model import kv_loader


class Event:
    """Like CUDA's: a wait is for the last record before it; for none, it is over at once."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.recorded = self.passed = 0

    def record(self, stream: Stream | None = None) -> None:
        self.recorded += 1
        count = self.recorded
        (stream or self._device.current).launch(lambda: setattr(self, "passed", count))

    def query(self) -> bool:
        return self.passed == self.recorded


class Stream:
    """Work in order: each piece may say that it cannot run yet."""

    def __init__(self, device: Device, name: str) -> None:
        self._device, self.name = device, name
        self.work: deque[tuple[Callable[[], bool], Callable[[], None]]] = deque()

    def launch(self, run: Callable[[], None], ready: Callable[[], bool] = lambda: True) -> None:
        self.work.append((ready, run))
        self._device.go_on(self)

    def wait_event(self, event: Event) -> None:
        count = event.recorded
        self.launch(lambda: None, lambda: event.passed >= count)

    def record_event(self) -> Event:
        event = Event(self._device)
        event.record(self)
        return event

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def step(self) -> bool:
        """Runs the next piece, if it can."""
        if not self.work or not self.work[0][0]():
            return False
        self.work.popleft()[1]()
        return True


class Device:
    """Stands for ``torch.cuda`` in ``model/kv_loader.py``; tensors are the CPU's.

    Args:
        copies: when what is launched runs: None: at ``run``. Or else on the main stream at once, as all
            that the tests do not launch, and copies as "early" as they can, or as "late".

    Attributes:
        main, copies: the step's stream, and the one that fills the ring.
        launched, copied: targets of copies, when they are launched and when they are done.
        widened: targets of what is widened behind copies, when that is launched.
    """

    def __init__(self, patch: pytest.MonkeyPatch, copies: str | None = None) -> None:
        self._when = copies
        self.main, self.copies = Stream(self, "main"), Stream(self, "copies")
        self.current = self.main
        self.launched: list[torch.Tensor] = []
        self.copied: list[torch.Tensor] = []
        self.widened: list[torch.Tensor] = []
        patch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        patch.setattr(torch.cuda, "stream", self._on)
        patch.setattr(torch.cuda, "Event", lambda: Event(self))
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        patch.setattr(kv_loader, "_copy_stream", lambda device: self.copies)
        patch.setattr(kv_loader, "_reads_ahead", lambda device: True)
        patch.setattr(kv_loader, "_copy", self._copy)
        patch.setattr(kv_loader, "_copy_all", self._copy_all)
        patch.setattr(kv_loader, "_widen", self._widen)

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert self.current is self.copies
        self.launched.append(target)
        self.current.launch(lambda: self.copied.append(target.copy_(source)))

    def _copy_all(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            self._copy(target, source)

    def _widen(self, values: torch.Tensor, scales: torch.Tensor, target: torch.Tensor) -> None:
        assert self.current is self.copies
        self.widened.append(target)
        self.current.launch(lambda: widen(values, scales, target))

    def go_on(self, stream: Stream) -> None:
        """Called when something is launched on ``stream``."""
        if self._when == "early":
            self.run_what_can()
        if self._when is not None and stream is self.main:
            while self.main.work:
                assert self.main.step() or self.copies.step(), "a deadlock"

    def run_what_can(self) -> None:
        while self.main.step() or self.copies.step():
            pass

    def run(self, choose: Callable[[list[Stream]], list[Stream]]) -> None:
        """Runs all that is launched; ``choose`` orders the streams at each turn."""
        while self.main.work or self.copies.work:
            assert any(stream.step() for stream in choose([self.main, self.copies])), "a deadlock"


def shuffled(seed: int) -> Callable[[list[Stream]], list[Stream]]:
    generator = random.Random(seed)
    return lambda streams: generator.sample(streams, len(streams))


ORDERS: dict[str, Callable[[list[Stream]], list[Stream]]] = {
    "main first": lambda streams: streams,
    "copies first": lambda streams: streams[::-1],
    **{f"shuffled {seed}": shuffled(seed) for seed in range(6)},
}
"""The extremes show what nothing waits for."""
