"""What a request reuses, or what is kept of it: the plans that requests carry.

``BlendPlan`` and ``CollectPlan`` hold KV; ``KeyedPlan`` names it, since a server's scheduler and its
model run in different processes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch

from vllm_blend.core.kv import KVShape, StoredKV
from vllm_blend.core.layers import LayerKV
from vllm_blend.core.prompt import check_spans
from vllm_blend.core.settings import BlendSettings

EXTRA_ARG = "blend"
"""The key of ``SamplingParams.extra_args`` that carries a request's plan, or its ``BlendRequest``."""


@dataclass(frozen=True, eq=False)
class ChunkSpan:
    """Stored KV at a place of a prompt: it stands for the tokens ``[start, end)``.

    ``token_ids``, where known, are compared with the prompt's before the KV is used.
    ``exact``: it was computed after just what stands before it here, so nothing is gained by computing
    it again.
    """

    start: int
    kv: StoredKV
    token_ids: tuple[int, ...] | None = None
    exact: bool = False

    @property
    def end(self) -> int:
        return self.start + self.kv.num_tokens


@dataclass(frozen=True, eq=False)
class BlendPlan:
    """What one request reuses. Immutable, so requests may share it (``n > 1``).

    ``timed``: measure its stages (``core/stage_clock.py``).
    ``harvest``: parts of the prompt whose KV is kept as this prefill computes it; outside of ``spans``.
    ``adapter``: digest of the LoRA adapter that computed the KV; empty: the base model.
    ``tells_rows``: tell which of its tokens are recomputed (``core/window_news.py``).
    """

    spans: tuple[ChunkSpan, ...]
    settings: BlendSettings = field(default_factory=BlendSettings)
    timed: bool = False
    harvest: tuple[CollectPlan, ...] = ()
    adapter: str = ""
    tells_rows: bool = False

    @cached_property
    def made(self) -> dict[str, torch.Tensor]:
        """What was derived of it once, for all of its windows (``model/select/early.py``)."""
        return {}

    def __deepcopy__(self, memo: object) -> BlendPlan:
        return self  # vLLM deep-copies sampling parameters; the KV is shared instead

    def check(self, prompt_token_ids: Sequence[int], shape: KVShape) -> None:
        """Raises ValueError if the plan does not fit the prompt or the model."""
        self.settings.check_num_layers(shape.num_layers)
        places = [(span.start, span.end) for span in self.spans]
        if places or not self.harvest:
            check_spans(places, len(prompt_token_ids))
        if self.harvest:
            kept = [(part.start, part.num_prompt_tokens) for part in self.harvest]
            check_spans(sorted(places + kept), len(prompt_token_ids))
            if places and not self.settings.early:
                raise ValueError(
                    f"policy is {self.settings.policy!r} and KV is to be kept of the same prompt; "
                    "allowed: policies that choose all rows before the first layer"
                )
        for index, span in enumerate(self.spans):
            span.kv.check(shape, span.end - span.start, name=f"spans[{index}].kv")
            if span.token_ids is None:
                continue
            if span.token_ids != tuple(prompt_token_ids[span.start : span.end]):
                raise ValueError(
                    f"spans[{index}] was computed for other tokens than the prompt has at "
                    f"[{span.start}, {span.end})"
                )


ChunkKey = bytes
"""Names a chunk's KV in a server's model process (``server/worker/chunk_cache.py``)."""


def digest_of(token_ids: Sequence[int]) -> bytes:
    """16 bytes of token ids."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16).digest()


@dataclass(frozen=True)
class ChunkIds:
    """A server's chunk by what makes it.

    Attributes:
        tenant: only its requests find the chunk.
        context: token ids that its KV is computed after.
    """

    tenant: str
    token_ids: tuple[int, ...]
    context: tuple[int, ...] = ()

    @property
    def shelf(self) -> tuple[str, tuple[int, ...]]:
        """What it has in common with others: whose they are, and what they are computed after."""
        return self.tenant, self.context

    @cached_property
    def digest(self) -> bytes:
        """16 bytes of the token ids."""
        return digest_of(self.token_ids)

    def after(self, context: tuple[int, ...]) -> ChunkIds:
        """The same text, computed after something else."""
        other = ChunkIds(self.tenant, self.token_ids, context)
        other.__dict__["digest"] = self.digest  # not computed again
        return other


@dataclass(frozen=True)
class KeyedSpan:
    """Prompt tokens ``[start, end)`` that are those of a chunk from ``offset`` on.

    ``exact`` is as in ``ChunkSpan``.
    """

    start: int
    end: int
    key: ChunkKey
    offset: int = 0
    exact: bool = False


@dataclass(frozen=True)
class KeyedPlan:
    """A ``BlendPlan`` that names its KV: what a scheduler can send to the model's process."""

    spans: tuple[KeyedSpan, ...]
    settings: BlendSettings = field(default_factory=BlendSettings)
    timed: bool = False
    harvest: tuple[CollectPlan, ...] = ()
    tells_rows: bool = False


