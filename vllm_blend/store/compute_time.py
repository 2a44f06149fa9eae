"""How long a prefill takes that computes some of its tokens, fitted to prefills that were timed.

``Measurement`` says which prefills to time. Who runs them (a script one by one, a server between its
clients' requests) tells it what they took.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

RATIOS = (0.15, 0.5)
"""Ratios that blended prefills are timed at."""


@dataclass(frozen=True)
class ComputeTime:
    """``seconds = fixed + token * n + row * m + pair * m * n``: m computed rows of n tokens.

    The terms stand for launches, the one full layer, matrix products and attention.
    """

    fixed: float
    token: float
    row: float
    pair: float

    def seconds(self, num_tokens: int, num_rows: float) -> float:
        """A prefill of ``num_tokens`` in which ``num_rows`` of them are computed at every layer."""
        return self.fixed + self.token * num_tokens + (self.row + self.pair * num_tokens) * num_rows

    def rows_in(self, seconds: float, num_tokens: int) -> float:
        """How many rows can be computed in a time; 0 if not even the rest fits."""
        left = seconds - self.fixed - self.token * num_tokens
        each = self.row + self.pair * num_tokens
        return max(left / each, 0.0) if each > 0 else float("inf")

    @classmethod
    def fit(cls, samples: Sequence[tuple[int, float, float]]) -> ComputeTime:
        """The least-squares fit, of relative errors, with no negative term.

        Args:
            samples: ``(num_tokens, num_rows, seconds)`` of measured prefills.

        Raises:
            ValueError: if there are none.
        """
        if not samples:
            raise ValueError("samples is empty; measure at least one prefill")
        n, m, t = np.array(samples, dtype=np.float64).T
        terms = np.stack([np.ones_like(n), n, m, m * n], axis=1) / t[:, None]
        scale = np.abs(terms).max(axis=0)
        used = [i for i in range(4) if scale[i] > 0]
        while True:  # a term that comes out negative is left out; at least one stays positive
            found = np.linalg.lstsq(terms[:, used] / scale[used], np.ones_like(t), rcond=None)[0]
            if (found >= 0).all():
                break
            used.pop(int(found.argmin()))
        values = np.zeros(4)
        values[used] = found / scale[used]
        return cls(*values.tolist())


@dataclass(frozen=True)
class EngineTimes:
    """What prefills take on an engine.

    Attributes:
        blended: those that reuse KV at hand.
        full: those that reuse nothing.
    """

    blended: ComputeTime
    full: ComputeTime


class Measurement:
    """Prefills to time, one after the other: three lengths, in full and at each ratio.

    Each is run once more than it counts, since the first of a shape may compile; of the others the
    median is taken.

    Args:
        longest: tokens of the longest prompt; the others have a half and a quarter of them.
        num_other: tokens of each prompt that are not reused.
        ratios: shares of the reused tokens that are recomputed.
        repeat: runs of each that count.

    Attributes:
        seconds: what was timed, by tokens of the prompt and ratio; None: in full.
        times: the fits; None until all is timed.
    """

    def __init__(
        self, longest: int, num_other: int, ratios: Sequence[float] = RATIOS, repeat: int = 3
    ) -> None:
        self.sizes = (longest // 4, longest // 2, longest)
        self.seconds: dict[tuple[int, float | None], float] = {}
        self.times: EngineTimes | None = None
        self._num_other = num_other
        self._repeat = repeat
        self._todo = [(size, ratio) for size in self.sizes for ratio in (None, *ratios)]
        self._runs: list[float] = []

    @property
    def next(self) -> tuple[int, float | None] | None:
        """Tokens and ratio of the prefill that is to be run now; None: all are timed."""
        return self._todo[0] if self._todo else None

    def took(self, seconds: float) -> None:
        """The prefill that was to be run took this long."""
        self._runs.append(seconds)
        if len(self._runs) <= self._repeat:
            return
        self.seconds[self._todo.pop(0)] = median(self._runs[1:])
        self._runs.clear()
        if not self._todo:
            full = [(n, n, t) for (n, ratio), t in self.seconds.items() if ratio is None]
            blended = [
                (n, self._num_other + ratio * (n - self._num_other), t)
                for (n, ratio), t in self.seconds.items()
                if ratio is not None
            ]
            self.times = EngineTimes(ComputeTime.fit(blended), ComputeTime.fit(full))
