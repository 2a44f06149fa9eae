"""The question's attention to the keys of the paged cache, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm_blend.models.frame import Frame

MAX_ASKED = 32
"""Question tokens that are asked, its last ones; bounds the memory of a long question."""


@dataclass(frozen=True, eq=False)
class Asked:
    """The question's last rows on a GPU, and what the keys of the paged cache receive of them.

    Attributes:
        rows: which of the rows that a layer computes, ``[MAX_ASKED]`` int64.
        last_keys: last key that each sees, ``[MAX_ASKED]`` int64; -1: it only pads.
        blocks: of their request, ``[max_num_blocks]`` int32.
        received: attention by position, of all layers so far, ``[max_num_keys]`` float32.
    """

    rows: torch.Tensor
    last_keys: torch.Tensor
    blocks: torch.Tensor
    received: torch.Tensor

    @classmethod
    def on_paged_cache(cls, frame: Frame, attns: Sequence[Any], num_asked: int) -> Asked | None:
        """The last ``num_asked`` of a frame's rows, all of one request; None where keys of ``attns``
        cannot be read from the paged cache: on a CPU, or with a sliding window, which frees blocks."""
        readable = all(hasattr(attn.impl, "caches") and attn.sliding_window is None for attn in attns)
        if not readable or not frame.share_tables(attns):
            return None
        metadata = frame.describe(attns[0])
        # the rows' request is the first that has any
        request = (metadata.query_start_loc[1:] == 0).sum(0, keepdim=True)
        blocks = metadata.block_table.index_select(0, request)[0]
        num_rows, device = frame.rows.numel(), frame.rows.device
        rows = torch.arange(num_rows - num_asked, num_rows - num_asked + MAX_ASKED, device=device)
        rows.clamp_(max=num_rows - 1)
        last_keys = frame.positions[rows]
        last_keys[num_asked:].fill_(-1)
        block_size = attns[0].impl.caches(attns[0].kv_cache)[0].shape[1]
        return cls(rows, last_keys, blocks, torch.zeros(blocks.numel() * block_size, device=device))

    def empty_like(self) -> Asked:
        """Fixed tensors that others are copied to; nobody is asked yet."""
        last_keys = torch.full_like(self.last_keys, -1)
        rows, blocks, received = map(torch.zeros_like, (self.rows, self.blocks, self.received))
        return Asked(rows, last_keys, blocks, received)

    def copy_(self, other: Asked) -> None:
        """Asks the other's rows; nothing is received yet."""
        self.rows.copy_(other.rows)
        self.last_keys.copy_(other.last_keys)
        self.blocks.copy_(other.blocks)
        self.received.zero_()

    @contextmanager
    def listening(self, attn: Any) -> Iterator[None]:
        """While it lasts, ``attn`` adds what its queries give, once it has written their keys."""
        from vllm_blend.ops.received_attention import received_attention  # needs Triton

        def after(_: torch.nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            query = args[0].view(len(args[0]), -1, attn.head_size).index_select(0, self.rows)
            key_cache, _value_cache = attn.impl.caches(attn.kv_cache)
            received_attention(
                query, key_cache, self.blocks, self.last_keys, self.received, scale=attn.impl.scale
            )

        hook = attn.register_forward_hook(after)
        try:
            yield
        finally:
            hook.remove()
