"""The engine's own requests: the measurement, chunks that were missed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from vllm_blend.core.plans import EXTRA_ARG, ChunkIds, CollectPlan, KeyedPlan
from vllm_blend.core.prompt import TokenIds
from vllm_blend.server.chunks.chunk_contexts import HARVESTED, chunk_contexts
from vllm_blend.server.chunks.chunk_registry import ChunkRegistry
from vllm_blend.server.chunks.prefix_cache import name_blocks, name_chunk_blocks
from vllm_blend.server.config import ServerSettings
from vllm_blend.server.internal.background_prefill import BackgroundPrefill
from vllm_blend.server.internal.calibration import KEY as CALIBRATION_KEY
from vllm_blend.server.internal.calibration import Calibration
from vllm_blend.store.adapters import Adapters

logger = logging.getLogger("vllm.vllm_blend.server")


class InternalRequests:
    """What the engine asks of itself, and when; nobody sees the answers.

    Args:
        vllm_config: the engine's.
        settings: the server's.
        chunks: that are known.
        hasher: of the prefix cache; None: there is none.
        block_size: of its blocks, in tokens.
        on_measured: called once the engine is measured.

    Attributes:
        calibration: the measurement; None: without a store there is nothing to decide by it.
        background: the missed chunks.
        contexts: what chunks are computed after.
        adapters: of clients' requests; a chunk is computed with its own.
        stopped: the engine is shutting down: nothing is begun but what a client's request waits for.
        paused: blending is off: nothing is begun.
    """

    def __init__(
        self,
        vllm_config: Any,
        settings: ServerSettings,
        chunks: ChunkRegistry,
        hasher: Callable[[Any], list[Any]] | None,
        block_size: int,
        on_measured: Callable[[], None],
    ) -> None:
        model_config = vllm_config.model_config
        longest = model_config.max_model_len - 1
        self.stopped = self.paused = False
        self.adapters = Adapters()
        self.contexts = chunk_contexts(
            vllm_config,
            settings.system,
            settings.head,
            settings.stand_in,
            settings.chat_template,
            settings.chat_template_kwargs,
            settings.harvest,
        )
        if not self.contexts.first:
            logger.warning(
                "vllm_blend: no chat template and no BOS, so chunks are computed after nothing, which "
                "costs quality; head sets a text."
            )
        self.calibration: Calibration | None = None
        if settings.store is not None:
            self.calibration = Calibration.of(vllm_config, settings, self._make)
        self.background = BackgroundPrefill(
            chunks, longest, settings.background_share, self._make, self._scoring
        )
        self._scored = "static" in settings.blend.policies
        self._chunks = chunks
        self._hasher, self._block_size = hasher, block_size
        self._on_measured = on_measured

    @property
    def num_waiting(self) -> int:
        """What is left to do, whether or not clients' requests come."""
        return (
            0 if self.stopped or self.paused else (not self._measured()) + self.background.num_waiting
        )

    def idles_for(self) -> float:
        """Seconds until there may be something to begin with, while no requests come; 0: there is."""
        return self.background.idles_for() if self.num_waiting and self._measured() else 0.0

    def is_mine(self, request_id: str) -> bool:
        return self.measures(request_id) or self.background.is_mine(request_id)

    def measures(self, request_id: str) -> bool:
        """Whether it is a request of the measurement."""
        return self.calibration is not None and self.calibration.is_mine(request_id)

    def start(self, num_unfinished: int) -> list[Any]:
        """Engine requests to begin with now; ``num_unfinished``: requests in the engine."""
        if self.paused or (self.stopped and (self._measured() or not num_unfinished)):
            return []
        if self._measured():
            return self.background.start(idle=num_unfinished <= self.background.num_running)
        assert self.calibration is not None
        return self.calibration.start()

    def give_up(self, num_unfinished: int) -> list[str]:
        """Requests that are to be ended now; ``num_unfinished``: requests in the engine."""
        return self.background.give_up() if num_unfinished > self.background.num_running else []

    def finish(self, request_id: str, output: Any = None) -> None:
        """One of its requests has ended with vLLM's engine output; None: it was aborted."""
        if self.background.is_mine(request_id):
            self.background.finish(request_id)
        elif self.calibration is not None:
            self.calibration.finish(completed=output is not None)
            if self.calibration.done:
                self._chunks.refuse(CALIBRATION_KEY)  # what it was measured with is not needed any more
                logger.info("vllm_blend: %s", self.calibration)
                self._on_measured()

    def _scoring(self, chunk: ChunkIds) -> TokenIds | None:
        """What a chunk is computed after for its scores; None: it needs none."""
        if not self._scored or chunk.context not in (self.contexts.later, HARVESTED):
            return None  # one that stands first in its prompt is exact there
        return self.contexts.scoring

    def _measured(self) -> bool:
        """Whether the engine is measured, or need not be."""
        return self.calibration is None or self.calibration.done or not self.calibration.wanted

    def _make(self, request_id: str, token_ids: list[int], plan: Any) -> Any:
        """An engine request; None: the adapter of its chunk is not to be had any more."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        adapter = None
        chunk = plan.chunk if isinstance(plan, CollectPlan) else None
        if chunk is not None:
            try:
                adapter = self.adapters.request(chunk.tenant)
            except FileNotFoundError as error:
                logger.warning("vllm_blend: a chunk is not computed: %s", error)
                return None
        params = SamplingParams(
            max_tokens=1,
            temperature=0,
            detokenize=False,
            skip_reading_prefix_cache=chunk is None,  # what is measured is computed
            extra_args={EXTRA_ARG: plan},
        )
        request: Any = Request(
            request_id, token_ids, params, None, lora_request=adapter, block_hasher=self._hasher
        )
        if self._hasher is None:
            return request
        if isinstance(plan, KeyedPlan):
            name_blocks(request, plan, request_id, self._block_size)
        elif chunk is not None:
            name_chunk_blocks(request, plan.start, self._block_size)
        return request
