"""What a step that blends asks of an attention backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from vllm_blend.attention.rotation import Rotation
from vllm_blend.core.layers import LayerKV
from vllm_blend.core.plans import BlendPlan
from vllm_blend.core.step import BlendStep, Status

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
    """A layer's stored KV, and where it goes in the paged cache.

    Attributes:
        old_kv: stored K before RoPE and V, each ``[num_chunk_rows, num_kv_heads, head_size]``; or the
            same as segments; or None: they are in the paged cache already.
        positions: new position of each stored token, ``[num_chunk_rows]``; not read with segments.
        slot_mapping: its slot in the paged cache, ``[num_chunk_rows]``; -1 where a kept row's
            fresh K and V go instead.
        copied: ``old_kv`` is a copy of what is stored, and may be written to.
    """

    old_kv: LayerKV | StoredSegments | None
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    copied: bool = False


class ComputedRows(Protocol):
    """The rows that a step computes, as attention metadata carry them (``model/active_rows.py``).

    Attributes:
        cache_fuse_metadata: the user's flags and this step's results, as the paper names them.
    """

    cache_fuse_metadata: Any

    def status(self, layer: int) -> Status:
        """What the layer does."""
        ...

    def before_attention(
        self,
        impl: BlendAttention,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Fuses the layer's stored KV into its paged cache, and lets the question be heard."""
        ...

    def end_after(self, layer: int) -> None:
        """Called after that; may end the model's forward by an exception."""
        ...


class StepWatcher(Protocol):
    """What an engine's attention layers tell of a step (``model/blending.py``)."""

    step: Any

    def attempt(self, do: Callable[[], None]) -> None:
        """Does what this rank does by itself (``model/guard.py``)."""
        ...

    def collect(self, layer: LayerBlend, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keeps K and V of the requests that are collected in this step."""
        ...


FUSES = (Status.CHECK, Status.AFTER_CHECK)
"""What a layer does where it attends from some rows alone, over stored KV: at a check layer the rows
that were just chosen. With ``DECODE`` and ``FULL_PREFILL`` attention is vLLM's own."""


@dataclass(eq=False)
class LayerBlend:
    """What a layer's attention needs to blend, from the engine's start on.

    Attributes:
        index: of the layer, from 0.
        rotation: how its K depends on its position.
        watcher: the engine's.
    """

    index: int
    rotation: Rotation
    watcher: StepWatcher


class BlendAttention:
    """Mixin for a stock ``AttentionImpl``, whose ``forward`` calls ``join``: before it attends from
    some rows alone; else before or after."""

    blend: LayerBlend | None = None
    """Set where the engine can blend."""

    fuses_segments: bool = False
    """Whether stored KV may come as ``StoredSegments``."""

    def join(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: Any
    ) -> ComputedRows | None:
        """A layer's part in the step that runs: keeps KV that is collected, fuses what is stored.

        Args:
            layer: vLLM's ``Attention``.
            query: ``[num_rows, num_heads, head_size]``.
            key, value: ``[num_rows, num_kv_heads, head_size]``, K rotated.
            metadata: of the layer; None where vLLM measures memory.

        Returns:
            The rows that are computed, where they are not all of the step's.
        """
        if self.blend is None or self.blend.watcher.step is None or metadata is None:
            return None
        blend, watcher = self.blend, self.blend.watcher
        watcher.attempt(lambda: watcher.collect(blend, key, value))
        active: ComputedRows | None = getattr(metadata, "active", None)
        if active is None or active.status(blend.index) not in FUSES:
            return None
        rows = active
        watcher.attempt(lambda: rows.before_attention(self, layer, query, key, value))
        rows.end_after(blend.index)
        return rows

    def fuse(self, layer: Any, kv_cache: torch.Tensor, fusion: Fusion) -> torch.Tensor | None:
        """Writes stored K, rotated to its place, and V to the slots that no fresh row takes.

        Returns:
            The rotated K, where it is at hand.
        """
        raise NotImplementedError

    @staticmethod
    def metadata(attn: Any, stock: Any, places: RowPlaces) -> Any:
        """Metadata with which this backend attends from some rows alone.

        Args:
            attn: vLLM's ``Attention`` layer.
            stock: its stock metadata of this step, for all rows.
            places: which rows those are.

        Returns:
            A copy of the stock metadata's type with a field ``active``, None.
        """
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class RowPlaces:
    """Rows of a step, and where they stand.

    Attributes:
        step: the step's requests.
        rows: kept rows of the step, ascending, ``[num_rows]`` int64.
        positions: of the rows in their prompts, ``[num_rows]`` int64.
        query_start_loc: first kept row of each request, then ``num_rows``, ``[num_reqs + 1]`` int32.
    """

    step: BlendStep
    rows: torch.Tensor
    positions: torch.Tensor
    query_start_loc: torch.Tensor


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


def last_keys(stock: Any, places: RowPlaces) -> torch.Tensor:
    """The last key that each kept row sees, ``[num_rows]``; the host does not wait for the device.

    Args:
        stock: a backend's metadata of the step: ``query_start_loc`` and ``seq_lens`` of all rows.
        places: the kept rows.
    """
    positions, rows = places.positions, places.rows
    for blended in places.step.requests:
        plan = blended.plan
        if not (isinstance(plan, BlendPlan) and plan.settings.mask == "bottom_right"):
            continue
        starts = stock.query_start_loc.long()
        request = torch.bucketize(rows, starts[1:], right=True)
        index = torch.arange(rows.numel(), device=rows.device)
        shifted = stock.seq_lens[request] - (places.query_start_loc[request + 1] - index)
        inside = (rows >= blended.row) & (rows < blended.row + blended.num_rows)
        positions = torch.where(inside, shifted, positions)
    return positions
