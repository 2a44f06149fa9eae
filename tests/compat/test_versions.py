"""What versions of vLLM do differently: each way is taken where vLLM is so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.forward_context import BatchDescriptor

from vllm_blend.compat import adapters
from vllm_blend.server.chunks import prefix_cache
from vllm_blend.server.chunks.prefix_cache import BlendKVCacheManager, BlockNames, block_hasher


class Manager:
    """vLLM 0.32's, as far as it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def prefix_cache_lookup_enabled(self, request: Any) -> bool:
        return True

    def get_computed_blocks(self, request: Any) -> Any:
        self.asked.append(tuple(request.block_hashes))
        return None, 0, 0


class Manager33(Manager):
    """vLLM 0.33's."""

    def get_computed_blocks(self, request: Any, max_cache_hit_length: int | None = None) -> Any:
        self.asked.append((max_cache_hit_length, *request.block_hashes))
        return None, 0, 0


@pytest.mark.parametrize(
    ("manager", "limit", "before"),
    [(Manager, (), ()), (Manager33, (7,), (7,)), (Manager33, (), (None,))],
)
def test_the_search_for_cached_blocks_hands_its_limit_on(
    manager: type[Manager], limit: tuple[int, ...], before: tuple[int | None, ...]
) -> None:
    blending: Any = type("Blend", (BlendKVCacheManager, manager), {"blend_block_size": 16})()
    plain = SimpleNamespace(block_hashes=["plain"])
    blending.get_computed_blocks(plain, *limit)
    names = BlockNames(["exact"], ["own"], first=0, end=16)  # type: ignore[list-item]
    blended = SimpleNamespace(blend_names=names, update_block_hashes=lambda: None)
    blending.get_computed_blocks(blended, *limit)
    assert blending.asked == [(*before, "plain"), (*before, "exact"), (*before, "own")]


@pytest.mark.parametrize(("config", "more"), [({}, ()), ({"num_hash_lookahead_tokens": 2}, (2,))])
def test_blocks_are_hashed_as_the_engine_hashes_them(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, int], more: tuple[int, ...]
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(prefix_cache, "get_request_block_hasher", lambda *args: asked.append(args))
    cache = SimpleNamespace(prefix_caching_hash_algo="sha256")
    block_hasher(SimpleNamespace(cache_config=cache, **config), 16)
    ((size, hash_fn, *rest),) = asked
    assert size == 16 and callable(hash_fn) and tuple(rest) == more


@pytest.mark.parametrize(("version", "has_one"), [("0.32.5", False), ("0.33.0", True)])
def test_contexts_without_graphs_tell_their_size_from_0_33_on(
    monkeypatch: pytest.MonkeyPatch, version: str, has_one: bool
) -> None:
    monkeypatch.setattr(adapters, "vllm_version", lambda: version)
    adapters._is_from.cache_clear()
    try:
        assert adapters.eager_descriptor(5) == (BatchDescriptor(num_tokens=5) if has_one else None)
    finally:
        adapters._is_from.cache_clear()
