"""What the layer loop asks of an attention backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from vllm_blend.core import BlendStep, Status
from vllm_blend.layers import LayerKV
from vllm_blend.models.clock import NO_CLOCK, StageClock

if TYPE_CHECKING:
    from vllm_blend.ops.segment_scatter import SegmentTables  # needs Triton


@dataclass(frozen=True, eq=False)
class StoredSegments:
    """A layer's stored KV as a GPU reads it where it lies (``ops/segment_scatter.py``).

    Attributes:
        tables: where each segment lies and goes.
        layer: which of the tables' layers.
        slot_mapping: slots of all rows of the step, ``[num_rows]``; -1 where a kept row's fresh K and V
            go instead.
    """

    tables: SegmentTables
    layer: int
    slot_mapping: torch.Tensor


@dataclass(frozen=True, eq=False)
class Fusion:
    """What a layer's attention needs beyond the stock metadata; ``old_kv`` is that layer's.

    Attributes:
        status: CHECK or AFTER_CHECK.
        old_kv: stored K before RoPE and V, each ``[num_chunk_rows, num_kv_heads, head_size]``; or the
            same as segments; or None: they are in the paged cache already.
        positions: new position of each stored token, ``[num_chunk_rows]``.
        slot_mapping: its slot in the paged cache, ``[num_chunk_rows]``; -1 where a kept row's
            fresh K and V go instead.
        cache_fuse_metadata: the user's settings and this step's results.
        clock: measures the stage "fuse".
    """

    status: Status
    old_kv: LayerKV | StoredSegments | None
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    cache_fuse_metadata: Any
    clock: StageClock = NO_CLOCK


class BlendAttention(Protocol):
    """A stock ``AttentionImpl``, subclassed."""

    rotary_emb: torch.nn.Module
    """The model's own rotary module of this layer."""

    fuses_segments: bool
    """Whether stored KV may come as ``StoredSegments``."""

    def fuse(self, layer: Any, kv_cache: torch.Tensor, fusion: Fusion) -> None:
        """Writes stored K, rotated to its place, and V to the slots that no fresh row takes."""
        ...

    @staticmethod
    def metadata(attn: Any, stock: Any, step: BlendStep, rows: torch.Tensor) -> Any:
        """Metadata with which this backend attends from ``rows`` alone.

        Args:
            attn: vLLM's ``Attention`` layer.
            stock: its stock metadata of this step, for all rows.
            step: the step's requests.
            rows: kept rows of the step, ascending, ``[num_rows]``.

        Returns:
            A copy of the stock metadata's type with a field ``fusion``.
        """
        ...


def consecutive_runs(rows: torch.Tensor, breaks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits ascending rows into runs of consecutive rows of one request.

    A run is what a stock causal kernel gets right: its rows are the last ones of the keys they see.

    Args:
        rows: ``[num_rows]`` int64, ascending.
        breaks: first row of each request in the step, ``[num_reqs]``.

    Returns:
        First index of each run in ``rows`` (``[num_runs]``), and its length (``[num_runs]``).
    """
    starts = torch.ones_like(rows, dtype=torch.bool)
    starts[1:] = (rows[1:] != rows[:-1] + 1) | torch.isin(rows[1:], breaks)
    first = starts.nonzero().flatten()
    length = torch.diff(first, append=first.new_tensor([rows.numel()]))
    return first, length
