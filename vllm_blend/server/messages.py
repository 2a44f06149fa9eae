"""What the scheduler and the model's process tell each other, on vLLM's own messages.

``WorkerCommands`` ride on the scheduler's output, ``WorkerEvents`` on the model runner's,
as attributes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_blend.core.plans import ChunkIds, ChunkKey
    from vllm_blend.core.step import Blended

COMMANDS = "blend_commands"
"""The attribute of vLLM's ``SchedulerOutput``."""
EVENTS = "blend_events"
"""The attribute of vLLM's ``ModelRunnerOutput``."""


@dataclass(frozen=True)
class WorkerCommands:
    """From the scheduler to the model's process, to be applied before the step.

    Attributes:
        drop: chunks whose memory others need.
        fetch: chunks to be had from the store's lower tiers, if they are there.
        overlap: of those, how many seconds of a load may be left when it counts as ended: the step that
            reuses the chunk takes as long, and waits for each layer where it must.
        locate: chunks to be looked for there.
        discard: chunks that are to leave all tiers of the store.
        claim: tenants whose chunks in lower tiers are to be told, and what these may be computed after.
        refresh: likewise, but those alone that came since they were told.
    """

    drop: tuple[ChunkKey, ...] = ()
    fetch: tuple[tuple[ChunkKey, ChunkIds], ...] = ()
    overlap: tuple[tuple[ChunkKey, float], ...] = ()
    locate: tuple[tuple[ChunkKey, ChunkIds], ...] = ()
    claim: tuple[tuple[str, frozenset[tuple[int, ...]]], ...] = ()
    refresh: tuple[tuple[str, frozenset[tuple[int, ...]]], ...] = ()
    discard: tuple[ChunkIds, ...] = ()

    @classmethod
    def of(cls, output: Any) -> WorkerCommands:
        """Those that came with a scheduler's output."""
        found: WorkerCommands = getattr(output, COMMANDS, None) or cls()
        return found


Place = tuple[str | None, int]
"""The fastest tier that has a chunk, None where none has it, and the bytes that a load would take."""


@dataclass(frozen=True)
class Lost:
    """A chunk of a request's plan whose KV is not in the model's process.

    Attributes:
        computed: the request's tokens that were in the paged cache already.
        reason: one word, for the metrics.
    """

    request_id: str
    key: ChunkKey
    computed: int
    reason: str


@dataclass
class WorkerEvents:
    """From the model's process to the scheduler.

    Attributes:
        lost: chunks that requests of this step should have reused.
        kept: chunks that were computed, and are here now.
        fetched: ordered chunks, and whether they are here now.
        located: chunks that were looked for.
        claimed: a tenant's chunks in lower tiers that it was not told, most recently used first.
        loads: how long loads take, by tier: seconds, and seconds a byte; beside ``located``.
        blended: what this step did of its requests.
        prefilled: ids of requests that did not blend in this step, as planned, since that failed.
        closed: blending is off from now on, since it failed too often.
        forgotten: no chunk is here any more, since one side failed to take in what the other told.
        seconds: of the stages of blending, by request id and stage.
        store: counters of the store (``ChunkStore.stats``), now and then.
    """

    lost: list[Lost] = field(default_factory=list)
    kept: list[ChunkKey] = field(default_factory=list)
    fetched: dict[ChunkKey, bool] = field(default_factory=dict)
    located: dict[ChunkKey, Place] = field(default_factory=dict)
    loads: dict[str, tuple[float, float]] = field(default_factory=dict)
    claimed: dict[str, list[ChunkIds]] = field(default_factory=dict)
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    store: dict[str, int] | None = None
    blended: list[Blended] = field(default_factory=list)
    prefilled: tuple[str, ...] = ()
    closed: bool = False
    forgotten: bool = False

    @classmethod
    def of(cls, output: Any) -> WorkerEvents:
        """Those that came with a model runner's output."""
        found: WorkerEvents = getattr(output, EVENTS, None) or cls()
        return found
