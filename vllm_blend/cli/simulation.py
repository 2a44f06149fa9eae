"""A server without its model: vLLM's own front and scheduler, as blending changes them, over a stand-in
for the model's process that keeps no KV, but knows which it would have, and how long a step would take.

What is looked up, kept, evicted, computed in the background and found in the prefix cache is therefore
what a server does, not a model of it. A clock of its own says when requests come and steps end.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_blend.cli.prompts import Row
from vllm_blend.cli.step_costs import StepCosts, rows_of
from vllm_blend.core.kv import KVShape
from vllm_blend.core.plans import EXTRA_ARG, ChunkIds, ChunkKey, CollectPlan, KeyedPlan
from vllm_blend.core.settings import num_kept
from vllm_blend.core.step import Blended
from vllm_blend.server.config import ServerSettings
from vllm_blend.server.messages import EVENTS, WorkerCommands, WorkerEvents
from vllm_blend.server.request import REPORT_KEY
from vllm_blend.store.config import TIERS
from vllm_blend.store.index import Index
from vllm_blend.store.keys import ModelKey
from vllm_blend.store.load_time import LoadTime
from vllm_blend.store.record import PAGE, Layout


@dataclass
class TierIndex:
    """What a tier of the store would hold, and when it drops the least recently used."""

    name: str
    budget_bytes: int
    load: LoadTime
    index: Index = field(default_factory=Index)

    def put(self, digest: bytes, num_bytes: int) -> None:
        if num_bytes > self.budget_bytes:
            return
        while self.index.num_bytes + num_bytes + PAGE > self.budget_bytes:
            oldest = self.index.oldest()
            if oldest is None:
                break
            self.index.remove(oldest)
        self.index.put(digest, num_bytes)


@dataclass(frozen=True)
class Served:
    """One request: its report (``request_reports.py``), and when it came and had its first token."""

    report: Mapping[str, Any]
    came_at: float
    first_token_at: float

    @property
    def ttft(self) -> float:
        return self.first_token_at - self.came_at


class StandIn:
    """The model's process.

    Args:
        requests: the scheduler's, by id.
        model_key: of the store's keys.
        costs: None: steps take no time.
    """

    def __init__(
        self,
        requests: Mapping[str, Any],
        model_key: ModelKey,
        tiers: Sequence[TierIndex],
        costs: StepCosts | None,
    ) -> None:
        self.tiers = tiers
        self.computed: dict[ChunkKey, int] = {}  # every chunk that was ever kept, and its tokens
        self._requests, self._model_key, self._costs = requests, model_key, costs
        self._num_layers = model_key.shape.num_layers
        self._coming: list[tuple[float, ChunkKey, bool]] = []  # loads, by their end

    @property
    def next_load(self) -> float | None:
        """When the next load ends."""
        return min((at for at, _, _ in self._coming), default=None)

    def run(self, output: Any, now: float) -> tuple[Any, float]:
        """One step of the scheduler's: the model runner's output, and the seconds it takes."""
        from vllm.v1.outputs import ModelRunnerOutput

        events = WorkerEvents()
        commands = WorkerCommands.of(output)
        for key, chunk in commands.fetch:
            self._coming.append(self._fetch(key, chunk, now))
        for tenant, _ in (*commands.claim, *commands.refresh):
            events.claimed[tenant] = []
        events.fetched = {key: found for at, key, found in self._coming if at <= now}
        self._coming = [one for one in self._coming if one[0] > now]
        seconds, names, sampled = 0.0, [], []
        for name, count in output.num_scheduled_tokens.items():
            request = self._requests[name]
            end = request.num_computed_tokens  # this step's among them
            seconds = self._add(seconds, *self._window(request, end - count, end, events))
            names.append(name)
            sampled.append([0] if end >= request.num_tokens else [])
        if self._costs is not None:
            seconds += self._costs.keep * sum(self.computed[key] for key in events.kept)
        found = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled)
        setattr(found, EVENTS, events)
        return found, seconds

    def _window(
        self, request: Any, start: int, end: int, events: WorkerEvents
    ) -> tuple[int, float, bool]:
        """A request's part of a step: tokens up to its end, rows, whether it blends."""
        plan = (request.sampling_params.extra_args or {}).get(EXTRA_ARG)
        if isinstance(plan, CollectPlan):
            self._collect(plan, start, end, events)
        if not isinstance(plan, KeyedPlan):
            return end, end - start, False
        for part in plan.harvest:
            self._collect(part, start, end, events)
        inside = [(max(s.start, start), min(s.end, end), s.exact) for s in plan.spans]
        reused = sum(max(0, hi - lo) for lo, hi, _ in inside)
        exact = sum(max(0, hi - lo) for lo, hi, is_exact in inside if is_exact)
        if not reused:
            return end, end - start, False
        own = end - start - reused
        settings = plan.settings.for_rows(own, reused, has_question=end >= request.num_prompt_tokens)
        recomputed = num_kept(settings.last_ratio, reused - exact)
        events.blended.append(Blended(request.request_id, start, reused, recomputed))
        rows = rows_of(own, reused, recomputed, settings, self._num_layers)
        return end, rows, True

    def _collect(self, plan: CollectPlan, start: int, end: int, events: WorkerEvents) -> None:
        """Keeps a chunk once all of it was computed."""
        before = plan.is_whole
        plan.advance(start, end)
        if plan.key is None or plan.chunk is None or plan.scored or before or not plan.is_whole:
            return
        events.kept.append(plan.key)
        self.computed[plan.key] = plan.num_tokens
        digest, num_bytes = self._record(plan.chunk)
        for tier in self.tiers:
            tier.put(digest, num_bytes)

    def _fetch(self, key: ChunkKey, chunk: ChunkIds, now: float) -> tuple[float, ChunkKey, bool]:
        """When a load ends, of which chunk, and whether any tier has it."""
        digest, num_bytes = self._record(chunk)
        for tier in self.tiers:
            if digest in tier.index:
                tier.put(digest, num_bytes)
                return now + tier.load.seconds(num_bytes), key, True
        return now, key, False

    def _record(self, chunk: ChunkIds) -> tuple[bytes, int]:
        """The name and the size of a chunk's record."""
        key = self._model_key.chunk(chunk.token_ids, chunk.context, chunk.tenant)
        return key.digest, Layout.of(key, scored=True).num_bytes

    def _add(self, seconds: float, num_tokens: int, num_rows: float, blends: bool) -> float:
        """The time of a step with one request more; what a step costs anyway counts once."""
        if self._costs is None:
            return 0.0
        times = self._costs.blended if blends else self._costs.full
        alone = times.seconds(num_tokens, num_rows)
        return alone if not seconds else seconds + alone - times.fixed


