"""The rows a layer computes, and the forward context in which a stock layer computes just those."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from vllm.forward_context import ForwardContext, override_forward_context

from vllm_blend.attention.base import Fusion
from vllm_blend.core import BlendStep, Status, StepRequest


class Frame:
    """The rows of a step that are still computed; it shrinks at check layers.

    Attributes:
        rows: rows of the step, ascending, ``[num_kept]``.
        positions: their prompt positions, ``[num_kept]``; before the first choice vLLM's own tensor,
            padding included.
    """

    def __init__(self, step: BlendStep, positions: torch.Tensor, context: ForwardContext) -> None:
        self.step = step
        self.rows = torch.arange(step.num_rows, device=positions.device)
        self.positions = positions
        self.kept: dict[StepRequest, torch.Tensor] = {}  # indices into its chunk_rows
        self._all_positions = positions
        self._context = context
        self._places: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id of slot_mapping
        self._described: dict[int, Any] = {}  # by id of the stock metadata

    def status(self, layer: int) -> Status:
        """What ``layer`` does: CHECK where rows are chosen, AFTER_CHECK once some were."""
        if any(layer in r.settings.check_layers for r in self.step.blended):
            return Status.CHECK
        return Status.AFTER_CHECK if self.kept else Status.FULL_PREFILL

    def candidates(self, request: StepRequest) -> tuple[torch.Tensor, torch.Tensor]:
        """The request's chunk tokens that are still computed.

        Returns:
            Their indices into the frame's rows and into the request's ``chunk_rows``.
        """
        kept = self.kept.get(request)
        if kept is None:
            kept = torch.arange(request.chunk_rows.numel(), device=self.rows.device)
        return torch.searchsorted(self.rows, request.chunk_rows[kept]), kept

    def shrink(self, kept: dict[StepRequest, torch.Tensor]) -> torch.Tensor:
        """Drops the chunk rows not in ``kept``; returns the indices of the rows that stay."""
        self.kept |= kept
        mask = torch.ones(self.step.num_rows, dtype=torch.bool, device=self.rows.device)
        count = self.step.num_rows
        for request, index in self.kept.items():
            mask[request.chunk_rows] = False
            mask[request.chunk_rows[index]] = True
            count -= request.chunk_rows.numel() - index.numel()
        rows = torch.nonzero_static(mask, size=count).flatten()
        take = torch.searchsorted(self.rows, rows)
        self.rows, self.positions = rows, self._all_positions[rows]
        self._places.clear()
        self._described.clear()
        return take

    def results(self) -> dict[str, Any]:
        """What the paper's ``cache_fuse_metadata`` tells of a choice of rows (``door.py``)."""
        slot_mapping = next(iter(self._context.slot_mapping.values()))
        return {
            "imp_indices": self.positions,
            "org_pos": self._all_positions[: self.step.num_rows],
            "org_seq_len": self.step.num_rows,
            "original_slot_mapping": slot_mapping[: self.step.num_rows],
            "our_slot_mapping": slot_mapping[self.rows],
            "attn_bias": None,
            "kv_cache_dtype": self.step.kv_cache_dtype,
        }

    def fusion(self, layer: int, attn: Any, status: Status, cache_fuse_metadata: Any) -> Fusion:
        """The stored KV of one layer and where it goes."""
        chunk_rows, slot_mapping = self._place(attn)
        old_kvs = [request.old_kv(layer) for request in self.kept]
        k, v = old_kvs[0]
        if len(old_kvs) > 1:
            k, v = torch.cat([kv[0] for kv in old_kvs]), torch.cat([kv[1] for kv in old_kvs])
        device = self.rows.device
        return Fusion(
            status,
            (k.to(device), v.to(device)),
            self._all_positions[chunk_rows],
            slot_mapping,
            cache_fuse_metadata,
        )

    @contextmanager
    def context(self, attn: Any, fusion: Fusion | None) -> Iterator[None]:
        """The forward context for one layer; without ``fusion`` vLLM's own, for all rows."""
        if fusion is None:
            yield
            return
        name = attn.layer_name
        context = replace(
            self._context,
            attn_metadata={name: replace(self._describe(attn), fusion=fusion)},
            slot_mapping={name: self._context.slot_mapping[name][self.rows]},
        )
        with override_forward_context(context):
            yield

    def _place(self, attn: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows that stored KV stands for, and their slots: -1 where a kept row's fresh KV goes."""
        slot_mapping = self._context.slot_mapping[attn.layer_name]
        if id(slot_mapping) not in self._places:
            chunk_rows = torch.cat([request.chunk_rows for request in self.kept])
            slots = slot_mapping.clone()
            slots[self.rows] = -1
            self._places[id(slot_mapping)] = chunk_rows, slots[chunk_rows]
        return self._places[id(slot_mapping)]

    def _describe(self, attn: Any) -> Any:
        """The backend's metadata for the kept rows; shared by layers that share the stock one."""
        stock = self._context.attn_metadata[attn.layer_name]
        if id(stock) not in self._described:
            self._described[id(stock)] = attn.impl.metadata(attn, stock, self.step, self.rows)
        return self._described[id(stock)]
