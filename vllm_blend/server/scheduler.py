"""The engine's side of a blending server: a mixin for vLLM's scheduler.

``add_request``          turns a ``BlendRequest`` into a plan: chunks looked up, or found by content;
                         one whose chunks may be in a store's lower tiers waits for the answer, and
                         is told by the controller which of them to wait for, if its ratio is "auto"
``schedule``             lets in the engine's own requests: the start-up check and measurement,
                         missed chunks; lets a blended prompt wait for a step that has room for it
``update_from_output``   takes their results out, adds what was reused to the others' first output
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_blend.core import EXTRA_ARG, KeyedPlan, KeyedSpan
from vllm_blend.server.background import Background, chunk_context
from vllm_blend.server.chunks import KnownChunks, bytes_per_token
from vllm_blend.server.config import ServerSettings
from vllm_blend.server.fetches import Fetches, Waiting
from vllm_blend.server.gate import Gate, first_logprobs
from vllm_blend.server.lookup import Lookup
from vllm_blend.server.mail import ORDERS, Lost, News, Orders
from vllm_blend.server.pace import KEY as pace_key
from vllm_blend.server.pace import Pace
from vllm_blend.server.prefix import BlendKVCacheManager, BlockNames, disown_blocks
from vllm_blend.server.reports import Reports, sizes
from vllm_blend.server.wire import BlendRequest

logger = logging.getLogger("vllm.vllm_blend.server")

STARTED = "blend_started"
"""An attribute of vLLM's ``SchedulerOutput``: when the step was scheduled."""