class Simulation:
    """A server that requests can be sent to.

    Args:
        config: vLLM's.
        cache_gb: of vLLM's own KV cache.
        costs: of steps; None: not known.
        loads: of the store's tiers, by name.
    """

    def __init__(
        self,
        config: Any,
        cache_gb: float,
        costs: StepCosts | None = None,
        loads: Mapping[str, LoadTime] | None = None,
    ) -> None:
        from vllm.renderers.online_renderer import OnlineRenderer
        from vllm.tokenizers.registry import cached_tokenizer_from_config
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        from vllm_blend.server.frontend.renderer import BlendRenderer

        self._config = config
        settings = ServerSettings.of(config)
        assert settings is not None
        self.settings = settings
        tokenizer = cached_tokenizer_from_config(config.model_config)
        self.chat = bool(getattr(tokenizer, "chat_template", None) or settings.chat_template)
        self._front = OnlineRenderer(
            config.model_config,
            BlendRenderer(config, tokenizer),
            request_logger=None,
            chat_template=settings.chat_template,
            chat_template_content_format="auto",
        )
        hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        self.scheduler = make_scheduler(config, cache_gb)
        block_size = self.scheduler._block_size
        self._hasher = get_request_block_hasher(block_size, hash_fn)
        model = config.model_config
        shape = KVShape(
            model.get_num_layers(config.parallel_config),
            model.get_num_kv_heads(config.parallel_config)
            * config.parallel_config.tensor_parallel_size,
            model.get_head_size(),
            model.dtype,
        )
        store = settings.store or {}
        tiers = [
            TierIndex(name, round(store[name]["budget_gb"] * 1e9), (loads or {}).get(name, LoadTime()))
            for name in TIERS
            if store.get(name)
        ]
        key = ModelKey("simulated", "", shape, storage=store.get("storage", "auto"))
        self.stand_in = StandIn(self.scheduler.requests, key, tiers, costs)
        self.now = 0.0
        self.scheduler.blend_internal.background.clock = lambda: self.now

    def serve(self, rows: Iterable[Row], field: Any = None) -> list[Served]:
        """The trace's requests, each when it comes: as its row says; else once the one before has its
        first token, and the server has nothing left to do.

        Raises:
            ValueError: names what a server would refuse.
        """
        found: dict[str, Served] = {}
        came: dict[str, float] = {}
        for number, row in enumerate(rows):
            if row.at is None:
                self._run(came, found, until=None)
            else:
                self._run(came, found, until=row.at)
                self.now = max(self.now, row.at)
            came[str(number)] = self.now if row.at is None else row.at
            self._send(str(number), row, field)
        self._run(came, found, until=None)
        return [found[name] for name in came]

    def _run(self, came: Mapping[str, float], found: dict[str, Served], until: float | None) -> None:
        """Steps until a time, or until there is nothing left to do."""
        from vllm_blend.server.scheduler.scheduler import STARTED

        state = self.scheduler
        while (state.idles_for() or state.has_requests()) and (until is None or self.now < until):
            output = self.scheduler.schedule()
            answer, seconds = self.stand_in.run(output, self.now)
            self.now += seconds
            if not output.num_scheduled_tokens:
                self.now = self._next_event(until)
            setattr(output, STARTED, time.monotonic() - seconds)  # what the scheduler takes it for
            results = self.scheduler.update_from_output(output, answer)
            for out in (out for result in results.values() for out in result.outputs):
                report = (out.kv_transfer_params or {}).get(REPORT_KEY) or {}
                found[out.request_id] = Served(report, came[out.request_id], self.now)

    def _next_event(self, until: float | None) -> float:
        """When a server that has nothing to compute goes on: after a load, a rest, or at ``until``."""
        load, rest = self.stand_in.next_load, self.scheduler.idles_for()
        ends = [at for at in (load, self.now + rest if rest else None) if at is not None]
        return min(max(self.now, min(ends, default=self.now)), math.inf if until is None else until)

    def _send(self, name: str, row: Row, field: Any) -> None:
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.request import Request

        from vllm_blend.server.frontend.admission import admit

        path, body = row.request("simulated", self.chat, field)
        prompt = self._render(path, body)
        params = SamplingParams(max_tokens=1, temperature=0, detokenize=False, ignore_eos=True)
        ids = list(prompt["prompt_token_ids"])
        salt = body.get("cache_salt")
        request = EngineCoreRequest(name, ids, None, params, None, 0.0, None, salt, None)
        admit(self._config, request, body["vllm_xargs"]["blend"], prompt)
        longest = self._config.model_config.max_model_len
        if len(ids) >= longest:
            raise ValueError(
                f"it has {len(ids)} tokens; the model takes {longest - 1} (--max-model-len)"
            )
        self.scheduler.add_request(Request.from_engine_core_request(request, self._hasher))

    def _render(self, path: str, body: dict[str, Any]) -> Any:
        """A prompt's token ids and spans, as the server's front makes them."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest

        if path.endswith("/chat/completions"):
            rendered: Any = asyncio.run(self._front.render_chat(ChatCompletionRequest(**body)))
            if not isinstance(rendered, tuple):
                raise ValueError(rendered.error.message)
            return rendered[1][0]
        (prompt,) = asyncio.run(self._front.render_completion(CompletionRequest(**body)))
        return prompt


def make_scheduler(config: Any, cache_gb: float) -> Any:
    """The scheduler of a blending server, over a KV cache of this size."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from vllm_blend.server.scheduler.scheduler import BlendSyncScheduler

    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    spec = FullAttentionSpec(
        block_size=cache.block_size,
        num_kv_heads=model.get_num_kv_heads(parallel),
        head_size=model.get_head_size(),
        dtype=model.dtype,
    )
    num_layers = model.get_num_layers(parallel)
    layers = [f"layers.{index}" for index in range(num_layers)]
    num_blocks = int(cache_gb * 1e9 / (spec.page_size_bytes * num_layers))
    cache.num_gpu_blocks = num_blocks
    return BlendSyncScheduler(
        config,
        KVCacheConfig(
            num_blocks,
            [],
            [KVCacheGroupSpec(layers, spec)],
            prefix_cache_retention_interval=cache.prefix_cache_retention_interval,
        ),
        StructuredOutputManager(config),
        cache.block_size,
        hash_block_size=cache.block_size,
        log_stats=True,
    )
