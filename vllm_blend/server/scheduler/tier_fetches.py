"""Chunks that may lie in a store's lower tiers, and the requests that wait for them.

A chunk that is not in memory is asked for in the model's process, which looks for it and loads it
beside the steps. What is there becomes known; what is not is computed in the background. A request
waits for its chunks at most as long as computing them would take: at worst it takes twice that time.
Where the ratio is ``"auto"``, chunks are first looked for, and only those that are worth it waited for.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from vllm_blend.core.plans import ChunkIds, ChunkKey
from vllm_blend.core.prompt import TokenIds
from vllm_blend.server.chunks.chunk_contexts import Contexts
from vllm_blend.server.chunks.chunk_registry import ChunkRegistry, chunk_key
from vllm_blend.server.chunks.token_index import SequenceIndex, Windows
from vllm_blend.server.internal.background_prefill import BackgroundPrefill
from vllm_blend.server.internal.calibration import Calibration
from vllm_blend.server.messages import Place, WorkerCommands
from vllm_blend.server.scheduler.waiting import State, Waiting
from vllm_blend.store.controller import Located
from vllm_blend.store.load_time import LoadTime

MIN_WAIT_S = 0.01
"""A request waits at least this long: the answer that there is nothing takes about that."""
FOUND_TOKENS, FOUND_TENANTS = 1_000_000, 256
"""Auto mode: tokens of a tenant's chunks in lower tiers that are found by content, and tenants; with a
stand-in, of a tenant's chunks computed after the same, and such sets."""
MIN_RATE_TOKENS = 64
"""Steps with fewer tokens tell nothing of how fast a prefill is."""


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
        self.waiting: dict[str, Waiting] = {}
        self._chunks = chunks
        self._background = background
        self._contexts = contexts
        self._pending: dict[ChunkKey, ChunkIds] = {}
        self._to_compute: set[ChunkKey] = set()  # of these, where they are not to be had
        self._to_ask: list[tuple[ChunkKey, ChunkIds]] = []
        self._to_locate: dict[ChunkKey, ChunkIds] = {}
        # by tenant and context, the last used last: chunks that are not in memory
        self._below: OrderedDict[tuple[str, TokenIds], SequenceIndex] = OrderedDict()
        self._claims: dict[str, bool] = {}  # whether the tenant's chunks on disk are known
        self._to_claim: list[str] = []
        chunks.on_evict = self._evicted
        self._loads: dict[str, LoadTime] = {}
        self._token_seconds = 0.0  # of a prefill, a token; not known yet

    def __len__(self) -> int:
        return len(self._pending) + list(self._claims.values()).count(False)

    def ask(self, chunk: ChunkIds, compute: bool = True) -> ChunkKey | None:
        """Asks for a chunk; None if it is being computed, or here, already.

        Args:
            compute: where it is not to be had, it is computed in the background.
        """
        key = chunk_key(chunk)
        if key in self._background or key in self._chunks:
            return None
        if compute:
            self._to_compute.add(key)
        if key not in self._pending:
            self._pending[key] = chunk
            self._to_ask.append((key, chunk))
        return key

    def locate(self, request: Waiting, missing: Iterable[ChunkIds]) -> None:
        """Lets a request wait until it is known where chunks are."""
        request.locate({chunk_key(chunk): chunk for chunk in missing}, time.monotonic())
        self._to_locate |= request.looked_for

    def found(self, key: ChunkKey, place: Place) -> None:
        """Where a chunk is."""
        for request in self.waiting.values():
            if key in request.looked_for:
                request.places[key] = place

    def claim(self, tenant: str) -> bool:
        """Whether a tenant's chunks on disk are known; if not, they will be."""
        if tenant not in self._claims:
            self._claims[tenant] = False
            self._to_claim.append(tenant)
        return self._claims[tenant]

    def claimed(self, tenant: str, chunks: Sequence[ChunkIds]) -> None:
        """A tenant's chunks on disk, most recently used first."""
        self._claims[tenant] = True
        self._index((tenant, self._contexts.later))
        for chunk in reversed(chunks):
            self._note(chunk_key(chunk), chunk)

    def find(self, tenant: str, token_ids: Sequence[int], min_tokens: int) -> list[ChunkIds]:
        """Chunks that are not in memory, of which a prompt has at least a part."""
        indexes = {
            context: self._index((tenant, context))
            for context in self._contexts.known
            if (tenant, context) in self._below
        }
        if not indexes:
            return []
        prompt = Windows.of(token_ids)
        runs = [(run, c) for c, index in indexes.items() for run in index.find(prompt, min_tokens)]
        found = {
            run.key: ChunkIds(tenant, indexes[context].tokens(run.key), context)
            for run, context in self._contexts.suited(runs)
        }
        return [chunk for chunk in found.values() if self._chunks.get(chunk) is None]

    def _evicted(self, key: ChunkKey, chunk: ChunkIds) -> None:
        self._note(key, chunk)

    def _note(self, key: ChunkKey, chunk: ChunkIds) -> None:
        self._index(chunk.shelf).add(key, Windows.of(chunk.token_ids))

    def _index(self, shelf: tuple[str, TokenIds]) -> SequenceIndex:
        """A tenant's chunks that are not in memory; those of tenants that were not seen for long go."""
        index = self._below.setdefault(shelf, SequenceIndex(FOUND_TOKENS))
        self._below.move_to_end(shelf)
        while len(self._below) > 1 and (
            len(self._below) > FOUND_TENANTS
            or sum(one.num_tokens for one in self._below.values()) > 2 * FOUND_TOKENS
        ):
            gone, _ = self._below.popitem(last=False)
            self._claims.pop(gone[0], None)  # if it comes back, its chunks on disk are looked for again
        return index

    def learn(self, loads: dict[str, tuple[float, float]]) -> None:
        """How long loads take, by tier: seconds, and seconds a byte."""
        for tier, (latency_s, byte_s) in loads.items():
            self._loads[tier] = LoadTime(latency_s, 1 / byte_s if byte_s > 0 else float("inf"))

    def decide(
        self,
        request: Waiting,
        marked: Sequence[Sequence[ChunkIds]],
        num_tokens: int,
        pace: Calibration,
    ) -> None:
        """Decides which marked chunks a request waits for, by where they are; it then waits.

        Args:
            marked: the chunks that the request names, each with all contexts that it may be known by.
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
        decision = pace.decide(chunks, self._loads, other)
        request.decision, request.tiers = decision, tuple(tiers)
        of_key = zip(keys, nearest, decision.load, strict=True)
        self.wait(request, [c for key, c, load in of_key if load and key in request.looked_for])

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
        commands = WorkerCommands(
            drop,
            fetch=tuple(self._to_ask),
            locate=tuple(self._to_locate.items()),
            claim=tuple((tenant, contexts) for tenant in self._to_claim),
        )
        self._to_ask, self._to_locate, self._to_claim = [], {}, []
        return commands

    def answer(self, key: ChunkKey, found: bool) -> None:
        """The model's process has the chunk now, or cannot have it."""
        chunk = self._pending.pop(key)
        if not found and chunk.shelf in self._below:
            self._below[chunk.shelf].remove(key)
        compute = key in self._to_compute
        self._to_compute.discard(key)
        if not found:
            if compute:
                self._background.add(chunk)
        elif self._chunks.reserve(chunk) is None:
            self._chunks.refuse(key)
        else:
            self._chunks.commit(key)
        for request in self.waiting.values():
            if request.state is State.CHUNKS and not request.chunks & self._pending.keys():
                request.come(time.monotonic())

    def wait(self, request: Waiting, missing: Iterable[ChunkIds]) -> None:
        """Lets a request wait for chunks."""
        compute = not self._contexts.harvest  # else it is kept from the request's own prefill
        asked = {key: chunk for chunk in missing if (key := self.ask(chunk, compute)) is not None}
        num_tokens = sum(len(chunk.token_ids) for chunk in asked.values())
        seconds = max(MIN_WAIT_S, num_tokens * (self._token_seconds or 1e-3)) if asked else 0.0
        request.wait(asked, time.monotonic(), seconds)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step without blending took this long."""
        if num_tokens >= MIN_RATE_TOKENS:
            new = seconds / num_tokens
            old = self._token_seconds or new
            self._token_seconds = old + 0.3 * (new - old)
