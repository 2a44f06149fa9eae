"""Chunks' KV in the model's process, by the keys that a server's scheduler gives them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from vllm_blend.core.kv import ChunkLost, KVShape, StoredKV
from vllm_blend.core.plans import BlendPlan, ChunkKey, ChunkSpan, CollectPlan, KeyedPlan
from vllm_blend.server.messages import Lost, WorkerCommands, WorkerEvents
from vllm_blend.server.worker.chunk_memory import ChunkMemory
from vllm_blend.server.worker.collected import Distances, HostCopies, HostRows
from vllm_blend.server.worker.tier_io import TierIO


class ChunkCache:
    """The KV that ``KeyedPlan`` names, in host memory; a store's other tiers lie below it.

    Attributes:
        tiers: of the store, or None.
        memory: where KV that is computed goes.
    """

    def __init__(self) -> None:
        self.tiers: TierIO | None = None
        self.memory = ChunkMemory(0)
        self._chunks: dict[ChunkKey, StoredKV] = {}
        self._lost: list[Lost] = []
        self._kept: list[ChunkKey] = []
        self._copies: HostCopies | None = None
        self._weights = ""
        self._forgotten = False

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def num_bytes(self) -> int:
        return sum(kv.num_bytes for kv in self._chunks.values())

    def apply(self, orders: WorkerCommands) -> None:
        """Does what the scheduler asks for."""
        self.drop(orders.drop)
        if self.tiers is not None:
            for chunk in orders.discard:
                self.tiers.purge(chunk)
        overlaps = dict(orders.overlap)
        for key, chunk in orders.fetch:
            assert self.tiers is not None
            self.tiers.fetch(key, chunk, overlaps.get(key, 0.0))
        for key, chunk in orders.locate:
            assert self.tiers is not None
            self.tiers.locate(key, chunk)
        for tenant, contexts in orders.claim:
            assert self.tiers is not None
            self.tiers.claim(tenant, contexts)
        for tenant, contexts in orders.refresh:
            assert self.tiers is not None
            self.tiers.claim(tenant, contexts, all_of_them=False)

    def resolve(
        self, plan: BlendPlan | CollectPlan | KeyedPlan, request_id: str, computed: int
    ) -> BlendPlan | CollectPlan | None:
        """The plan with its KV; a span whose KV is not here is computed like any other token.

        Args:
            request_id: whose plan it is.
            computed: its tokens that are in the paged cache already.
        """
        if not isinstance(plan, KeyedPlan):
            return plan
        if plan.spans and self._copies is not None:
            self._copies.join()
        spans = []
        for span in plan.spans:
            kv = self._chunks.get(span.key)
            end = span.offset + span.end - span.start
            if kv is None or end > kv.num_tokens:
                reason = "gone" if kv is None else "short"
                self._lost.append(Lost(request_id, span.key, computed, reason))
                continue
            if self.tiers is not None:
                kv = self.tiers.nearest(span.key) or kv
            tokens = kv.tokens(span.offset, end)
            spans.append(ChunkSpan(span.start, tokens, exact=span.exact))
        if not spans and not plan.harvest:
            return None
        return BlendPlan(
            tuple(spans), plan.settings, plan.timed, plan.harvest, tells_rows=plan.tells_rows
        )

    def collect(self, plan: CollectPlan, shape: KVShape, device: torch.device) -> None:
        """Gives a plan a place for the K and V that come from ``device``.

        Args:
            shape: the model's.
        """
        assert plan.key is not None
        if not plan.scored:
            if device.type == "cuda" and self._copies is None:
                self._copies = HostCopies(device)
            block = self.memory.reserve(plan.key, shape, plan.num_tokens)
            plan.into = HostRows(block, self._copies)
        elif (base := self._chunks.get(plan.key)) is not None:  # else it was dropped meanwhile
            if self._copies is not None:
                self._copies.join()
            plan.into = Distances(base, shape, device)

    def distances(self, plan: CollectPlan) -> torch.Tensor | None:
        """Of a chunk that was computed after something else for its scores: what this rank's heads
        bring to them (``core/static_scores.py``); None: what is stored was dropped meanwhile."""
        return plan.into.sums() if isinstance(plan.into, Distances) else None

    def keep(self, plan: CollectPlan, scores: torch.Tensor | None = None) -> None:
        """Keeps what was collected under a key, if it is whole.

        Args:
            scores: what the ``distances`` of all ranks make, of a plan that is scored.
        """
        assert plan.key is not None
        # vLLM may hand the plan over again after a preemption: it starts anew
        is_whole, into = plan.is_whole, plan.into
        plan.restart()
        if not is_whole or into is None or (plan.scored and plan.key not in self._chunks):
            return
        copied = None
        if isinstance(into, HostRows):
            kv = into.kv()
            copied = None if self._copies is None else self._copies.end()
        else:
            assert scores is not None
            kv = replace(self._chunks[plan.key], scores=scores)
        if self.tiers is not None and plan.chunk is not None:
            self.tiers.put(plan.key, plan.chunk, kv, copied)
        self._chunks[plan.key] = kv
        if not plan.scored:
            self._kept.append(plan.key)

    def drop(self, keys: Iterable[ChunkKey]) -> None:
        """Forgets chunks; one that is not here is no error."""
        for key in keys:
            self._chunks.pop(key, None)
            self._kept = [kept for kept in self._kept if kept != key]
            self.memory.free(key)
            if self.tiers is not None:
                self.tiers.forget(key)

    def whole(self) -> list[ChunkKey]:
        """The chunks whose KV is here, in finite numbers; what is not finite leaves the store's memory,
        too."""
        if self._copies is not None:
            self._copies.end().synchronize()
        found = []
        for key, kv in self._chunks.items():
            try:
                finite = all(bool(torch.isfinite(part).all()) for layer in kv.layers for part in layer)
            except ChunkLost:  # its last layers did not come: the scheduler is told
                continue
            if finite:
                found.append(key)
            elif self.tiers is not None:
                self.tiers.discard(key)
        return found

    def renew(self, weights: str) -> None:
        """Forgets all chunks, since the model has other weights now.

        Args:
            weights: which, for the store's keys.
        """
        self.drop(list(self._chunks))
        self._lost, self._weights = [], weights
        if self.tiers is not None:
            self.tiers.renew(weights)

    def forget(self) -> None:
        """Forgets all chunks, of which the scheduler is to be told."""
        self.renew(self._weights)
        self._kept, self._forgotten = [], True

    def take_forgotten(self) -> bool:
        """Whether all chunks were forgotten since this was last called."""
        forgotten, self._forgotten = self._forgotten, False
        return forgotten

    def collect_events(self) -> WorkerEvents | None:
        """What there is to tell the scheduler, but for times."""
        events = WorkerEvents(lost=self._lost, kept=self._kept)
        self._lost, self._kept = [], []
        if self._copies is not None:
            self._copies.release()
        if self.tiers is not None:
            fetched = self.tiers.fetched()  # first, since the ranks meet in it
            for key, kv in self.tiers.settled().items():
                if key in self._chunks:
                    self._chunks[key] = kv
                    self.memory.free(key)
            for key, found in fetched.items():
                if found is not None:
                    self._chunks.setdefault(key, found)  # a prefill may have brought it meanwhile
            for key, late in self.tiers.take_lost().items():
                if self._chunks.get(key) is late:
                    del self._chunks[key]
                    events.lost.append(Lost("", key, 0, "late"))
            events.fetched = {key: kv is not None for key, kv in fetched.items()}
            events.located = self.tiers.located()
            if events.located:
                events.loads = self.tiers.loads()
            events.claimed = self.tiers.claimed()
            events.store = self.tiers.stats()
        return None if events == WorkerEvents() else events
