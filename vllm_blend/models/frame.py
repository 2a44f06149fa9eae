"""The rows a layer computes, and the forward context in which a stock layer computes just those."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import ForwardContext, override_forward_context

from vllm_blend.attention.base import Fusion, StoredSegments
from vllm_blend.core import BlendStep, Status, StepRequest, behind_one_another
from vllm_blend.drift import Drift
from vllm_blend.layers import LayerKV
from vllm_blend.models.clock import NO_CLOCK, StageClock
from vllm_blend.models.load import StoredLayers, began

if TYPE_CHECKING:
    from vllm_blend.ops.segment_scatter import SegmentTables


class Frame:
    """The rows of a step that are still computed; it shrinks at check layers.

    Attributes:
        rows: rows of the step, ascending, ``[num_kept]``.
        positions: their prompt positions, ``[num_kept]``; before the first choice vLLM's own tensor,
            padding included.
        clock: measures the step's stages.
    """

    def __init__(
        self,
        step: BlendStep,
        positions: torch.Tensor,
        context: ForwardContext,
        num_layers: int,
        drift: Drift | None,
    ) -> None:
        self.step = step
        self.clock = StageClock(step, positions.device)
        self.rows = torch.arange(step.num_rows, device=positions.device)
        self.positions = positions
        self.kept: dict[StepRequest, torch.Tensor] = {}  # indices into its chunk_rows
        self.fused: set[StepRequest] = set()  # their stored KV is in the cache, in all layers to come
        self._all_positions = positions
        self._context = context
        self._num_layers = num_layers
        self._drift = drift
        self._kept_context = self.kept_context()
        self._began = began(positions.device)
        self._places: dict[int, tuple[torch.Tensor, ...]] = {}  # by id of slot_mapping
        self._segment_tables: SegmentTables | None = None
        self._tables_made = False
        self._described: dict[int, Any] = {}  # by id of the stock metadata

    @cached_property
    def stored(self) -> StoredLayers:
        """The step's stored KV; made once layer 0 is launched, so that the GPU does not wait for it."""
        requests = self.step.blended
        first_layer = min((r.settings.check_layers[0] for r in requests), default=self._num_layers)
        return self._stored(requests, first_layer, self.clock)

    def status(self, layer: int) -> Status:
        """What ``layer`` does: CHECK where rows are chosen, AFTER_CHECK once some were."""
        if any(layer in r.settings.check_layers for r in self.step.blended):
            return Status.CHECK
        return Status.AFTER_CHECK if self.kept else Status.FULL_PREFILL

    def candidates(self, request: StepRequest) -> tuple[torch.Tensor, torch.Tensor]:
        """The request's chunk tokens that are still computed.

        Returns:
            Their indices into the frame's rows and into the request's ``chunk_rows``.
        """
        kept = self.kept.get(request)
        if kept is None:
            kept = torch.arange(request.chunk_rows.numel(), device=self.rows.device)
        return torch.searchsorted(self.rows, request.chunk_rows[kept]), kept

    def shrink(self, kept: dict[StepRequest, torch.Tensor]) -> torch.Tensor:
        """Drops the chunk rows not in ``kept``; returns the indices of the rows that stay."""
        self.kept |= kept
        mask = torch.ones(self.step.num_rows, dtype=torch.bool, device=self.rows.device)
        count = self.step.num_rows
        for request, index in self.kept.items():
            # not `mask[rows] = False`: on a GPU that waits for the device, to copy the scalar there
            mask.index_fill_(0, request.chunk_rows, False)
            mask.index_fill_(0, request.chunk_rows[index], True)
            count -= request.chunk_rows.numel() - index.numel()
        rows = torch.nonzero_static(mask, size=count).flatten()
        take = torch.searchsorted(self.rows, rows)
        self.rows, self.positions = rows, self._all_positions[rows]
        self._places.clear()
        self._described.clear()
        self._segment_tables, self._tables_made = None, False  # there may be more to fuse now
        return take

    def narrow(self, at: torch.Tensor) -> torch.Tensor:
        """Drops the rows at ``at`` whose KV is in the cache already; returns the indices that stay."""
        stays = torch.ones_like(self.rows, dtype=torch.bool)
        stays.index_fill_(0, at, False)
        take = torch.nonzero_static(stays, size=self.rows.numel() - at.numel()).flatten()
        self.rows, self.positions = self.rows[take], self.positions[take]
        self._described.clear()
        for key, (positions, chunk_slots, kept_slots, slots) in self._places.items():
            # stored KV still spares `at`
            self._places[key] = positions, chunk_slots, kept_slots[take], slots
        return take

    def alone(self, request: StepRequest, at: torch.Tensor, first_layer: int) -> Frame:
        """A frame of its own for some rows of one request, in which none of its chunk tokens is kept.

        Args:
            request: a blended request.
            at: the frame's rows to compute; no chunk token among them, ``[num_rows]``.
            first_layer: the first whose stored KV will be asked for.
        """
        other = copy(self)
        other.rows, other.positions = self.rows[at], self.positions[at]
        other.kept, other.fused = {request: request.chunk_rows.new_empty(0)}, set()
        other.clock = NO_CLOCK  # whoever asked for it measures
        other.stored = self._stored([request], first_layer, NO_CLOCK)
        other._kept_context = self.kept_context()
        other._places, other._described = {}, {}
        other._segment_tables, other._tables_made = None, False
        return other

    def results(self) -> dict[str, Any]:
        """What the paper's ``cache_fuse_metadata`` tells of a choice of rows (``door.py``)."""
        slot_mapping = next(iter(self._context.slot_mapping.values()))
        return {
            "imp_indices": self.positions,
            "org_pos": self._all_positions[: self.step.num_rows],
            "org_seq_len": self.step.num_rows,
            "original_slot_mapping": slot_mapping[: self.step.num_rows],
            "our_slot_mapping": slot_mapping[self.rows],
            "attn_bias": None,
            "kv_cache_dtype": self.step.kv_cache_dtype,
        }

    def fusion(self, layer: int, attn: Any, status: Status, cache_fuse_metadata: Any) -> Fusion:
        """The stored KV of one layer and where it goes; to be fused before the layer is ``done``."""
        positions, slot_mapping, _, slots = self._place(attn)
        old_kv: LayerKV | StoredSegments | None = None
        if requests := self._to_fuse():
            self.stored.read(layer)
            if attn.impl.fuses_segments and (tables := self._tables()) is not None:
                old_kv = StoredSegments(tables, layer, slots)
            else:
                old_kv = behind_one_another([self.stored.old_kv(r, layer) for r in requests])
        return Fusion(status, old_kv, positions, slot_mapping, cache_fuse_metadata, self.clock)

    def fuse(self, attn: Any, fusion: Fusion) -> None:
        """Fuses before a layer that is not called: a graph replays it, or it has no rows to compute."""
        with self.clock.stage("fuse"):
            attn.impl.fuse(attn, attn.kv_cache, fusion)

    @contextmanager
    def context(self, attn: Any, fusion: Fusion | None) -> Iterator[None]:
        """The forward context for one layer; without ``fusion`` vLLM's own, for all rows."""
        if fusion is None:
            yield
            return
        name = attn.layer_name
        metadata = copy(self.describe(attn))
        metadata.fusion = fusion
        self._kept_context.attn_metadata[name] = metadata
        self._kept_context.slot_mapping[name] = self.kept_slots(attn)
        with override_forward_context(self._kept_context):
            yield
        del self._kept_context.attn_metadata[name]  # it holds the layer's stored KV

    @contextmanager
    def writing(self, attn: Any, at: torch.Tensor) -> Iterator[None]:
        """The forward context in which attention writes K and V of the rows ``at``, and no more."""
        name = attn.layer_name
        slot_mapping = self._context.slot_mapping[name][self.rows[at]]
        context = replace(self._context, attn_metadata={name: None}, slot_mapping={name: slot_mapping})
        with override_forward_context(context):
            yield

    def share_tables(self, attns: Iterable[Any]) -> bool:
        """Whether these layers have slots and blocks in common."""
        names = [attn.layer_name for attn in attns]
        tables = (self._context.slot_mapping, self._context.attn_metadata)
        return all(len({id(table[name]) for name in names}) == 1 for table in tables)

    def kept_slots(self, attn: Any) -> torch.Tensor:
        """Slots of the kept rows, ``[num_kept]``."""
        return self._place(attn)[2]

    def kept_context(self) -> ForwardContext:
        """A forward context without rows: vLLM's own but for what describes them."""
        return replace(self._context, attn_metadata={}, slot_mapping={})

    def describe(self, attn: Any) -> Any:
        """The backend's metadata for the kept rows; shared by layers that share the stock one."""
        stock = self._context.attn_metadata[attn.layer_name]
        if id(stock) not in self._described:
            self._described[id(stock)] = attn.impl.metadata(attn, stock, self.step, self.rows)
        return self._described[id(stock)]

    def _stored(self, requests: list[StepRequest], first_layer: int, clock: StageClock) -> StoredLayers:
        device = self.rows.device
        return StoredLayers(
            requests, device, self._num_layers, first_layer, clock, self._began, self._drift
        )

    def _tables(self) -> SegmentTables | None:
        """Where the stored KV lies that is not in the cache yet; None if it is not read as segments."""
        if self._tables_made:
            return self._segment_tables
        self._tables_made = True
        if segments := self.stored.segments(self._to_fuse()):
            from vllm_blend.ops.segment_scatter import SegmentTables  # needs Triton

            self._segment_tables = SegmentTables(
                len(segments), self.step.num_rows, self._num_layers, self.rows.device
            )
            self._segment_tables.fill(
                [(segment.end - segment.start, segment.position, segment.row) for segment in segments],
                torch.stack([segment.addresses for segment in segments], dim=1),
            )
        return self._segment_tables

    def _to_fuse(self) -> list[StepRequest]:
        """The blended requests whose stored KV goes to the cache layer by layer."""
        return [request for request in self.kept if request not in self.fused]

    def _place(self, attn: Any) -> tuple[torch.Tensor, ...]:
        """Where KV goes in this layer; shared by layers that share the slot mapping.

        Returns:
            Positions of the rows that stored KV stands for, their slots (-1 where a kept row's fresh
            KV goes), the slots of the kept rows, and the second for all rows of the step.
        """
        slot_mapping = self._context.slot_mapping[attn.layer_name]
        if id(slot_mapping) not in self._places:
            chunk_rows = torch.cat([self.rows[:0], *(r.chunk_rows for r in self._to_fuse())])
            slots = slot_mapping.clone()
            slots.index_fill_(0, self.rows, -1)
            self._places[id(slot_mapping)] = (
                self._all_positions[chunk_rows],
                slots[chunk_rows],
                slot_mapping[self.rows],
                slots,
            )
        return self._places[id(slot_mapping)]
