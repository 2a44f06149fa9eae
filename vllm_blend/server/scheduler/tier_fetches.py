"""Chunks that may lie in a store's lower tiers, and the requests that wait for them.

A chunk that is not in memory is asked for in the model's process, which looks for it and loads it
beside the steps. What is there becomes known; what is not is computed in the background. A request
waits for its chunks at most as long as computing them would take: at worst it takes twice that time.
Where the ratio is ``"auto"``, chunks are first looked for, and only those that are worth it waited for.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from vllm_blend.core.plans import ChunkIds, ChunkKey
from vllm_blend.core.settings import BlendSettings, num_kept
from vllm_blend.server.chunks.askers import ANSWERED
from vllm_blend.server.chunks.chunk_contexts import HARVESTED, HARVESTED_FIRST, Contexts
from vllm_blend.server.chunks.chunk_registry import ChunkRegistry, chunk_key
from vllm_blend.server.chunks.fair_queue import FairQueue
from vllm_blend.server.chunks.shared_index import SharedIndex
from vllm_blend.server.chunks.token_index import Windows
from vllm_blend.server.internal.background_prefill import MAX_WAITING_TOKENS, BackgroundPrefill
from vllm_blend.server.internal.calibration import Calibration
from vllm_blend.server.messages import Place, WorkerCommands
from vllm_blend.server.scheduler.waiting import Waiting
from vllm_blend.store.controller import Located
from vllm_blend.store.load_time import LoadTime

MIN_WAIT_S = 0.01
"""A request waits at least this long: the answer that there is nothing takes about that."""
FOUND_TOKENS, FOUND_SHELVES = 2_000_000, 256
"""Auto mode: tokens of chunks in lower tiers that are found by content, and sets of a tenant's chunks
that were computed after the same."""
MAX_PENDING = 64
"""Chunks that the model's process looks for and loads at once; the others wait here."""
REFRESH_S = 1.0
"""Auto mode: what is known of lower tiers, where other servers write, is no older when it is used; a
step that finds it half as old asks anew."""
EARLY = 1.2
"""A prefill may begin while loads are believed to take this much longer than it: both beliefs are some
10% off; what has begun too early waits for a layer, what has begun too late stays late."""
MIN_RATE_TOKENS = 64
"""Steps with fewer tokens tell nothing of how fast a prefill is."""


def rows_beside(settings: BlendSettings, num_tokens: int, num_reused: int) -> int:
    """Of a prompt's tokens those that a step computes while layers of its chunks are still to come. A
    question that is asked first reads most of them before the rows are chosen.

    Args:
        num_reused: tokens of its chunks.
    """
    own = num_tokens - num_reused
    settings = settings.for_rows(own, num_reused)
    return own if settings.asks else own + num_kept(settings.recomp_ratio, num_reused)


