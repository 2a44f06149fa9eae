"""The correctness gate: does blending hold its identities on the weights that were loaded?

On random tokens, with the engine itself, before the first request is blended: a full prefill whose KV
is kept, then blends with that exact KV, which must give the full prefill's next-token distribution at
any ratio. A model whose K depends on the position otherwise than by its rotary module does not.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from vllm_blend.core import ChunkKey, CollectPlan, KeyedPlan, KeyedSpan
from vllm_blend.settings import BlendSettings

NUM_TOKENS = 192
"""Of the prompt; fewer where the engine takes only shorter ones."""
KEY: ChunkKey = b"vllm_blend: gate"
TOP = 20
TOLERANCE = {torch.float32: 5e-3, torch.float16: 0.1, torch.bfloat16: 0.5}
"""Largest difference of a log-probability; rounding alone is some ten times smaller."""


class Gate:
    """The gate's requests, one after the other, and its verdict.

    Args:
        vocab_size: of the model.
        max_tokens: of a prompt; at least 32.
        dtype: it computes in.
        settings: the server's default.
        make_request: an engine request of ``(request_id, token_ids, plan, num_logprobs)``.

    Attributes:
        verdict: None while it runs; then "" or why the model cannot blend.
        error: the largest difference of a log-probability seen.
        told: whether the verdict was logged.
    """

    def __init__(
        self,
        vocab_size: int,
        max_tokens: int,
        dtype: torch.dtype,
        settings: BlendSettings,
        make_request: Callable[[str, list[int], Any, int], Any],
    ) -> None:
        self.verdict: str | None = None
        self.error = 0.0
        self.told = False
        self._tolerance = TOLERANCE.get(dtype, 0.5)
        self._make_request = make_request
        choose = random.Random(0)
        length = min(NUM_TOKENS, max_tokens)
        self._token_ids = [choose.randrange(vocab_size) for _ in range(length)]
        self._expected: dict[int, float] = {}
        ends = ((3, length // 2), (length // 2, length - 8))
        spans = tuple(KeyedSpan(start, end, KEY, start) for start, end in ends)
        first = replace(settings, check_layers=(1,), recomp_ratios=None)
        self._plans = iter(
            (
                CollectPlan(num_prompt_tokens=length, key=KEY),
                KeyedPlan(spans, replace(first, recomp_ratio=0.0)),
                KeyedPlan(spans, replace(first, recomp_ratio=0.5)),
                KeyedPlan(spans, settings),
                CollectPlan(num_prompt_tokens=1, key=KEY),  # leaves one token's KV behind
            )
        )
        self._current: tuple[str, Any] | None = None

    def start(self) -> list[Any]:
        """The next engine request, if none runs; without one more, the verdict is given."""
        if self._current is not None or self.verdict is not None:
            return []
        plan = next(self._plans, None)
        if plan is None:
            self.verdict = ""
            return []
        request_id = f"vllm_blend-gate-{id(plan)}"
        self._current = (request_id, plan)
        length = plan.num_prompt_tokens if isinstance(plan, CollectPlan) else None
        return [self._make_request(request_id, self._token_ids[:length], plan, TOP)]

    def is_mine(self, request_id: str) -> bool:
        return self._current is not None and self._current[0] == request_id

    def finish(self, logprobs: dict[int, float] | None) -> None:
        """Takes the running request's next-token log-probabilities; None if it was aborted."""
        assert self._current is not None
        _, plan = self._current
        self._current = None
        if logprobs is None:
            self.verdict = "the start-up check was aborted"
        elif isinstance(plan, KeyedPlan) and not self.verdict:
            self._compare(logprobs)
        elif not self._expected:
            self._expected = logprobs

    def lose(self) -> None:
        """The KV that the check blends with was not kept."""
        self.verdict = "the model's process did not keep the KV of the start-up check"

    def _compare(self, logprobs: dict[int, float]) -> None:
        both = logprobs.keys() & self._expected.keys()
        error = max((abs(logprobs[t] - self._expected[t]) for t in both), default=float("inf"))
        self.error = max(self.error, error)
        if not error <= self._tolerance:
            self.verdict = (
                f"with exact KV its next-token log-probabilities are off by {error:.3g} "
                f"(allowed: {self._tolerance})"
            )


def first_logprobs(logprobs: Any) -> dict[int, float]:
    """Log-probabilities of the top tokens at an output's first position."""
    ids, values = logprobs.logprob_token_ids[0], logprobs.logprobs[0]
    return dict(zip(map(int, ids), map(float, values), strict=True))
