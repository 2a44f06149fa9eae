"""Attention from the question's tokens to the chunks' tokens.

``Questions`` sums it over some layers, in a pass of the model's own forward over the tokens that no
chunk holds, with the chunks' stored KV in the paged cache; the pass ends with the last of those layers.
That the question tells which tokens to recompute is the point of ProphetKV and FusionRAG.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from vllm_blend.core.step import MAX_ASKED, StepRequest
from vllm_blend.model.select.question import attention_received

if TYPE_CHECKING:
    from vllm_blend.model.active_rows import ActiveRows


@dataclass(frozen=True, eq=False)
class QuestionRows:
    """A request's question in a pass over its own rows.

    Attributes:
        first: which of the pass's rows is the request's first; ``count``: how many it has.
        index: of the request in the step.
        rows: the question's last ones, ``[MAX_ASKED]`` int64; padded with the last.
        last_keys: last key that each sees, ``[MAX_ASKED]`` int64; -1: it only pads.
        total: what positions of the prompt receive, ``[num_positions]`` float32.
    """

    request: StepRequest
    first: int
    count: int
    index: int
    rows: torch.Tensor
    last_keys: torch.Tensor
    total: torch.Tensor


class Questions:
    """Hears what each layer's queries give to the keys (``model/active_rows.py``, ``Listener``).

    Args:
        frame: the rows of the pass: of ``requests`` those that no chunk holds.
        requests: in the step's order.
        layers: that are asked.
    """

    def __init__(self, frame: ActiveRows, requests: Sequence[StepRequest], layers: range) -> None:
        self._frame, self._layers = frame, layers
        self._asked: list[QuestionRows] = []
        self._of_layers: list[Any] = []
        ends = [*accumulate(request.num_rows - request.num_chunk_rows for request in requests)]
        places = [_places(request, end) for request, end in zip(requests, ends, strict=True)]
        rows, last_keys = _to(torch.stack(places, dim=1), frame.device)
        self._rows = rows.flatten()
        for index, request in enumerate(requests):
            count = request.num_rows - request.num_chunk_rows
            self._asked.append(
                QuestionRows(
                    request,
                    ends[index] - count,
                    count,
                    bisect_right(frame.step.starts, request.row) - 1,
                    rows[index],
                    last_keys[index],
                    torch.zeros(request.end, device=frame.device),
                )
            )

    def hear(
        self, impl: Any, layer: Any, query: torch.Tensor, key: torch.Tensor, stored_k: Any
    ) -> None:
        if impl.blend.index in self._layers:
            self._hear(impl, layer, query, key, stored_k)

    def _hear(
        self, impl: Any, layer: Any, query: torch.Tensor, key: torch.Tensor, stored_k: Any
    ) -> None:
        query = query.view(len(query), -1, impl.head_size)
        if hasattr(impl, "asked"):  # over the paged cache, all layers at the end
            table = self._frame.stock_metadata(layer).block_table
            self._of_layers.append(impl.asked(layer, query, self._rows, table))
            return
        softcap, sinks = getattr(impl, "logits_soft_cap", None) or 0.0, getattr(impl, "sinks", None)
        window = layer.sliding_window or 0
        start = 0
        for asked in self._asked:
            request, own = asked.request, slice(asked.first, asked.first + asked.count)
            stored = stored_k[start : start + request.num_chunk_rows]
            start += request.num_chunk_rows
            real = asked.last_keys >= 0
            positions = self._frame.positions[own]
            chunk = request.chunk_rows - request.shift
            k = torch.cat([stored, key[own].view(len(positions), *stored.shape[1:])])
            at = torch.cat([chunk, positions])
            if request.position:
                table = self._frame.stock_metadata(layer).block_table[asked.index]
                k = torch.cat([impl.cached_keys(layer, table, request.position), k])
                at = torch.cat([torch.arange(request.position), at])
            got = attention_received(
                query[asked.rows[real]],
                k,
                asked.last_keys[real],
                at,
                impl.scale,
                window,
                softcap,
                sinks,
            )
            asked.total.index_add_(0, at, got)

    def received(self) -> dict[StepRequest, torch.Tensor]:
        """What the chunk rows of each request got of this rank's heads, ``[num_chunk_rows]``."""
        if self._of_layers:
            from vllm_blend.attention.paged import Received  # needs Triton

            of_layers, self._of_layers = Received(self._of_layers), []
            for number, asked in enumerate(self._asked):
                queries = slice(number * MAX_ASKED, (number + 1) * MAX_ASKED)
                of_layers.add_to(asked.total, queries, asked.index, asked.last_keys)
        found = {}
        for asked in self._asked:
            request = asked.request
            rows = request.chunk_rows - request.shift
            found[request] = asked.total[rows]
        return found


def _places(request: StepRequest, end: int) -> torch.Tensor:
    """Of the question's tokens, their rows and the last key that each sees, ``[2, MAX_ASKED]``; the
    request's own rows end at ``end``."""
    asked, end = request.num_asked, end - (request.end - request.prompt_end)
    rows = torch.arange(end - asked, end - asked + MAX_ASKED).clamp_(max=end - 1)
    last_keys = torch.full((MAX_ASKED,), -1)
    last_keys[:asked] = torch.arange(request.prompt_end - asked, request.prompt_end)
    return torch.stack([rows, last_keys])


def _to(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type != "cuda":
        return values
    return values.pin_memory().to(device, non_blocking=True)
