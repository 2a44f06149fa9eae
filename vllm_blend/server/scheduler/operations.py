"""What an operator may ask of a running engine: what it keeps, and to delete, check or compute it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from vllm_blend.core.plans import ChunkIds, ChunkKey
from vllm_blend.server.chunks.chunk_contexts import HARVESTED, HARVESTED_FIRST, Contexts
from vllm_blend.server.chunks.chunk_registry import ChunkRegistry, chunk_key
from vllm_blend.server.internal.internal_requests import InternalRequests
from vllm_blend.server.scheduler.lookup import Lookup
from vllm_blend.server.scheduler.request_reports import sizes
from vllm_blend.server.scheduler.tier_fetches import Fetches
from vllm_blend.store.adapters import adapter_of, shelf, tenant_of

BEGINNING = 24
"""Tokens of a chunk that are listed."""


class Operations:
    """Of one engine; called between its steps.

    Args:
        chunks, lookup, internal, fetches: the scheduler's.
    """

    def __init__(
        self,
        chunks: ChunkRegistry,
        lookup: Lookup,
        internal: InternalRequests,
        fetches: Fetches | None,
    ) -> None:
        self._chunks, self._lookup = chunks, lookup
        self._internal, self._fetches = internal, fetches

    @property
    def _contexts(self) -> Contexts:
        return self._internal.contexts

    def stats(self) -> dict[str, Any]:
        """What is kept in memory, by tenant, and whether the engine blends."""
        tenants: dict[str, dict[str, int]] = {}
        for key, chunk in self._chunks.all():
            found = tenants.setdefault(tenant_of(chunk.tenant), {"chunks": 0, "tokens": 0, "in_use": 0})
            found["chunks"] += 1
            found["tokens"] += len(chunk.token_ids)
            found["in_use"] += self._chunks.is_pinned(key)
        return {
            "blending": not self._internal.paused,
            "tokens": self._chunks.num_tokens,
            "max_tokens": self._chunks.max_tokens,
            "waiting_chunks": len(self._internal.background) + len(self._fetches or ()),
            "tenants": tenants,
        }

    def sizes(self, token_bytes: int, store: dict[str, int]) -> dict[str, Any]:
        """For the gauges: what is kept, by tier, and what was computed for it.

        Args:
            token_bytes: of a token's KV.
            store: the store's counters; empty without a store.
        """
        background = self._internal.background
        host = len(self._chunks), self._chunks.num_tokens * token_bytes
        return sizes(*host, store) | {
            "computed_chunks": background.num_computed,
            "waiting_chunks": len(background) + len(self._fetches or ()),
            "dropped_chunks": background.num_dropped,
            "evicted_chunks": self._chunks.num_evicted,
        }

    def listed(self, tenant: str | None, offset: int, limit: int) -> dict[str, Any]:
        """Chunks in memory, the oldest first.

        Args:
            tenant: None: all tenants'.
        """
        chosen = [
            one for one in self._chunks.all() if tenant is None or tenant_of(one[1].tenant) == tenant
        ]
        return {
            "num_chunks": len(chosen),
            "chunks": [self._told(key, chunk) for key, chunk in chosen[offset : offset + limit]],
        }

    def _told(self, key: ChunkKey, chunk: ChunkIds) -> dict[str, Any]:
        return {
            "key": key.hex(),
            "tenant": tenant_of(chunk.tenant),
            "adapter": adapter_of(chunk.tenant),
            "tokens": len(chunk.token_ids),
            "harvested": chunk.context in (HARVESTED, HARVESTED_FIRST),
            "in_use": self._chunks.is_pinned(key),
            "beginning": [int(token) for token in chunk.token_ids[:BEGINNING]],
        }

    def delete(self, chunks: Sequence[ChunkIds]) -> dict[str, int]:
        """Deletes chunks wherever this server may have them: those in memory, and those that wait or
        are being computed.

        Args:
            chunks: each under every context that it may be known after.

        Returns:
            How many are gone, and how many will be once nobody uses them.
        """
        counts = {"deleted": 0, "deleted_after_use": 0}
        for chunk in chunks:
            key = chunk_key(chunk)
            self._internal.background.forget(key)
            if self._fetches is not None:
                self._fetches.forget(chunk)
            if key in self._chunks or self._chunks.coming(key) is not None:
                counts["deleted" if self._chunks.delete(key) else "deleted_after_use"] += 1
        return counts

    def delete_tenant(self, tenant: str) -> dict[str, int]:
        """Deletes all that is known of a tenant's texts; counts as ``delete``.

        Of chunks in lower tiers: those of the base model, and of adapters that requests have had.
        """
        known = [*self._chunks.all(), *self._chunks.all_coming()]
        found = [chunk for _, chunk in known] + self._internal.background.waiting()
        counts = self.delete([chunk for chunk in found if tenant_of(chunk.tenant) == tenant])
        for name in self._shelves(tenant):
            self._lookup.forget_tenant(name)
            if self._fetches is not None:
                self._fetches.forget_tenant(name)
        return counts

    def variants(self, tenant: str, pieces: Sequence[Sequence[int]]) -> list[ChunkIds]:
        """Chunks of these token ids, after all that they may be known after, of all adapters."""
        return [
            ChunkIds(name, tuple(ids), context)
            for name in self._shelves(tenant)
            for ids in pieces
            for context in self._contexts.known
        ]

    def _shelves(self, tenant: str) -> list[str]:
        """Where a tenant's chunks lie (``store/adapters.py``)."""
        return [shelf(tenant, digest) for digest in ["", *self._internal.adapters.digests]]

    def verify(self, held: Collection[ChunkKey]) -> dict[str, int]:
        """Compares the list of chunks with what the model's process holds.

        Args:
            held: chunks whose KV is whole in every rank.

        Returns:
            How many were compared; how many of them lack their KV, and are forgotten.
        """
        known = list(self._chunks.all())
        lost = [key for key, _ in known if key not in held]
        for key in lost:
            self._chunks.lose(key)
        return {"chunks": len(known), "lost": len(lost)}

    def warm(self, tenant: str, pieces: Sequence[Sequence[int]]) -> dict[str, int]:
        """Lets chunks be fetched, or computed in the background, that are not known yet.

        Returns:
            How many are known, and how many are asked for; the others are refused.
        """
        counts = {"known": 0, "asked": 0}
        for ids in pieces:
            known = (ChunkIds(tenant, tuple(ids), context) for context in self._contexts.known)
            if self._lookup.known(list(known))[0] is not None:
                counts["known"] += 1
                continue
            chunk = ChunkIds(tenant, tuple(ids), self._contexts.later)
            self._lookup.miss(chunk)
            key = chunk_key(chunk)
            asked = key in self._internal.background or (
                self._fetches is not None and self._fetches.is_asked(key)
            )
            counts["asked"] += asked
        return counts
