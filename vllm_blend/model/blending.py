"""An engine that blends: what it knows of its model, and how a step that blends or collects runs.

The runner's hook sets ``step`` before it calls the model (``plugin/step_requests.py``). Where all
rows are chosen before layer 0, the model's own forward runs on them (``model/rows.py``); policies
that look at a check layer take the layer loop (``model/loop.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from vllm.forward_context import get_forward_context

from vllm_blend.attention.base import LayerBlend
from vllm_blend.core.cache_fuse_metadata import CacheFuseMetadata
from vllm_blend.core.kv import KVShape
from vllm_blend.core.plans import CollectPlan
from vllm_blend.core.stage_clock import StageClock
from vllm_blend.core.step import Blended, BlendStep
from vllm_blend.model import rows
from vllm_blend.model.active_rows import ActiveRows
from vllm_blend.model.collect import collect
from vllm_blend.model.guard import Guard
from vllm_blend.model.kv_loader import InFlight
from vllm_blend.model.lookahead import LastLayerHeard, Questions, asked_layers
from vllm_blend.model.select.question import num_asked

if TYPE_CHECKING:
    from vllm_blend.model.loop import LayerLoop


class RunsRows(Protocol):
    """Runs a frame's rows faster than the model's own forward (``model/graphs.py``)."""

    def run(self, frame: ActiveRows, inputs: rows.Inputs) -> torch.Tensor | None:
        """``[num_rows, hidden_size]``; None where it cannot."""
        ...


class Blending:
    """An engine's blending.

    Attributes:
        vllm_config: the engine's.
        model: vLLM's model, which holds ``inner``.
        inner: vLLM's inner model, where the paper's flags are (``plugin/attach.py``).
        attns: vLLM's ``Attention`` of each layer.
        owners: the module that holds each of them (``self_attn``), or None.
        weights, first_weights: digest of a server's parameters, as they were last seen, and at the
            engine's start.
        kv_shape: what stored KV must look like here.
        unsupported: why this engine cannot blend, or None.
        step: of the forward that runs, if it blends or collects, else None.
        chunks: a server's (``server/worker/chunk_cache.py``).
        loop: the layer loop, where this model has one.
        graphs: steps on rows as CUDA graphs, where the engine uses them.
        clocks: of the steps since they were last asked for.
        blended: what these did, likewise.
        in_flight: stored KV that the GPU may still be reading.
        shift: added to the positions of every row; only a probe does that.
        watch: gets the hidden states of every step; likewise.
        collecting: what a step computes is kept, if its plan says so.
        guard: what happens when a step fails.
    """

    vllm_config: Any
    model: Any
    inner: Any
    kv_shape: KVShape

    def __init__(self) -> None:
        self.attns: Sequence[Any] = ()
        self.owners: Sequence[Any] = ()
        self.unsupported: str | None = None
        self.weights = self.first_weights = ""
        self.step: BlendStep | None = None
        self.chunks: Any = None
        self.loop: LayerLoop | None = None
        self.graphs: RunsRows | None = None
        self.clocks: list[StageClock] = []
        self.blended: list[Blended] = []
        self.in_flight = InFlight()
        self.shift = 0
        self.watch: Callable[[torch.Tensor], None] | None = None
        self._frame: ActiveRows | None = None
        self.collecting = True
        self.guard = Guard()

    @property
    def cache_fuse_metadata(self) -> CacheFuseMetadata:
        found: CacheFuseMetadata = self.inner.cache_fuse_metadata
        return found

    def forward(
        self,
        stock: Callable[..., Any],
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Runs the step that is set.

        Args:
            stock: the model's own forward. The other arguments are the model's.

        Returns:
            Hidden states of all rows, ``[num_tokens, hidden_size]``; 0 where none were computed.
        """
        step = self.step
        assert step is not None
        inputs = rows.Inputs(stock, input_ids, positions, intermediate_tensors, inputs_embeds, kwargs)
        # in place: a graph reads positions where vLLM's runner keeps them
        with rows.placed(positions, positions + self.shift if self.shift else None):
            output = self._blend_or_prefill(step, inputs) if step.blended else inputs.run()
        if self.watch is not None:
            self.watch(output)
        self._ended(step, positions.device)
        return output

    def _blend_or_prefill(self, step: BlendStep, inputs: rows.Inputs) -> torch.Tensor:
        """Blends; where that fails, all rows of the step are computed, as by vLLM's own forward."""
        if self.guard.is_open:
            try:
                return self._blend(step, inputs)
            except Exception as error:
                self.guard.caught(error)
        self.guard.prefilled += [request.request_id for request in step.blended]
        return inputs.run()

    def _blend(self, step: BlendStep, inputs: rows.Inputs) -> torch.Tensor:
        frame = self._frame_of(step, inputs)
        with frame.clock.stage("select"):
            self._ask(frame, inputs)
            early = [request for request in step.blended if request.settings.early]
            if early:
                frame.shrink({r: rows.choose(r, frame.received.get(r)) for r in early})
            if not frame.num_rows:  # a window of chunked prefill may hold reused tokens alone
                frame.shrink({early[0]: torch.tensor([early[0].num_chunk_rows - 1])})
        self._frame = frame
        try:
            if len(early) == len(step.blended):
                hidden = self._run_rows(frame, inputs)
                output = rows.scattered(frame, hidden, inputs.positions.shape[0])
                self.cache_fuse_metadata.record(frame.results())
            else:
                assert self.loop is not None  # else the request was refused
                output = self.loop.run(frame, inputs)
        finally:
            self._frame = None
            frame.let_go()
        self.clocks.append(frame.clock)
        self.blended += [
            Blended(r.request_id, r.position, r.num_chunk_rows, len(frame.kept.get(r, ())))
            for r in step.blended
        ]
        return output

    def _ask(self, frame: ActiveRows, inputs: rows.Inputs) -> None:
        """Runs the rows that no chunk holds of the requests that want the question asked: what their
        chunks get of its attention, at the layers that are asked. Up to those their stored KV is in
        the cache then."""
        asking = [r for r in frame.step.blended if r.settings.asks and num_asked(r)]
        if not asking:
            return
        layers = asked_layers(len(self.attns))
        ahead = self._frame_of(frame.step, inputs, frame.clock)
        ahead.own_rows_of(asking)
        frame.fused_layers = ahead.end_layer = layers.stop
        ahead.listener = questions = Questions(ahead, asking, layers)
        self.collecting = False
        try:
            self._run_rows(ahead, inputs)
        except LastLayerHeard:
            pass
        finally:
            self.collecting = True
            ahead.let_go()
        frame.received = questions.received()
        frame.fused |= set(asking)
        frame.begin_behind()

    def _run_rows(self, frame: ActiveRows, inputs: rows.Inputs) -> torch.Tensor:
        """The model's own forward of a frame's rows, ``[num_rows, hidden_size]``."""
        hidden = None if self.graphs is None else self.graphs.run(frame, inputs)
        return inputs.run_on(frame, self.attns) if hidden is None else hidden

    def _frame_of(
        self, step: BlendStep, inputs: rows.Inputs, clock: StageClock | None = None
    ) -> ActiveRows:
        return ActiveRows(
            step,
            inputs.positions,
            get_forward_context(),
            len(self.attns),
            self.cache_fuse_metadata,
            clock,
        )

    def collect(self, layer: LayerBlend, key: torch.Tensor, value: torch.Tensor) -> None:
        """Called by each layer's attention in a step (``attention/base.py``)."""
        if self.collecting and self.step is not None and self.step.collected:
            collect(self.step, self._frame, layer.index, layer.rotation, key, value)

    def _ended(self, step: BlendStep, device: torch.device) -> None:
        for request in step.collected:
            plan = request.plan
            assert isinstance(plan, CollectPlan)
            if plan.on_model and request.end >= plan.num_prompt_tokens:
                for owner, kv in zip(self.owners, plan.kv, strict=True):
                    if owner is not None:
                        owner.hack_kv = list(kv)
        if device.type == "cuda":
            self.in_flight.hold(step, device)
        try:
            self.chunks.keep(step)
        except Exception as error:
            self.guard.caught(error)  # a chunk that is not kept is missed

    def take_blended(self) -> list[Blended]:
        """What was done since this was last called."""
        blended, self.blended = self.blended, []
        return blended

    def take_clocks(self) -> list[StageClock]:
        """Those of the steps since this was last called; lets go of stored KV that is read."""
        self.in_flight.release()
        clocks, self.clocks = self.clocks, []
        return clocks
