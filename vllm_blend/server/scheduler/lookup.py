"""Which chunks a prompt reuses: those that its request names, and those found in it; and which of the
others are kept as its own prefill computes them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_blend.core.plans import ChunkIds, ChunkKey, CollectPlan, KeyedSpan
from vllm_blend.core.prompt import TokenIds
from vllm_blend.server.chunks.askers import ANSWERED
from vllm_blend.server.chunks.chunk_contexts import HARVESTED, HARVESTED_FIRST, Contexts, Places
from vllm_blend.server.chunks.chunk_registry import ChunkRegistry
from vllm_blend.server.chunks.doorkeeper import Doorkeeper
from vllm_blend.server.chunks.shared_index import SharedIndex
from vllm_blend.server.chunks.token_index import Run, Windows
from vllm_blend.server.internal.background_prefill import BackgroundPrefill
from vllm_blend.server.request import MAX_SPANS, BlendRequest, Span, pieces
from vllm_blend.server.scheduler.tier_fetches import Fetches

LEARNED_TOKENS = 64
"""Auto mode: a text that comes back in another place becomes a chunk from this length on."""
RECENT_TOKENS, RECENT_TENANTS = 1_000_000, 256
"""Auto mode: tokens of past prompts that are remembered, to see what comes back in another prompt of
their tenant; and tenants."""


@dataclass
class Found:
    """What was found of a request's chunks.

    Attributes:
        spans: of the prompt, with known KV, ascending.
        missed: chunks that the request names and that are not in memory.
        short: chunks that are too short to be reused.
        left: of those that were missed, new ones that are not kept, since nothing came back lately.
        harvest: kept from this request's prefill.
        num_harvested: of ``spans``, chunks that were kept from another request's prefill.
    """

    spans: list[KeyedSpan] = field(default_factory=list)
    missed: int = 0
    short: int = 0
    left: int = 0
    harvest: list[CollectPlan] = field(default_factory=list)
    num_harvested: int = 0

    def why_not(self, blend_request: BlendRequest, min_tokens: int) -> str:
        """Why there are no spans."""
        if self.left:
            return "no chunk is known yet; new ones are kept when they come again: none did lately"
        if self.missed:
            return "no chunk is known yet"
        if self.short:
            return f"its chunks have fewer than {min_tokens} tokens (min_chunk_tokens)"
        return blend_request.why_not or "no chunk in the prompt"


def apart(
    runs: Sequence[tuple[Run, TokenIds]], missed: Sequence[tuple[int, ChunkIds]]
) -> tuple[list[tuple[Run, TokenIds]], list[tuple[int, ChunkIds]], list[ChunkIds]]:
    """Known text and missed chunks that have no token in common: what is kept from a prefill has to be
    computed in it. A chunk that is known for the most part, as an edited file is, is left to the text
    that is known.

    Args:
        runs: known text, disjoint and ascending, and what the chunk of each is computed after.
        missed: where each chunk begins, and the chunk; disjoint.

    Returns:
        The runs and the missed chunks that stay, and the chunks that are known for the most part.
    """
    ends, stay, known = [run.end for run, _ in runs], [], []
    for start, chunk in missed:
        end = start + len(chunk.token_ids)
        num_known = 0
        for run, _ in runs[bisect_right(ends, start) :]:
            if run.start >= end:
                break
            num_known += min(run.end, end) - max(run.start, start)
        if 2 * num_known > end - start:
            known.append(chunk)
        else:
            stay.append((start, chunk))
    computed = Places((start, start + len(chunk.token_ids)) for start, chunk in stay)
    return [one for one in runs if computed.are_free(one[0].start, one[0].end)], stay, known


class Lookup:
    """Looks chunks up; those that are missed are kept from the request's prefill, fetched, or computed
    in the background.

    Args:
        chunks: that are in memory.
        background: where the others are computed.
        fetches: of the store, where there is one.
        contexts: what chunks are computed after.
        min_tokens: shorter chunks, and shorter parts of one, are computed afresh.
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
        self._doorkeeper = Doorkeeper(chunks)
        self._recent = SharedIndex(RECENT_TOKENS, RECENT_TENANTS)  # by tenant
        self._num_seen = 0

    def __call__(
        self,
        tenant: str,
        tokens: TokenIds,
        blend_request: BlendRequest,
        request_id: str = ANSWERED,
    ) -> Found:
        """The prompt's chunks; those that are not in memory are kept from its prefill, or asked for."""
        named = self.marked(tenant, tokens, blend_request)
        found = Found(short=len(blend_request.spans) - len(named))
        missed: list[tuple[int, ChunkIds]] = []
        first_start = named[0][0][0] if named else 0
        for (start, end), chunks in named:
            key, context = self.known(chunks)
            if key is None or context is None:
                missed.append((start, chunks[0]))
                continue
            if context not in self._contexts.suited_at(start, first_start):
                # the next prompt gets it after what suits its place
                self.miss(chunks[0], request_id)
            exact = start == len(context) and tokens[:start] == context
            found.spans.append(KeyedSpan(start, end, key, exact=exact))
        found.missed = len(missed)
        if blend_request.auto:
            windows = Windows.of(tokens)
            places = [(span.start, span.end) for span in found.spans]
            runs = self._find(tenant, windows, places)
            if self._contexts.harvest and blend_request.settings.early:
                runs, missed, known = apart(runs, missed)
                for chunk in known:
                    self.miss(self._contexts.by_itself(chunk), request_id)
            found.spans += self._spans(windows, runs, places, request_id)
            taken = [(span.start, span.end) for span in found.spans]
            taken += [(start, start + len(chunk.token_ids)) for start, chunk in missed]
            learned = self._learn(tenant, tokens, windows, taken)
            missed += learned
            if learned:
                self._chunks.used(tenant)
        found.spans.sort(key=lambda span: span.start)
        # rows of an approximate prompt whose rows are chosen at check layers are not all computed
        harvests = self._contexts.harvest and (blend_request.settings.early or not found.spans)
        starts = [start for start, _ in missed] + [span.start for span in found.spans]
        first_start = min(starts, default=0)
        keys = [span.key for span in found.spans]
        contexts = [self._chunks.chunk(key).context for key in keys]
        found.num_harvested = sum(context in (HARVESTED, HARVESTED_FIRST) for context in contexts)
        self._chunks.pin(keys)  # what is reused makes no room for what is kept
        try:
            for start, chunk in missed:
                if not (blend_request.keep or self._admits(chunk)):
                    found.left += 1
                    continue
                plan = self._harvest(chunk, start, first_start) if harvests else None
                if plan is None:
                    self.miss(chunk, request_id)
                else:
                    found.harvest.append(plan)
        finally:
            self._chunks.unpin(keys)
        return found

    def _admits(self, chunk: ChunkIds) -> bool:
        """Whether a chunk that is missed is to be kept; it may lie in a store, if there is one."""
        return self._fetches is not None or self._doorkeeper.admits(chunk)

    def _harvest(self, chunk: ChunkIds, start: int, first_start: int) -> CollectPlan | None:
        """A chunk is kept from the prefill of the prompt that has it at ``start``; None: there is no
        room, or it is being kept already."""
        context = HARVESTED if start > first_start else HARVESTED_FIRST
        kept = chunk.after(context)
        if (key := self._chunks.reserve(kept)) is None:
            return None
        return CollectPlan(start, num_prompt_tokens=start + len(kept.token_ids), key=key, chunk=kept)

    def forget_tenant(self, tenant: str) -> None:
        """Forgets a tenant's prompts."""
        self._recent.drop(tenant)
        self._doorkeeper.forget_tenant(tenant)

    def marked(
        self, tenant: str, tokens: TokenIds, blend_request: BlendRequest
    ) -> list[tuple[Span, list[ChunkIds]]]:
        """The chunks that a request names, but for short ones, each after all that it may be known
        after, what suits its place best first."""
        spans = [span for span in blend_request.spans if span[1] - span[0] >= self._min_tokens]
        found = []
        for start, end in spans:
            chunk = ChunkIds(tenant, tokens[start:end])
            contexts = self._contexts.by_fit(start, spans[0][0])
            found.append(((start, end), [chunk.after(context) for context in contexts]))
        return found

    def known(self, chunks: Sequence[ChunkIds]) -> tuple[ChunkKey, TokenIds] | tuple[None, None]:
        """The first of these that is in memory: its key, and what it is computed after."""
        for chunk in chunks:
            if (key := self._chunks.get(chunk)) is not None:
                return key, chunk.context
        return None, None

    def _find(self, tenant: str, windows: Windows, taken: Sequence[Span]) -> list[tuple[Run, TokenIds]]:
        """Known text in the prompt outside the places that are taken, each with what its chunk is
        computed after."""
        # the last token's logits start the answer: it is always computed
        prompt = windows.head(len(windows.tokens) - 1)
        runs = [
            (run, context)
            for context in self._contexts.known
            for run in self._chunks.find(tenant, context, prompt, self._min_tokens)
        ]
        return self._contexts.suited(runs, taken)[: MAX_SPANS - len(taken)]

    def _spans(
        self,
        windows: Windows,
        runs: Sequence[tuple[Run, TokenIds]],
        taken: Sequence[Span],
        request_id: str,
    ) -> list[KeyedSpan]:
        """What is reused of known text; its chunks are asked for after what suits their places."""
        first_start = min([start for start, _ in taken] + [run.start for run, _ in runs], default=0)
        spans = []
        for run, context in runs:
            assert isinstance(run.key, bytes)
            exact = False
            if run.offset == 0 and run.start == len(context):
                exact = windows.tokens[: run.start].tolist() == list(context)
            spans.append(KeyedSpan(run.start, run.end, run.key, run.offset, exact))
            if context not in (better := self._contexts.suited_at(run.start, first_start)):
                self.miss(self._chunks.chunk(run.key).after(better[0]), request_id)
        return spans

    def miss(self, chunk: ChunkIds, request_id: str = ANSWERED) -> None:
        """A chunk is not in memory: it is fetched, or computed in the background; one that was kept
        from a request's prefill is kept from the next."""
        computes = chunk.context not in (HARVESTED, HARVESTED_FIRST)
        if self._fetches is not None:
            self._fetches.ask(chunk, request_id, computes)
        elif computes:
            self._background.add(chunk, request_id)

    def _learn(
        self, tenant: str, tokens: TokenIds, windows: Windows, taken: Sequence[tuple[int, int]]
    ) -> list[tuple[int, ChunkIds]]:
        """Text of a tenant's earlier prompts that comes back after other text becomes a chunk.

        Args:
            taken: places of the prompt that are chunks'.

        Returns:
            Where each begins, and the chunk.
        """
        # a chunk that is too short to be found would be learned again and again
        known = windows.head(len(tokens) - 1)
        places, learned = Places(taken), []
        first_start = places.starts[0] if taken else len(tokens)
        recent = self._recent.get(tenant)
        for run in recent.find(known, max(LEARNED_TOKENS, self._min_tokens)) if recent else ():
            if run.start > 0 and places.are_free(run.start, run.end):
                for start, end in pieces(run.start, run.end, self._max_tokens):
                    first_start = min(first_start, start)
                    context = self._contexts.at(start, first_start)
                    learned.append((start, ChunkIds(tenant, tokens[start:end], context)))
        self._num_seen += 1
        self._recent.add(tenant, self._num_seen, windows)
        return learned
