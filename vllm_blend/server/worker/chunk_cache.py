"""Chunks' KV in the model's process, by the keys that a server's scheduler gives them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from vllm_blend.core.kv import StoredKV
from vllm_blend.core.plans import BlendPlan, ChunkKey, ChunkSpan, CollectPlan, KeyedPlan
from vllm_blend.core.static_scores import movement
from vllm_blend.core.step import BlendStep
from vllm_blend.server.messages import Lost, WorkerCommands, WorkerEvents
from vllm_blend.server.worker.pinned_memory import PinnedMemory
from vllm_blend.server.worker.tier_io import TierIO


class ChunkCache:
    """The KV that ``KeyedPlan`` names, in host memory; a store's other tiers lie below it.

    Attributes:
        tiers: of the store, or None.
        memory: where KV that comes from a GPU goes; None without a GPU, whose KV stays where it is.
    """

    def __init__(self) -> None:
        self.tiers: TierIO | None = None
        self.memory: PinnedMemory | None = None
        self._chunks: dict[ChunkKey, StoredKV] = {}
        self._lost: list[Lost] = []

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def num_bytes(self) -> int:
        return sum(kv.num_bytes for kv in self._chunks.values())

    def apply(self, orders: WorkerCommands) -> None:
        """Does what the scheduler asks for."""
        self.drop(orders.drop)
        for key, chunk in orders.fetch:
            assert self.tiers is not None
            self.tiers.fetch(key, chunk)
        for key, chunk in orders.locate:
            assert self.tiers is not None
            self.tiers.locate(key, chunk)
        for tenant, contexts in orders.claim:
            assert self.tiers is not None
            self.tiers.claim(tenant, contexts)

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
        return BlendPlan(tuple(spans), plan.settings, plan.timed) if spans else None

    def keep(self, step: BlendStep) -> None:
        """Keeps what the step collected under a key, once it is whole."""
        for request in step.collected:
            plan = request.plan
            assert isinstance(plan, CollectPlan)
            if plan.key is None or request.position + request.num_rows < plan.num_prompt_tokens:
                continue
            # vLLM may hand the plan over again after a preemption: it starts anew
            kv, plan.kv = StoredKV(tuple(plan.kv)), []
            if plan.scored:
                base = self._chunks.get(plan.key)
                if base is None:  # dropped meanwhile
                    continue
                kv = replace(base, scores=movement(base, kv))
            in_store = False
            if self.tiers is not None and plan.chunk is not None:
                in_store = self.tiers.put(plan.key, plan.chunk, kv)
            if not in_store and not plan.scored and self.memory is not None:
                kv = self.memory.copy(plan.key, kv)
            self._chunks[plan.key] = kv

    def drop(self, keys: Iterable[ChunkKey]) -> None:
        """Forgets chunks; one that is not here is no error."""
        for key in keys:
            self._chunks.pop(key, None)
            if self.memory is not None:
                self.memory.free(key)
            if self.tiers is not None:
                self.tiers.forget(key)

    def renew(self, weights: str) -> None:
        """Forgets all chunks, since the model has other weights now.

        Args:
            weights: which, for the store's keys.
        """
        self.drop(list(self._chunks))
        self._lost = []
        if self.tiers is not None:
            self.tiers.renew(weights)

    def collect_events(self) -> WorkerEvents | None:
        """What there is to tell the scheduler, but for times."""
        events = WorkerEvents(lost=self._lost)
        self._lost = []
        if self.tiers is not None:
            self._chunks |= {k: kv for k, kv in self.tiers.settled().items() if k in self._chunks}
            fetched = self.tiers.fetched()
            self._chunks |= {key: kv for key, kv in fetched.items() if kv is not None}
            events.fetched = {key: kv is not None for key, kv in fetched.items()}
            events.located = self.tiers.located()
            if events.located:
                events.loads = self.tiers.loads()
            events.claimed = self.tiers.claimed()
            events.store = self.tiers.stats()
        return None if events == WorkerEvents() else events
