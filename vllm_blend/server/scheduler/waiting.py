"""What a request waits for before it gets its plan, as states that time and news move on.

    CALIBRATION   a ratio "auto" needs the engine's own times; at most CALIBRATION_S
    INDEX         auto mode: which of the tenant's chunks lie on disk; at most LOCATE_S
    ASK           nothing: the scheduler asks for chunks, or for where they are
    PLACES        where its chunks are (ratio "auto"); at most LOCATE_S
    DECIDE        nothing: the scheduler decides which of them are worth a load, and asks for those
    CHUNKS        the chunks; at most as long as computing them would take
    READY         nothing

``advance`` takes a request as far as it gets without the scheduler, which acts in ASK and in DECIDE.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from enum import Enum, auto
from typing import Any

from vllm_blend.core.plans import ChunkIds, ChunkKey
from vllm_blend.server.messages import Place
from vllm_blend.server.request import BlendRequest
from vllm_blend.store.controller import Decision

LOCATE_S = 1.0
"""A request waits this long, at most, for where chunks are."""
CALIBRATION_S = 30.0
"""A request waits this long, at most, for the calibration; a busy engine takes longer."""


class State(Enum):
    CALIBRATION = auto()
    INDEX = auto()
    ASK = auto()
    PLACES = auto()
    DECIDE = auto()
    CHUNKS = auto()
    READY = auto()


class Waiting:
    """A request that waits.

    Args:
        blend_request: what it asks for.
        now: in seconds, as all times here.
        request_id: whose chunks they are.

    Attributes:
        state: see above.
        paced: its ratio is decided by the engine's times and by where its chunks are; else it is the
            one that it names, or the floor.
        looked_for: chunks whose place is asked for.
        places: of those, the ones that were found, or not.
        chunks: that it waits for.
        asked_at: when it first asked for any of that.
        until: when it waits no longer for ``chunks``.
        decision: which of its marked chunks to wait for, and the ratio.
        tiers: where each marked chunk was; None: nowhere.
    """

    def __init__(self, blend_request: BlendRequest, now: float, request_id: str = "") -> None:
        self.blend_request, self.request_id = blend_request, request_id
        self.paced = blend_request.paced and bool(blend_request.spans)
        self.looked_for: dict[ChunkKey, ChunkIds] = {}
        self.places: dict[ChunkKey, Place] = {}
        self.chunks: frozenset[ChunkKey] = frozenset()
        self._to_come: set[ChunkKey] = set()
        self.asked_at = self.until = now
        self.decision: Decision | None = None
        self.tiers: tuple[str | None, ...] = ()
        self._enter(State.CALIBRATION if self.paced else State.INDEX, now)

    def advance(self, now: float, calibrated: bool, indexed: bool) -> State:
        """Goes on as far as it can.

        Args:
            calibrated: the engine's times are known.
            indexed: its tenant's chunks on disk are known.
        """
        waited = now - self._since
        if self.state is State.CALIBRATION and (calibrated or waited >= CALIBRATION_S):
            self.paced = calibrated
            self._enter(State.INDEX, now)
            waited = 0.0
        if self.state is State.INDEX and (not self.blend_request.auto or indexed or waited >= LOCATE_S):
            self._enter(State.ASK, now)
        all_found = len(self.places) == len(self.looked_for)
        if self.state is State.PLACES and (all_found or waited >= LOCATE_S):
            self._enter(State.DECIDE, now)
        if self.state is State.CHUNKS and now >= self.until:
            self._enter(State.READY, now)
        return self.state

    def locate(self, chunks: dict[ChunkKey, ChunkIds], now: float) -> None:
        """It has asked where these chunks are."""
        assert self.state is State.ASK
        self.looked_for, self.asked_at = chunks, now
        self._enter(State.PLACES, now)

    def wait(self, chunks: Iterable[ChunkKey], now: float, seconds: float) -> None:
        """It has asked for these chunks, and waits for them; at most for so many seconds."""
        assert self.state in (State.ASK, State.DECIDE)
        if self.state is State.ASK:
            self.asked_at = now
        self.chunks, self.until = frozenset(chunks), now + seconds
        self._to_come = set(self.chunks)
        self._enter(State.CHUNKS, now)

    def come(self, key: ChunkKey, now: float) -> None:
        """One of its chunks is here, or cannot be had; with the last of them its wait ends."""
        self._to_come.discard(key)
        if not self._to_come:
            self.until = min(self.until, now)

    def seconds(self, now: float) -> float | None:
        """How long it has waited for chunks and their places; None: it asked for none."""
        return min(self.until, now) - self.asked_at if self.chunks or self.looked_for else None

    @property
    def told(self) -> dict[str, Any] | None:
        """The decision, for its report."""
        if self.decision is None:
            return None
        lists = {"load": list(self.decision.load), "tiers": list(self.tiers)}
        found = asdict(self.decision) | lists
        slow = zip(self.tiers, self.decision.load, strict=True)
        return found | {"slow_chunks": dict(Counter(tier for tier, load in slow if tier and not load))}

    def _enter(self, state: State, now: float) -> None:
        self.state, self._since = state, now
