"""How ``sparse_attention`` divides rows: tiles of its kernel, and tiles that FlashAttention takes as
requests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from vllm_blend.ops.library import INTERPRETED

SHARES = 2
"""Tiles of ``sparse_attention_rest`` in a virtual request."""


@dataclass(frozen=True, eq=False)
class VirtualRequests:
    """Tiles of rows as requests of a kernel with a causal mask, whose rows follow one another.

    The first row of a tile sees the keys up to its own position there, each other one a key more than
    the row before. Positions rise by at least one a row, so no row sees a key too many; where they rise
    by one, as in a question, none is missing.

    Later tiles come first, as they see more keys: a kernel that takes requests in their order ends with
    the short ones.

    Attributes:
        starts: first row of each tile, and one more number, which kernels want: ``[num_tiles + 1]``
            int32.
        query_lens: rows of each tile; a request's last tile has fewer, or none: ``[num_tiles]`` int32.
        seq_lens: keys of each tile: its first row's position and its rows, ``[num_tiles]`` int32.
        block_table: ``[num_tiles, max_num_blocks]`` int32.
        block_q: rows of a tile at most.
    """

    starts: torch.Tensor
    query_lens: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    block_q: int


def prefix_rows(group: int) -> int:
    """Query rows of a virtual request, where a KV head has ``group`` query heads.

    Times ``group`` they make the 128 rows of scores of FlashAttention 3's tiles. More would leave more
    keys to ``sparse_attention_rest``, fewer read the common keys more often.
    """
    return SHARES * rest_tiles().block_q(group)


def virtual_requests(
    positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_table: torch.Tensor,
    *,
    group: int,
) -> VirtualRequests:
    """Tiles of ``prefix_rows`` as requests; does not wait for the device.

    Args:
        group: query heads of a KV head. Others as ``sparse_attention``'s; rows that no request has may
            follow the last one.
    """
    block_q = prefix_rows(group)
    num_rows, num_reqs = positions.shape[0], block_table.shape[0]
    tile = torch.arange(num_rows // block_q + num_reqs - 1, -1, -1, device=positions.device)
    index = torch.arange(num_reqs, device=positions.device)
    first_tile = query_start_loc[:-1] // block_q + index
    request = torch.searchsorted(first_tile, tile, right=True) - 1
    start, end = query_start_loc[request], query_start_loc[request + 1]
    first_row = torch.minimum(start + (tile - first_tile[request]) * block_q, end)
    query_lens = (end - first_row).clamp(max=block_q)
    seq_lens = positions[first_row.clamp(max=num_rows - 1)] + query_lens
    return VirtualRequests(
        torch.cat([first_row, first_row[-1:]]).to(torch.int32),
        query_lens.to(torch.int32),
        torch.where(query_lens > 0, seq_lens, 0).to(torch.int32),
        block_table[request],
        block_q,
    )


@dataclass(frozen=True)
class Tiles:
    """How the kernel is launched.

    Attributes:
        block_m: rows of the score matrix: query rows times the heads of a KV head.
        block_n: keys a step.
        heads_abreast: KV heads that run side by side.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    heads_abreast: int = 1

    def block_q(self, group: int) -> int:
        """Query rows of a tile, where a KV head has ``group`` query heads."""
        return max(self.block_m, triton.next_power_of_2(group)) // group


def choose_tiles(query: torch.Tensor, num_kv_heads: int) -> Tiles:
    """Tiles for this launch, from what the host knows."""
    if INTERPRETED:
        return Tiles(block_m=32, block_n=32, num_warps=4, num_stages=1)
    if query.element_size() == 4 or query.shape[2] > 128:
        # a result of 64 rows by 512 wants the registers of 8 warps
        num_warps = 4 if query.shape[2] <= 256 else 8
        return Tiles(block_m=64, block_n=32, num_warps=num_warps, num_stages=2)
    # Two such programs share a multiprocessor, so one's softmax runs beside the other's products.
    # All heads abreast was better than one at every length from 4k to 32k.
    return Tiles(block_m=64, block_n=64, num_warps=4, num_stages=2, heads_abreast=num_kv_heads)


def rest_tiles() -> Tiles:
    """Tiles of ``sparse_attention_rest``, each a share of a virtual request."""
    if INTERPRETED:
        return Tiles(block_m=16, block_n=32, num_warps=4, num_stages=1)
    return Tiles(block_m=128 // SHARES, block_n=32, num_warps=4, num_stages=2)
