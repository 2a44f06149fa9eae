"""Prefix caching of blended requests: exact blocks first, approximate ones under names of their own.

A block's name in vLLM's prefix cache is a hash chained over the tokens before it. A blended request
reads blocks under the stock names, which exact requests wrote; what it computes itself, from the block
of the first reused token on, is named by a chain that also holds its plan. So an exact request never
finds it, and only a request with the same plan and tenant does; and only where it finds all of its
chunks' tokens so, since the choice among a part of them would be another one.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from typing import Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import BlockHash, get_request_block_hasher

from vllm_blend.core.plans import KeyedPlan


@dataclass
class BlockNames:
    """Names of a blended request's blocks; kept at ``request.blend_names``.

    Attributes:
        exact: stock names of the prompt's full blocks.
        own: names of those from ``first`` on, under a salt.
        first: the block from which on the request's own blocks are approximate.
        end: of the last chunk.
    """

    exact: list[BlockHash]
    own: list[BlockHash]
    first: int
    end: int

    @classmethod
    def of(cls, request: Any, plan: KeyedPlan, tenant: str, block_size: int) -> BlockNames:
        facts = [
            tenant,
            str(plan.settings),
            [(s.start, s.end, s.key.hex(), s.offset) for s in plan.spans],
        ]
        salt = blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()
        first, end = plan.spans[0].start // block_size, plan.spans[-1].end
        return cls(list(request.block_hashes), own_names(request, salt, first, block_size), first, end)

    def give(self, request: Any, num_exact: int) -> None:
        """Names the request's blocks, the first ``num_exact`` of them by stock names."""
        request.block_hashes = self.exact[:num_exact] + self.own[num_exact - self.first :]
        request.update_block_hashes()  # of the answer's: chained to these


def own_names(request: Any, salt: str, first: int, block_size: int) -> list[BlockHash]:
    """Names of the prompt's full blocks from ``first`` on: hashes of the salt and all tokens so far.

    As vLLM's, but for its encoding of each block, which takes longer than the hash.
    """
    hasher = sha256(json.dumps(["vllm_blend", salt, request.cache_salt]).encode())
    tokens: Sequence[int] = request.prompt_token_ids
    ids = array("i", tokens[: len(tokens) // block_size * block_size])
    start = first * block_size
    hasher.update(ids[:start])
    names = []
    for at in range(start, len(ids), block_size):
        hasher.update(ids[at : at + block_size])
        names.append(BlockHash(hasher.copy().digest()))
    return names


def name_blocks(request: Any, plan: KeyedPlan, tenant: str, block_size: int) -> None:
    """Gives a request's approximate blocks names of their own."""
    request.blend_names = BlockNames.of(request, plan, tenant, block_size)
    request.blend_names.give(request, request.blend_names.first)


def name_chunk_blocks(request: Any, start: int, block_size: int) -> None:
    """Names the blocks of a chunk's own request: its context's, before ``start``, may be any request's;
    the chunk's are computed, and nobody else's, since they are a tenant's."""
    first = start // block_size
    names = own_names(request, request.request_id, first, block_size)
    request.block_hashes = request.block_hashes[:first] + names
    request.blend_is_own = True


def block_hasher(vllm_config: Any, block_size: int) -> Callable[[Any], list[BlockHash]]:
    """Names blocks as the engine does for clients' requests.

    vLLM 0.33 may hash some tokens behind a block too, for drafters.
    """
    hash_fn = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
    ahead = getattr(vllm_config, "num_hash_lookahead_tokens", 0)
    hasher: Callable[[Any], list[BlockHash]] = get_request_block_hasher(
        block_size, hash_fn, *([ahead] if ahead else [])
    )
    return hasher


class BlendKVCacheManager:
    """Mixin for vLLM's ``KVCacheManager``: a blended request's search for cached blocks."""

    blend_block_size: int

    def get_computed_blocks(self, request: Any, *limit: int | None, **limits: int | None) -> Any:
        """Finds a request's blocks; vLLM 0.33 also says how many tokens of them it takes at most."""
        names: BlockNames | None = getattr(request, "blend_names", None)
        stock: Any = super()
        if names is None or not stock.prefix_cache_lookup_enabled(request):
            return stock.get_computed_blocks(request, *limit, **limits)
        request.block_hashes = names.exact
        exact = stock.get_computed_blocks(request, *limit, **limits)
        names.give(request, names.first)
        mixed = stock.get_computed_blocks(request, *limit, **limits)
        if mixed[1] >= max(exact[1] + 1, names.end):
            return mixed
        names.give(request, max(names.first, exact[1] // self.blend_block_size))
        return exact

    def record_prefix_cache_stats(self, request: Any, num_hits: int) -> None:
        """Counts what clients' requests found."""
        stock: Any = super()
        if not getattr(request, "blend_is_own", False):
            stock.record_prefix_cache_stats(request, num_hits)


def prepare_manager(
    manager: Any, vllm_config: Any, block_size: int
) -> Callable[[Any], list[BlockHash]]:
    """Makes vLLM's ``KVCacheManager`` find a blended request's blocks; returns what names the blocks of
    requests that the engine makes itself, as it does for clients'."""
    manager.__class__ = type("BlendKVCacheManager", (BlendKVCacheManager, type(manager)), {})
    manager.blend_block_size = block_size
    return block_hasher(vllm_config, block_size)


def disown_blocks(request: Any, start: int, manager: Any) -> None:
    """Takes a request's blocks from token ``start`` on out of the prefix cache."""
    names = request.blend_names
    # what it computes now is its own
    names.own = own_names(request, request.request_id, names.first, manager.blend_block_size)
    names.give(request, names.first)
    groups = manager.kv_cache_config.kv_cache_groups
    for group, blocks in zip(groups, manager.get_block_ids(request.request_id), strict=True):
        manager.evict_blocks(set(blocks[start // group.kv_cache_spec.block_size :]))
