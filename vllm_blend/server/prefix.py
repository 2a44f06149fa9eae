"""Prefix caching of blended requests: exact blocks first, approximate ones under names of their own.

A block's name in vLLM's prefix cache is a hash chained over the tokens before it. A blended request
reads blocks under the stock names, which exact requests wrote; what it computes itself, from the block
of the first reused token on, is named by a chain that also holds its plan. So an exact request never
finds it, and only a request with the same plan and tenant does; and only where it finds all of its
chunks' tokens so, since the choice among a part of them would be another one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from vllm_blend.core import KeyedPlan

Hasher = Callable[[Any], list[Any]]
"""vLLM's ``request_block_hasher``: a request's block hashes from ``len(block_hashes)`` on."""


@dataclass
class BlockNames:
    """Names of a blended request's blocks; kept at ``request.blend_names``.

    Attributes:
        exact: stock names of the prompt's full blocks.
        first: the block from which on the request's own blocks are approximate.
        end: of the last chunk.
        salt: of the names from there on.
        salted: names under that salt, from block 0 on, as far as they were needed.
    """

    exact: list[Any]
    first: int
    end: int
    salt: str
    salted: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, request: Any, plan: KeyedPlan, tenant: str, block_size: int) -> BlockNames:
        facts = [
            tenant,
            str(plan.settings),
            [(s.start, s.end, s.key.hex(), s.offset) for s in plan.spans],
        ]
        salt = blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()
        first, end = plan.spans[0].start // block_size, plan.spans[-1].end
        return cls(list(request.block_hashes), first, end, f"vllm_blend:{salt}")

    def mixed(self, request: Any, hasher: Hasher, num_exact: int) -> list[Any]:
        """All names of the request, the first ``num_exact`` of them stock ones."""
        stock_salt, stock_hashes = request.cache_salt, request.block_hashes
        request.cache_salt, request.block_hashes = f"{stock_salt or ''}{self.salt}", self.salted
        try:
            self.salted += hasher(request)
        finally:
            request.cache_salt, request.block_hashes = stock_salt, stock_hashes
        return self.exact[:num_exact] + self.salted[num_exact:]


def name_blocks(
    request: Any, plan: KeyedPlan, tenant: str, hasher: Hasher | None, block_size: int
) -> None:
    """Gives a request's approximate blocks names of their own; ``hasher`` None: there is no cache."""
    if hasher is not None:
        names = BlockNames.of(request, plan, tenant, block_size)
        request.blend_names = names
        request.block_hashes = names.mixed(request, hasher, names.first)


class BlendKVCacheManager:
    """Mixin for vLLM's ``KVCacheManager``: a blended request's search for cached blocks."""

    blend_hasher: Hasher
    blend_block_size: int

    def get_computed_blocks(self, request: Any) -> Any:
        names: BlockNames | None = getattr(request, "blend_names", None)
        stock: Any = super()
        if names is None or not stock.prefix_cache_lookup_enabled(request):
            return stock.get_computed_blocks(request)
        request.block_hashes = names.exact
        exact = stock.get_computed_blocks(request)
        request.block_hashes = names.mixed(request, self.blend_hasher, names.first)
        mixed = stock.get_computed_blocks(request)
        if mixed[1] >= max(exact[1] + 1, names.end):
            return mixed
        num_exact = max(names.first, exact[1] // self.blend_block_size)
        request.block_hashes = names.mixed(request, self.blend_hasher, num_exact)
        return exact


def disown_blocks(request: Any, start: int, hasher: Any, manager: Any) -> None:
    """Takes a request's blocks from token ``start`` on out of the prefix cache."""
    names = request.blend_names
    names.salt, names.salted = f"vllm_blend:{request.request_id}", []  # what it computes now is its own
    request.block_hashes = names.mixed(request, hasher, names.first)
    groups = manager.kv_cache_config.kv_cache_groups
    for group, blocks in zip(groups, manager.get_block_ids(request.request_id), strict=True):
        manager.evict_blocks(set(blocks[start // group.kv_cache_spec.block_size :]))
