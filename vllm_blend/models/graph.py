"""The layers after the check as CUDA graphs.

Run one by one, a layer of some hundred rows takes the host longer to launch than the GPU to compute.
So the layers from the last check to the last but one are captured once for each padded number of rows
and requests (by a server all at once, at its first blend, which is the start-up check's): a step then
copies its rows and where they stand into fixed tensors, and launches one graph. Beside the layers, the
graph has a branch that writes stored KV to the paged cache, layer by layer, from wherever it lies: GPU
memory or pinned host memory.

Other steps run layer by layer (``loop.py``): those of more than MAX_ROWS rows, which a GPU takes longer
to compute than the host to launch, and those that cannot be replayed: collecting, KV that is still
being loaded or lies in pageable memory, layers with other slots than the rest.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.forward_context import ForwardContext, override_forward_context

from vllm_blend.attention.base import Fusion, StoredSegments
from vllm_blend.core import Status
from vllm_blend.models.frame import ALL_PROGRAMS, HOST_PROGRAMS, Frame, Segment, tabulated
from vllm_blend.ops.segment_scatter import SegmentTables

logger = logging.getLogger("vllm.vllm_blend")

ROW_STEPS = (*range(128, 2048, 128), *range(2048, 4096 + 1, 256))
"""Rows are padded to the next of these: what a tile of a matrix product holds, or two."""

MAX_ROWS = ROW_STEPS[-1]
"""Steps of more rows keep the GPU busy without a graph."""

REQ_STEPS = (8, 64, 256)
"""Requests are padded to the next of these, or to the most there can be: an empty one costs little."""

MAX_SEGMENTS = 256
MAX_GRAPHS = 64


@dataclass(frozen=True, eq=False)
class GraphPlan:
    """What of a step a graph does: ``layers``, and for them and all later ones, the stored KV."""

    layers: range
    segments: list[Segment]


@dataclass(frozen=True)
class Shape:
    """What a graph was captured for."""

    layers: range
    num_rows: int
    num_reqs: int
    num_programs: int  # that write stored KV
    kv_cache: int  # address of the first layer's


@dataclass(frozen=True, eq=False)
class Inputs:
    """The fixed tensors that graphs read.

    Attributes:
        hidden, residual: of the kept rows, ``[MAX_ROWS, hidden_size]``.
        positions: of the kept rows in their prompts, ``[MAX_ROWS]``.
        last_keys: last key that each kept row sees, ``[MAX_ROWS]``.
        slots: slots of the kept rows, -1 where there is none, ``[MAX_ROWS]``.
        query_start_loc: first of the kept rows of each request, ``[max_num_reqs + 1]``.
        block_table: ``[max_num_reqs, max_num_blocks]``.
        all_slots: slots of all rows of the step, ``[max_num_tokens]``.
        stored: where stored KV lies and goes.
    """

    hidden: torch.Tensor
    residual: torch.Tensor
    positions: torch.Tensor
    last_keys: torch.Tensor
    slots: torch.Tensor
    query_start_loc: torch.Tensor
    block_table: torch.Tensor
    all_slots: torch.Tensor
    stored: SegmentTables


class AfterCheckGraphs:
    """Runs the layers after the check from CUDA graphs, captured when their shape is first seen.

    Args:
        layers: the model's decoder layers.
        max_num_tokens: most rows of a step.
        max_num_reqs: most requests of a step.
        ahead: capture every number of rows at the first run, so that no later request waits for it.
    """

    def __init__(self, layers: Any, max_num_tokens: int, max_num_reqs: int, ahead: bool) -> None:
        self._layers = layers
        self._max_num_tokens = max_num_tokens
        max_reqs = max(REQ_STEPS[0], max_num_reqs)
        self._req_steps = [*(n for n in REQ_STEPS if n < max_reqs), max_reqs]
        self._ahead = ahead
        self._max_rows = MAX_ROWS
        self._inputs: Inputs | None = None
        self._graphs: OrderedDict[Shape, torch.cuda.CUDAGraph] = OrderedDict()
        self._pool: Any = None
        self._branch = torch.cuda.Stream()

    def __len__(self) -> int:
        return len(self._graphs)

    def plan(self, frame: Frame, index: int) -> GraphPlan | None:
        """What ``run`` can do after the choice at layer ``index``, if it can."""
        attns = [layer.self_attn.attn for layer in self._layers[index:]]
        if (
            frame.step.collected
            or index >= len(self._layers) - 1
            or not 0 < frame.rows.numel() <= self._max_rows
            or any(index < max(r.settings.check_layers) for r in frame.step.blended)
            or not frame.share_tables(attns)
            or not all(attn.impl.fuses_segments for attn in attns)
        ):
            return None
        segments = frame.segments()
        if segments is None or len(segments) > MAX_SEGMENTS:
            return None
        return GraphPlan(range(index, len(self._layers) - 1), segments)

    def run(
        self, frame: Frame, plan: GraphPlan, hidden: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layers' output and residual at the frame's rows, until the next run overwrites them.

        Stored KV is in the paged cache then, in these layers and all later ones.
        """
        attn = self._layers[plan.layers[0]].self_attn.attn
        metadata = frame.describe(attn)
        if self._inputs is None:
            self._inputs = self._make_inputs(hidden, metadata)
        inputs, num_rows, num_reqs = self._inputs, frame.rows.numel(), len(metadata.block_table)
        shape = Shape(
            plan.layers,
            _padded(num_rows),
            next(n for n in self._req_steps if num_reqs <= n),
            ALL_PROGRAMS if all(s.on_gpu for s in plan.segments) else HOST_PROGRAMS,
            attn.kv_cache.data_ptr(),
        )
        if self._ahead:
            self._ahead = False
            self._capture_ahead(inputs, shape, metadata, frame.kept_context())
        self._fill_stored(inputs, plan)
        self._fill_rows(inputs, shape, frame, attn, metadata, hidden, residual)
        if shape in self._graphs:
            self._graphs.move_to_end(shape)
            self._graphs[shape].replay()
        else:
            context = frame.kept_context()
            self._run_layers(inputs, shape, metadata, context)
            if self._capture(inputs, shape, metadata, context):
                logger.info("vllm_blend: captured %s", shape)
        frame.all_fused()
        return inputs.hidden[:num_rows], inputs.residual[:num_rows]

    def _run_layers(self, inputs: Inputs, shape: Shape, metadata: Any, context: ForwardContext) -> None:
        """What a graph holds: the layers, and beside them the branch that writes stored KV.

        The layers' outputs take the place of their inputs.
        """
        main = torch.cuda.current_stream()
        self._branch.wait_stream(main)
        written = []
        with torch.cuda.stream(self._branch):
            for index in range(shape.layers[0], len(self._layers)):
                attn = self._layers[index].self_attn.attn
                stored = StoredSegments(inputs.stored, index, inputs.all_slots, shape.num_programs)
                attn.impl.fuse_segments(attn.kv_cache, stored)
                written.append(self._branch.record_event())

        rows = slice(shape.num_rows)
        first = self._layers[shape.layers[0]].self_attn.attn
        metadata = first.impl.at(
            metadata,
            inputs.last_keys[rows],
            inputs.query_start_loc[: shape.num_reqs + 1],
            inputs.block_table[: shape.num_reqs],
        )
        metadata.fusion = Fusion(
            Status.AFTER_CHECK, None, inputs.positions[rows], inputs.slots[rows], None
        )
        hidden, residual = inputs.hidden[rows], inputs.residual[rows]
        for index, event in zip(shape.layers, written, strict=False):
            layer = self._layers[index]
            name = layer.self_attn.attn.layer_name
            context.attn_metadata[name] = metadata
            context.slot_mapping[name] = inputs.slots[rows]
            main.wait_event(event)
            with override_forward_context(context):
                hidden, residual = layer(inputs.positions[rows], hidden, residual)
        main.wait_event(written[-1])
        inputs.hidden[rows].copy_(hidden)
        inputs.residual[rows].copy_(residual)

    def _capture_ahead(
        self, inputs: Inputs, shape: Shape, metadata: Any, context: ForwardContext
    ) -> None:
        """Captures ``shape`` at every number of rows, with few requests and with some."""
        start = time.perf_counter()
        inputs.slots.fill_(-1)  # nothing is written,
        inputs.query_start_loc.zero_()  # and nothing read
        inputs.stored.fill([], [])
        most = _padded(min(self._max_num_tokens, MAX_ROWS))
        row_steps = [n for n in ROW_STEPS if n <= most]
        for num_rows in reversed(row_steps):  # the later ones fit in the first one's memory
            for num_reqs in self._req_steps[:2]:
                other = replace(shape, num_rows=num_rows, num_reqs=num_reqs)
                self._run_layers(inputs, other, metadata, context)
                if not self._capture(inputs, other, metadata, context):
                    break  # there may be room for fewer rows
        logger.info(
            "vllm_blend: captured %d graphs of layers %d to %d in %.1f s",
            len(self._graphs),
            shape.layers[0],
            shape.layers[-1],
            time.perf_counter() - start,
        )

    def _capture(self, inputs: Inputs, shape: Shape, metadata: Any, context: ForwardContext) -> bool:
        """Captures the layers, which must have run once: that compiles the kernels they need."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # thread_local: other threads may load KV meanwhile
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._run_layers(inputs, shape, metadata, context)
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # torch leaves the capture's behind
            self._max_rows = max((n for n in ROW_STEPS if n < shape.num_rows), default=0)
            logger.warning(
                "vllm_blend: no CUDA graph for %d rows, so blends that recompute more than %d run "
                "layer by layer: %s",
                shape.num_rows,
                self._max_rows,
                error,
            )
            return False
        self._graphs[shape] = graph
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)
        return True

    def _make_inputs(self, hidden: torch.Tensor, metadata: Any) -> Inputs:
        def zeros(*size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=hidden.device)

        max_reqs = self._req_steps[-1]
        return Inputs(
            hidden=zeros(MAX_ROWS, hidden.shape[1], dtype=hidden.dtype),
            residual=zeros(MAX_ROWS, hidden.shape[1], dtype=hidden.dtype),
            positions=zeros(MAX_ROWS, dtype=torch.int64),
            last_keys=zeros(MAX_ROWS, dtype=metadata.positions.dtype),
            slots=zeros(MAX_ROWS, dtype=torch.int64),
            query_start_loc=zeros(max_reqs + 1, dtype=torch.int32),
            block_table=zeros(max_reqs, metadata.block_table.shape[1], dtype=torch.int32),
            all_slots=zeros(self._max_num_tokens, dtype=torch.int64),
            stored=SegmentTables(MAX_SEGMENTS, self._max_num_tokens, len(self._layers), hidden.device),
        )

    def _fill_stored(self, inputs: Inputs, plan: GraphPlan) -> None:
        if plan.segments:
            inputs.stored.fill(*tabulated(plan.segments))
        else:
            inputs.stored.fill([], [])

    def _fill_rows(
        self,
        inputs: Inputs,
        shape: Shape,
        frame: Frame,
        attn: Any,
        metadata: Any,
        hidden: torch.Tensor,
        residual: torch.Tensor,
    ) -> None:
        """Copies a step to the fixed tensors; what pads it writes no KV and sees no keys."""
        num_rows, num_reqs = frame.rows.numel(), len(metadata.block_table)
        slots, kept_slots = frame.slots(attn)
        inputs.hidden[:num_rows].copy_(hidden)
        inputs.residual[:num_rows].copy_(residual)
        inputs.positions[:num_rows].copy_(frame.positions)
        inputs.last_keys[:num_rows].copy_(metadata.positions)
        inputs.slots[:num_rows].copy_(kept_slots)
        inputs.slots[num_rows : shape.num_rows].fill_(-1)
        inputs.query_start_loc[: num_reqs + 1].copy_(metadata.query_start_loc)
        inputs.query_start_loc[num_reqs + 1 : shape.num_reqs + 1].fill_(num_rows)
        inputs.block_table[:num_reqs].copy_(metadata.block_table)
        inputs.all_slots[: len(slots)].copy_(slots)


def _padded(num_rows: int) -> int:
    return next(n for n in ROW_STEPS if num_rows <= n)
