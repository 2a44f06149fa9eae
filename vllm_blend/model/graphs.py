"""The model's forward on rows as CUDA graphs, one up to each layer's attention and one after the last.

Launched from Python, a layer takes the host 0.3 to 0.6 ms: longer than a GPU computes some hundred rows
of it. vLLM's own graphs end before attention and begin after it; these hold attention too, for rows at
any positions. Between two of them the host does what a graph cannot: it lets the GPU wait for the next
layer's stored KV, and hands out queries, K and V to what listens or collects.

the first  from the embedding to the first layer's attention: fresh K and V are in the paged cache
the others a layer's stored K and V go to the paged cache, by the segments that a step's tables name;
           its attention, and on to the next layer's, or to the model's output

All sizes are captured at the engine's start, once the probes have passed, from one blended step.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config.compilation import CUDAGraphMode

from vllm_blend.core.plans import BlendPlan
from vllm_blend.core.tensor_parallel import capturing_on
from vllm_blend.model.active_rows import ActiveRows
from vllm_blend.model.graph_capture import Capture, Chain, Group, Places
from vllm_blend.model.guard import Guard, StepFailed

if TYPE_CHECKING:
    from vllm_blend.model.blending import Blending
    from vllm_blend.model.rows import Inputs
    from vllm_blend.ops.segment_scatter import SegmentTables

logger = logging.getLogger("vllm.vllm_blend")

ROW_SIZES = (*range(64, 256, 64), *range(256, 3072 + 1, 128))
"""Rows are padded to the next of these. Products of multiples of 128 rows are the fastest: of 512 rows
faster than of 400 or 448 on an H100. Steps of more rows keep the GPU busy without graphs."""

MAX_REQS = 256
"""Most requests of a step that is replayed, if an engine takes as many; an empty one costs little."""

MAX_SEGMENTS = 128
"""Most pieces of stored KV of such a step."""

MAX_FAILED = 3
"""Sizes whose capture fails until no more are tried: it may not be the sizes."""


class RowGraphs:
    """Graphs of an engine's model.

    Args:
        blending: the engine's.

    Attributes:
        wanted: the next step that blends is captured, for rows of all sizes. Only the engine's start
            sets it: no request does.
    """

    def __init__(self, blending: Blending) -> None:
        self._blending = blending
        self._chains: dict[int, Chain] = {}
        self._places: Places | None = None
        self._kv_cache = 0
        self._max_reqs = min(MAX_REQS, blending.vllm_config.scheduler_config.max_num_seqs)
        self.wanted = False

    @classmethod
    def of(cls, blending: Blending) -> RowGraphs | None:
        """Those of an engine that uses CUDA graphs, else None."""
        config = blending.vllm_config
        mode = config.compilation_config.cudagraph_mode
        if (
            config.device_config.device_type != "cuda"
            or config.model_config.enforce_eager
            or config.parallel_config.pipeline_parallel_size > 1  # stages hand on hidden states
            or config.lora_config is not None  # its kernels' numbers of tokens are not in fixed places
            or config.kv_transfer_config is not None  # it is to hear of each layer
            or mode in (None, CUDAGraphMode.NONE)
            or not all(hasattr(attn.impl, "at") for attn in blending.attns)
        ):
            return None
        return cls(blending)

    @property
    def sizes(self) -> list[int]:
        """Numbers of rows that are captured, ascending."""
        return sorted(self._chains)

    def prepared(self, frame: ActiveRows, inputs: Inputs) -> Callable[[], torch.Tensor] | None:
        """The model's forward of a frame's rows, to be called before anything else is prepared:
        ``[num_rows, hidden_size]``, valid until the next one.

        None: the step must run without graphs.
        """
        size = next((n for n in self.sizes if frame.num_rows <= n), None)
        if (
            size is None
            or not self._fits(frame, inputs)
            or self._kv_cache != self._blending.attns[0].kv_cache.data_ptr()
        ):
            return None
        places = self._places
        assert places is not None
        if not self._fill_tables(places.tables, frame):
            return None
        self._fill(places, frame, inputs, size)

        def run() -> torch.Tensor:
            self._replay(self._chains[size], frame)
            return places.hidden[: frame.num_rows]

        return run

    def _fits(self, frame: ActiveRows, inputs: Inputs) -> bool:
        """Whether graphs know all that this step is about."""
        return (
            inputs.input_ids is not None
            and inputs.inputs_embeds is None
            and inputs.positions.dim() == 1
            and inputs.intermediate_tensors is None
            and not any(isinstance(value, torch.Tensor) for value in inputs.more.values())
            and len(frame.step.starts) <= self._max_reqs + 1
            and all(
                request.plan.settings.mask == "exact"
                for request in frame.step.requests
                if isinstance(request.plan, BlendPlan)
            )
        )

    # --- a step --------------------------------------------------------------------------------------

    def _fill_tables(self, tables: SegmentTables, frame: ActiveRows) -> bool:
        """Names the frame's stored KV; False: not all of it can be read where it lies, or too much."""
        last = len(self._blending.attns) - 1
        first, rest = frame.fusing(0).requests, frame.fusing(last).requests
        requests = [*first, *(request for request in rest if request not in first)]
        parts = [frame.stored_of(request).segments([request]) for request in requests]
        if any(part is None for part in parts):
            return False
        counts = [len(part or ()) for part in parts]
        if sum(counts) > MAX_SEGMENTS:
            return False
        segments = [segment for part in parts for segment in part or ()]
        of_first = sum(counts[: len(first)])
        tables.fill(
            [(segment.end - segment.start, segment.position, segment.row) for segment in segments],
            np.stack([segment.addresses for segment in segments], axis=1) if segments else [],
            [of_first if layer < frame.fused_layers else len(segments) for layer in range(last + 1)],
        )
        return True

    def _fill(self, places: Places, frame: ActiveRows, inputs: Inputs, size: int) -> None:
        """Copies a step's rows to the fixed tensors; rows that pad write no KV and see no keys."""
        rows, count = frame.rows, frame.num_rows
        num_reqs = len(frame.step.starts) - 1
        assert inputs.input_ids is not None
        torch.index_select(inputs.input_ids, 0, rows, out=places.input_ids[:count])
        torch.index_select(inputs.positions, 0, rows, out=places.positions[:count])
        places.query_start_loc[: num_reqs + 1].copy_(frame.query_start_loc)
        places.query_start_loc[num_reqs + 1 :].fill_(count)
        filled: set[Group] = set()
        for attn, group in zip(self._blending.attns, places.groups, strict=True):
            if group in filled:
                continue
            filled.add(group)
            slot_mapping = frame.stock_slots(attn)
            torch.index_select(slot_mapping, 0, rows, out=group.slots[:count])
            group.slots[count:size].fill_(-1)
            all_slots = group.all_slots[: len(slot_mapping)]
            all_slots.copy_(slot_mapping).index_fill_(0, rows, -1)
            group.block_table[:num_reqs].copy_(frame.stock_metadata(attn).block_table[:num_reqs])

    def _replay(self, chain: Chain, frame: ActiveRows) -> None:
        attempt = self._blending.attempt
        attended = frame.listener is not None or bool(frame.step.collected)
        chain.graphs[0].replay()
        for index, graph in enumerate(chain.graphs[1:]):
            heard: list[tuple[torch.Tensor, ...]] = []
            if attended:
                attempt(partial(self._collect, chain, frame, index, heard))
            attempt(partial(self._read, frame, index))
            graph.replay()
            attempt(partial(self._read_on, frame, index, heard))
            frame.end_after(index)

    def _collect(
        self, chain: Chain, frame: ActiveRows, index: int, heard: list[tuple[torch.Tensor, ...]]
    ) -> None:
        query, key, value = (tensor[: frame.num_rows] for tensor in chain.stops[index])
        self._blending.collect(self._blending.attns[index].impl.blend, key, value)
        if frame.listener is not None:
            heard.append((query.clone(), key))  # heard once stored K is in the cache

    def _read(self, frame: ActiveRows, index: int) -> None:
        for stored in frame.fusing(index).stored:
            stored.read(index)

    def _read_on(self, frame: ActiveRows, index: int, heard: list[tuple[torch.Tensor, ...]]) -> None:
        for stored in frame.fusing(index).stored:
            stored.done(index)
        attn = self._blending.attns[index]
        for query, key in heard:
            assert frame.listener is not None
            frame.listener.hear(attn.impl, attn, query, key, None)

    # --- capture -------------------------------------------------------------------------------------

    def capture(self, frame: ActiveRows, inputs: Inputs, guard: Guard) -> None:
        """Captures every size, the large ones first: the others fit in their memory. A size whose
        capture fails on some rank runs without; after ``MAX_FAILED`` of them so do all."""
        self.wanted = False
        if not self._fits(frame, inputs):
            return
        start, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
        attns = self._blending.attns
        self._kv_cache = attns[0].kv_cache.data_ptr()
        most = self._blending.vllm_config.scheduler_config.max_num_batched_tokens
        sizes = [size for size in ROW_SIZES if size <= max(most, ROW_SIZES[0])]
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        collecting, self._blending.collecting = self._blending.collecting, False
        gc.collect()
        failed = 0
        try:
            for size in reversed(sizes):
                try:
                    self._chains[size] = self._capture(frame, inputs, size, pool, stream, guard)
                except StepFailed as error:
                    failed += 1
                    logger.warning(
                        "vllm_blend: no CUDA graphs for blended steps of %d rows, so the host launches "
                        "each of their layers: %s",
                        size,
                        error.__cause__ or error,
                    )
                if failed == MAX_FAILED:
                    break
        finally:
            self._blending.collecting = collecting
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        if self.sizes:
            logger.info(
                "vllm_blend: captured blended steps of %d to %d rows as CUDA graphs in %.1f s, "
                "%.2f GiB",
                self.sizes[0],
                self.sizes[-1],
                time.perf_counter() - start,
                (free - torch.cuda.mem_get_info()[0]) / 2**30,
            )

    def _capture(
        self,
        frame: ActiveRows,
        inputs: Inputs,
        size: int,
        pool: Any,
        stream: torch.cuda.Stream,
        guard: Guard,
    ) -> Chain:
        """The graphs of one size.

        Raises:
            StepFailed: on all ranks, where they cannot be had on one.
        """
        if self._places is None:  # the first size is the largest
            self._places = guard.attempt(lambda: self._make_places(frame, inputs, size), None)
            guard.agree()
        assert self._places is not None
        capture = Capture(self._blending, self._places, size, pool)
        guard.attempt(lambda: capture.run(frame, inputs, warm=True), None)
        guard.agree()
        torch.cuda.synchronize()
        with capturing_on(stream):
            # no rank waits for another while it captures
            chain = guard.attempt(lambda: capture.run(frame, inputs), None)
        guard.agree()
        assert chain is not None
        return chain

    def _make_places(self, frame: ActiveRows, inputs: Inputs, max_rows: int) -> Places:
        from vllm_blend.ops.segment_scatter import SegmentTables  # needs Triton

        attns, config = self._blending.attns, self._blending.vllm_config
        device, max_tokens = frame.device, config.scheduler_config.max_num_batched_tokens
        groups: dict[tuple[int, int], Group] = {}
        of_layers = []
        for attn in attns:
            slots, metadata = frame.stock_slots(attn), frame.stock_metadata(attn)
            # one group's builders may make a block table each
            key = id(slots), metadata.block_table.data_ptr()
            if key not in groups:
                width = metadata.block_table.shape[1]
                groups[key] = Group(
                    slots.new_full((max_rows,), -1),
                    slots.new_full((max(max_tokens, len(slots)),), -1),
                    metadata.block_table.new_zeros(self._max_reqs, width),
                )
            of_layers.append(groups[key])
        assert inputs.input_ids is not None
        hidden_size = config.model_config.get_hidden_size()
        dtype = config.model_config.dtype
        return Places(
            inputs.input_ids.new_zeros(max_rows),
            inputs.positions.new_zeros(max_rows),
            torch.zeros(self._max_reqs + 1, dtype=torch.int32, device=device),
            of_layers,
            SegmentTables(MAX_SEGMENTS, max(max_tokens, frame.step.num_rows), len(attns), device),
            torch.zeros(max_rows, hidden_size, dtype=dtype, device=device),
        )