LaunchCopies = Callable[[int, torch.Tensor], None]
"""Copies all that a step collects of a layer: which, and its rows, ``[2, num_rows, num_kv_heads,
head_size]``. Two launches later the rows may be written again by what the GPU computes then."""


class Copies(Protocol):
    """Copies what a step collects beside its compute."""

    def prepared(self, parts: Iterable[tuple[torch.Tensor, int]]) -> LaunchCopies:
        """A step's copies, to be launched layer by layer.

        Args:
            parts: each one's place, K and V, ``[num_layers, 2, num_tokens, num_kv_heads, head_size]``;
                and its first row among a layer's.
        """
        ...


class Collected(Protocol):
    """Where a collected chunk's K and V go."""

    def copied(self, first: int, count: int) -> tuple[Copies, torch.Tensor] | None:
        """What copies tokens of the chunk from ``first`` on, and where to: ``[num_layers, 2, count,
        num_kv_heads, head_size]``; None: ``write`` takes them."""
        ...

    def write(self, layer: int, first: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Takes tokens of the chunk from ``first`` on, ``[num_tokens, num_kv_heads, head_size]``."""
        ...


@dataclass(eq=False)
class CollectPlan:
    """Rows of a prompt whose KV is kept: from ``start`` to ``num_prompt_tokens``; of a ``BlendPlan``'s
    ``harvest`` that is where the part ends.

    Attention hands them over window by window (``model/collect.py``); all is there when the prefill
    has come to its end, unless the prefix cache had part of it, which is not computed then.

    Attributes:
        into: where they go; None: to ``kv``, where they are.
        on_model: also leave it at ``self_attn.hack_kv``, as the paper's code does.
        key: keep it in the model's process under this key.
        chunk: what is kept, for a store's lower tiers.
        scored: ``key``'s KV is there, computed after something else: keep only its tokens' scores.
        prefix: exact KV of the prompt's first tokens, which are not computed then; at most ``start``.
        as_written: keep K as attention writes it, rotated to its place.
        adapter: digest of the request's LoRA adapter; empty: it has none.
    """

    start: int = 0
    on_model: bool = False
    num_prompt_tokens: int = 0
    kv: list[LayerKV] = field(default_factory=list)
    key: ChunkKey | None = None
    chunk: ChunkIds | None = None
    scored: bool = False
    prefix: StoredKV | None = None
    as_written: bool = False
    adapter: str = ""
    into: Collected | None = None
    _computed: int = 0

    def __deepcopy__(self, memo: object) -> CollectPlan:
        return self  # the caller reads the result from this very object

    @property
    def num_tokens(self) -> int:
        """How many rows are to be kept."""
        return self.num_prompt_tokens - self.start

    @property
    def spans(self) -> tuple[ChunkSpan, ...]:
        """What is not computed."""
        return () if self.prefix is None else (ChunkSpan(0, self.prefix, exact=True),)

    def check(self, prompt_token_ids: Sequence[int], shape: KVShape) -> None:
        self.num_prompt_tokens = len(prompt_token_ids)
        if not 0 <= self.start < self.num_prompt_tokens:
            raise ValueError(
                f"start is {self.start}; the prompt has {self.num_prompt_tokens} tokens, so "
                f"allowed: 0 to {self.num_prompt_tokens - 1}"
            )
        if self.prefix is not None:
            self.prefix.check(shape, self.prefix.num_tokens, name="prefix")
            if self.prefix.num_tokens > self.start:
                raise ValueError(
                    f"prefix has {self.prefix.num_tokens} tokens; allowed: {self.start} at most, "
                    "since the rows from start on are computed"
                )

    @property
    def is_whole(self) -> bool:
        """Whether all rows were computed, and handed over."""
        return self._computed >= self.num_prompt_tokens

    def advance(self, position: int, end: int) -> None:
        """The prompt's rows ``[position, end)`` were handed over; after a gap they are of no use."""
        if position <= max(self._computed, self.start):
            self._computed = end

    def restart(self) -> None:
        """Forgets what was handed over."""
        self._computed, self.kv, self.into = 0, [], None

    def write(self, layer: int, position: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Keep rows of layer ``layer`` that stand at ``position`` and after in the prompt."""
        skip = max(self.start - position, 0)
        rows = min(len(k), self.num_prompt_tokens - position)
        if self.into is None and layer == len(self.kv):
            size = (self.num_tokens, *k.shape[1:])
            self.kv.append((k.new_empty(size), v.new_empty(size)))
        if skip >= rows:
            return
        first, k, v = position + skip - self.start, k[skip:rows], v[skip:rows]
        if self.into is not None:
            self.into.write(layer, first, k, v)
            return
        for place, rest in zip(self.kv[layer], (k, v), strict=True):
            place[first : first + len(rest)] = rest
