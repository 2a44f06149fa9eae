"""What a policy may look at when it chooses rows at a check layer; computed when first asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from vllm_blend.core.static_scores import static_scores
from vllm_blend.core.step import StepRequest
from vllm_blend.core.tensor_parallel import all_reduce_sum
from vllm_blend.model.guard import Guard
from vllm_blend.model.select.policies import make_policy
from vllm_blend.model.select.projection import Projection, normed_heads, project, project_v
from vllm_blend.model.select.question import attention_received
from vllm_blend.model.select.ranking import deviation

if TYPE_CHECKING:
    from vllm_blend.model.active_rows import ActiveRows

STALE = 1e-4
"""Stored V nearer to fresh V than this share of its squared norm is as good as fresh (1% of the norm;
bf16 rounding alone is below 0.5%)."""


class CheckLayerCandidates:
    """One request at one check layer.

    The candidates are its chunk tokens that are still computed: all of them at the first check layer.
    Nothing here makes the host wait for the device: every size is known from the plan.

    Args:
        frame: the rows still computed.
        request: whose rows are chosen.
        layers: the model's decoder layers.
        index: the check layer.
        hidden, residual: its inputs, ``[num_rows, hidden_size]``; not changed.
        guard: of what this rank does between the ranks' sums.
    """

    def __init__(
        self,
        frame: ActiveRows,
        request: StepRequest,
        layers: Sequence[Any],
        index: int,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        guard: Guard,
    ) -> None:
        self.frame, self.request = frame, request
        self.layers, self.index = layers, index
        self.hidden, self.residual = hidden, residual
        self._guard = guard
        count = len(frame.kept.get(request, range(request.num_chunk_rows)))
        none = torch.zeros(count, dtype=torch.int64, device=frame.device)
        self.at, self.chunk_index = guard.attempt(lambda: frame.candidates(request), (none, none))

    def sum_over_ranks(self) -> None:
        """Computes what the request's policy reads of all ranks: they must take part together, so
        before the policy, which may fail on one of them."""
        for name in sorted(make_policy(self.request.settings).reads):
            getattr(self, name)

    def _summed(self, part: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The sum over the ranks, of a number for each candidate."""
        none = torch.zeros(self.at.numel(), device=self.at.device)
        return all_reduce_sum(self._guard.attempt(part, none))

    @cached_property
    def fresh(self) -> Projection:
        """Q, K and V of the candidates, as the check layer computes them."""
        return project(self.layers[self.index], self.hidden[self.at], self.residual[self.at])

    @cached_property
    def fresh_v(self) -> torch.Tensor:
        """V of the candidates, ``[num_candidates, num_kv_heads, head_size]``."""
        if "fresh" in self.__dict__:
            return self.fresh.v
        v = project_v(self.layers[self.index], self.hidden[self.at], self.residual[self.at])
        return self.fresh.v if v is None else v

    @cached_property
    def fresh_k(self) -> torch.Tensor:
        """K of the candidates as RoPE gets it, ``[num_candidates, num_kv_heads, head_size]``."""
        return normed_heads(self.layers[self.index].self_attn, "k", self.fresh.k)

    @cached_property
    def stored_k(self) -> torch.Tensor:
        """K before RoPE from the chunks, ``[num_candidates, num_kv_heads, head_size]``."""
        return self.frame.stored.old_kv(self.request, self.index)[0][self.chunk_index]

    @cached_property
    def stored_v(self) -> torch.Tensor:
        """V from the chunks, the same shape."""
        return self.frame.stored.old_kv(self.request, self.index)[1][self.chunk_index]

    @cached_property
    def v_deviation(self) -> torch.Tensor:
        """Squared distance of fresh to stored V, ``[num_candidates]`` float32."""
        return self._summed(lambda: deviation(self.fresh_v, self.stored_v))

    @cached_property
    def k_deviation(self) -> torch.Tensor:
        """The same of K, before RoPE: a rotation of both changes no distance."""
        return self._summed(lambda: deviation(self.fresh_k, self.stored_k))

    @cached_property
    def stale(self) -> torch.Tensor:
        """Where recomputing changes anything at all, ``[num_candidates]`` bool.

        False for the prompt's head and for a chunk that stands where it was computed.
        """
        size = self._summed(lambda: deviation(self.stored_v, torch.zeros_like(self.stored_v)))
        return self.v_deviation > STALE * size

    @cached_property
    def positions(self) -> torch.Tensor:
        """Prompt position of each candidate, ``[num_candidates]`` int64."""
        return self.frame.positions[self.at]

    @cached_property
    def place_in_chunk(self) -> torch.Tensor:
        """How many tokens of its own chunk stand before each candidate, ``[num_candidates]`` int64."""
        places = [
            torch.arange(lo - span.start, hi - span.start, device=self.request.device)
            for span, lo, hi in self.request.windows
        ]
        return torch.cat(places)[self.chunk_index]

    @cached_property
    def own_at(self) -> torch.Tensor:
        """The frame's rows of the request's tokens that no chunk holds, ``[num_own_rows]``."""
        request = self.request
        own = torch.ones(request.num_rows, dtype=torch.bool, device=request.device)
        own.index_fill_(0, request.chunk_rows - request.row, False)
        count = request.num_rows - request.num_chunk_rows
        rows = torch.nonzero_static(own, size=count).flatten() + request.row
        return torch.searchsorted(self.frame.rows, rows)

    @property
    def num_asked(self) -> int:
        """How many of those are the question's last tokens."""
        return self.request.num_asked

    @cached_property
    def attention_here(self) -> torch.Tensor | None:
        """The question's attention at this layer, ``[num_candidates]`` float32; None: no question."""
        return self._summed(self._attention_here) if self.num_asked else None

    def _attention_here(self) -> torch.Tensor:
        """What this rank's heads give."""
        at, layer = self.own_at, self.layers[self.index]
        own = project(layer, self.hidden[at], self.residual[at])
        self_attn = layer.self_attn
        end = len(at) - (self.request.end - self.request.prompt_end)
        asked_rows = slice(end - self.num_asked, end)
        q = normed_heads(self_attn, "q", own.q[asked_rows])
        k = torch.cat([self.fresh_k, normed_heads(self_attn, "k", own.k)])
        own_positions = self.frame.positions[at]
        both = torch.cat([self.positions, own_positions])
        rotation, asked = self_attn.attn.impl.blend.rotation, own_positions[asked_rows]
        k, q = rotation.rotate(k, both), rotation.rotate(q, asked)
        got = attention_received(q, k, asked, both, self_attn.attn.impl.scale)
        return got[: self.at.numel()]

    @cached_property
    def attention_ahead(self) -> torch.Tensor:
        """The same summed over the layers that are asked, in the pass before this step's forward."""
        return self.frame.received[self.request][self.chunk_index]

    @cached_property
    def static(self) -> torch.Tensor:
        """Scores kept with the chunks, ``[num_candidates]`` float32."""
        return static_scores(self.request.windows).to(self.request.device)[self.chunk_index]
