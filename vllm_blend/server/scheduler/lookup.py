"""Which chunks a prompt reuses: those that its request names, and those found in it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vllm_blend.core.plans import ChunkIds, ChunkKey, KeyedSpan
from vllm_blend.core.prompt import TokenIds
from vllm_blend.server.chunks.askers import ANSWERED
from vllm_blend.server.chunks.chunk_contexts import Contexts, Places
from vllm_blend.server.chunks.chunk_registry import ChunkRegistry
from vllm_blend.server.chunks.shared_index import SharedIndex
from vllm_blend.server.chunks.token_index import Windows
from vllm_blend.server.internal.background_prefill import BackgroundPrefill
from vllm_blend.server.request import MAX_SPANS, BlendRequest, Span
from vllm_blend.server.scheduler.tier_fetches import Fetches

LEARNED_TOKENS = 64
"""Auto mode: a text that comes back in another place becomes a chunk from this length on."""
RECENT_TOKENS, RECENT_TENANTS = 1_000_000, 256
"""Auto mode: tokens of past prompts that are remembered, to see what comes back in another prompt of
their tenant; and tenants."""


@dataclass(frozen=True)
class Found:
    """What was found of a request's chunks.

    Attributes:
        spans: of the prompt, with known KV, ascending.
        missed: chunks that are not in memory.
        short: chunks that are too short to be reused.
    """

    spans: list[KeyedSpan]
    missed: int
    short: int


class Lookup:
    """Looks chunks up; those that are missed are fetched, or computed in the background.

    Args:
        chunks: that are in memory.
        background: where the others are computed.
        fetches: of the store, where there is one.
        contexts: what chunks are computed behind.
        min_tokens: shorter chunks, and shorter parts of one, are computed afresh.
    """

    def __init__(
        self,
        chunks: ChunkRegistry,
        background: BackgroundPrefill,
        fetches: Fetches | None,
        contexts: Contexts,
        min_tokens: int,
    ) -> None:
        self._chunks, self._background, self._fetches = chunks, background, fetches
        self._contexts, self._min_tokens = contexts, min_tokens
        self._recent = SharedIndex(RECENT_TOKENS, RECENT_TENANTS)  # by tenant
        self._num_seen = 0

    def __call__(
        self,
        tenant: str,
        tokens: TokenIds,
        blend_request: BlendRequest,
        request_id: str = ANSWERED,
    ) -> Found:
        """The prompt's chunks; those that are not in memory are asked for."""
        spans, missed = [], 0
        named = self.marked(tenant, tokens, blend_request)
        for (start, end), chunk in named:
            key, context = self.known(chunk)
            if context != chunk.context:
                # the next prompt gets it behind what suits its place
                self.miss(chunk, request_id)
            if key is None or context is None:
                missed += 1
            else:
                exact = start == len(context) and tokens[:start] == context
                spans.append(KeyedSpan(start, end, key, exact=exact))
        if blend_request.auto:
            windows = Windows.of(tokens)
            spans += self._find(tenant, windows, spans, request_id)
            self._learn(tenant, tokens, windows, spans, request_id)
        spans.sort(key=lambda span: span.start)
        return Found(spans, missed, len(blend_request.spans) - len(named))

    def marked(
        self, tenant: str, tokens: TokenIds, blend_request: BlendRequest
    ) -> list[tuple[Span, ChunkIds]]:
        """The chunks that a request names, but for short ones, each behind what suits its place."""
        spans = [span for span in blend_request.spans if span[1] - span[0] >= self._min_tokens]
        return [
            (
                (start, end),
                ChunkIds(tenant, tokens[start:end], self._contexts.at(start, spans[0][0])),
            )
            for start, end in spans
        ]

    def known(self, chunk: ChunkIds) -> tuple[ChunkKey, TokenIds] | tuple[None, None]:
        """The key of a chunk that is in memory, else of the same tokens' for another place; and what
        that is computed behind."""
        for context in dict.fromkeys((chunk.context, *self._contexts[:2])):
            if (key := self._chunks.get(replace(chunk, context=context))) is not None:
                return key, context
        return None, None

    def _find(
        self, tenant: str, windows: Windows, taken: list[KeyedSpan], request_id: str
    ) -> list[KeyedSpan]:
        """Known chunks in the prompt outside the spans that are taken."""
        # the last token's logits start the answer: it is always computed
        prompt = windows.head(len(windows.tokens) - 1)
        runs = [
            (run, context)
            for context in dict.fromkeys(self._contexts[:2])
            for run in self._chunks.find(tenant, context, prompt, self._min_tokens)
        ]
        places = [(span.start, span.end) for span in taken]
        suited = self._contexts.suited(runs, places)[: MAX_SPANS - len(taken)]
        first_start = min([start for start, _ in places] + [run.start for run, _ in suited], default=0)
        spans = []
        for run, context in suited:
            assert isinstance(run.key, bytes)
            exact = False
            if run.offset == 0 and run.start == len(context):
                exact = windows.tokens[: run.start].tolist() == list(context)
            spans.append(KeyedSpan(run.start, run.end, run.key, run.offset, exact))
            if context != (better := self._contexts.at(run.start, first_start)):
                self.miss(replace(self._chunks.chunk(run.key), context=better), request_id)
        return spans

    def miss(self, chunk: ChunkIds, request_id: str = ANSWERED) -> None:
        """A chunk is not in memory: it is fetched, or computed in the background."""
        if self._fetches is None:
            self._background.add(chunk, request_id)
        else:
            self._fetches.ask(chunk, request_id)

    def _learn(
        self,
        tenant: str,
        tokens: TokenIds,
        windows: Windows,
        spans: list[KeyedSpan],
        request_id: str,
    ) -> None:
        """Text of a tenant's earlier prompts that comes back behind other text becomes a chunk."""
        # a chunk that is too short to be found would be learned again and again
        known = windows.head(len(tokens) - 1)
        places = Places((span.start, span.end) for span in spans)
        first_start = places.starts[0] if spans else len(tokens)
        recent = self._recent.get(tenant)
        for run in recent.find(known, max(LEARNED_TOKENS, self._min_tokens)) if recent else ():
            if run.start > 0 and places.are_free(run.start, run.end):
                first_start = min(first_start, run.start)
                context = self._contexts.at(run.start, first_start)
                self.miss(ChunkIds(tenant, tokens[run.start : run.end], context), request_id)
        self._num_seen += 1
        self._recent.add(tenant, self._num_seen, windows)
