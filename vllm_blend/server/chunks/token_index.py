"""Known token sequences, found anywhere in a prompt.

Every known sequence is indexed at each ``WINDOW``-th token by a hash of the next ``WINDOW`` tokens. A
prompt's windows are hashed at every position (a polynomial hash, all positions at once); where one is
known, the tokens themselves are compared, and the run is made as long as they agree in both
directions. So a chunk is found at any place, also cut short or with other tokens at its edges, and
never by its hash alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

WINDOW = 16
"""Tokens a window; the shortest run that is found for certain has ``2 * WINDOW - 1``."""

MAX_IN_VAIN = 256
"""Places of a prompt where a comparison may come to nothing, before fewer places are looked at."""

_AT_ONCE = 64
"""Hashes that are looked up before the next ones are: most positions lie in a run that is found."""

_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd; 2**64 / golden ratio
_POWERS = np.cumprod(np.full(WINDOW, _BASE, dtype=np.uint64))[::-1].copy()


@dataclass(frozen=True)
class Run:
    """Tokens ``[start, end)`` of a prompt that are those of a known sequence from ``offset`` on."""

    start: int
    end: int
    key: Hashable
    offset: int


class Windows:
    """A prompt's tokens, hashed once for all indexes that are asked for it.

    Attributes:
        tokens: ``[num_tokens]`` int32.
    """

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens

    @classmethod
    def of(cls, token_ids: Sequence[int]) -> Windows:
        return cls(np.asarray(token_ids, dtype=np.int32))

    @cached_property
    def hashes(self) -> np.ndarray:
        """Of ``tokens[i : i + WINDOW]`` for every ``i``, uint64; none where there is no window."""
        if len(self.tokens) < WINDOW:
            return np.zeros(0, dtype=np.uint64)
        return np.lib.stride_tricks.sliding_window_view(_mixed(self.tokens), WINDOW) @ _POWERS

    def head(self, num_tokens: int) -> Windows:
        """Of the first tokens alone; not copied."""
        head = Windows(self.tokens[:num_tokens])
        head.hashes = self.hashes[: max(0, num_tokens - WINDOW + 1)]
        return head


class SequenceIndex:
    """Token sequences by content; the least recently found go first.

    Args:
        max_tokens: tokens kept in all; about 10 bytes each.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._sequences: OrderedDict[Hashable, np.ndarray] = OrderedDict()
        self._windows: dict[int, tuple[Hashable, int]] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._sequences

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, key: Hashable, windows: Windows) -> None:
        """Makes a sequence known; one shorter than a window, or longer than all, is not kept."""
        if key in self._sequences:
            self._sequences.move_to_end(key)
            return
        tokens = windows.tokens
        if not WINDOW <= len(tokens) <= self.max_tokens:
            return
        while self.num_tokens + len(tokens) > self.max_tokens:
            self.remove_oldest()
        self._sequences[key] = tokens
        self.num_tokens += len(tokens)
        for index, value in enumerate(_indexed(tokens)):
            self._windows.setdefault(value, (key, index * WINDOW))

    def tokens(self, key: Hashable) -> tuple[int, ...]:
        """A known sequence."""
        return tuple(self._sequences[key].tolist())

    def remove_oldest(self) -> None:
        """Forgets the sequence that was not found for longest."""
        self.remove(next(iter(self._sequences)))

    def remove(self, key: Hashable) -> None:
        """Forgets a sequence; one that is not known is no error."""
        tokens = self._sequences.pop(key, None)
        if tokens is None:
            return
        self.num_tokens -= len(tokens)
        for index, value in enumerate(_indexed(tokens)):
            if self._windows.get(value) == (key, index * WINDOW):
                del self._windows[value]

    def find(self, prompt: Windows, min_tokens: int = WINDOW) -> list[Run]:
        """Runs of known tokens in a prompt, ascending, not overlapping, each as long as it can be.

        Args:
            min_tokens: shorter runs are left out.
        """
        tokens = prompt.tokens
        runs: list[Run] = []
        position = done = 0  # tokens before `done` belong to a run already
        in_vain = 0
        while self._windows and position < len(prompt.hashes):
            values = prompt.hashes[position : position + _AT_ONCE].tolist()
            hit = next((at for at, value in enumerate(values) if value in self._windows), None)
            if hit is None:
                position += len(values)
                continue
            position += hit
            key, offset = self._windows[values[hit]]
            known = self._sequences[key]
            back = _common(tokens[done:position][::-1], known[:offset][::-1])
            length = _common(tokens[position:], known[offset:])
            if length < WINDOW or back + length < min_tokens:
                # another sequence's hash, or too short to be worth it; where there are many of those,
                # as in repeated tokens, only each WINDOW-th position is looked at
                in_vain += 1
                position += 1 if in_vain <= MAX_IN_VAIN else WINDOW
                continue
            runs.append(Run(position - back, position + length, key, offset - back))
            self._sequences.move_to_end(key)
            position = done = position + length
        return runs


def _indexed(tokens: np.ndarray) -> list[int]:
    """Of a sequence's ``hashes`` each ``WINDOW``-th, under which it is found."""
    whole = tokens[: len(tokens) // WINDOW * WINDOW]
    hashes: list[int] = (_mixed(whole).reshape(-1, WINDOW) @ _POWERS).tolist()
    return hashes


def _mixed(tokens: np.ndarray) -> np.ndarray:
    mixed = (tokens.astype(np.uint64) + np.uint64(1)) * _BASE
    mixed ^= mixed >> np.uint64(29)
    return mixed


def _common(one: np.ndarray, two: np.ndarray) -> int:
    """Length of the common beginning; not much more than that is compared."""
    size, done, step = min(len(one), len(two)), 0, 64
    while done < size:
        end = min(size, done + step)
        different = one[done:end] != two[done:end]
        if different.any():
            return done + int(different.argmax())
        done, step = end, 2 * step
    return size
