"""An engine that blends: what it knows of its model, and how a step that blends or collects runs.

The runner's hook plans a step before it calls the model (``plugin/step_requests.py``). Where all
rows are chosen before layer 0, the model's own forward runs on them (``model/rows.py``); policies
that look at a check layer take the layer loop (``model/loop.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from vllm.forward_context import get_forward_context, is_forward_context_available

from vllm_blend.attention.base import LayerBlend
from vllm_blend.compat.kv_connectors import unseen
from vllm_blend.core import pipeline, tensor_parallel
from vllm_blend.core.cache_fuse_metadata import CacheFuseMetadata
from vllm_blend.core.kv import KVShape
from vllm_blend.core.settings import asked_layers
from vllm_blend.core.stage_clock import StageClock
from vllm_blend.core.step import BlendStep, StepRequest
from vllm_blend.core.tensor_parallel import all_reduce_sum
from vllm_blend.core.window_news import WindowNews
from vllm_blend.model import rows
from vllm_blend.model.active_rows import ActiveRows, LastLayerHeard, places_of
from vllm_blend.model.adapter_rows import with_adapters
from vllm_blend.model.collect import Handed, Layers, keep
from vllm_blend.model.guard import Guard, StepFailed, digest
from vllm_blend.model.kv_loader import STAGED, InFlight
from vllm_blend.model.lookahead import Questions
from vllm_blend.model.row_choice import Chosen, RowChoice
from vllm_blend.model.stages import StageRun, digest_of, digest_of_choice, first_ranks

if TYPE_CHECKING:
    from vllm_blend.model.loop import LayerLoop


class RunsRows(Protocol):
    """Runs a frame's rows faster than the model's own forward (``model/graphs.py``)."""

    wanted: bool

    def capture(self, frame: ActiveRows, inputs: rows.Inputs, guard: Guard) -> None:
        """Gets ready, where that is ``wanted``."""
        ...

    def prepared(self, frame: ActiveRows, inputs: rows.Inputs) -> Callable[[], rows.Hidden] | None:
        """To be called for ``[num_rows, hidden_size]``; None where it cannot."""
        ...


T = TypeVar("T")


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
        adapters: of the requests, where the model is in their process (``store/adapters.py``).
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
        self.adapters: Any = None
        self.loop: LayerLoop | None = None
        self.graphs: RunsRows | None = None
        self.clocks: list[StageClock] = []
        self.blended: list[WindowNews] = []
        self.in_flight = InFlight()
        self.shift = 0
        self.watch: Callable[[rows.Hidden], None] | None = None
        self._unsettled: StageRun | None = None
        self._frame: ActiveRows | None = None
        self._begun = False
        self._to_blend: Sequence[str] = ()
        self.collecting = True
        self._layers = Layers(lambda plan, device: self.chunks.collect(plan, self.kv_shape, device))
        self.guard = Guard()

    @property
    def cache_fuse_metadata(self) -> CacheFuseMetadata:
        found: CacheFuseMetadata = self.inner.cache_fuse_metadata
        return found

    @property
    def is_on(self) -> bool:
        """Whether the forward that runs next blends or collects, as far as it is known."""
        return self._begun or self.step is not None

    def staging(self) -> torch.Tensor | None:
        """As much memory as a step may take for blending, uint8, to be held while vLLM measures what a
        forward needs; else None. A GPU's cache of blocks leaves room for it then."""
        if not self.attns or self.unsupported is not None:
            return None
        if not is_forward_context_available() or get_forward_context().attn_metadata is not None:
            return None
        shape, rows = self.kv_shape, self.vllm_config.scheduler_config.max_num_batched_tokens
        size = prod(shape.of(rows)) * shape.dtype.itemsize
        return torch.empty(
            STAGED * size, dtype=torch.uint8, device=self.vllm_config.device_config.device
        )

    def begin(self, to_blend: Sequence[str], plan: Callable[[], BlendStep | None]) -> None:
        """Plans the forward that runs next. To be called on all ranks, or none; ``end`` after it.

        Args:
            to_blend: ids of the requests that have a plan to blend.
            plan: makes the step.
        """
        self._layers.clear()
        self._begun, self._to_blend = self.guard.is_open, to_blend
        if self._begun:
            self.step = self.guard.attempt(plan, None)
        else:
            self.guard.refuse(to_blend)

    def end(self) -> None:
        """Lets go of the step, which holds stored KV."""
        self._begun, self.step = False, None

    def forward(
        self,
        stock: Callable[..., Any],
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> rows.Hidden:
        """Runs the step that is set; of several pipeline stages the last one settles it, the others do
        once they have sent what they computed.

        Args:
            stock: the model's own forward. The other arguments are the model's.

        Returns:
            Hidden states of all rows, ``[num_tokens, hidden_size]``; 0 where none were computed.
        """
        step = self.step
        inputs = rows.Inputs(stock, input_ids, positions, intermediate_tensors, inputs_embeds, kwargs)
        run = StageRun(step, self._to_blend, inputs, get_forward_context(), self.shift)
        try:
            with rows.placed(positions, positions + self.shift if self.shift else None):
                if step is not None and step.blended:
                    run.output = self._blend(step, run)
                else:
                    self.guard.agree(digest_of(step))
        except Exception as error:
            if tensor_parallel.num_ranks() > 1 and not isinstance(error, StepFailed):
                raise  # the other ranks may be waiting for this one
            run.error = error
        if step is not None and positions.is_cuda:
            self.in_flight.hold(step, positions.device)
        if run.output is None and (run.error is None or not pipeline.is_last_stage()):
            self.collecting = run.error is None
            try:
                run.output = run.alone()
            finally:
                self.collecting = True
        self.attempt(self._layers.end)
        self._unsettled = run
        return self.settle() if pipeline.is_last_stage() else run.output

    def settle(self) -> rows.Hidden | None:
        """Ends the step that was run, with all pipeline stages: what it computed is kept; where it has
        failed, all rows are computed as by vLLM's own forward, and none are kept.

        Returns:
            What the stage has computed; None: nothing has run since this was last called.
        """
        run, self._unsettled = self._unsettled, None
        self._layers.clear()
        if run is None:
            return None
        try:
            if pipeline.num_stages() > 1:
                if run.error is not None:
                    self.guard.note(run.error)
                self.guard.agree(digest([digest_of(run.step), run.choice]), all_stages=True)
            elif run.error is not None:
                raise run.error
        except Exception as error:
            self.guard.caught(error)
            self.guard.prefilled += run.failed
            self.step = run.step = None
            run.output = run.in_full()
        if run.clock is not None and run.step is not None:
            self.clocks.append(run.clock)
            self.blended += run.blended
        if self.watch is not None:
            self.watch(run.output)
        if run.step is not None:
            keep(run.step, self.owners, self.chunks, self.guard)
        return run.output

    def _blend(self, step: BlendStep, now: StageRun) -> rows.Hidden:
        guard, inputs = self.guard, now.inputs
        frame = guard.attempt(lambda: self._frame_of(step, inputs), None)
        asking = [r for r in step.blended if r.settings.asks]
        if asking:
            self._ask(step, frame, asking, inputs)
        choice = RowChoice(guard, step, frame, [r for r in asking if r.settings.early])
        chosen = choice.rows()
        run = guard.attempt(lambda: self._prepared(_known(frame), inputs, chosen), None)
        if (more := choice.more_rows()) is not None:
            chosen = more
            run = guard.attempt(lambda: self._prepared(_known(frame), inputs, chosen), None)
        if not guard.agree(digest_of(step), digest_of_choice(chosen)):
            chosen = first_ranks(chosen)  # whose scores may differ in their last bits
            run = guard.attempt(lambda: self._prepared(_known(frame), inputs, chosen), None)
            guard.agree()
        frame = _known(frame)
        if self.graphs is not None and self.graphs.wanted:
            self.graphs.capture(frame, inputs, guard)
            run = self._prepared(frame, inputs, chosen)
        assert run is not None
        self._frame = frame
        try:
            hidden = run()
        finally:
            self._frame = None
            frame.let_go()
        output = guard.attempt(lambda: self._finished(frame, inputs, hidden, chosen), hidden)
        now.blended = guard.attempt(lambda: _news_of(frame), [])
        guard.agree()
        now.clock, now.choice = frame.clock, digest_of_choice(chosen)
        return output

    def _ask(
        self,
        step: BlendStep,
        frame: ActiveRows | None,
        asking: list[StepRequest],
        inputs: rows.Inputs,
    ) -> None:
        """Runs the rows that no chunk holds of the requests that want the question asked: what their
        chunks get of its attention, at the layers that are asked. Up to those their stored KV is in
        the cache then."""
        guard, layers = self.guard, asked_layers(len(self.attns))

        def prepare() -> tuple[ActiveRows, Questions, Callable[[], rows.Hidden]]:
            ahead = self._frame_of(step, inputs, _known(frame).clock)
            ahead.own_rows_of(asking)
            ahead.end_layer = layers.stop
            ahead.listener = questions = Questions(ahead, asking, layers)
            return ahead, questions, self._runner(ahead, inputs)

        prepared = guard.attempt(prepare, None)
        guard.agree(digest_of(step))
        frame, (ahead, questions, run) = _known(frame), _known(prepared)
        frame.fused_layers = layers.stop
        self.collecting = False
        try:
            # a layer's KV is not whole before the rows are chosen
            with frame.clock.stage("select"), suppress(LastLayerHeard), unseen():
                run()
        finally:
            self.collecting = True
            ahead.let_go()
        got = guard.attempt(questions.received, dict[StepRequest, torch.Tensor]())
        for request in asking:
            none = torch.zeros(request.num_chunk_rows, device=frame.device)
            frame.received[request] = all_reduce_sum(got.get(request, none))
        frame.fused |= set(asking)
        guard.attempt(frame.begin_rest, None)

    def _prepared(
        self, frame: ActiveRows, inputs: rows.Inputs, chosen: Chosen
    ) -> Callable[[], rows.Hidden]:
        """The forward of the chosen rows, to be called."""
        with frame.clock.stage("select"):
            if chosen:
                frame.shrink(chosen)
            if not frame.num_rows:  # a window of chunked prefill may hold reused tokens alone
                first = next(iter(chosen))
                frame.shrink({first: torch.tensor([first.num_chunk_rows - 1])})
        if len(chosen) == len(frame.step.blended):
            return self._runner(frame, inputs)
        assert self.loop is not None  # else the request was refused
        return partial(self.loop.run, frame, inputs, self.guard)

    def _runner(self, frame: ActiveRows, inputs: rows.Inputs) -> Callable[[], rows.Hidden]:
        """The model's own forward of a frame's rows, ``[num_rows, hidden_size]``, to be called."""
        run = None if self.graphs is None else self.graphs.prepared(frame, inputs)
        run = inputs.prepared(frame, self.attns) if run is None else run
        return with_adapters(self.model, frame.rows, run)

    def _finished(
        self,
        frame: ActiveRows,
        inputs: rows.Inputs,
        hidden: rows.Hidden,
        chosen: Chosen,
    ) -> rows.Hidden:
        """Hidden states of all rows of what the step has run."""
        if len(chosen) < len(frame.step.blended):
            return hidden  # the layer loop's
        output = rows.scattered(frame, hidden, inputs.num_tokens)
        self.cache_fuse_metadata.record(frame.results())
        return output

    def _frame_of(
        self, step: BlendStep, inputs: rows.Inputs, clock: StageClock | None = None
    ) -> ActiveRows:
        context, positions = get_forward_context(), inputs.positions
        if positions.dim() > 1:  # M-RoPE's are not where a token stands, behind an image
            positions = places_of(context, step.num_rows)
        return ActiveRows(
            step,
            positions,
            context,
            len(self.attns),
            self.cache_fuse_metadata,
            clock,
        )

    def attempt(self, do: Callable[[], None]) -> None:
        """Called by each layer's attention for what this rank does by itself."""
        self.guard.attempt(do, None)

    def collect(self, layer: LayerBlend, key: torch.Tensor, value: torch.Tensor) -> None:
        """Called by each layer's attention in a step (``attention/base.py``)."""
        if not self.collecting or self.step is None or not self.step.collected:
            return
        self._layers.hand_over(Handed(self.step, self._frame, layer, key, value))

    def take_blended(self) -> list[WindowNews]:
        """What was done since this was last called."""
        blended, self.blended = self.blended, []
        return blended

    def take_clocks(self) -> list[StageClock]:
        """Those of the steps since this was last called; lets go of stored KV that is read."""
        self.in_flight.release()
        clocks, self.clocks = self.clocks, []
        return clocks


def _news_of(frame: ActiveRows) -> list[WindowNews]:
    """What a step did, once all of it is launched; of pipeline stages vLLM hears the last one alone."""
    none, is_heard = torch.empty(0, dtype=torch.int64), pipeline.is_last_stage()
    return [WindowNews(r, frame.kept.get(r, none), is_heard) for r in frame.step.blended]


def _known(value: T | None) -> T:
    """A value that is there, since nothing has failed before it is asked for."""
    assert value is not None
    return value
