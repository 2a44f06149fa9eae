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

import numpy as np

WINDOW = 16
"""Tokens a window; the shortest run that is found for certain has ``2 * WINDOW - 1``."""

_BASE = np.uint64(0x9E3779B97F4A7C15)  # odd; 2**64 / golden ratio
_POWERS = np.cumprod(np.full(WINDOW, _BASE, dtype=np.uint64))[::-1].copy()


@dataclass(frozen=True)
class Run:
    """Tokens ``[start, end)`` of a prompt that are those of a known sequence from ``offset`` on."""

    start: int
    end: int
    key: Hashable
    offset: int


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

    def add(self, key: Hashable, token_ids: Sequence[int]) -> None:
        """Makes a sequence known; one shorter than a window, or longer than all, is not kept."""
        if key in self._sequences:
            self._sequences.move_to_end(key)
            return
        tokens = np.asarray(token_ids, dtype=np.int32)
        if not WINDOW <= len(tokens) <= self.max_tokens:
            return
        while self.num_tokens + len(tokens) > self.max_tokens:
            self.remove(next(iter(self._sequences)))
        self._sequences[key] = tokens
        self.num_tokens += len(tokens)
        for index, value in enumerate(window_hashes(tokens)[::WINDOW].tolist()):
            self._windows.setdefault(value, (key, index * WINDOW))

    def tokens(self, key: Hashable) -> tuple[int, ...]:
        """A known sequence."""
        return tuple(self._sequences[key].tolist())

    def remove(self, key: Hashable) -> None:
        """Forgets a sequence; one that is not known is no error."""
        tokens = self._sequences.pop(key, None)
        if tokens is None:
            return
        self.num_tokens -= len(tokens)
        for index, value in enumerate(window_hashes(tokens)[::WINDOW].tolist()):
            if self._windows.get(value) == (key, index * WINDOW):
                del self._windows[value]

    def find(self, token_ids: Sequence[int], min_tokens: int = WINDOW) -> list[Run]:
        """Runs of known tokens in a prompt, ascending, not overlapping, each as long as it can be.

        Args:
            token_ids: the prompt's.
            min_tokens: shorter runs are left out.
        """
        tokens = np.asarray(token_ids, dtype=np.int32)
        if not self._windows or len(tokens) < WINDOW:
            return []
        runs: list[Run] = []
        done = 0  # tokens before this belong to a run already
        for position, value in enumerate(window_hashes(tokens).tolist()):
            if position < done or value not in self._windows:
                continue
            key, offset = self._windows[value]
            known = self._sequences[key]
            back = _common(tokens[done:position][::-1], known[:offset][::-1])
            length = _common(tokens[position:], known[offset:])
            if length < WINDOW or back + length < min_tokens:
                continue  # another sequence's hash, or too short to be worth it
            runs.append(Run(position - back, position + length, key, offset - back))
            self._sequences.move_to_end(key)
            done = position + length
        return runs


def window_hashes(tokens: np.ndarray) -> np.ndarray:
    """Hash of ``tokens[i : i + WINDOW]`` for every ``i``, ``[num_tokens - WINDOW + 1]`` uint64."""
    mixed = (tokens.astype(np.uint64) + np.uint64(1)) * _BASE
    mixed ^= mixed >> np.uint64(29)
    return np.lib.stride_tricks.sliding_window_view(mixed, WINDOW) @ _POWERS


def _common(one: np.ndarray, two: np.ndarray) -> int:
    """Length of the common beginning."""
    size = min(len(one), len(two))
    different = (one[:size] != two[:size]).nonzero()[0]
    return int(different[0]) if len(different) else size
