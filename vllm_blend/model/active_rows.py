"""The forward context in which vLLM's layers compute a step's chosen rows, and stored KV beside them.

Rows are known before layer 0, or become known at a check layer (``model/loop.py``); either way the
stock layers run on them, and find in vLLM's forward context what depends on where a row stands.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from vllm.forward_context import ForwardContext, override_forward_context

from vllm_blend.attention.base import (
    BlendAttention,
    Fusion,
    RowPlaces,
    StoredSegments,
    last_keys,
)
from vllm_blend.core.kv import concat_kv
from vllm_blend.core.layers import LayerKV
from vllm_blend.core.stage_clock import StageClock
from vllm_blend.core.step import BlendStep, Status, StepRequest
from vllm_blend.model.chosen_rows import ChosenRows
from vllm_blend.model.kv_loader import StoredLayers, began

if TYPE_CHECKING:
    from vllm_blend.ops.segment_scatter import SegmentTables


class LastLayerHeard(Exception):
    """Ends a forward of the model once the last layer that is asked was heard."""


class Listener(Protocol):
    """Hears the queries of a layer, once stored K is where the queries find it."""

    def hear(
        self, impl: Any, layer: Any, query: torch.Tensor, key: torch.Tensor, stored_k: Any
    ) -> None: ...


@dataclass(eq=False)
class Fusing:
    """Requests whose stored KV goes to the cache at the same layers.

    Attributes:
        stored: where it comes from.
        in_segments: it may be read where it lies, by ``tables``.
        slots: where it goes, and its positions, by the id of all rows' slots.
    """

    requests: list[StepRequest]
    stored: list[StoredLayers]
    in_segments: bool = True
    tables: SegmentTables | None = None
    slots: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @cached_property
    def is_joined(self) -> bool:
        """Whether a layer's KV is put together of several parts, which copies it."""
        return sum(len(request.windows) for request in self.requests) > 1

    @cached_property
    def rows(self) -> torch.Tensor:
        """The step's rows that it stands for."""
        return torch.cat([request.chunk_rows for request in self.requests])


def places_of(context: ForwardContext, num_rows: int) -> torch.Tensor:
    """Where each row of a step stands in its request, ``[num_rows]`` int64, by the metadata of its
    attention; the host does not wait for the device."""
    stock = next(iter(context.attn_metadata.values()))
    starts = stock.query_start_loc.long()
    rows = torch.arange(num_rows, device=starts.device)
    request = torch.bucketize(rows, starts[1:], right=True)
    return stock.seq_lens[request].long() - (starts[request + 1] - rows)


