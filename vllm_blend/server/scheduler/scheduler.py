"""The engine's side of a blending server: a mixin for vLLM's scheduler.

``add_request``          turns a ``BlendRequest`` into a plan: chunks looked up, or found by content;
                         one whose chunks may be in a store's lower tiers waits for the answer, and
                         is told by the controller which of them to wait for, if its ratio is "auto"
``schedule``             lets in the engine's own requests: measurements,
                         missed chunks; lets a blended prompt wait for a step that has room for it
``update_from_output``   takes their results out, adds what was reused to the others' first output
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from vllm_blend.core.plans import EXTRA_ARG, ChunkIds, ChunkKey, KeyedPlan
from vllm_blend.server.chunks.chunk_registry import ChunkRegistry, bytes_per_token
from vllm_blend.server.chunks.prefix_cache import (
    BlendKVCacheManager,
    block_hasher,
    disown_blocks,
    name_blocks,
)
from vllm_blend.server.config import ServerSettings
from vllm_blend.server.internal.internal_requests import InternalRequests
from vllm_blend.server.messages import COMMANDS, Lost, WorkerCommands, WorkerEvents
from vllm_blend.server.request import BlendRequest
from vllm_blend.server.scheduler.lookup import Lookup
from vllm_blend.server.scheduler.request_reports import Reports, sizes
from vllm_blend.server.scheduler.step_room import StepRoom
from vllm_blend.server.scheduler.tier_fetches import Fetches
from vllm_blend.server.scheduler.waiting import State, Waiting
from vllm_blend.store.adapters import shelf

logger = logging.getLogger("vllm.vllm_blend.server")

STARTED = "blend_started"
"""An attribute of vLLM's ``SchedulerOutput``: when the step was scheduled."""

STREAMED = "its prompt is streamed, so that its later parts have no places of their own"
REPLACED = "the model's weights were replaced meanwhile"


