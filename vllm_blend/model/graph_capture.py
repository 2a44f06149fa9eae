"""The capture of a forward on rows as CUDA graphs (``model/graphs.py``): one up to each layer's
attention and one after the last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import ForwardContext, override_forward_context

from vllm_blend.compat.adapters import eager_descriptor
from vllm_blend.compat.cuda import unowned
from vllm_blend.core.step import Status
from vllm_blend.model.active_rows import ActiveRows

if TYPE_CHECKING:
    from vllm_blend.model.blending import Blending
    from vllm_blend.model.rows import Inputs
    from vllm_blend.ops.segment_scatter import SegmentTables


@dataclass(frozen=True, eq=False)
class Group:
    """Where layers that share a KV cache's blocks find a step's rows; fixed tensors.

    Attributes:
        slots: of the rows, -1 where there is none, ``[max_rows]``.
        all_slots: of all rows of the step, -1 where fresh K and V go, ``[max_num_tokens]``.
        block_table: ``[max_reqs, max_num_blocks]``.
    """

    slots: torch.Tensor
    all_slots: torch.Tensor
    block_table: torch.Tensor


@dataclass(frozen=True, eq=False)
class Places:
    """The fixed tensors that graphs read.

    Attributes:
        input_ids, positions: of the rows, ``[max_rows]``.
        query_start_loc: first row of each request, ``[max_reqs + 1]``; the last is the number of rows.
        groups: by layer; layers may share one.
        tables: the stored KV.
        hidden: the model's output, ``[max_rows, hidden_size]``.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    query_start_loc: torch.Tensor
    groups: list[Group]
    tables: SegmentTables
    hidden: torch.Tensor


@dataclass(frozen=True, eq=False)
class Chain:
    """The graphs of one size.

    Attributes:
        graphs: in their order.
        stops: query, K and V of each layer, valid until the next graph runs.
    """

    graphs: list[torch.cuda.CUDAGraph]
    stops: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class Capture:
    """The capture of one size.

    Attention layers call it as they call a frame: there it ends a graph and begins the next one.
    """

    def __init__(self, blending: Blending, places: Places, size: int, pool: Any) -> None:
        self._blending, self._places, self._size, self._pool = blending, places, size, pool
        self._graph: torch.cuda.CUDAGraph | None = None
        self._chain = Chain([], [])
        self._warm = False
        self.cache_fuse_metadata = blending.cache_fuse_metadata

    def status(self, layer: int) -> Status:
        """What every layer does on rows that were chosen before it."""
        return Status.AFTER_CHECK

    def run(self, frame: ActiveRows, inputs: Inputs, warm: bool = False) -> Chain:
        """Runs the model on rows that read and write nothing; ``warm``: without capturing it."""
        self._warm = warm
        places, size = self._places, self._size
        try:
            self._begin()
            with override_forward_context(self._context(frame)):
                hidden = inputs.stock(
                    input_ids=places.input_ids[:size],
                    positions=places.positions[:size],
                    intermediate_tensors=None,
                    inputs_embeds=None,
                    **inputs.more,
                )
            places.hidden[:size].copy_(hidden)
        finally:
            self._end()
        return self._chain

    def before_attention(
        self, impl: Any, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Called by each layer's attention: cuts here, and writes stored KV."""
        if not self._warm:
            self._end()
            self._chain.stops.append((unowned(query), unowned(key), unowned(value)))
            self._begin()
        index = impl.blend.index
        slots = self._places.groups[index].all_slots
        impl.fuse_segments(layer, layer.kv_cache, self._places.tables, index, slots)

    def end_after(self, layer: int) -> None:
        """All layers are captured."""

    def _begin(self) -> None:
        if not self._warm:
            graph = torch.cuda.CUDAGraph()
            # thread_local: other threads may load KV meanwhile
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            self._graph = graph

    def _end(self) -> None:
        if self._graph is not None:
            graph, self._graph = self._graph, None
            graph.capture_end()
            self._chain.graphs.append(graph)

    def _context(self, frame: ActiveRows) -> ForwardContext:
        """Of rows at the fixed places. What is derived of them belongs to the first graph."""
        places, size = self._places, self._size
        described: dict[tuple[int, Any], Any] = {}
        metadata, slots = {}, {}
        for attn, group in zip(self._blending.attns, places.groups, strict=True):
            key = id(group), getattr(attn, "sliding_window", None)
            if key not in described:
                described[key] = attn.impl.at(
                    frame.describe(attn),
                    places.positions[:size],
                    places.query_start_loc,
                    group.block_table,
                )
                described[key].active = self
            metadata[attn.layer_name] = described[key]
            slots[attn.layer_name] = group.slots[:size]
        padding = torch.arange(size, device=frame.device) >= places.query_start_loc[-1:]
        return frame.context_of(
            metadata,
            slots,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            batch_descriptor=eager_descriptor(size),
            is_padding=padding if frame.tells_padding else None,
        )
