"""Chunks in memory: what requests read from."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from vllm_blend.core.kv import StoredKV
from vllm_blend.core.layers import LayerKV
from vllm_blend.store.arena import Arena, Extent
from vllm_blend.store.keys import ChunkKey
from vllm_blend.store.record import Layout, layers_in
from vllm_blend.store.tier import Stats

MAX_ASKED = 4
"""Chunks that are kept for now, at most, until one is dropped without asking."""


@dataclass(eq=False)
class Slot:
    """Memory for one chunk. It becomes an entry of the tier when it is published.

    Attributes:
        memory: all layers, uint8 ``[payload_bytes]``; holding it keeps the slot in use.
        layers: views of it.
        extent: None if the arena was full, so that this is memory of its own.
        scores: float32 ``[num_tokens]``, filled in by whoever fills the memory, where they are known.
    """

    key: ChunkKey
    memory: torch.Tensor
    layers: Sequence[LayerKV]
    extent: Extent | None
    scores: torch.Tensor | None = None


@dataclass(eq=False)
class _Entry:
    key: ChunkKey
    extent: Extent
    num_bytes: int
    scores: torch.Tensor | None
    kv: weakref.ref[StoredKV] | None = field(default=None, repr=False)


class HostTier:
    """Chunks' KV in one bounded arena. What it hands out stays valid as long as any tensor of it lives.

    Args:
        budget_bytes: of the arena.
        pinned: page-locked; None: where there is a GPU.
        may_evict: asked before a chunk is dropped; a False keeps it for now. It must not call back.
        device: whose memory; None: the host's.
    """

    def __init__(
        self,
        budget_bytes: int,
        pinned: bool | None = None,
        may_evict: Callable[[ChunkKey], bool] = lambda key: True,
        device: torch.device | None = None,
    ) -> None:
        self.name = "host"
        self.stats = Stats()
        self.budget_bytes = budget_bytes
        self._may_evict = may_evict
        self._arena = Arena(budget_bytes, pinned, device)
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()

    def get(self, key: ChunkKey) -> StoredKV | None:
        """The chunk's KV, not copied."""
        return self.learn(key, None)

    def learn(self, key: ChunkKey, scores: torch.Tensor | None) -> StoredKV | None:
        """The chunk's KV, not copied; from now on with these scores, where it had none."""
        with self._lock:
            entry = self._find(key)
            if entry is None:
                return None
            self._entries.move_to_end(key.digest)
            kv = entry.kv() if entry.kv is not None else None
            if entry.scores is None and scores is not None:
                entry.scores, kv = scores.detach().clone(), None
            if kv is None:
                kv = StoredKV(_layers(self._memory(entry), key), entry.scores)
                entry.kv = weakref.ref(kv)
            return kv

    def memory(self, key: ChunkKey) -> torch.Tensor | None:
        """The chunk's bytes, uint8 ``[payload_bytes]``; this is no use of it."""
        with self._lock:
            entry = self._find(key)
            return None if entry is None else self._memory(entry)

    def scores(self, key: ChunkKey) -> torch.Tensor | None:
        """The chunk's scores, float32 ``[num_tokens]``; None: it is not here, or has none."""
        with self._lock:
            entry = self._find(key)
            return None if entry is None else entry.scores

    def contains(self, key: ChunkKey) -> bool:
        with self._lock:
            return key.digest in self._entries

    def reserve(self, key: ChunkKey) -> Slot:
        """Memory for a chunk; the least recently used ones that are not in use make room for it.

        If they do not suffice, it is memory of its own, which ``publish`` does not keep.
        """
        if (slot := self._reserve(key)) is not None:
            return slot
        self.stats.add("overflows")
        memory = torch.empty(Layout.of(key).payload_bytes, dtype=torch.uint8)
        return Slot(key, memory, _layers(memory, key), None)

    def publish(self, slot: Slot) -> None:
        """From now on the chunk is found; its memory must be filled and verified.

        It keeps the scores that were known of it before, where the slot has none.
        """
        if slot.extent is None:
            return
        with self._lock:
            before = self._find(slot.key)
            scores = before.scores if before is not None and slot.scores is None else slot.scores
            self._remove(slot.key.digest)
            entry = _Entry(slot.key, slot.extent, slot.memory.nbytes, scores)
            self._entries[slot.key.digest] = entry

    def abandon(self, slot: Slot) -> None:
        """Gives the memory back; whoever has a tensor of it may still read it."""
        if slot.extent is not None:
            with self._lock:
                self._arena.free(slot.extent)

    def discard(self, key: ChunkKey) -> None:
        with self._lock:
            self._remove(key.digest)

    def usage(self) -> dict[str, int]:
        with self._lock:
            self._arena.collect()
            in_use = sum(entry.extent.in_use for entry in self._entries.values())
            return {
                "entries": len(self._entries),
                "entries_in_use": in_use,
                "bytes": self._arena.size - self._arena.free_bytes,
                "moved_bytes": self._arena.moved_bytes,
            }

    def close(self) -> None:
        with self._lock:
            for digest in list(self._entries):
                self._remove(digest)

    def _reserve(self, key: ChunkKey) -> Slot | None:
        """Memory of the arena, or None."""
        num_bytes = Layout.of(key).payload_bytes
        with self._lock:
            extent = self._make_room(num_bytes)
            if extent is None:
                return None
            memory = self._arena.tensor(extent, num_bytes)
        return Slot(key, memory, _layers(memory, key), extent)

    def _find(self, key: ChunkKey) -> _Entry | None:
        entry = self._entries.get(key.digest)
        return entry if entry is not None and entry.key.id_bytes == key.id_bytes else None

    def _memory(self, entry: _Entry) -> torch.Tensor:
        return self._arena.tensor(entry.extent, entry.num_bytes)

    def _remove(self, digest: bytes) -> None:
        entry = self._entries.pop(digest, None)
        if entry is not None:
            self._arena.free(entry.extent)

    def _make_room(self, num_bytes: int) -> Extent | None:
        if num_bytes > self._arena.size:
            return None
        kept: set[bytes] = set()
        while (extent := self._arena.allocate(num_bytes)) is None:
            victim = self._victim(kept)
            if victim is None:
                return None
            self._remove(victim)
            self.stats.add("evictions")
        return extent

    def _victim(self, kept: set[bytes]) -> bytes | None:
        """The least recently used chunk that may go; ``kept`` collects those that were asked for."""
        for digest, entry in self._entries.items():
            if digest in kept or entry.extent.in_use:
                continue
            if len(kept) >= MAX_ASKED or self._may_evict(entry.key):
                return digest
            kept.add(digest)
        return None


def _layers(memory: torch.Tensor, key: ChunkKey) -> Sequence[LayerKV]:
    return layers_in(memory, key.model.shape, key.num_tokens, key.model.storage)
