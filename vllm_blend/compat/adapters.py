"""What versions of vLLM do differently, where a call cannot be written for all of them alike."""

from __future__ import annotations

from functools import cache

from vllm.forward_context import BatchDescriptor

from vllm_blend.compat.fit import known_version
from vllm_blend.compat.member import VERSIONS
from vllm_blend.compat.version import vllm_version


def eager_descriptor(num_rows: int) -> BatchDescriptor | None:
    """``batch_descriptor`` of a forward context without CUDA graphs.

    From 0.33 on it tells the batch's size before sequence parallelism (vLLM's routed experts are
    recorded by it); before, there is none.
    """
    return BatchDescriptor(num_tokens=num_rows) if _is_from(VERSIONS[1]) else None


@cache
def _is_from(version: str) -> bool:
    return VERSIONS.index(known_version(vllm_version() or VERSIONS[0])) >= VERSIONS.index(version)
