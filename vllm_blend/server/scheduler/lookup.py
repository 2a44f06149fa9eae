"""Which chunks a prompt reuses: those that its request names, and those found in it."""

from __future__ import annotations

from dataclasses import replace

from vllm_blend.core.plans import ChunkIds, ChunkKey, KeyedSpan
from vllm_blend.core.prompt import TokenIds
from vllm_blend.server.chunks.chunk_contexts import Contexts
from vllm_blend.server.chunks.chunk_registry import ChunkRegistry
from vllm_blend.server.chunks.token_index import SequenceIndex, Windows
from vllm_blend.server.internal.background_prefill import BackgroundPrefill
from vllm_blend.server.request import BlendRequest, pieces
from vllm_blend.server.scheduler.tier_fetches import Fetches

LEARNED_TOKENS = 64
"""Auto mode: a text that comes back in another place becomes a chunk from this length on."""
RECENT_TOKENS = 1_000_000
"""Auto mode: tokens of past prompts that are remembered, to see what comes back."""


class Lookup:
    """Looks chunks up; those that are missed are fetched, or computed in the background.

    Args:
        chunks: that are in memory.
        background: where the others are computed.
        fetches: of the store, where there is one.
        contexts: what chunks are computed behind.
        min_tokens: of a chunk, or a part of one, that is found by content.
        max_tokens: of a chunk that is learned.
    """

    def __init__(
        self,
        chunks: ChunkRegistry,
        background: BackgroundPrefill,
        fetches: Fetches | None,
        contexts: Contexts,
        min_tokens: int,
        max_tokens: int,
    ) -> None:
        self._chunks, self._background, self._fetches = chunks, background, fetches
        self._contexts = contexts
        self._min_tokens, self._max_tokens = min_tokens, max_tokens
        self._recent = SequenceIndex(RECENT_TOKENS)
        self._num_seen = 0

    def __call__(
        self, tenant: str, tokens: TokenIds, blend_request: BlendRequest
    ) -> tuple[list[KeyedSpan], int]:
        """Spans of the prompt with known KV, ascending, and the number of chunks that were missed."""
        spans, missed = [], 0
        for (start, end), chunk in zip(
            blend_request.spans, self.marked(tenant, tokens, blend_request), strict=True
        ):
            key, context = self.known(chunk)
            if context != chunk.context:
                self.miss(chunk)  # the next prompt gets it behind what suits its place
            if key is None or context is None:
                missed += 1
            else:
                exact = tokens[:start] == context
                spans.append(KeyedSpan(start, end, key, exact=exact))
        if blend_request.auto:
            windows = Windows.of(tokens)
            spans += self._find(tenant, windows, spans)
            self._learn(tenant, tokens, windows, spans)
        return sorted(spans, key=lambda span: span.start), missed

    def marked(self, tenant: str, tokens: TokenIds, blend_request: BlendRequest) -> list[ChunkIds]:
        """The chunks that a request names, each behind what suits its place."""
        return [
            ChunkIds(tenant, tokens[start:end], self._contexts.at(start, blend_request.spans[0][0]))
            for start, end in blend_request.spans
        ]

    def known(self, chunk: ChunkIds) -> tuple[ChunkKey, TokenIds] | tuple[None, None]:
        """The key of a chunk that is in memory, else of the same tokens' for another place; and what
        that is computed behind."""
        for context in dict.fromkeys((chunk.context, *self._contexts[:2])):
            if (key := self._chunks.get(replace(chunk, context=context))) is not None:
                return key, context
        return None, None

    def _find(self, tenant: str, windows: Windows, taken: list[KeyedSpan]) -> list[KeyedSpan]:
        """Known chunks in the prompt outside the spans that are taken."""
        # the last token's logits start the answer: it is always computed
        prompt = windows.head(len(windows.tokens) - 1)
        runs = [
            (run, context)
            for context in dict.fromkeys(self._contexts[:2])
            for run in self._chunks.find(tenant, context, prompt, self._min_tokens)
        ]
        places = [(span.start, span.end) for span in taken]
        suited = self._contexts.suited(runs, places)
        first_start = min([start for start, _ in places] + [run.start for run, _ in suited], default=0)
        spans = []
        for run, context in suited:
            assert isinstance(run.key, bytes)
            behind = context + self._chunks.chunk(run.key).token_ids[: run.offset]
            same_length = len(behind) == run.start
            exact = same_length and windows.tokens[: run.start].tolist() == list(behind)
            spans.append(KeyedSpan(run.start, run.end, run.key, run.offset, exact))
            if context != (better := self._contexts.at(run.start, first_start)):
                self.miss(replace(self._chunks.chunk(run.key), context=better))
        return spans

    def miss(self, chunk: ChunkIds) -> None:
        """A chunk is not in memory: it is fetched, or computed in the background."""
        if self._fetches is None:
            self._background.add(chunk)
        else:
            self._fetches.ask(chunk)

    def _learn(self, tenant: str, tokens: TokenIds, windows: Windows, spans: list[KeyedSpan]) -> None:
        """Text of earlier prompts that comes back behind other text becomes a chunk."""
        # a chunk that is too short to be found would be learned again and again
        known = windows.head(len(tokens) - 1)
        starts = [span.start for span in spans]
        for run in self._recent.find(known, max(LEARNED_TOKENS, self._min_tokens)):
            covered = any(run.start < span.end and span.start < run.end for span in spans)
            assert isinstance(run.key, tuple)
            if run.start > 0 and not covered and run.key[0] == tenant:
                for start, end in pieces(run.start, run.end, self._max_tokens):
                    starts.append(start)
                    context = self._contexts.at(start, min(starts))
                    self.miss(ChunkIds(tenant, tokens[start:end], context))
        self._num_seen += 1
        self._recent.add((tenant, self._num_seen), windows)
