"""A forward step in which requests blend or are collected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import torch

from vllm_blend.core.kv import concat_kv
from vllm_blend.core.layers import LayerKV
from vllm_blend.core.plans import BlendPlan, ChunkSpan, CollectPlan
from vllm_blend.core.settings import BlendSettings


class Status(IntEnum):
    """What a layer does in a step; the names and numbers are those of the paper's code."""

    DECODE = -1  # new tokens on the paged cache: vLLM's own path
    FULL_PREFILL = 0  # all rows: vLLM's own path
    CHECK = 1  # compare fresh with stored V, choose the rows that go on
    AFTER_CHECK = 2  # chosen rows only, over the fused cache


MAX_ASKED = 32
"""Question tokens that are asked, its last ones; bounds the memory of a long question."""

MAX_FAILURES = 3
"""Failures of one kind until an engine blends no more."""

NOTHING_RECOMPUTED = BlendSettings(policy="static", recomp_ratio=0.0)


@dataclass(eq=False)
class StepRequest:
    """One request's window in a forward step: prompt positions ``[position, position + num_rows)``.

    Attributes:
        row: its first row in the step.
        request_id: vLLM's.
        num_prompt_tokens: a request that was preempted also prefills what it has answered so far,
            after its prompt; None: this window ends with the prompt.
    """

    plan: BlendPlan | CollectPlan
    row: int
    position: int
    num_rows: int
    device: torch.device
    request_id: str = ""
    num_prompt_tokens: int | None = None

    @cached_property
    def settings(self) -> BlendSettings:
        """Which of the rows that stored KV stands for are computed: of a collected prefix none; without
        the question where this window does not hold it, or too much that is new."""
        if not isinstance(self.plan, BlendPlan):
            return NOTHING_RECOMPUTED
        num_own = self.num_rows - self.num_chunk_rows
        return self.plan.settings.for_rows(num_own, self.num_chunk_rows, self.num_asked > 0)

    @property
    def num_asked(self) -> int:
        """How many of the window's last prompt tokens are the question's, ``MAX_ASKED`` at most; 0 if
        this window of a chunked prefill does not hold it."""
        end = self.prompt_end
        return max(0, end - max(self.plan.spans[-1].end, self.position, end - MAX_ASKED))

    @property
    def kept_parts(self) -> tuple[CollectPlan, ...]:
        """Parts of its prompt whose KV is kept."""
        return (self.plan,) if isinstance(self.plan, CollectPlan) else self.plan.harvest

    @property
    def shift(self) -> int:
        """From a prompt position in the window to its row of the step."""
        return self.row - self.position

    @property
    def end(self) -> int:
        """Prompt position after its last row."""
        return self.position + self.num_rows

    @property
    def prompt_end(self) -> int:
        """The same, without rows of an answer."""
        return self.end if self.num_prompt_tokens is None else min(self.end, self.num_prompt_tokens)

    @cached_property
    def windows(self) -> list[tuple[ChunkSpan, int, int]]:
        """Spans with stored KV in this window: ``(span, first, last + 1)`` as prompt positions."""
        found = [(s, max(s.start, self.position), min(s.end, self.end)) for s in self.plan.spans]
        return [window for window in found if window[1] < window[2]]

    @property
    def num_chunk_rows(self) -> int:
        """Rows that stored KV stands for."""
        return sum(end - start for _, start, end in self.windows)

    @cached_property
    def chunk_rows(self) -> torch.Tensor:
        """Rows of the step that stored KV stands for, ascending, ``[num_chunk_rows]`` int64."""
        places = [(lo + self.shift, hi + self.shift) for _, lo, hi in self.windows]
        return torch.cat([torch.arange(lo, hi, device=self.device) for lo, hi in places])

    def old_kv(self, layer: int) -> LayerKV:
        """Stored K and V of ``chunk_rows`` at one layer on the step's device, each ``[num_chunk_rows,
        ...]``; not copied where one span holds them all there. Some may lie on the host, some not."""
        parts = []
        for span, lo, hi in self.windows:
            k, v = (x[lo - span.start : hi - span.start] for x in span.kv.layers[layer])
            parts.append((k.to(self.device), v.to(self.device)))
        return concat_kv(parts)


@dataclass(frozen=True)
class Blended:
    """What a step did of a request's prompt.

    Attributes:
        position: of the window's first token in the prompt.
        reused: tokens with stored KV.
        recomputed: those of them that were computed nevertheless.
        recomputed_spans: where these stand in the prompt, ``[start, end)``, ascending, without gaps;
            empty where the client did not ask.
    """

    request_id: str
    position: int
    reused: int
    recomputed: int
    recomputed_spans: tuple[tuple[int, int], ...] = ()


@dataclass(eq=False)
class BlendStep:
    """One forward step in which at least one request blends or is collected.

    Attributes:
        requests: those requests; the other rows of the step are computed as always.
        starts: first row of each of the step's requests, then ``num_rows``.
        kv_cache_dtype: vLLM's name for the paged cache's type.
    """

    requests: list[StepRequest]
    starts: Sequence[int]
    kv_cache_dtype: str

    @property
    def num_rows(self) -> int:
        """Rows of the step, without padding."""
        return self.starts[-1]

    @cached_property
    def blended(self) -> list[StepRequest]:
        """Requests with stored KV in this step."""
        return [request for request in self.requests if request.windows]

    @cached_property
    def collected(self) -> list[tuple[StepRequest, CollectPlan]]:
        """What is kept of this step's KV, and of which request."""
        return [
            (request, plan)
            for request in self.requests
            for plan in request.kept_parts
            if plan.start < request.end and request.position < plan.num_prompt_tokens
        ]
