"""How long a load of so many bytes takes, learned from loads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class LoadTime:
    """``seconds = latency + bytes / bandwidth``, fitted to the loads seen, later ones counting more.

    Args:
        latency_s, bytes_per_s: what is believed before the first load.
        memory: about how many loads the fit looks back.
    """

    def __init__(self, latency_s: float = 0.0, bytes_per_s: float = 1e9, memory: int = 20) -> None:
        self._keep = 1 - 1 / memory
        self._prior = latency_s, 1 / bytes_per_s
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # of 1, n, t, n * n, n * t

    @property
    def measured(self) -> bool:
        """Whether a load has been seen."""
        return self._sums[0] > 0

    def observe(self, num_bytes: int, seconds: float) -> None:
        """A load of ``num_bytes`` took ``seconds``."""
        new = 1.0, float(num_bytes), seconds, float(num_bytes) ** 2, num_bytes * seconds
        self._sums = tuple(  # type: ignore[assignment]
            self._keep * old + value for old, value in zip(self._sums, new, strict=True)
        )

    def line(self) -> tuple[float, float]:
        """Latency in seconds, and seconds a byte.

        Loads of one size cannot tell the two apart; then all of the time counts as bandwidth.
        """
        count, n, t, nn, nt = self._sums
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

    def seconds(self, num_bytes: int) -> float:
        """Expected time of a load."""
        latency, slope = self.line()
        return latency + slope * num_bytes


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
