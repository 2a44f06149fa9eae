"""How a step is split for XFORMERS: consecutive requests that one kernel call computes.

``split`` decides on the host, from lengths alone; ``build_part`` makes masks and indices on the device,
once a step. xformers is imported where a mask is made, not before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

SHORT = 16
"""Rows up to which a request with earlier keys reads them from the paged cache, where they are: to
gather them for so few rows would cost more than the attention."""

MAX_KEYS = 32768
"""Keys that one call gathers, more only if one request has more: bounds the memory it takes."""


class Way(Enum):
    """How the rows of a span attend."""

    PAGED = "our kernel, over the paged cache, each row up to its position"
    FRESH = "xformers, over K and V of this very step: no earlier keys"
    GATHERED = "xformers, over K and V gathered from the paged cache"
    BOTTOM_RIGHT = "xformers, one request's kept rows under the mask of the paper's code"


@dataclass(frozen=True)
class Span:
    """Consecutive requests of a step that one kernel call computes.

    Attributes:
        requests: which of the step's requests.
        rows: which rows are theirs.
        query_lens: rows of each request.
        seq_lens: keys of each request, its rows' own included; not used where PAGED.
    """

    way: Way
    requests: slice
    rows: slice
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]


def split(query_lens: Sequence[int], seq_lens: Sequence[int], short: int = SHORT) -> list[Span]:
    """Spans of a step, in order; every row is in one of them.

    Args:
        query_lens: rows of each request; padding requests have none.
        seq_lens: keys of each request, at least; exact where it has more than ``short`` rows.
        short: rows up to which a request with earlier keys is PAGED.
    """
    ways = []
    for rows, keys in zip(query_lens, seq_lens, strict=True):
        if rows == 0 or (keys > rows and rows <= short):
            ways.append(Way.PAGED)
        else:
            ways.append(Way.FRESH if keys == rows else Way.GATHERED)
    spans: list[Span] = []
    first, first_row, row, keys = 0, 0, 0, 0
    for index, way in enumerate(ways):
        full = way is Way.GATHERED and keys + seq_lens[index] > MAX_KEYS
        if index > first and (way is not ways[first] or full):
            spans.append(_span(ways[first], first, index, first_row, query_lens, seq_lens))
            first, first_row, keys = index, row, 0
        row += query_lens[index]
        keys += seq_lens[index]
    if ways:
        spans.append(_span(ways[first], first, len(ways), first_row, query_lens, seq_lens))
    return [span for span in spans if span.rows.stop > span.rows.start]


def split_kept(starts: Sequence[int], bottom_right: dict[int, int]) -> list[Span]:
    """Spans of the kept rows of a step that blends.

    Args:
        starts: first kept row of each request, then the number of kept rows.
        bottom_right: keys of each request that wants the mask of the paper's code, by its index.
    """
    num_reqs = len(starts) - 1
    query_lens = [starts[i + 1] - starts[i] for i in range(num_reqs)]
    seq_lens = [bottom_right.get(i, 0) for i in range(num_reqs)]
    spans, first = [], 0
    for index in [*sorted(bottom_right), num_reqs]:
        spans.append(_span(Way.PAGED, first, index, starts[first], query_lens, seq_lens))
        if index < num_reqs:
            one = _span(Way.BOTTOM_RIGHT, index, index + 1, starts[index], query_lens, seq_lens)
            spans.append(one)
        first = index + 1
    return [span for span in spans if span.rows.stop > span.rows.start]


def _span(
    way: Way, first: int, end: int, row: int, query_lens: Sequence[int], seq_lens: Sequence[int]
) -> Span:
    rows = slice(row, row + sum(query_lens[first:end]))
    return Span(way, slice(first, end), rows, tuple(query_lens[first:end]), tuple(seq_lens[first:end]))


@dataclass(frozen=True, eq=False)
class PagedPart:
    """Rows for ``sparse_attention``.

    Attributes:
        positions: last key that each row sees, ``[num_rows]``.
        query_start_loc: first of these rows of each request, then ``num_rows``, ``[num_reqs + 1]``.
        block_table: ``[num_reqs, max_num_blocks]``.
    """

    rows: slice
    positions: torch.Tensor
    query_start_loc: torch.Tensor
    block_table: torch.Tensor


@dataclass(frozen=True, eq=False)
class MaskedPart:
    """Rows for ``memory_efficient_attention``.

    Attributes:
        mask: xformers' ``attn_bias``.
        keys: block and offset of each key in the paged cache, each ``[num_keys]``; None: K and V of
            the rows themselves.
    """

    rows: slice
    mask: Any
    keys: tuple[torch.Tensor, torch.Tensor] | None


def build_part(metadata: Any, span: Span, window: int, block_size: int) -> PagedPart | MaskedPart:
    """The span on the device; the host does not wait for it.

    Args:
        metadata: XFormersMetadata of the step.
        window: a query sees this many keys, its own included; 0: all.
        block_size: of the paged cache.
    """
    block_table = metadata.block_table[span.requests]
    if span.way is Way.PAGED:
        start, end = span.requests.start, span.requests.stop
        query_start_loc = metadata.query_start_loc[start : end + 1]
        if span.rows.start:
            query_start_loc = query_start_loc - span.rows.start
        if metadata.positions is not None:
            positions = metadata.positions[span.rows]
        else:
            positions = last_positions(query_start_loc, metadata.seq_lens[span.requests], span)
        return PagedPart(span.rows, positions, query_start_loc, block_table)
    device = block_table.device
    if span.way is Way.FRESH:
        return MaskedPart(span.rows, fresh_mask(span.query_lens, window, device), None)
    first_keys = [0] * len(span.seq_lens)
    if window:  # keys before the first row's window may be gone from the cache
        first_keys = [
            max(0, keys - rows - window + 1)
            for rows, keys in zip(span.query_lens, span.seq_lens, strict=True)
        ]
    key_lens = [keys - first for keys, first in zip(span.seq_lens, first_keys, strict=True)]
    if span.way is Way.BOTTOM_RIGHT:
        mask = bottom_right_mask(window)
    else:
        mask = gathered_mask(span.query_lens, key_lens, window, device)
    return MaskedPart(span.rows, mask, key_places(block_table, first_keys, key_lens, block_size))


def last_positions(query_start_loc: torch.Tensor, seq_lens: torch.Tensor, span: Span) -> torch.Tensor:
    """Position of each row, if a request's rows are its last tokens, ``[num_rows]``."""
    if max(span.query_lens) == min(span.query_lens) == 1:
        return seq_lens - 1
    row = torch.arange(sum(span.query_lens), device=seq_lens.device, dtype=query_start_loc.dtype)
    request = torch.bucketize(row, query_start_loc[1:], right=True)
    return seq_lens[request] - (query_start_loc[request + 1] - row)


