"""What the scheduler and the model's process do with a chunk that is computed in the background."""

from __future__ import annotations

from vllm_blend.server.internal.background_prefill import BackgroundPrefill


def complete(background: BackgroundPrefill, request_id: str) -> None:
    """A chunk's request ends with its KV there."""
    plan = background._running[request_id]
    assert plan.key is not None and plan.chunk is not None
    if not plan.scored:
        background.chunks.commit(plan.key)
        background.came(plan.key, plan.chunk)
    background.finish(request_id)
