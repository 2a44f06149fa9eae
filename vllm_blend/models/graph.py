"""The layers after the check as CUDA graphs.

Run one by one, a layer of some hundred rows takes the host longer to launch than the GPU to compute.
So each layer from the last check to the last but one is captured once for each padded number of rows
and requests (by a server all at once, at its first blend, which is the start-up check's): a step then
copies its rows and where they stand into fixed tensors, and launches a graph a layer. A layer's graph
reads what the one before it left; the first one also derives what attention needs of the rows.

Stored KV is not the graphs' concern: the loop fuses a layer's before it replays the layer
(``loop.py``), from wherever it lies, as it does before a layer that is called. Those are the layers of
steps of more than MAX_ROWS rows, which a GPU takes longer to compute than the host to launch, and of
steps that cannot be replayed: collecting, layers with other slots than the rest, a rotary module with
rules of its own.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.forward_context import ForwardContext, override_forward_context

from vllm_blend.attention.base import Fusion
from vllm_blend.core import Status
from vllm_blend.models.frame import Frame
from vllm_blend.ranks import capturing_on
from vllm_blend.select.asked import Asked

logger = logging.getLogger("vllm.vllm_blend")

ROW_STEPS = (*range(128, 2048, 128), *range(2048, 4096 + 1, 256))
"""Rows are padded to the next of these: what a tile of a matrix product holds, or two."""

MAX_ROWS = ROW_STEPS[-1]
"""Steps of more rows keep the GPU busy without a graph."""

REQ_STEPS = (8, 64, 256)
"""Requests are padded to the next of these, or to the most there can be: an empty one costs little."""

MAX_GRAPHS = 64
"""Shapes that are kept, each as a graph a layer."""


@dataclass(frozen=True)
class Shape:
    """What graphs were captured for."""

    layers: range
    num_rows: int
    num_reqs: int
    kv_cache: int  # address of the first layer's
    asked: bool = False


@dataclass(frozen=True, eq=False)
class Inputs:
    """The fixed tensors that graphs read.

    Attributes:
        hidden, residual: of the kept rows, ``[MAX_ROWS, hidden_size]``; the last layer's output takes
            the place of the first one's input.
        positions: of the kept rows in their prompts, ``[MAX_ROWS]``.
        last_keys: last key that each kept row sees, ``[MAX_ROWS]``.
        slots: slots of the kept rows, -1 where there is none, ``[MAX_ROWS]``.
        query_start_loc: first of the kept rows of each request, ``[max_num_reqs + 1]``.
        block_table: ``[max_num_reqs, max_num_blocks]``.
    """

    hidden: torch.Tensor
    residual: torch.Tensor
    positions: torch.Tensor
    last_keys: torch.Tensor
    slots: torch.Tensor
    query_start_loc: torch.Tensor
    block_table: torch.Tensor


@dataclass(frozen=True, eq=False)
class Replay:
    """A step's ``layers`` as graphs, one a layer, to be run in turn.

    Attributes:
        hidden, residual: at the step's kept rows, ``[num_kept, hidden_size]``: the output, once the
            last of the layers has run, until other rows are prepared.
        received: where rows are asked, what the keys received of them (``select/asked.py``).
    """

    layers: range
    graphs: list[torch.cuda.CUDAGraph]
    hidden: torch.Tensor
    residual: torch.Tensor
    received: torch.Tensor | None = None

    def run(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Launches a layer, whose stored KV is fused."""
        self.graphs[index - self.layers.start].replay()
        return self.hidden, self.residual


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
        self._asked: Asked | None = None
        self._graphs: OrderedDict[Shape, list[torch.cuda.CUDAGraph]] = OrderedDict()
        self._pool: Any = None
        self._stream = torch.cuda.Stream()  # of captures: nothing ever runs on it

    def __len__(self) -> int:
        """Shapes that are captured."""
        return len(self._graphs)

    def prepare(
        self,
        frame: Frame,
        index: int,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        asked: Asked | None = None,
    ) -> Replay | None:
        """The layers from ``index`` on over the frame's rows; None: run them one by one.

        Args:
            index: where rows were chosen; or where a pass ahead begins.
            hidden, residual: the layer's inputs, ``[num_rows, hidden_size]``.
            asked: the rows of a pass ahead whose attention to the keys is wanted.
        """
        attns = [layer.self_attn.attn for layer in self._layers[index:]]
        if (
            frame.step.collected
            or index >= len(self._layers) - 1
            or not 0 < frame.rows.numel() <= self._max_rows
            or (asked is None and any(index < max(r.settings.check_layers) for r in frame.step.blended))
            or not frame.share_tables(attns)
            # a rotary module with rules of its own may ask the device for something
            or not all(attn.impl.fuses_segments for attn in attns)
        ):
            return None
        metadata = frame.describe(attns[0])
        if self._inputs is None:
            self._inputs = self._make_inputs(hidden, metadata)
        num_rows, num_reqs = frame.rows.numel(), len(metadata.block_table)
        shape = Shape(
            range(index, len(self._layers) - 1),
            _padded(num_rows),
            next(n for n in self._req_steps if num_reqs <= n),
            attns[0].kv_cache.data_ptr(),
            asked is not None,
        )
        if asked is not None and self._asked is None:
            self._asked = asked.empty_like()
        if self._ahead:
            self._ahead = False
            self._capture_ahead(
                self._inputs, replace(shape, asked=False), metadata, frame.kept_context()
            )
        if shape not in self._graphs:
            if shape.num_rows > self._max_rows:
                return None
            gc.collect()
            if not self._capture(self._inputs, shape, metadata, frame.kept_context()):
                return None
            logger.info("vllm_blend: captured %s", shape)
        self._graphs.move_to_end(shape)
        self._fill(self._inputs, shape, frame, metadata, hidden, residual)
        received = None
        if asked is not None and self._asked is not None:
            self._asked.copy_(asked)
            received = self._asked.received
        rows = slice(num_rows)
        return Replay(
            shape.layers,
            self._graphs[shape],
            self._inputs.hidden[rows],
            self._inputs.residual[rows],
            received,
        )

    def _capture_ahead(
        self, inputs: Inputs, shape: Shape, metadata: Any, context: ForwardContext
    ) -> None:
        """Captures ``shape`` at every number of rows, with few requests and with some."""
        start = time.perf_counter()
        gc.collect()
        most = _padded(min(self._max_num_tokens, MAX_ROWS))
        row_steps = [n for n in ROW_STEPS if n <= most]
        for num_rows in reversed(row_steps):  # the later ones fit in the first one's memory
            for num_reqs in self._req_steps[:2]:
                other = replace(shape, num_rows=num_rows, num_reqs=num_reqs)
                if not self._capture(inputs, other, metadata, context):
                    break  # there may be room for fewer rows
        logger.info(
            "vllm_blend: captured layers %d to %d as CUDA graphs for %d shapes in %.1f s",
            shape.layers[0],
            shape.layers[-1],
            len(self._graphs),
            time.perf_counter() - start,
        )

    def _capture(self, inputs: Inputs, shape: Shape, metadata: Any, context: ForwardContext) -> bool:
        """Captures the layers for ``shape``, all or none; returns whether there was room.

        They run once before that, which compiles the kernels they need. What ``inputs`` held is lost.
        """
        inputs.slots.fill_(-1)  # nothing is written,
        inputs.query_start_loc.zero_()  # and nothing read
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graphs: list[torch.cuda.CUDAGraph] = []
        try:
            self._run_layers(inputs, shape, metadata, context, nullcontext)
            torch.cuda.synchronize()  # as torch.cuda.graph does, but once for all layers
            torch.cuda.empty_cache()
            with capturing_on(self._stream):
                self._run_layers(inputs, shape, metadata, context, lambda: self._capturing(graphs))
        except RuntimeError as error:
            self._max_rows = max((n for n in ROW_STEPS if n < shape.num_rows), default=0)
            logger.warning(
                "vllm_blend: no CUDA graph for %d rows, so blends that recompute more than %d run "
                "layer by layer: %s",
                shape.num_rows,
                self._max_rows,
                error,
            )
            return False
        self._graphs[shape] = graphs
        if len(self._graphs) > MAX_GRAPHS:
            self._graphs.popitem(last=False)
        return True

    @contextmanager
    def _capturing(self, graphs: list[torch.cuda.CUDAGraph]) -> Iterator[None]:
        """Captures what is launched while it lasts, as one graph more."""
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads may load KV meanwhile
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()
        graphs.append(graph)

    def _run_layers(
        self,
        inputs: Inputs,
        shape: Shape,
        metadata: Any,
        context: ForwardContext,
        each: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """What graphs hold, a layer within one ``each()``.

        A layer's output is the next one's input as it is, so captures must follow one another: memory
        that a tensor here leaves is used again, by those behind it and by other shapes. The layers
        themselves overwrite ``hidden`` and ``residual``.
        """
        rows = slice(shape.num_rows)
        hidden, residual = inputs.hidden[rows], inputs.residual[rows]
        positions, slots = inputs.positions[rows], inputs.slots[rows]
        asked = self._asked if shape.asked else None
        for index in shape.layers:
            layer = self._layers[index]
            attn = layer.self_attn.attn
            with each():
                if index == shape.layers[0]:
                    metadata = attn.impl.at(
                        metadata,
                        inputs.last_keys[rows],
                        inputs.query_start_loc[: shape.num_reqs + 1],
                        inputs.block_table[: shape.num_reqs],
                    )
                    metadata.fusion = Fusion(Status.AFTER_CHECK, None, positions, slots, None)
                context.attn_metadata[attn.layer_name] = metadata
                context.slot_mapping[attn.layer_name] = slots
                listening = nullcontext() if asked is None else asked.listening(attn)
                with override_forward_context(context), listening:
                    hidden, residual = layer(positions, hidden, residual)
                if index == shape.layers[-1]:
                    inputs.hidden[rows].copy_(hidden)
                    inputs.residual[rows].copy_(residual)

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
        )

    def _fill(
        self,
        inputs: Inputs,
        shape: Shape,
        frame: Frame,
        metadata: Any,
        hidden: torch.Tensor,
        residual: torch.Tensor,
    ) -> None:
        """Copies a step to the fixed tensors; what pads it writes no KV and sees no keys."""
        num_rows, num_reqs = frame.rows.numel(), len(metadata.block_table)
        inputs.hidden[:num_rows].copy_(hidden)
        inputs.residual[:num_rows].copy_(residual)
        inputs.positions[:num_rows].copy_(frame.positions)
        inputs.last_keys[:num_rows].copy_(metadata.positions)
        inputs.slots[:num_rows].copy_(frame.kept_slots(self._layers[shape.layers[0]].self_attn.attn))
        inputs.slots[num_rows : shape.num_rows].fill_(-1)
        inputs.query_start_loc[: num_reqs + 1].copy_(metadata.query_start_loc)
        inputs.query_start_loc[num_reqs + 1 : shape.num_reqs + 1].fill_(num_rows)
        inputs.block_table[:num_reqs].copy_(metadata.block_table)


def _padded(num_rows: int) -> int:
    return next(n for n in ROW_STEPS if num_rows <= n)
