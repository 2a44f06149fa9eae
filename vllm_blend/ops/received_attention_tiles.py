"""How ``received_attention`` divides queries and keys."""

from __future__ import annotations

from functools import cache

import torch
import triton

from vllm_blend.ops.library import INTERPRETED
from vllm_blend.ops.sparse_attention_tiles import Tiles

MAX_QUERIES = 32
"""Queries of a call: each program looks through all of ``last_keys`` for the number of keys."""


def choose_tiles(query: torch.Tensor, group: int) -> Tiles:
    """Tiles for this launch, where a KV head has ``group`` query heads.

    They do not depend on the number of queries: that would compile the kernels for each.
    """
    block_m = triton.next_power_of_2(MAX_QUERIES * group)
    if INTERPRETED:
        return Tiles(block_m=min(64, block_m), block_n=32, num_warps=4, num_stages=1)
    if query.element_size() == 4 or query.shape[2] > 128:
        return Tiles(block_m=min(64, block_m), block_n=32, num_warps=4, num_stages=2)
    return Tiles(block_m=min(128, block_m), block_n=64, num_warps=4, num_stages=3)


def choose_splits(device: torch.device, num_parts: int) -> int:
    """Programs of a part, a power of two: so many that two programs share a multiprocessor."""
    if INTERPRETED:
        return 2
    num_programs = 2 * num_multiprocessors(device)
    return 1 << min(6, max(1, num_programs // num_parts).bit_length() - 1)


@cache
def num_multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
