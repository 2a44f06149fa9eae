"""Chunks' KV in the model's process, by the keys that a server's scheduler gives them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from vllm_blend.core import BlendPlan, BlendStep, ChunkKey, ChunkSpan, CollectPlan, KeyedPlan, StoredKV
from vllm_blend.server.mail import Lost


class ChunkKV:
    """The KV that ``KeyedPlan`` names, in host memory.

    Attributes:
        lost: what plans named and was not here, since it was last asked for.
    """

    def __init__(self) -> None:
        self.lost: list[Lost] = []
        self._chunks: dict[ChunkKey, StoredKV] = {}

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def num_bytes(self) -> int:
        return sum(kv.num_bytes for kv in self._chunks.values())

    def resolve(
        self, plan: BlendPlan | CollectPlan | KeyedPlan, request_id: str, computed: int
    ) -> BlendPlan | CollectPlan | None:
        """The plan with its KV; a span whose KV is not here is computed like any other token.

        Args:
            request_id: whose plan it is.
            computed: its tokens that are in the paged cache already.
        """
        if not isinstance(plan, KeyedPlan):
            return plan
        spans = []
        for span in plan.spans:
            kv = self._chunks.get(span.key)
            end = span.offset + span.end - span.start
            if kv is None or end > kv.num_tokens:
                reason = "gone" if kv is None else "short"
                self.lost.append(Lost(request_id, span.key, computed, reason))
                continue
            part = kv.tokens(span.offset, end)
            spans.append(ChunkSpan(span.start, part))
        return BlendPlan(tuple(spans), plan.settings, plan.timed) if spans else None

    def keep(self, step: BlendStep) -> None:
        """Keeps what the step collected under a key, once it is whole."""
        for request in step.collected:
            plan = request.plan
            assert isinstance(plan, CollectPlan)
            if plan.key is None:
                continue
            self.drop(plan.drop)
            if request.position + request.num_rows >= plan.num_prompt_tokens:
                # vLLM may hand the plan over again after a preemption: it starts anew
                layers, plan.kv = plan.kv, []
                self._chunks[plan.key] = StoredKV(tuple((_to_host(k), _to_host(v)) for k, v in layers))

    def drop(self, keys: Iterable[ChunkKey]) -> None:
        """Forgets chunks; one that is not here is no error."""
        for key in keys:
            self._chunks.pop(key, None)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The same in host memory; what comes from a GPU is pinned, so that it goes back without a wait."""
    return tensor.cpu().pin_memory() if tensor.is_cuda else tensor