class BlendScheduler:
    """Mixin for vLLM's schedulers."""

    # of vLLM's scheduler
    kv_cache_manager: Any
    vllm_config: Any
    log_stats: bool
    requests: dict[str, Any]
    max_num_scheduled_tokens: int
    max_num_running_reqs: int
    num_spec_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        stock: Any = super()
        stock.__init__(*args, **kwargs)
        settings = ServerSettings.of(self.vllm_config)
        assert settings is not None  # else compat.py would not have chosen this class
        model_config = self.vllm_config.model_config
        self.blend_settings = settings
        self.blend_token_bytes = bytes_per_token(self.vllm_config)
        self.blend_chunks = KnownChunks(settings.chunk_bytes // self.blend_token_bytes)
        context = chunk_context(self.vllm_config, settings.system, settings.head)
        if not context:
            logger.warning(
                "vllm_blend: no chat template and no BOS, so chunks are computed behind nothing, which "
                "costs quality; head sets a text."
            )
        longest = model_config.max_model_len - 1
        self.blend_background = Background(
            self.blend_chunks,
            context,
            longest - len(context),
            settings.background_share,
            self._own_request,
        )
        self.blend_fetches: Fetches | None = None
        self.blend_pace: Pace | None = None
        if settings.store is not None:
            self.blend_fetches = Fetches(self.blend_chunks, self.blend_background)
            if settings.auto:
                self.blend_fetches.claim("")  # so that they are known to the first request
            self.blend_pace = Pace.of(self.vllm_config, settings, self._own_request)
        self.blend_lookup = Lookup(
            self.blend_chunks, self.blend_background, self.blend_fetches, settings.min_chunk_tokens
        )
        self.blend_gate = Gate(
            model_config.get_vocab_size(),
            longest,
            model_config.dtype,
            settings.blend,
            self._own_request,
        )
        self._plans: dict[str, KeyedPlan] = {}
        self._store_stats: dict[str, int] = {}
        engine = self.vllm_config.parallel_config.data_parallel_index
        labels = model_config.served_model_name, str(engine)
        self.blend_reports = Reports(labels, settings.log_requests, self._sizes)
        self._block_size = kwargs["hash_block_size"]
        self._hasher: Any = None
        manager = self.kv_cache_manager
        if manager.enable_caching:
            # as the engine makes it for clients' requests
            hash_fn = get_hash_fn_by_name(self.vllm_config.cache_config.prefix_caching_hash_algo)
            self._hasher = get_request_block_hasher(self._block_size, hash_fn)
            manager.__class__ = type("BlendKVCacheManager", (BlendKVCacheManager, type(manager)), {})
            manager.blend_hasher, manager.blend_block_size = self._hasher, self._block_size

    # --- requests -----------------------------------------------------------------------------

    def add_request(self, request: Any) -> None:
        stock: Any = super()
        params = request.sampling_params
        wire = (params.extra_args or {}).get(EXTRA_ARG) if params is not None else None
        if isinstance(wire, dict):
            wish = BlendRequest.from_wire(wire)
            if self.blend_fetches is None:
                self._plan(request, wish)
            else:
                assert self.blend_pace is not None
                self.blend_pace.wanted |= wish.paced
                self.blend_fetches.waiting[request.request_id] = Waiting(wish)
                self._ask(request)
        stock.add_request(request)

    def _ask(self, request: Any) -> None:
        """Asks for the chunks that a waiting request lacks, once the start-up check is done; or first
        for where they are, once the engine is measured."""
        fetches, pace = self.blend_fetches, self.blend_pace
        if fetches is None or pace is None or self.blend_gate.verdict is None:
            return
        waiting = fetches.waiting[request.request_id]
        paced = waiting.wish.paced and bool(waiting.wish.spans) and not self._why_not()
        if paced and not pace.done:
            if waiting.awaits_measurement():
                return
            paced = False
        tokens, tenant = tuple(request.prompt_token_ids), _tenant(request, waiting.wish)
        if fetches.holds(waiting, tenant):
            return
        marked = [tokens[start:end] for start, end in waiting.wish.spans]
        can = not self._why_not()
        missing = [ids for ids in marked if can and self.blend_chunks.get(tenant, ids) is None]
        found = []
        if can and waiting.wish.auto:
            found = fetches.find(tenant, tokens[:-1], self.blend_settings.min_chunk_tokens)
        if paced:
            for ids in found:
                fetches.ask(tenant, ids)
            fetches.locate(waiting, tenant, missing)
        else:
            fetches.wait(waiting, tenant, missing + found)

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        """Asked by vLLM's scheduler before it lets a request in."""
        stock: Any = super()
        fetches = self.blend_fetches
        if fetches is not None and (waiting := fetches.waiting.get(request.request_id)):
            if waiting.keys is None and waiting.looked_for is None:
                self._ask(request)  # what it waited for may be there, or long enough in coming
            if waiting.located and self.blend_pace is not None:
                tokens, tenant = tuple(request.prompt_token_ids), _tenant(request, waiting.wish)
                fetches.decide(waiting, tenant, tokens, self.blend_pace)
            if not waiting.done:
                return False
            del fetches.waiting[request.request_id]
            self._plan(request, waiting.wish, waiting)
        return bool(stock._handle_blocked_waiting_request(request))

    def _plan(self, request: Any, wish: BlendRequest, waited: Waiting | None = None) -> None:
        """Gives the request its plan, or takes its wish away where nothing can be reused."""
        start = time.perf_counter()
        params = request.sampling_params
        tokens = tuple(request.prompt_token_ids)
        tenant = _tenant(request, wish)
        spans: list[KeyedSpan] = []
        missed = 0
        why = self._why_not()
        if not why:
            spans, missed = self.blend_lookup(tenant, tokens, wish)
            why = "" if spans else "no chunk is known yet" if missed else "no chunk in the prompt"
        settings, decision = wish.settings, waited.decision if waited is not None else None
        if decision is not None and any(decision.load):
            settings = replace(settings, recomp_ratio=decision.ratio)
        elif decision is not None and waited is not None and any(waited.tiers):
            spans, why = [], decision.reason
        params.extra_args = {k: v for k, v in params.extra_args.items() if k != EXTRA_ARG}
        plan = None
        if spans:
            timed = wish.report or bool(self.log_stats)
            plan = KeyedPlan(tuple(spans), settings, timed)
            params.extra_args[EXTRA_ARG] = self._plans[request.request_id] = plan
            self.blend_chunks.pin(span.key for span in spans)
            self._name_blocks(request, plan, tenant)
        self.blend_reports.add(
            request.request_id,
            len(tokens),
            plan,
            missed=missed,
            why_not=why,
            lookup_seconds=time.perf_counter() - start,
            asked=wish.report,
            decided=waited.told if waited is not None else None,
        )
        if waited is not None and (waited.keys or waited.looked_for):
            loaded = sum(span.key in (waited.keys or ()) for span in spans)
            seconds = min(waited.until, time.monotonic()) - waited.since
            self.blend_reports.waited(request.request_id, seconds, loaded)

    def _name_blocks(self, request: Any, plan: KeyedPlan, tenant: str) -> None:
        """Its approximate blocks get names of their own in the prefix cache."""
        if self._hasher is not None:
            names = BlockNames.of(request, plan, tenant, self._block_size)
            request.blend_names = names
            request.block_hashes = names.mixed(request, self._hasher, names.first)

    def _why_not(self) -> str:
        if self.blend_gate.verdict is None:
            return "the start-up check is still running"
        return self.blend_gate.verdict and f"the start-up check failed: {self.blend_gate.verdict}"

    # --- the engine's own requests --------------------------------------------------------------

    def _own_request(
        self, request_id: str, token_ids: list[int], plan: Any, num_logprobs: int | None = None
    ) -> Any:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(
            max_tokens=1,
            temperature=0,
            detokenize=False,
            logprobs=num_logprobs,
            skip_reading_prefix_cache=True,
            extra_args={EXTRA_ARG: plan},
        )
        request: Any = Request(request_id, token_ids, params, None, block_hasher=self._hasher)
        if isinstance(plan, KeyedPlan):
            self._name_blocks(request, plan, tenant=request_id)
        return request

    def _is_own(self, request_id: str) -> bool:
        return self._measures(request_id) or self.blend_background.is_mine(request_id)

    def _measures(self, request_id: str) -> bool:
        pace = self.blend_pace
        return self.blend_gate.is_mine(request_id) or (pace is not None and pace.is_mine(request_id))

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        stock: Any = super()
        for request in self.blend_gate.start():
            stock.add_request(request)
        if self.blend_gate.verdict is not None and not self.blend_gate.told:
            self._tell_verdict()
            self._ask_all()
        if self.blend_gate.verdict == "" and self._measured():
            busy = stock.get_num_unfinished_requests() > self.blend_background.num_running
            for request in self.blend_background.start(idle=not busy):
                stock.add_request(request)
        output = stock.schedule(*args, **kwargs)
        orders = Orders(self.blend_chunks.take_drops())
        if self.blend_fetches is not None:
            orders = self.blend_fetches.take_orders(orders.drop)
        if orders != Orders():
            setattr(output, ORDERS, orders)
        setattr(output, STARTED, time.monotonic())
        return output

    def _reserve_prefill_lookahead(self, request: Any, num_computed: int, num_new: int) -> int:
        """Asked by vLLM's scheduler how many of ``num_new`` tokens that a step has room for it takes.

        A blended prompt takes all that is left of it or a whole window, else it waits: tokens are
        chosen among those of one step, and must not depend on what else the step holds.
        """
        stock: Any = super()
        left = request.num_tokens - num_computed
        if request.request_id in self._plans and left > 1 and (window := self._window()):
            num_new = min(left, window) if num_new >= min(left, window) else 0
        return int(stock._reserve_prefill_lookahead(request, num_computed, num_new))

    def _window(self) -> int:
        """Tokens of a prompt that fit a step beside running decodes; 0: too few, vLLM cuts freely."""
        config = self.vllm_config.scheduler_config
        decodes = self.max_num_running_reqs * (1 + self.num_spec_tokens)
        window = self.max_num_scheduled_tokens - decodes
        if window < decodes or not config.enable_chunked_prefill:
            return 0
        return min(window, config.long_prefill_token_threshold or window)

    def _ask_all(self) -> None:
        """Something that requests waited for is done."""
        fetches = self.blend_fetches
        for request_id, waiting in fetches.waiting.items() if fetches is not None else ():
            if waiting.keys is None and waiting.looked_for is None:
                self._ask(self.requests[request_id])

    def _measured(self) -> bool:
        """Whether the engine is measured, or need not be; else the measurement goes on."""
        stock: Any = super()
        if self.blend_pace is None or self.blend_pace.done or not self.blend_pace.wanted:
            return True
        for request in self.blend_pace.start():
            stock.add_request(request)
        return False

    def _finish_pace(self, completed: bool) -> None:
        pace, fetches = self.blend_pace, self.blend_fetches
        assert pace is not None and fetches is not None
        pace.finish(completed)
        if pace.done:
            self.blend_chunks.refuse(pace_key)  # what it was measured with is not needed any more
            fetches.computed(*pace.longest)
            logger.info("vllm_blend: %s", pace)
            self._ask_all()

    def _tell_verdict(self) -> None:
        gate = self.blend_gate
        if gate.verdict:
            logger.error("vllm_blend: this model cannot blend: %s. Nothing is reused.", gate.verdict)
        else:
            logger.info("vllm_blend: the start-up check passed, largest error %.2g.", gate.error)
        gate.told = True

    def has_requests(self) -> bool:
        stock: Any = super()
        if stock.has_requests():
            return True
        waiting = self.blend_gate.verdict is None or self.blend_background.num_waiting > 0
        waiting |= bool(self.blend_fetches)
        if self.blend_pace is not None and self.blend_gate.verdict == "":
            waiting |= self.blend_pace.wanted and not self.blend_pace.done
        return waiting and bool(stock.pause_state == PauseState.UNPAUSED)

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        stock: Any = super()
        finished = stock.finish_requests(*args, **kwargs)
        for request in finished:
            self._forget(request.request_id)
            if self.blend_gate.is_mine(request.request_id):
                self.blend_gate.finish(None)
            elif self._measures(request.request_id):
                self._finish_pace(completed=False)
            elif self.blend_background.is_mine(request.request_id):
                self.blend_background.finish(request.request_id, completed=False)
        return finished

    def _forget(self, request_id: str) -> None:
        self.blend_reports.forget(request_id)
        if self.blend_fetches is not None:
            self.blend_fetches.waiting.pop(request_id, None)
        plan = self._plans.pop(request_id, None)
        if plan is not None:
            self.blend_chunks.unpin(span.key for span in plan.spans)

    # --- results --------------------------------------------------------------------------------

    def update_from_output(self, scheduler_output: Any, model_output: Any) -> Any:
        stock: Any = super()
        scheduled = scheduler_output.num_scheduled_tokens
        theirs = sum(n for request_id, n in scheduled.items() if not self._is_own(request_id))
        self.blend_background.earn(theirs)
        started = getattr(scheduler_output, STARTED, None)
        if self.blend_fetches is not None and self.blend_pace is not None and started:
            seconds = time.monotonic() - started
            self.blend_pace.step_took(scheduled, seconds)
            if not self._plans.keys() & scheduled.keys() and not any(map(self._measures, scheduled)):
                self.blend_fetches.computed(scheduler_output.total_num_scheduled_tokens, seconds)
        self._hear(News.of(model_output))
        results = stock.update_from_output(scheduler_output, model_output)
        for result in results.values():
            result.outputs = [out for out in result.outputs if not self._took(out)]
        return results

    def _hear(self, news: News) -> None:
        """Notes what the model's process tells."""
        for request_id, stages in news.seconds.items():
            self.blend_reports.took(request_id, stages)
        for lost in news.lost:
            self._lose(lost)
        for key, found in news.fetched.items():
            assert self.blend_fetches is not None
            self.blend_fetches.answer(key, found)
        for tenant, chunks in news.claimed.items():
            assert self.blend_fetches is not None
            self.blend_fetches.claimed(tenant, chunks)
        for key, place in news.located.items():
            assert self.blend_fetches is not None
            self.blend_fetches.learn(news.loads)
            self.blend_fetches.found(key, place)
        self._store_stats = news.store or self._store_stats

    def _lose(self, lost: Lost) -> None:
        """A chunk's KV is not where it should be: it will be computed again.

        The request that was to reuse it goes on with what is left of its plan. Its blocks were named
        by the plan when it was scheduled, so they are taken out of the prefix cache. (A request with
        the same plan in the same step may have read them: they are nearer to full prefill than their
        names say.)
        """
        chunk = self.blend_chunks.lose(lost.key)
        if chunk is not None:
            self.blend_lookup.miss(chunk.tenant, chunk.token_ids)
        if self.blend_gate.is_mine(lost.request_id):
            self.blend_gate.lose()
        request, plan = self.requests.get(lost.request_id), self._plans.get(lost.request_id)
        if request is None or plan is None:
            return
        spans = [s for s in plan.spans if s.key == lost.key and s.end > lost.computed]
        if not spans:  # it has their tokens from the prefix cache
            return
        self.blend_chunks.unpin(span.key for span in spans)
        left = tuple(span for span in plan.spans if span not in spans)
        del self._plans[lost.request_id], request.sampling_params.extra_args[EXTRA_ARG]
        new = replace(plan, spans=left) if left else None
        if new is not None:
            self._plans[lost.request_id] = request.sampling_params.extra_args[EXTRA_ARG] = new
        if self._hasher is not None:
            disown_blocks(
                request,
                max(lost.computed, plan.spans[0].start),
                self._hasher,
                self.kv_cache_manager,
            )
        self.blend_reports.lose(lost.request_id, spans, lost.reason, new)

    def _took(self, output: Any) -> bool:
        """Takes an output of the engine's own; adds what was reused to others."""
        request_id = output.request_id
        if self.blend_background.is_mine(request_id):
            if output.finish_reason is not None:
                self.blend_background.finish(request_id, completed=True)
            return True
        if self.blend_gate.is_mine(request_id):
            if output.finish_reason is not None:
                self.blend_gate.finish(first_logprobs(output.new_logprobs))
            return True
        if self._measures(request_id):
            if output.finish_reason is not None:
                self._finish_pace(completed=True)
            return True
        self.blend_reports.attach(output)
        if output.finish_reason is not None:
            self._forget(request_id)
        return False

    def _sizes(self) -> dict[str, Any]:
        host = len(self.blend_chunks), self.blend_chunks.num_tokens * self.blend_token_bytes
        return sizes(*host, self._store_stats) | {
            "computed_chunks": self.blend_background.num_computed,
            "evicted_chunks": self.blend_chunks.num_evicted,
        }


class BlendSyncScheduler(BlendScheduler, Scheduler):
    """vLLM's scheduler with blending."""


class BlendAsyncScheduler(BlendScheduler, AsyncScheduler):
    """vLLM's asynchronous scheduler with blending."""


def _tenant(request: Any, wish: BlendRequest) -> str:
    return wish.tenant or request.cache_salt or ""
