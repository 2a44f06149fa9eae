"""How long a load of so many bytes takes, learned from loads."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Sums = tuple[float, float, float, float, float]
"""Of 1, n, t, n * n, n * t over loads of n bytes in t seconds, each weighted."""


class LoadTime:
    """``seconds = latency + bytes / bandwidth``, fitted to the loads seen, later ones counting more.

    A load that is under way counts as soon as it takes longer than was believed: a tier that has become
    slow is known to be before it has carried anything.

    Args:
        latency_s, bytes_per_s: what is believed before the first load.
        memory: about how many loads the fit looks back.
        now: a clock in seconds.
    """

    def __init__(
        self,
        latency_s: float = 0.0,
        bytes_per_s: float = 1e9,
        memory: int = 20,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._keep = 1 - 1 / memory
        self._prior = latency_s, 1 / bytes_per_s
        self._sums: Sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        self._clock = SharedClock(now)
        self._under_way: list[tuple[int, float]] = []  # bytes, and when it started

    @property
    def measured(self) -> bool:
        """Whether a load has been seen."""
        return self._sums[0] > 0

    @contextmanager
    def loading(self, num_bytes: int) -> Iterator[float]:
        """While it lasts a load is under way; what it yields is for ``loaded``."""
        with self._clock.running() as started:
            load = num_bytes, started
            self._under_way.append(load)
            try:
                yield started
            finally:
                self._under_way.remove(load)

    def loaded(self, num_bytes: int, started: float) -> None:
        """A load that is under way has brought all of its bytes."""
        self.observe(num_bytes, self._clock.seconds(started))

    def observe(self, num_bytes: int, seconds: float) -> None:
        """A load of ``num_bytes`` took ``seconds``."""
        self._sums = self._with(self._sums, num_bytes, seconds)

    def line(self) -> tuple[float, float]:
        """Latency in seconds, and seconds a byte.

        Loads of one size cannot tell the two apart; then all of the time counts as bandwidth.
        """
        sums = self._sums
        for num_bytes, started in list(self._under_way):
            seconds = self._clock.seconds(started)
            latency, slope = self._fit(sums)
            if seconds > latency + slope * num_bytes:
                sums = self._with(sums, num_bytes, seconds)
        return self._fit(sums)

    def seconds(self, num_bytes: int) -> float:
        """Expected time of a load."""
        latency, slope = self.line()
        return latency + slope * num_bytes

    def seconds_left(self) -> float:
        """Until all loads that are under way have ended, as it is believed; infinite where no load has
        been seen, or one of them takes longer than was believed."""
        latency, slope = self._fit(self._sums)
        left = [latency + slope * n - self._clock.seconds(at) for n, at in list(self._under_way)]
        return sum(left) if self.measured and min(left, default=0.0) >= 0 else math.inf

    def _with(self, sums: Sums, num_bytes: int, seconds: float) -> Sums:
        count, n, t, nn, nt = (self._keep * old for old in sums)
        return count + 1, n + num_bytes, t + seconds, nn + num_bytes**2, nt + num_bytes * seconds

    def _fit(self, sums: Sums) -> tuple[float, float]:
        count, n, t, nn, nt = sums
        if count == 0:
            return self._prior
        mean_n, mean_t = n / count, t / count
        variance = nn / count - mean_n**2
        if variance > (0.01 * mean_n) ** 2:
            slope = (nt / count - mean_n * mean_t) / variance
            latency = mean_t - slope * mean_n
            if slope > 0 and latency >= 0:
                return latency, slope
        return 0.0, mean_t / max(mean_n, 1.0)


class SharedClock:
    """Divides time among the loads that share a tier, so that their times add up to the tier's.

    While ``n`` loads are under way, each is charged a second in ``n``. So what several loads at once
    take is about the sum of their times, and one load's time does not depend on its company.

    Args:
        now: a clock in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._active = 0
        self._share = 0.0  # what a load that had been under way since the start would be charged
        self._at = now()
        self._lock = threading.Lock()

    @contextmanager
    def running(self) -> Iterator[float]:
        """While it lasts a load is under way; what it yields is for ``seconds``."""
        started = self._change(1)
        try:
            yield started
        finally:
            self._change(-1)

    def seconds(self, started: float) -> float:
        """What a load that is under way has been charged so far."""
        return self._change(0) - started

    def _change(self, by: int) -> float:
        with self._lock:
            at = self._now()
            self._share += (at - self._at) / max(self._active, 1)
            self._at = at
            self._active += by
            return self._share
