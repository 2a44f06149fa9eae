"""Which chunks a prompt reuses: those that its request names, and those found in it."""

from __future__ import annotations

from vllm_blend.core import KeyedSpan
from vllm_blend.prompt import TokenIds
from vllm_blend.server.background import Background
from vllm_blend.server.chunks import KnownChunks
from vllm_blend.server.fetches import Fetches
from vllm_blend.server.match import SequenceIndex, Windows
from vllm_blend.server.wire import BlendRequest

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
        min_tokens: of a chunk, or a part of one, that is found by content.
    """

    def __init__(
        self,
        chunks: KnownChunks,
        background: Background,
        fetches: Fetches | None,
        min_tokens: int,
    ) -> None:
        self._chunks, self._background, self._fetches = chunks, background, fetches
        self._min_tokens = min_tokens
        self._computed_at = len(background.context)
        self._recent = SequenceIndex(RECENT_TOKENS)
        self._num_seen = 0

    def __call__(
        self, tenant: str, tokens: TokenIds, wish: BlendRequest
    ) -> tuple[list[KeyedSpan], int]:
        """Spans of the prompt with known KV, ascending, and the number of chunks that were missed."""
        spans, missed = [], 0
        for start, end in wish.spans:
            key = self._chunks.get(tenant, tokens[start:end])
            if key is not None:
                spans.append(KeyedSpan(start, end, key, computed_at=self._computed_at))
            else:
                missed += 1
                self.miss(tenant, tokens[start:end])
        if wish.auto:
            windows = Windows.of(tokens)
            spans += self._find(tenant, windows, spans)
            self._learn(tenant, tokens, windows, spans)
        return sorted(spans, key=lambda span: span.start), missed

    def _find(self, tenant: str, windows: Windows, taken: list[KeyedSpan]) -> list[KeyedSpan]:
        """Known chunks in the prompt outside the spans that are taken."""
        # the last token's logits start the answer: it is always computed
        runs = self._chunks.find(tenant, windows.head(len(windows.tokens) - 1), self._min_tokens)
        return [
            KeyedSpan(run.start, run.end, run.key, run.offset, self._computed_at + run.offset)
            for run in runs
            if isinstance(run.key, bytes)
            and not any(run.start < span.end and span.start < run.end for span in taken)
        ]

    def miss(self, tenant: str, token_ids: TokenIds) -> None:
        """A chunk is not in memory: it is fetched, or computed in the background."""
        if self._fetches is None:
            self._background.add(tenant, token_ids)
        else:
            self._fetches.ask(tenant, token_ids)

    def _learn(self, tenant: str, tokens: TokenIds, windows: Windows, spans: list[KeyedSpan]) -> None:
        """Text of earlier prompts that comes back behind other text becomes a chunk."""
        # a chunk that is too short to be found would be learned again and again
        known = windows.head(len(tokens) - 1)
        for run in self._recent.find(known, max(LEARNED_TOKENS, self._min_tokens)):
            covered = any(run.start < span.end and span.start < run.end for span in spans)
            assert isinstance(run.key, tuple)
            if run.start > 0 and not covered and run.key[0] == tenant:
                self.miss(tenant, tokens[run.start : run.end])
        self._num_seen += 1
        self._recent.add((tenant, self._num_seen), windows)