def key_places(
    block_table: torch.Tensor, first_keys: Sequence[int], key_lens: Sequence[int], block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block and offset of the keys ``[first, first + len)`` of each request, one after another."""
    device, total = block_table.device, sum(key_lens)
    ends, end = [], 0
    for length in key_lens:
        end += length
        ends.append(end)
    shifts = [f - (e - n) for f, e, n in zip(first_keys, ends, key_lens, strict=True)]
    lens, shift = torch.tensor([key_lens, shifts], pin_memory=block_table.is_cuda).to(
        device, non_blocking=True
    )
    request = torch.repeat_interleave(torch.arange(len(ends), device=device), lens, output_size=total)
    position = torch.arange(total, device=device) + shift[request]
    return block_table[request, position // block_size].long(), position % block_size


def fresh_mask(query_lens: Sequence[int], window: int, device: torch.device) -> Any:
    """Each request's rows see each other, causally."""
    from xformers.ops.fmha.attn_bias import BlockDiagonalCausalMask, BlockDiagonalMask

    if window:
        blocks = BlockDiagonalMask.from_seqlens(list(query_lens), device=device)
        return blocks.make_local_attention(window)
    return BlockDiagonalCausalMask.from_seqlens(list(query_lens), device=device)


def gathered_mask(
    query_lens: Sequence[int], key_lens: Sequence[int], window: int, device: torch.device
) -> Any:
    """Each request's rows are the last ones of its keys, and see causally."""
    from xformers.ops.fmha.attn_bias import BlockDiagonalMask

    blocks = BlockDiagonalMask.from_seqlens(list(query_lens), list(key_lens), device=device)
    if window:
        return blocks.make_local_attention_from_bottomright(window)
    return blocks.make_causal_from_bottomright()


def bottom_right_mask(window: int) -> Any:
    """One request's rows are taken for its last ones, which kept rows are not (the paper's code)."""
    from xformers.ops.fmha.attn_bias import LowerTriangularFromBottomRightMask

    mask = LowerTriangularFromBottomRightMask()
    return mask.make_local_attention(window) if window else mask
