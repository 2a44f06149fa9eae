"""The engine's side of a blending server: a mixin for vLLM's scheduler.

``add_request``          takes a ``BlendRequest``, which waits for its plan
``schedule``             turns it into a plan where vLLM's scheduler comes to it: chunks looked up, or
                         found by content; one whose chunks may be in a store's lower tiers waits for
                         the answer first, and is told by the controller which of them to wait for,
                         if its ratio is "auto". Lets in the engine's own requests, and blended
                         prompts where a step has room
``update_from_output``   takes their results out, adds what was reused to the others' first output
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_blend.core.plans import EXTRA_ARG, KeyedPlan
from vllm_blend.server.chunks.chunk_registry import ChunkRegistry, bytes_per_token
from vllm_blend.server.chunks.prefix_cache import prepare_manager
from vllm_blend.server.config import ServerSettings
from vllm_blend.server.internal.internal_requests import InternalRequests
from vllm_blend.server.messages import COMMANDS, Lost, WorkerCommands, WorkerEvents
from vllm_blend.server.request import WITH_MEDIA, BlendRequest
from vllm_blend.server.scheduler.kv_connectors import Connected
from vllm_blend.server.scheduler.lookup import Lookup
from vllm_blend.server.scheduler.operations import Operations
from vllm_blend.server.scheduler.request_plans import RequestPlans
from vllm_blend.server.scheduler.request_reports import OFF, STREAMED, Reports
from vllm_blend.server.scheduler.switching import Switching
from vllm_blend.server.scheduler.tier_fetches import Fetches
from vllm_blend.server.scheduler.tier_waits import TierWaits
from vllm_blend.server.scheduler.waiting import State, Waiting
from vllm_blend.store.adapters import shelf

logger = logging.getLogger("vllm.vllm_blend.server")

STARTED = "blend_started"
"""An attribute of vLLM's ``SchedulerOutput``: when the step was scheduled."""

ASKED_AHEAD = 16
"""Requests, a step, of whose chunks the store is asked before vLLM's scheduler comes to them."""


