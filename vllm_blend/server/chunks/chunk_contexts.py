"""What a server's chunks are computed behind, and which of their KV suits which place of a prompt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from vllm_blend.core import stand_in as own_text
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


class Contexts(NamedTuple):
    """What chunks are computed behind; the same for the whole server, so that a chunk's KV serves in
    every prompt.

    Attributes:
        first: of a chunk that stands first in its prompt.
        later: of the others; the same where there is no stand-in.
        scoring: what ``later`` chunks are computed behind once more, for their tokens' scores; None:
            there is nothing to be had.
    """

    first: TokenIds
    later: TokenIds
    scoring: TokenIds | None = None

    def at(self, start: int, first_start: int) -> TokenIds:
        """What suits a chunk at ``start`` of a prompt whose first chunk is at ``first_start``."""
        return self.later if start > first_start else self.first

    def suited(
        self, runs: Iterable[tuple[Run, TokenIds]], taken: Iterable[tuple[int, int]] = ()
    ) -> list[tuple[Run, TokenIds]]:
        """Runs that do not overlap, out of those of chunks computed behind either.

        Where both are there, the one that suits the place; where one is, that one.

        Args:
            runs: each with what its chunk is computed behind.
            taken: places of the prompt that are no run's.
        """
        runs, places = list(runs), list(taken)
        first_start = min([start for start, _ in places] + [run.start for run, _ in runs], default=0)
        chosen = []
        for run, context in sorted(
            runs, key=lambda one: (one[1] != self.at(one[0].start, first_start), one[0].start)
        ):
            if not any(run.start < end and start < run.end for start, end in places):
                chosen.append((run, context))
                places.append((run.start, run.end))
        return sorted(chosen, key=lambda one: one[0].start)


def chunk_contexts(
    vllm_config: Any,
    system: str | None = None,
    head: str = "",
    stand_in: str | None = None,
    template: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Contexts:
    """The chat template's head, else BOS, then ``head``; for all chunks but the first ``stand_in`` too.

    The head need not be the prompt's own beginning, but the nearer it is, the better (docs/quality.md).
    A template that tells the day is rendered for one that never changes: chunks are known by what they
    are computed behind, tomorrow and in other servers too.

    Args:
        vllm_config: the engine's.
        system: a system message for the template; None: its default.
        head: text behind all that.
        stand_in: text behind that; None: a text of our own.
        template: the chat template, if it is not the tokenizer's.
        variables: of the template.

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
        return Contexts((), ())
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
    return Contexts(first, later, first + own if first == later else first)