class ActiveRows(ChosenRows):
    """The rows of a step that are computed, as its layers see them.

    Attributes:
        fused_layers: of ``fused`` requests the layers before this one are in the cache.
        received: what the chunk rows of a request that was asked get of its question's attention,
            ``[num_chunk_rows]`` float32.
        listener: hears the queries of every layer.
        end_layer: the forward ends before it.
        clock: measures the step's stages.
    """

    def __init__(
        self,
        step: BlendStep,
        positions: torch.Tensor,
        context: ForwardContext,
        num_layers: int,
        cache_fuse_metadata: Any = None,
        clock: StageClock | None = None,
    ) -> None:
        super().__init__(step, positions)
        self.clock = StageClock(step, positions.device) if clock is None else clock
        self.fused_layers = self.end_layer = num_layers
        self.received: dict[StepRequest, torch.Tensor] = {}
        self.listener: Listener | None = None
        self._context = context
        self._num_layers = num_layers
        self.cache_fuse_metadata = cache_fuse_metadata
        self._began = began(positions.device)
        self._slots: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id of slot_mapping
        self._fusing: dict[bool, Fusing] = {}
        self._described: dict[tuple[int, Any], Any] = {}  # by id of the stock metadata, and window

    @cached_property
    def _check_layers(self) -> frozenset[int]:
        """Layers at which rows are chosen."""
        late = [r.settings.check_layers for r in self.step.blended if not r.settings.early]
        return frozenset(layer for layers in late for layer in layers)

    @cached_property
    def stored(self) -> StoredLayers:
        """The step's stored KV, but that of ``fused`` requests."""
        requests = [request for request in self.step.blended if request not in self.fused]
        late = [r.settings.check_layers[0] for r in requests if not r.settings.early]
        return self._loads(
            requests, 0 if len(late) < len(requests) else min(late, default=self._num_layers)
        )

    @cached_property
    def stored_later(self) -> StoredLayers:
        """That of ``fused`` requests, from ``fused_layers`` on."""
        some = [request for request in self.step.blended if request in self.fused]
        return self._loads(some if self.fused_layers < self._num_layers else [], self.fused_layers)

    def _loads(self, requests: list[StepRequest], first_layer: int) -> StoredLayers:
        return StoredLayers(
            requests,
            self.device,
            self._num_layers,
            first_layer,
            self.clock,
            self.end_layer,
        )

    def begin_rest(self) -> None:
        """Starts to read ``stored_later``, beside what runs of this step."""
        self.stored_later.begin(self._began)

    def stored_of(self, request: StepRequest) -> StoredLayers:
        return self.stored_later if request in self.fused else self.stored

    def status(self, layer: int) -> Status:
        """What ``layer`` does: CHECK where rows are chosen, AFTER_CHECK once some were."""
        if layer in self._check_layers:
            return Status.CHECK
        return Status.AFTER_CHECK if self.kept else Status.FULL_PREFILL

    def results(self) -> dict[str, Any]:
        """What the paper's ``cache_fuse_metadata`` tells of a choice of rows."""
        slot_mapping = next(iter(self._context.slot_mapping.values()))
        return {
            "imp_indices": self.positions,
            "org_pos": self._all_positions[: self.step.num_rows],
            "org_seq_len": self.step.num_rows,
            "original_slot_mapping": slot_mapping[: self.step.num_rows],
            "our_slot_mapping": slot_mapping[self.rows],
            "attn_bias": self._last_keys(),
            "kv_cache_dtype": self.step.kv_cache_dtype,
        }

    # --- what attention asks for -------------------------------------------------------------------

    def before_attention(
        self,
        impl: BlendAttention,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Fuses the layer's stored KV, and lets the question be heard."""
        stored_k = self.fuse(impl, layer)
        if self.listener is not None:
            self.listener.hear(impl, layer, query, key, stored_k)

    def end_after(self, layer: int) -> None:
        """Ends the forward where no later layer is wanted."""
        if layer + 1 == self.end_layer < self._num_layers:
            raise LastLayerHeard

    def fuse(self, impl: Any, layer: Any) -> torch.Tensor | None:
        """Writes the layer's stored KV to its paged cache; returns rotated K where it is at hand."""
        index = impl.blend.index
        if not self.fusing(index).requests:
            return None
        fusion = self.fusion(index, layer)
        with self.clock.stage("fuse"):
            stored_k: torch.Tensor | None = impl.fuse(layer, layer.kv_cache, fusion)
        for stored in self.fusing(index).stored:
            stored.done(index)
        return stored_k

    def fusion(self, layer: int, attn: Any) -> Fusion:
        """The stored KV of one layer and where it goes; to be fused before the layer is ``done``."""
        fusing = self.fusing(layer)
        for stored in fusing.stored:
            stored.read(layer)
        _, slots = self._places(attn)
        old_kv: LayerKV | StoredSegments
        if attn.impl.fuses_segments and (tables := self._tables(fusing)) is not None:
            old_kv, positions = StoredSegments(tables, layer, slots), self._all_positions
        else:
            requests = fusing.requests
            old_kv = concat_kv([self.stored_of(r).old_kv(r, layer) for r in requests])
            if id(slots) not in fusing.slots:
                fusing.slots[id(slots)] = slots[fusing.rows], self._all_positions[fusing.rows]
            slots, positions = fusing.slots[id(slots)]
        return Fusion(old_kv, positions, slots, fusing.is_joined)

    def fusing(self, layer: int) -> Fusing:
        """Whose stored KV goes to the cache at ``layer``; shared by layers where it is the same."""
        all_of_them = layer >= self.fused_layers
        if all_of_them not in self._fusing:
            requests = [r for r in self.kept if all_of_them or r not in self.fused]
            stored = dict.fromkeys(self.stored_of(request) for request in requests)
            self._fusing[all_of_them] = Fusing(requests, list(stored))
        return self._fusing[all_of_them]

    def stock_metadata(self, attn: Any) -> Any:
        """The backend's metadata for all rows."""
        return self._context.attn_metadata[attn.layer_name]

    def stock_slots(self, attn: Any) -> torch.Tensor:
        """Slots of all rows, ``[num_tokens]``."""
        slots: torch.Tensor = self._context.slot_mapping[attn.layer_name]
        return slots

    def describe(self, attn: Any) -> Any:
        """The backend's metadata for the rows; shared by layers that share the stock one."""
        stock = self.stock_metadata(attn)
        key = id(stock), getattr(attn, "sliding_window", None)
        if key not in self._described:
            metadata = attn.impl.metadata(attn, stock, self._row_places())
            metadata.active = self
            self._described[key] = metadata
        return self._described[key]

    def changed(self) -> None:
        self._slots.clear()
        self._described.clear()
        self._fusing.clear()  # there may be more to fuse now

    def let_go(self) -> None:
        """Of what holds the frame: else stored KV would stay until garbage is collected."""
        self._described.clear()
        self.listener = None

    def kept_slots(self, attn: Any) -> torch.Tensor:
        """Slots of the kept rows, ``[num_kept]``."""
        return self._places(attn)[0]

    # --- forward contexts --------------------------------------------------------------------------

    def context(self, attns: Iterable[Any], **changes: Any) -> ForwardContext:
        """vLLM's forward context, but for what describes rows."""
        attns = list(attns)
        return self.context_of(
            {attn.layer_name: self.describe(attn) for attn in attns},
            {attn.layer_name: self.kept_slots(attn) for attn in attns},
            **changes,
        )

    def context_of(
        self, attn_metadata: dict[str, Any], slot_mapping: dict[str, torch.Tensor], **changes: Any
    ) -> ForwardContext:
        """The same for other rows; by layer."""
        return replace(
            self._context,
            attn_metadata=attn_metadata,
            slot_mapping=slot_mapping,
            moe_layer_index=0,
            **changes,
        )

    @property
    def tells_padding(self) -> bool:
        """Whether vLLM's context says which rows only pad."""
        return self._context.is_padding is not None

    @contextmanager
    def on_rows(self, attn: Any) -> Iterator[None]:
        """While it lasts, a layer computes the rows; all of them before the first choice."""
        if self._rows is None:
            yield
            return
        with override_forward_context(self.context([attn])):
            yield

    # --- how -----------------------------------------------------------------------------------------

    def _last_keys(self) -> torch.Tensor:
        """The mask of the rows: the last key that each sees, ``[num_kept]``."""
        if all(request.settings.mask == "exact" for request in self.step.blended):
            return self.positions
        stock = next(iter(self._context.attn_metadata.values()))
        return last_keys(stock, self._row_places())

    def _row_places(self) -> RowPlaces:
        return RowPlaces(self.step, self.rows, self.positions, self.query_start_loc)

    def _tables(self, fusing: Fusing) -> SegmentTables | None:
        """Where the stored KV lies; None if it is not read as segments."""
        if fusing.tables is not None or not fusing.in_segments:
            return fusing.tables
        parts = [self.stored_of(request).segments([request]) for request in fusing.requests]
        if not parts or any(part is None for part in parts):
            fusing.in_segments = False
            return None
        from vllm_blend.ops.segment_scatter import SegmentTables  # needs Triton

        segments = [segment for part in parts if part is not None for segment in part]
        tables = SegmentTables(len(segments), self.step.num_rows, self._num_layers, self.device)
        tables.fill(
            [(segment.end - segment.start, segment.position, segment.row) for segment in segments],
            np.stack([segment.addresses for segment in segments], axis=1),
        )
        fusing.tables = tables
        return tables

    def _places(self, attn: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Where KV goes in this layer; shared by layers that share the slot mapping.

        Returns:
            The slots of the kept rows; and those of all rows of the step, -1 where a kept row's fresh
            KV goes.
        """
        slot_mapping = self._context.slot_mapping[attn.layer_name]
        if id(slot_mapping) not in self._slots:
            slots = slot_mapping.index_fill(0, self.rows, -1)
            self._slots[id(slot_mapping)] = slot_mapping[self.rows], slots
        return self._slots[id(slot_mapping)]
