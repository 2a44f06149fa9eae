"""What a request that may find chunks in a store's lower tiers asks for, and what it waits for."""

from __future__ import annotations

import time
from collections.abc import Sequence

from vllm_blend.server.chunks.chunk_contexts import Contexts
from vllm_blend.server.internal.calibration import Calibration
from vllm_blend.server.scheduler.lookup import Lookup
from vllm_blend.server.scheduler.tier_fetches import Fetches, rows_beside
from vllm_blend.server.scheduler.waiting import State, Waiting


class TierWaits:
    """Moves waiting requests on: asks for their chunks, and decides which are worth a load.

    Args:
        fetches: where chunks are asked for.
        lookup: what is known.
        contexts: what chunks are computed after.
        calibration: the engine's times.
        min_tokens: shorter chunks are not looked for.
    """

    def __init__(
        self,
        fetches: Fetches,
        lookup: Lookup,
        contexts: Contexts,
        calibration: Calibration,
        min_tokens: int,
    ) -> None:
        self._fetches, self._lookup, self._contexts = fetches, lookup, contexts
        self._calibration, self._min_tokens = calibration, min_tokens

    def advance(self, waiting: Waiting, tenant: str, prompt_token_ids: Sequence[int]) -> Waiting:
        """Takes a request as far as it gets now."""
        indexed = not waiting.blend_request.auto or self._fetches.claim(tenant)
        while True:
            state = waiting.advance(time.monotonic(), self._calibration.done, indexed)
            if state not in (State.ASK, State.DECIDE):
                return waiting
            tokens = tuple(prompt_token_ids)
            named = self._lookup.marked(tenant, tokens, waiting.blend_request)
            marked = [chunk for _, chunk in named]
            if state is State.DECIDE:
                self._fetches.decide(waiting, marked, len(tokens), self._calibration)
                continue
            missing = [
                chunk
                for variants in marked
                if self._lookup.known(variants)[0] is None
                for chunk in variants[: self._contexts.num_suited]
            ]
            found = []
            if waiting.blend_request.auto:
                found = self._fetches.find(tenant, tokens[:-1], self._min_tokens)
            if waiting.paced:
                for chunk in found:
                    self._fetches.ask(chunk, waiting.request_id)
                self._fetches.locate(waiting, missing)
            else:
                known = {variants[0].token_ids for variants in marked} | {c.token_ids for c in found}
                reused = min(sum(map(len, known)), len(tokens) - 1)
                rows = rows_beside(waiting.blend_request.settings, len(tokens), reused)
                self._fetches.wait(waiting, missing + found, rows)
