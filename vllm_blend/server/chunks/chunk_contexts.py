"""What a server's chunks are computed after, and which of their KV suits which place of a prompt.

A chunk's context is what its KV was computed after: one of the server's own, for chunks that it
computes by themselves; or what stood before it in the prompt of a request that computed it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from vllm_blend.core import stand_in as own_text
from vllm_blend.core.plans import ChunkIds
from vllm_blend.core.prompt import (
    PINNED_DAY,
    TokenIds,
    chat_frame,
    head_ids,
    plain_frame,
    text_ids,
)
from vllm_blend.core.static_scores import SCORING_TOKENS
from vllm_blend.server.chunks.token_index import Run

HARVESTED_FIRST, HARVESTED = (2**31 - 1,), (2**31 - 2,)
"""Stand for the context of a prompt's first chunk, and of the others, where a request's own prefill
computed them. (The largest ids that a store's key can hold; no vocabulary has them.)"""


class Contexts(NamedTuple):
    """What chunks are computed after; the same for the whole server, so that a chunk's KV serves in
    every prompt.

    Attributes:
        first: of a chunk that stands first in its prompt.
        later: of the others; the same where there is no stand-in.
        scoring: what chunks but the first ones are computed after once more, for their tokens' scores;
            None: there is nothing to be had.
        harvest: chunks are kept from requests' own prefills, too.
    """

    first: TokenIds
    later: TokenIds
    scoring: TokenIds | None = None
    harvest: bool = False

    @property
    def known(self) -> tuple[TokenIds, ...]:
        """All under which a chunk may be found."""
        harvested = (HARVESTED, HARVESTED_FIRST) if self.harvest else ()
        return tuple(dict.fromkeys((self.later, self.first, *harvested)))

    def by_fit(self, start: int, first_start: int) -> tuple[TokenIds, ...]:
        """``known``, what suits a place best first; arguments as ``at``'s."""
        suited = self.suited_at(start, first_start)
        return tuple(dict.fromkeys((*suited, *self.known)))

    def suited_at(self, start: int, first_start: int) -> tuple[TokenIds, ...]:
        """Those that suit a place, the server's own first; arguments as ``at``'s."""
        harvested = HARVESTED if start > first_start else HARVESTED_FIRST
        return (self.at(start, first_start), *((harvested,) if self.harvest else ()))

    @property
    def num_suited(self) -> int:
        """How many suit a place."""
        return 1 + self.harvest

    def by_itself(self, chunk: ChunkIds) -> ChunkIds:
        """A chunk that was to be kept from a request's prefill, as the server computes it."""
        return chunk.after(self.first if chunk.context == HARVESTED_FIRST else self.later)

    def at(self, start: int, first_start: int) -> TokenIds:
        """What suits a chunk at ``start`` of a prompt whose first chunk is at ``first_start``."""
        return self.later if start > first_start else self.first

    def suited(
        self, runs: Iterable[tuple[Run, TokenIds]], taken: Iterable[tuple[int, int]] = ()
    ) -> list[tuple[Run, TokenIds]]:
        """Runs that do not overlap, out of those of chunks computed after either.

        Where both are there, the one that suits the place; where one is, that one.

        Args:
            runs: each with what its chunk is computed after.
            taken: places of the prompt that are no run's.
        """
        runs, places = list(runs), Places(taken)
        first_start = min([run.start for run, _ in runs] + places.starts[:1], default=0)
        chosen = []
        for run, context in sorted(
            runs,
            key=lambda one: (one[1] not in self.suited_at(one[0].start, first_start), one[0].start),
        ):
            if places.are_free(run.start, run.end):
                chosen.append((run, context))
                places.take(run.start, run.end)
        return sorted(chosen, key=lambda one: one[0].start)


class Places:
    """Places of a prompt that are taken, ``[start, end)`` each, disjoint.

    Attributes:
        starts, ends: of them, ascending.
    """

    def __init__(self, places: Iterable[tuple[int, int]] = ()) -> None:
        ordered = sorted(places)
        self.starts, self.ends = [start for start, _ in ordered], [end for _, end in ordered]

    def are_free(self, start: int, end: int) -> bool:
        """Whether none of ``[start, end)`` is taken."""
        at = bisect_right(self.ends, start)
        return at == len(self.starts) or self.starts[at] >= end

    def take(self, start: int, end: int) -> None:
        """Takes a place that is free."""
        at = bisect_left(self.starts, start)
        self.starts.insert(at, start)
        self.ends.insert(at, end)


def chunk_contexts(
    vllm_config: Any,
    system: str | None = None,
    head: str = "",
    stand_in: str | None = None,
    template: str | None = None,
    variables: Mapping[str, Any] | None = None,
    harvest: bool = False,
) -> Contexts:
    """The chat template's head, else BOS, then ``head``; for all chunks but the first ``stand_in`` too.

    The head need not be the prompt's own beginning, but the nearer it is, the better (docs/quality.md).
    A template that tells the day is rendered for one that never changes: chunks are known by what they
    are computed after, tomorrow and in other servers too.

    Args:
        vllm_config: the engine's.
        system: a system message for the template; None: its default.
        head: text after all that.
        stand_in: text after that; None: a text of our own.
        template: the chat template, if it is not the tokenizer's.
        variables: of the template.
        harvest: as in ``Contexts``.

    Raises:
        ValueError: if there is no tokenizer for these texts, no template for ``system``, or if they
            leave no room for a chunk.
    """
    model_config = vllm_config.model_config
    if model_config.skip_tokenizer_init:
        if system is not None or head or stand_in:
            raise ValueError(
                "system, head and stand_in of vllm_blend need a tokenizer; the engine has none"
            )
        return Contexts((), (), harvest=harvest)
    from vllm.tokenizers.registry import cached_tokenizer_from_config

    tokenizer = cached_tokenizer_from_config(model_config)
    try:
        frame = chat_frame(tokenizer, system, template, {**PINNED_DAY, **(variables or {})})
    except Exception as error:  # no chat template, or one that does not take these messages
        if system is not None:
            raise ValueError(f"system of vllm_blend does not fit the chat template: {error}") from error
        frame = plain_frame(tokenizer)
    first = head_ids(tokenizer, frame, head, ())
    longest = model_config.max_model_len
    own = text_ids(tokenizer, own_text.text(), "text")[: min(SCORING_TOKENS, longest // 4)]
    later = first + (text_ids(tokenizer, stand_in, "stand_in of vllm_blend") if stand_in else ())
    if stand_in is None and len(first + own) <= longest - 2:
        later = first + own
    if len(later) > longest - 2:
        raise ValueError(
            f"system, head and stand_in of vllm_blend have {len(later)} tokens; allowed: {longest - 2}"
        )
    return Contexts(first, later, first + own if first == later else first, harvest)