class BlendScheduler(Switching, Connected):
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
        manager = self.kv_cache_manager if self.kv_cache_manager.enable_caching else None
        hasher = prepare_manager(manager, self.vllm_config, self._block_size) if manager else None
        self.blend_internal = InternalRequests(
            self.vllm_config,
            settings,
            self.blend_chunks,
            hasher,
            self._block_size,
            on_measured=self._calibrated,
        )
        background, contexts = self.blend_internal.background, self.blend_internal.contexts
        self.blend_fetches: Fetches | None = None
        if settings.store is not None:
            self.blend_fetches = Fetches(self.blend_chunks, background, contexts)
            if settings.auto:
                self.blend_fetches.claim("")  # so that they are known to the first request
        self.blend_lookup = Lookup(
            self.blend_chunks,
            background,
            self.blend_fetches,
            contexts,
            settings.min_chunk_tokens,
            settings.max_chunk_tokens,
        )
        self.blend_plans = RequestPlans(self.blend_chunks, manager, self._block_size)
        self.blend_waiting = {}
        self._newcomers: deque[str] = deque()
        self._waits: TierWaits | None = None
        calibration, min_tokens = self.blend_internal.calibration, settings.min_chunk_tokens
        if self.blend_fetches is not None and calibration is not None:
            self._waits = TierWaits(
                self.blend_fetches, self.blend_lookup, contexts, calibration, min_tokens
            )
        self.blend_operations = Operations(
            self.blend_chunks, self.blend_lookup, self.blend_internal, self.blend_fetches
        )
        self.connect(settings.kv_block_connectors)
        self._num_weights = 0  # that took the place of others
        self._in_order, self._failures = True, Counter[str]()
        self._step_rows = settings.step_rows or self.max_num_scheduled_tokens
        self._rows_left = self._step_rows
        self._store_stats: dict[str, int] = {}
        engine = self.vllm_config.parallel_config.data_parallel_index
        labels = self.vllm_config.model_config.served_model_name, str(engine)
        self.blend_reports = Reports(
            labels,
            settings.log_requests,
            lambda: self.blend_operations.sizes(self.blend_token_bytes, self._store_stats),
            settings.report_sizes,
        )
        self.tell_window()

    # --- requests -----------------------------------------------------------------------------

    def add_request(self, request: Any) -> None:
        stock: Any = super()
        params = request.sampling_params
        wire = (params.extra_args or {}).get(EXTRA_ARG) if params is not None else None
        if isinstance(wire, dict):
            blend_request = BlendRequest.from_wire(wire)
            if self.blend_internal.paused:
                self._refuse(request, blend_request.report, OFF)
            elif request.resumable or request.request_id in self.requests:
                self._refuse(request, blend_request.report, STREAMED)
            elif request.mm_features:
                self._refuse(request, blend_request.report, WITH_MEDIA)
            elif why := self.blend_internal.adapters.why_unknown(request.lora_request):
                self._refuse(request, blend_request.report, why)
            else:
                self._let_wait(request.request_id, blend_request)
        stock.add_request(request)

    def _let_wait(self, request_id: str, blend_request: BlendRequest) -> None:
        """A new request waits for its plan.

        vLLM's engine takes all requests that have come before it runs a step, so where many come at
        once this must take no time.
        """
        self.blend_waiting[request_id] = Waiting(blend_request, time.monotonic(), request_id)
        if self.blend_internal.calibration is not None:
            self.blend_internal.calibration.wanted |= blend_request.paced
            self._newcomers.append(request_id)

    def _ask_ahead(self) -> None:
        """Asks the store for chunks of requests that have just come, before vLLM's scheduler comes to
        them; of a few a step, since the others would hold it up."""
        for _ in range(min(len(self._newcomers), ASKED_AHEAD)):
            if (request_id := self._newcomers.popleft()) in self.blend_waiting:
                self._attempt(self.requests[request_id], self._is_ready)

    def _is_ready(self, request: Any, waiting: Waiting) -> bool:
        """Takes a request as far as it gets now: whether it waits for nothing but its plan."""
        if self._waits is None:
            return True
        tenant = self._shelf(request, waiting.blend_request)
        return self._waits.advance(waiting, tenant, request.prompt_token_ids).state is State.READY

    def _is_planned(self, request: Any, waiting: Waiting) -> bool:
        """The same, and gives it its plan: whether it has one."""
        if not self._is_ready(request, waiting):
            return False
        self._plan(request, waiting)
        self._wait_no_longer(request)
        return True

    def _attempt(self, request: Any, do: Callable[[Any, Waiting], bool]) -> bool:
        """What ``do`` says of a request that waits; one with which it fails is prefilled in full."""
        waiting = self.blend_waiting[request.request_id]
        try:
            return do(request, waiting)
        except Exception as error:
            self.refuse_failed(request, waiting.blend_request, error)
            self._wait_no_longer(request)
            return True

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        """Asked by vLLM's scheduler before it lets a request in."""
        stock: Any = super()
        if request.request_id in self.blend_waiting and not self._attempt(request, self._is_planned):
            return False
        return bool(stock._handle_blocked_waiting_request(request))

    def _plan(self, request: Any, waited: Waiting) -> None:
        """Gives the request its plan, or lets it be prefilled in full where nothing can be reused."""
        start = time.perf_counter()
        blend_request, decision = waited.blend_request, waited.decision
        tokens = tuple(request.prompt_token_ids)
        tenant = self._shelf(request, blend_request)
        found = self.blend_lookup(tenant, tokens, blend_request, request.request_id)
        spans, why = found.spans, ""
        if not spans:
            why = found.why_not(blend_request, self.blend_settings.min_chunk_tokens)
        settings = blend_request.settings
        if decision is not None and any(decision.load):
            settings = replace(settings, recomp_ratio=decision.ratio)
        elif decision is not None and any(waited.tiers):
            spans, why = [], decision.reason
        asked = blend_request.report
        timed = asked or bool(self.log_stats)
        whole = KeyedPlan(tuple(spans), settings, timed, tuple(found.harvest), tells_rows=asked)
        owner = f"{self._num_weights} {tenant}"
        plan = self.blend_plans.give(request, whole, owner)
        for span in spans:
            self.blend_internal.background.used(span.key)
        self.blend_reports.add(
            request.request_id,
            len(tokens),
            plan,
            missed=found.missed,
            short=found.short,
            harvested=found.num_harvested if spans else 0,
            why_not=why,
            lookup_seconds=time.perf_counter() - start,
            asked=asked,
            decided=waited.told,
        )
        if (seconds := waited.seconds(time.monotonic())) is not None:
            loaded = sum(span.key in waited.chunks for span in spans)
            self.blend_reports.waited(request.request_id, seconds, loaded)

    # --- steps -------------------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        stock: Any = super()
        self.put_in_order()
        if given_up := self.blend_internal.give_up(stock.get_num_unfinished_requests()):
            self._abort(given_up.__contains__)
        for request in self.blend_internal.start(stock.get_num_unfinished_requests()):
            stock.add_request(request)
        self._ask_ahead()
        self._rows_left, self._step_blends = self._step_rows, None
        output = stock.schedule(*args, **kwargs)
        self.blend_internal.background.earn(self._client_rows(output.num_scheduled_tokens))
        self.blend_internal.background.stalled = not output.num_scheduled_tokens
        if (commands := self.take_blend_commands()) is not None:
            setattr(output, COMMANDS, commands)
        setattr(output, STARTED, time.monotonic())
        return output

    def take_blend_commands(self) -> WorkerCommands | None:
        """What the model's process is to do before its next step; None: nothing."""
        drops, discards = self.blend_chunks.take_drops(), self.blend_chunks.take_discards()
        commands = WorkerCommands(drops, discard=discards)
        if self.blend_fetches is not None:
            commands = replace(self.blend_fetches.take_commands(drops), discard=discards)
        return None if commands == WorkerCommands() else commands

    def _calibrated(self) -> None:
        """The engine's times are known."""
        fetches, calibration = self.blend_fetches, self.blend_internal.calibration
        assert fetches is not None and calibration is not None  # there is a store
        if calibration.done:
            fetches.computed(*calibration.longest)
        for request_id in list(self.blend_waiting):
            self._attempt(self.requests[request_id], self._is_ready)

    def has_requests(self) -> bool:
        """Whether a step would do something now."""
        stock: Any = super()
        if stock.has_requests() or self.blend_internal.stopped:
            return bool(stock.has_requests())
        waiting = self.blend_internal.num_waiting > 0 or self.blend_chunks.has_discards
        waiting |= bool(self.blend_fetches)
        waiting &= stock.pause_state == PauseState.UNPAUSED
        return waiting and not self.idles_for()

    def idles_for(self) -> float:
        """Seconds for which steps would do nothing, unless requests come."""
        stock: Any = super()
        if stock.has_requests() or self.blend_chunks.has_discards or self.blend_fetches:
            return 0.0
        return self.blend_internal.idles_for()

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
        self.blend_waiting.pop(request_id, None)
        self.blend_plans.forget(request_id)
        self.connectors.forget(request_id)

    # --- results --------------------------------------------------------------------------------

    def update_from_output(self, scheduler_output: Any, model_output: Any) -> Any:
        stock: Any = super()
        scheduled = scheduler_output.num_scheduled_tokens
        internal, started = self.blend_internal, getattr(scheduler_output, STARTED, None)
        seconds = time.monotonic() - started if started else 0.0
        if scheduled and all(map(internal.background.is_mine, scheduled)):
            internal.background.took(scheduler_output.total_num_scheduled_tokens, seconds)
        elif scheduled:
            internal.background.worked()
        if self.blend_fetches is not None and internal.calibration is not None and started:
            internal.calibration.step_took(scheduled, seconds)
            blended = any(name in self.blend_plans for name in scheduled)
            if not blended and not any(map(internal.measures, scheduled)):
                self.blend_fetches.computed(scheduler_output.total_num_scheduled_tokens, seconds)
        try:
            self._learn_of(WorkerEvents.of(model_output))
        except Exception as error:
            self.failed(error)
        results = stock.update_from_output(scheduler_output, model_output)
        for result in results.values():
            result.outputs = [out for out in result.outputs if not self._took(out)]
        return results

    def _learn_of(self, events: WorkerEvents) -> None:
        """Notes what the model's process tells."""
        if events.closed:
            self.switch_blending(False)
        self._in_order &= not events.forgotten
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
        if (fetches := self.blend_fetches) is not None:
            fetches.learn(events.loads)
            for key, found in events.fetched.items():
                fetches.answer(key, found)
            for tenant, chunks in events.claimed.items():
                fetches.claimed(tenant, chunks)
            for key, place in events.located.items():
                fetches.found(key, place)
        self._store_stats = events.store or self._store_stats

    def _lose(self, lost: Lost) -> None:
        """A chunk's KV is not where it should be: it will be computed again."""
        chunk = self.blend_chunks.lose(lost.key)
        if chunk is not None:
            self.blend_lookup.miss(chunk)
        request = self.requests.get(lost.request_id)
        if request is not None and lost.request_id in self.blend_plans:
            spans, new = self.blend_plans.lose(request, lost)
            if spans:
                self.blend_reports.lose(lost.request_id, spans, lost.reason, new)

    def _took(self, output: Any) -> bool:
        """Takes an output of the engine's own; adds what was reused to others."""
        request_id, ended = output.request_id, output.finish_reason is not None
        if self.blend_internal.is_mine(request_id):
            if ended:
                self.blend_internal.finish(request_id, output)
            return True
        # its prefill has ended: the prefix cache had part of these
        for chunk in self.blend_plans.end_harvest(request_id):
            self.blend_lookup.miss(self.blend_internal.contexts.by_itself(chunk))
        self.blend_reports.attach(output)
        if ended:
            self._forget(request_id, answered=True)
        return False

    def _shelf(self, request: Any, blend_request: BlendRequest) -> str:
        """Where the request's chunks are kept: its tenant's, of its adapter."""
        tenant = blend_request.tenant or request.cache_salt or ""
        return shelf(tenant, self.blend_internal.adapters.digest(request.lora_request))


class BlendSyncScheduler(BlendScheduler, Scheduler):
    """vLLM's scheduler with blending."""


class BlendAsyncScheduler(BlendScheduler, AsyncScheduler):
    """vLLM's asynchronous scheduler with blending."""