class BlendScheduler(StepRoom):
    """Mixin for vLLM's schedulers."""

    # of vLLM's scheduler
    kv_cache_manager: Any
    vllm_config: Any
    log_stats: bool
    requests: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        stock: Any = super()
        stock.__init__(*args, **kwargs)
        settings = ServerSettings.of(self.vllm_config)
        assert settings is not None  # else plugin/hooks.py would not have chosen this class
        self.blend_settings = settings
        storage = (settings.store or {}).get("storage", "auto")
        self.blend_token_bytes = bytes_per_token(self.vllm_config, storage)
        self.blend_chunks = ChunkRegistry(settings.chunk_bytes // self.blend_token_bytes)
        self._block_size = kwargs["hash_block_size"]
        hasher = None
        manager = self.kv_cache_manager
        self._caching: bool = manager.enable_caching
        if self._caching:
            hasher = block_hasher(self.vllm_config, self._block_size)
            manager.__class__ = type("BlendKVCacheManager", (BlendKVCacheManager, type(manager)), {})
            manager.blend_block_size = self._block_size
        self.blend_internal = InternalRequests(
            self.vllm_config,
            settings,
            self.blend_chunks,
            hasher,
            self._block_size,
            on_measured=self._calibrated,
        )
        background = self.blend_internal.background
        self.blend_fetches: Fetches | None = None
        if settings.store is not None:
            self.blend_fetches = Fetches(self.blend_chunks, background, self.blend_internal.contexts)
            if settings.auto:
                self.blend_fetches.claim("")  # so that they are known to the first request
        self.blend_lookup = Lookup(
            self.blend_chunks,
            background,
            self.blend_fetches,
            self.blend_internal.contexts,
            settings.min_chunk_tokens,
            settings.max_chunk_tokens,
        )
        self._plans: dict[str, KeyedPlan] = {}
        self._harvests: dict[str, list[ChunkKey]] = {}  # by request; what is kept of its prefill
        self._num_weights = 0  # that took the place of others
        self._step_rows = settings.step_rows or self.max_num_scheduled_tokens
        self._rows_left = self._step_rows
        self._store_stats: dict[str, int] = {}
        engine = self.vllm_config.parallel_config.data_parallel_index
        labels = self.vllm_config.model_config.served_model_name, str(engine)
        self.blend_reports = Reports(labels, settings.log_requests, self._sizes, settings.report_sizes)
        if window := self._window():
            logger.info("vllm_blend: blended prompts of up to %d tokens are prefilled whole.", window)
        elif self._cuts:
            logger.warning(
                "vllm_blend: blended prompts are cut where a step is full, so what is recomputed "
                "depends on what else it holds; max_num_batched_tokens of at least twice "
                "max_num_seqs prevents it."
            )

    # --- requests -----------------------------------------------------------------------------

    def add_request(self, request: Any) -> None:
        stock: Any = super()
        params = request.sampling_params
        wire = (params.extra_args or {}).get(EXTRA_ARG) if params is not None else None
        if isinstance(wire, dict):
            blend_request = BlendRequest.from_wire(wire)
            if request.resumable or request.request_id in self.requests:
                self._refuse(request, blend_request, STREAMED)
            elif why := self.blend_internal.adapters.why_unknown(request.lora_request):
                self._refuse(request, blend_request, why)
            elif self.blend_fetches is None:
                self._plan(request, blend_request)
            else:
                assert self.blend_internal.calibration is not None
                self.blend_internal.calibration.wanted |= blend_request.paced
                self.blend_fetches.waiting[request.request_id] = Waiting(
                    blend_request, time.monotonic(), request.request_id
                )
                self._advance(self.blend_fetches, request)
        stock.add_request(request)

    def _refuse(self, request: Any, blend_request: BlendRequest, why: str) -> None:
        """Lets a request be prefilled in full, as by vLLM alone."""
        params = request.sampling_params
        params.extra_args = {k: v for k, v in params.extra_args.items() if k != EXTRA_ARG}
        self.blend_reports.add(
            request.request_id,
            len(request.prompt_token_ids),
            None,
            missed=0,
            short=0,
            why_not=why,
            lookup_seconds=0.0,
            asked=blend_request.report,
        )

    def _advance(self, fetches: Fetches, request: Any) -> Waiting:
        """Takes a waiting request as far as it gets now."""
        waiting, calibration = fetches.waiting[request.request_id], self.blend_internal.calibration
        assert calibration is not None
        tenant = self._shelf(request, waiting.blend_request)
        indexed = not waiting.blend_request.auto or fetches.claim(tenant)
        state = waiting.advance(time.monotonic(), calibration.done, indexed)
        if state not in (State.ASK, State.DECIDE):
            return waiting
        tokens = tuple(request.prompt_token_ids)
        named = self.blend_lookup.marked(tenant, tokens, waiting.blend_request)
        marked = [chunk for _, chunk in named]
        if state is State.DECIDE:
            fetches.decide(waiting, marked, len(tokens), calibration)
        else:
            missing = [
                chunk
                for variants in marked
                if self.blend_lookup.known(variants)[0] is None
                for chunk in variants[: self.blend_internal.contexts.num_suited]
            ]
            found = []
            if waiting.blend_request.auto:
                found = fetches.find(tenant, tokens[:-1], self.blend_settings.min_chunk_tokens)
            if waiting.paced:
                for chunk in found:
                    fetches.ask(chunk, request.request_id)
                fetches.locate(waiting, missing)
            else:
                fetches.wait(waiting, missing + found)
        return self._advance(fetches, request)

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        """Asked by vLLM's scheduler before it lets a request in."""
        stock: Any = super()
        fetches = self.blend_fetches
        if fetches is not None and request.request_id in fetches.waiting:
            waiting = self._advance(fetches, request)
            if waiting.state is not State.READY:
                return False
            del fetches.waiting[request.request_id]
            self._plan(request, waiting.blend_request, waiting)
        return bool(stock._handle_blocked_waiting_request(request))

    def _plan(self, request: Any, blend_request: BlendRequest, waited: Waiting | None = None) -> None:
        """Gives the request its plan, or lets it be prefilled in full where nothing can be reused."""
        start = time.perf_counter()
        params = request.sampling_params
        tokens = tuple(request.prompt_token_ids)
        tenant = self._shelf(request, blend_request)
        found = self.blend_lookup(tenant, tokens, blend_request, request.request_id)
        spans, why = found.spans, ""
        if not spans:
            unmarked = blend_request.why_not or "no chunk in the prompt"
            why = "no chunk is known yet" if found.missed else unmarked
            if found.short and not found.missed:
                least = self.blend_settings.min_chunk_tokens
                why = f"its chunks have fewer than {least} tokens (min_chunk_tokens)"
        settings, decision = blend_request.settings, waited.decision if waited is not None else None
        if decision is not None and any(decision.load):
            settings = replace(settings, recomp_ratio=decision.ratio)
        elif decision is not None and waited is not None and any(waited.tiers):
            spans, why = [], decision.reason
        params.extra_args = {k: v for k, v in params.extra_args.items() if k != EXTRA_ARG}
        plan = None
        timed = blend_request.report or bool(self.log_stats)
        whole = KeyedPlan(tuple(spans), settings, timed, tuple(found.harvest))
        if found.harvest:
            params.extra_args[EXTRA_ARG] = whole
            self._harvests[request.request_id] = [kept.key for kept in found.harvest if kept.key]
        if spans:
            params.extra_args[EXTRA_ARG] = self._plans[request.request_id] = plan = whole
            self.blend_chunks.pin(span.key for span in spans)
            for span in spans:
                self.blend_internal.background.used(span.key)
            if self._caching:
                name_blocks(request, plan, f"{self._num_weights} {tenant}", self._block_size)
        self.blend_reports.add(
            request.request_id,
            len(tokens),
            plan,
            missed=found.missed,
            short=found.short,
            harvested=found.num_harvested if spans else 0,
            why_not=why,
            lookup_seconds=time.perf_counter() - start,
            asked=blend_request.report,
            decided=waited.told if waited is not None else None,
        )
        if waited is not None and (seconds := waited.seconds(time.monotonic())) is not None:
            loaded = sum(span.key in waited.chunks for span in spans)
            self.blend_reports.waited(request.request_id, seconds, loaded)

    # --- steps -------------------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        stock: Any = super()
        for request in self.blend_internal.start(stock.get_num_unfinished_requests()):
            stock.add_request(request)
        self._rows_left = self._step_rows
        output = stock.schedule(*args, **kwargs)
        self.blend_internal.background.stalled = not output.num_scheduled_tokens
        commands = WorkerCommands(self.blend_chunks.take_drops())
        if self.blend_fetches is not None:
            commands = self.blend_fetches.take_commands(commands.drop)
        if commands != WorkerCommands():
            setattr(output, COMMANDS, commands)
        setattr(output, STARTED, time.monotonic())
        return output

    def _calibrated(self) -> None:
        """The engine's times are known."""
        fetches, calibration = self.blend_fetches, self.blend_internal.calibration
        if fetches is None or calibration is None:
            return
        if calibration.done:
            fetches.computed(*calibration.longest)
        for request_id in fetches.waiting:
            self._advance(fetches, self.requests[request_id])

    def stop_background(self) -> None:
        """The engine is shutting down: what no client's request waits for is not computed any more."""
        if self.blend_internal.stopped:
            return
        self.blend_internal.stopped = True
        background = self.blend_internal.background
        logger.info("vllm_blend: %d chunks are not computed, for the shutdown.", len(background))
        background.clear()
        self.finish_requests(
            [name for name in self.requests if background.is_mine(name)],
            RequestStatus.FINISHED_ABORTED,
        )

    def weights_replaced(self) -> None:
        """The model has other weights than before: no KV of the old ones is reused.

        The model's process has forgotten it already (``plugin/weights.py``).
        """
        self._num_weights += 1
        internal = self.blend_internal
        self.finish_requests(
            [name for name in self.requests if internal.is_mine(name)], RequestStatus.FINISHED_ABORTED
        )
        if internal.calibration is not None:
            internal.calibration.forget_kv()
        for request_id in list(self._harvests):
            self._end_harvest(request_id)
        for request_id in list(self._plans):
            self._give_up(self.requests[request_id], 0, None)
            self.blend_reports.fail(request_id, REPLACED)
        self.blend_chunks.clear()
        if self.blend_fetches is not None:
            self.blend_fetches.renew()

    def has_requests(self) -> bool:
        stock: Any = super()
        if stock.has_requests() or self.blend_internal.stopped:
            return bool(stock.has_requests())
        waiting = self.blend_internal.num_waiting > 0 or bool(self.blend_fetches)
        return waiting and bool(stock.pause_state == PauseState.UNPAUSED)

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        stock: Any = super()
        finished = stock.finish_requests(*args, **kwargs)
        for request in finished:
            # vLLM ends a request so, too, when a stop string ends its answer
            self._forget(request.request_id, answered=request.num_output_tokens > 0)
            if self.blend_internal.is_mine(request.request_id):
                self.blend_internal.finish(request.request_id)
        return finished

    def _forget(self, request_id: str, answered: bool) -> None:
        background = self.blend_internal.background
        if answered:
            background.askers.answered(request_id)
        else:
            for key in background.askers.left(request_id):
                background.remove(key)
                if self.blend_fetches is not None:
                    self.blend_fetches.remove(key)
        self.blend_reports.forget(request_id)
        if self.blend_fetches is not None:
            self.blend_fetches.waiting.pop(request_id, None)
        plan = self._plans.pop(request_id, None)
        if plan is not None:
            self.blend_chunks.unpin(span.key for span in plan.spans)
        self._end_harvest(request_id)

    # --- results --------------------------------------------------------------------------------

    def update_from_output(self, scheduler_output: Any, model_output: Any) -> Any:
        stock: Any = super()
        scheduled = scheduler_output.num_scheduled_tokens
        internal, started = self.blend_internal, getattr(scheduler_output, STARTED, None)
        internal.background.earn(sum(n for name, n in scheduled.items() if not internal.is_mine(name)))
        seconds = time.monotonic() - started if started else 0.0
        if scheduled and all(map(internal.background.is_mine, scheduled)):
            internal.background.took(scheduler_output.total_num_scheduled_tokens, seconds)
        if self.blend_fetches is not None and internal.calibration is not None and started:
            internal.calibration.step_took(scheduled, seconds)
            if not self._plans.keys() & scheduled.keys() and not any(map(internal.measures, scheduled)):
                self.blend_fetches.computed(scheduler_output.total_num_scheduled_tokens, seconds)
        self._learn_of(WorkerEvents.of(model_output))
        results = stock.update_from_output(scheduler_output, model_output)
        for result in results.values():
            result.outputs = [out for out in result.outputs if not self._took(out)]
        return results

    def _learn_of(self, events: WorkerEvents) -> None:
        """Notes what the model's process tells."""
        for request_id, stages in events.seconds.items():
            self.blend_reports.took(request_id, stages)
        for blended in events.blended:
            self.blend_reports.blended(blended)
        for request_id in events.prefilled:
            self.blend_reports.fail(request_id)
        for lost in events.lost:
            self._lose(lost)
        for key in events.kept:
            if (chunk := self.blend_chunks.coming(key)) is not None:  # else its request was aborted
                self.blend_chunks.commit(key)
                self.blend_internal.background.came(key, chunk)
        for key, found in events.fetched.items():
            assert self.blend_fetches is not None
            self.blend_fetches.answer(key, found)
        for tenant, chunks in events.claimed.items():
            assert self.blend_fetches is not None
            self.blend_fetches.claimed(tenant, chunks)
        for key, place in events.located.items():
            assert self.blend_fetches is not None
            self.blend_fetches.learn(events.loads)
            self.blend_fetches.found(key, place)
        self._store_stats = events.store or self._store_stats

    def _end_harvest(self, request_id: str) -> list[ChunkIds]:
        """Gives up what is still to come of a request's prefill; returns that."""
        left = []
        for key in self._harvests.pop(request_id, ()):
            if (chunk := self.blend_chunks.coming(key)) is not None:
                self.blend_chunks.cancel(key)
                left.append(chunk)
        return left

    def _lose(self, lost: Lost) -> None:
        """A chunk's KV is not where it should be: it will be computed again.

        The request that was to reuse it goes on with what is left of its plan. Its blocks were named
        by the plan when it was scheduled, so they are taken out of the prefix cache. (A request with
        the same plan in the same step may have read them: they are nearer to full prefill than their
        names say.)
        """
        chunk = self.blend_chunks.lose(lost.key)
        if chunk is not None:
            self.blend_lookup.miss(chunk)
        request, plan = self.requests.get(lost.request_id), self._plans.get(lost.request_id)
        if request is None or plan is None:
            return
        spans = [s for s in plan.spans if s.key == lost.key and s.end > lost.computed]
        if not spans:  # it has their tokens from the prefix cache
            return
        left = tuple(span for span in plan.spans if span not in spans)
        new = replace(plan, spans=left) if left else None
        self._give_up(request, lost.computed, new)
        self.blend_reports.lose(lost.request_id, spans, lost.reason, new)

    def _give_up(self, request: Any, computed: int, new: KeyedPlan | None) -> None:
        """Gives a request another plan, or none; its blocks behind ``computed`` tokens are its own."""
        plan = self._plans.pop(request.request_id)
        params = request.sampling_params
        params.extra_args = {k: v for k, v in params.extra_args.items() if k != EXTRA_ARG}
        if new is not None:
            self._plans[request.request_id] = params.extra_args[EXTRA_ARG] = new
            self.blend_chunks.pin(span.key for span in new.spans)
        self.blend_chunks.unpin(span.key for span in plan.spans)
        if self._caching:
            disown_blocks(request, max(computed, plan.spans[0].start), self.kv_cache_manager)

    def _took(self, output: Any) -> bool:
        """Takes an output of the engine's own; adds what was reused to others."""
        request_id, ended = output.request_id, output.finish_reason is not None
        if self.blend_internal.is_mine(request_id):
            if ended:
                self.blend_internal.finish(request_id, output)
            return True
        for chunk in self._end_harvest(request_id):  # its prefill has ended: the prefix cache had part
            self.blend_lookup.miss(self.blend_internal.contexts.by_itself(chunk))
        self.blend_reports.attach(output)
        if ended:
            self._forget(request_id, answered=True)
        return False

    def _shelf(self, request: Any, blend_request: BlendRequest) -> str:
        """Where the request's chunks are kept: its tenant's, of its adapter."""
        tenant = blend_request.tenant or request.cache_salt or ""
        return shelf(tenant, self.blend_internal.adapters.digest(request.lora_request))

    def _sizes(self) -> dict[str, Any]:
        host = len(self.blend_chunks), self.blend_chunks.num_tokens * self.blend_token_bytes
        return sizes(*host, self._store_stats) | {
            "computed_chunks": self.blend_internal.background.num_computed,
            "waiting_chunks": len(self.blend_internal.background) + len(self.blend_fetches or ()),
            "dropped_chunks": self.blend_internal.background.num_dropped,
            "evicted_chunks": self.blend_chunks.num_evicted,
        }


class BlendSyncScheduler(BlendScheduler, Scheduler):
    """vLLM's scheduler with blending."""


class BlendAsyncScheduler(BlendScheduler, AsyncScheduler):
    """vLLM's asynchronous scheduler with blending."""