class Fetches:
    """The chunks that were asked for.

    Args:
        chunks: where those that are there become known.
        background: where the others are computed.
        contexts: what chunks are computed after.
    """

    def __init__(
        self, chunks: ChunkRegistry, background: BackgroundPrefill, contexts: Contexts
    ) -> None:
        self._chunks = chunks
        self._background = background
        self._contexts = contexts
        self._askers = background.askers
        self._to_ask = FairQueue(MAX_WAITING_TOKENS)
        self._pending: dict[ChunkKey, ChunkIds] = {}  # asked for in the model's process
        self._to_compute: set[ChunkKey] = set()  # of those that were asked for, if no tier has them
        self._overlaps: dict[ChunkKey, float] = {}  # of those that are still to be asked for
        self._waiters: defaultdict[ChunkKey, list[Waiting]] = defaultdict(list)
        self._to_locate: dict[ChunkKey, ChunkIds] = {}
        self._seekers: defaultdict[ChunkKey, list[Waiting]] = defaultdict(list)
        # by tenant and context: chunks that are not in memory
        self._below = SharedIndex(FOUND_TOKENS, FOUND_SHELVES)
        # tenants whose chunks in lower tiers are known, and since when; will be; are to be asked for
        self._claimed: dict[str, float] = {}
        self._claiming: set[str] = set()
        self._to_claim: list[str] = []
        self._to_refresh: list[str] = []
        chunks.on_evict = self._note
        self._loads: dict[str, LoadTime] = {}
        self._token_seconds = 0.0  # of a prefill, a token; not known yet

    def __len__(self) -> int:
        return len(self._to_ask) + len(self._pending) + len(self._claiming)

    def ask(self, chunk: ChunkIds, request_id: str = ANSWERED, compute: bool = True) -> ChunkKey | None:
        """Asks for a chunk; None if it is being computed, or here, already, or too many wait.

        Args:
            compute: where it is not to be had, it is computed in the background; but not one that
                a request's prefill computed, whose context is not known as tokens.
        """
        key = chunk_key(chunk)
        if key in self._background or key in self._chunks:
            self._background.add(chunk, request_id)  # it waits for it too
            return None
        self._askers.ask(key, request_id)
        if compute and chunk.context not in (HARVESTED, HARVESTED_FIRST):
            self._to_compute.add(key)
        if key not in self._pending and key not in self._to_ask:
            self._overlaps.pop(key, None)
            dropped = self._to_ask.add(key, chunk)
            self._background.num_dropped += len(dropped)
            for other in dropped:
                self._overlaps.pop(other, None)
                self._askers.forget(other)
                self._ended(other)
            if key in dropped:
                return None
        return key

    def remove(self, key: ChunkKey) -> None:
        """Nobody waits for a chunk any more."""
        self._to_ask.remove(key)
        self._overlaps.pop(key, None)
        self._ended(key)

    def is_asked(self, key: ChunkKey) -> bool:
        """Whether a chunk is asked for, and neither here nor given up."""
        return key in self._to_ask or key in self._pending

    def forget(self, chunk: ChunkIds) -> None:
        """A chunk is deleted: it is not asked for, and not found below, until it is put anew."""
        key = chunk_key(chunk)
        self._pending.pop(key, None)
        self._askers.forget(key)
        self.remove(key)
        self._below.remove(chunk.shelf, key)

    def forget_tenant(self, tenant: str) -> None:
        """All of a tenant's chunks are deleted."""
        for chunk in [*self._to_ask, *self._pending.values()]:
            if chunk.tenant == tenant:
                self.forget(chunk)
        for context in self._contexts.known:
            self._below.drop((tenant, context))

    def clear(self) -> None:
        """Asks for nothing more."""
        self._overlaps.clear()
        while self._to_ask:
            key, _ = self._to_ask.pop()
            self._askers.forget(key)
            self._ended(key)

    def renew(self) -> None:
        """The store has other chunks now: what was asked of it, or known, is forgotten."""
        self.clear()
        for key in [*self._pending, *self._waiters]:
            self._askers.forget(key)
            self._ended(key)
        self._pending.clear()
        self._below = SharedIndex(FOUND_TOKENS, FOUND_SHELVES)
        self._claimed.clear()
        self._to_claim, self._to_refresh = list(self._claiming), []

    def locate(self, request: Waiting, missing: Iterable[ChunkIds]) -> None:
        """Lets a request wait until it is known where chunks are."""
        request.locate({chunk_key(chunk): chunk for chunk in missing}, time.monotonic())
        self._to_locate |= request.looked_for
        for key in request.looked_for:
            self._seekers[key].append(request)

    def found(self, key: ChunkKey, place: Place) -> None:
        """Where a chunk is."""
        for request in self._seekers.pop(key, ()):
            request.places[key] = place

    def claim(self, tenant: str) -> bool:
        """Whether a tenant's chunks in lower tiers are known, as of late; if not, they will be.

        While the engine steps they are asked for again and again, so that a request seldom waits for
        that; the first one after a pause does.
        """
        if not self._is_older(tenant, REFRESH_S):
            return True
        if tenant not in self._claiming:
            self._ask_for_all(tenant)
        return False

    def _ask_for_all(self, tenant: str) -> None:
        (self._to_refresh if tenant in self._claimed else self._to_claim).append(tenant)
        self._claiming.add(tenant)

    def claimed(self, tenant: str, chunks: Sequence[ChunkIds]) -> None:
        """A tenant's chunks in lower tiers that it was not told yet, most recently used first."""
        self._claiming.discard(tenant)
        self._claimed[tenant] = time.monotonic()
        self._forget(self._below.open((tenant, self._contexts.later)))
        for chunk in reversed(chunks):
            self._note(chunk_key(chunk), chunk)

    def _is_older(self, tenant: str, seconds: float) -> bool:
        """What is known of a tenant's chunks; it may be nothing."""
        return time.monotonic() > self._claimed.get(tenant, -math.inf) + seconds

    def find(self, tenant: str, token_ids: Sequence[int], min_tokens: int) -> list[ChunkIds]:
        """Chunks that are not in memory, of which a prompt has at least a part."""
        contexts = self._contexts.known
        indexes = {c: index for c in contexts if (index := self._below.get((tenant, c))) is not None}
        if not indexes:
            return []
        prompt = Windows.of(token_ids)
        runs = [(run, c) for c, index in indexes.items() for run in index.find(prompt, min_tokens)]
        found = {
            run.key: ChunkIds(tenant, indexes[context].tokens(run.key), context)
            for run, context in self._contexts.suited(runs)
        }
        return [chunk for chunk in found.values() if self._chunks.get(chunk) is None]

    def _note(self, key: ChunkKey, chunk: ChunkIds) -> None:
        self._forget(self._below.add(chunk.shelf, key, Windows.of(chunk.token_ids)))

    def _forget(self, shelves: Iterable[Hashable]) -> None:
        """If these tenants come back, their chunks on disk are looked for again."""
        for shelf in shelves:
            assert isinstance(shelf, tuple)
            self._claimed.pop(shelf[0], None)

    def learn(self, loads: dict[str, tuple[float, float]]) -> None:
        """How long loads take, by tier: seconds, and seconds a byte."""
        for tier, (latency_s, byte_s) in loads.items():
            self._loads[tier] = LoadTime(latency_s, 1 / byte_s if byte_s > 0 else float("inf"))

    def decide(
        self,
        request: Waiting,
        marked: Sequence[Sequence[ChunkIds]],
        num_tokens: int,
        calibration: Calibration,
    ) -> None:
        """Decides which marked chunks a request waits for, by where they are; it then waits.

        Args:
            marked: the chunks that the request names, each after all that it may be known after.
            num_tokens: of its prompt.
        """
        chunks: list[Located] = []
        tiers: list[str | None] = []
        nearest = [self._nearest(request, variants) for variants in marked]
        keys = [chunk_key(chunk) for chunk in nearest]
        for key, chunk in zip(keys, nearest, strict=True):
            size = len(chunk.token_ids)
            tier, num_bytes = request.places.get(key, (None, 0))
            if key not in request.looked_for:
                tier = "host"
            tiers.append(tier)
            if tier is None:
                chunks.append(Located(size, 1, None))  # computed, whatever it takes
            else:
                chunks.append(Located(size, num_bytes, tier if num_bytes else None))
        other = num_tokens - sum(chunk.num_tokens for chunk in chunks)
        settings = request.blend_request.settings
        # the rows of a question that is asked first are known; the others are chosen after it
        decision = calibration.decide(chunks, self._loads, other, overlap=not settings.asks)
        request.decision, request.tiers = decision, tuple(tiers)
        loaded = [chunk for chunk, load in zip(nearest, decision.load, strict=True) if load]
        reused = sum(len(chunk.token_ids) for chunk in loaded)
        rows = rows_beside(replace(settings, recomp_ratio=decision.ratio), num_tokens, reused)
        self.wait(request, [c for c in loaded if chunk_key(c) in request.looked_for], rows)

    def _nearest(self, request: Waiting, variants: Sequence[ChunkIds]) -> ChunkIds:
        """Of one chunk's: that which is in memory, else in a tier, else the first."""

        def rank(chunk: ChunkIds) -> int:
            key = chunk_key(chunk)
            if key in self._chunks:
                return 0
            return 1 if request.places.get(key, (None, 0))[0] is not None else 2

        return min(variants, key=rank)

    def take_commands(self, drop: tuple[ChunkKey, ...]) -> WorkerCommands:
        """What the model's process is to do; ``drop`` beside it."""
        contexts = frozenset(self._contexts.known)
        fetch = []
        while self._to_ask and len(self._pending) < MAX_PENDING:
            fetch.append(self._to_ask.pop())
            self._pending.update(fetch[-1:])
        for tenant in self._claimed.keys() - self._claiming:
            if self._is_older(tenant, REFRESH_S / 2):
                self._ask_for_all(tenant)
        commands = WorkerCommands(
            drop,
            fetch=tuple(fetch),
            overlap=tuple((k, self._overlaps.pop(k)) for k, _ in fetch if k in self._overlaps),
            locate=tuple(self._to_locate.items()),
            claim=tuple((tenant, contexts) for tenant in self._to_claim),
            refresh=tuple((tenant, contexts) for tenant in self._to_refresh),
        )
        self._to_locate, self._to_claim, self._to_refresh = {}, [], []
        return commands

    def answer(self, key: ChunkKey, found: bool) -> None:
        """The model's process has the chunk now, or cannot have it."""
        chunk = self._pending.pop(key, None)
        if chunk is None:
            if found and not self._chunks.expects(key):
                self._chunks.refuse(key)  # nobody wants it any more
            return
        if found:
            self._askers.forget(key)
            if self._chunks.reserve(chunk) is not None:
                self._chunks.commit(key)
            elif not self._chunks.expects(key):  # a request's own prefill may bring it meanwhile
                self._chunks.refuse(key)
        else:
            self._below.remove(chunk.shelf, key)
            if key not in self._to_compute:
                self._askers.forget(key)
            elif key in self._askers:
                self._background.add(chunk, None)
        self._ended(key)

    def _ended(self, key: ChunkKey) -> None:
        """A chunk has come, or will not come."""
        self._to_compute.discard(key)
        for request in self._waiters.pop(key, ()):
            request.come(key, time.monotonic())

    def wait(self, request: Waiting, missing: Iterable[ChunkIds], num_rows: int = 0) -> None:
        """Lets a request wait for chunks.

        Args:
            num_rows: that its prefill computes beside the last of their loads; 0: it begins after them.
        """
        name = request.request_id
        compute = not self._contexts.harvest  # else it is kept from the request's own prefill
        keys = ((self.ask(chunk, name, compute), chunk) for chunk in missing)
        asked = {key: chunk for key, chunk in keys if key is not None}
        beside = EARLY * num_rows * self._token_seconds
        for key in asked:
            self._waiters[key].append(request)
            if beside and key in self._to_ask:
                self._overlaps[key] = min(beside, self._overlaps.get(key, beside))
        num_tokens = sum(len(chunk.token_ids) for chunk in asked.values())
        seconds = max(MIN_WAIT_S, num_tokens * (self._token_seconds or 1e-3)) if asked else 0.0
        request.wait(asked, time.monotonic(), seconds)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step without blending took this long."""
        if num_tokens >= MIN_RATE_TOKENS:
            new = seconds / num_tokens
            old = self._token_seconds or new
            self._token_seconds = old + 0.3 * (new - old)
