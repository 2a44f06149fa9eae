"""Which rows of a step are computed: all of them until some are chosen."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from vllm_blend.core.step import BlendStep, StepRequest


class ChosenRows:
    """The rows of a step that are computed.

    Args:
        positions: vLLM's, of all rows of the step.

    Attributes:
        kept: of each request whose rows are chosen, those of its ``chunk_rows`` that are computed, as
            indices; on the host where the host has chosen them.
        fused: requests whose stored KV is in the cache already.
        num_choices: how often other rows were chosen.
    """

    def __init__(self, step: BlendStep, positions: torch.Tensor) -> None:
        self.step = step
        self.kept: dict[StepRequest, torch.Tensor] = {}
        self.fused: set[StepRequest] = set()
        self.num_choices = 0
        self._rows: torch.Tensor | None = None
        self._positions: torch.Tensor | None = None
        self._query_start_loc: torch.Tensor | None = None
        self._all_positions = positions

    @property
    def device(self) -> torch.device:
        return self._all_positions.device

    @property
    def rows(self) -> torch.Tensor:
        """Rows of the step, ascending, ``[num_kept]``."""
        if self._rows is None:
            self._rows = torch.arange(self.step.num_rows, device=self.device)
        return self._rows

    @property
    def num_rows(self) -> int:
        return self.step.num_rows if self._rows is None else self._rows.numel()

    @property
    def positions(self) -> torch.Tensor:
        """Prompt positions of the rows, ``[num_kept]``; before the first choice vLLM's own tensor,
        padding included."""
        if self._rows is None:
            return self._all_positions
        if self._positions is None:
            self._positions = self._all_positions[self._rows]
        return self._positions

    @property
    def query_start_loc(self) -> torch.Tensor:
        """First of the rows of each request, then ``num_rows``, ``[num_reqs + 1]`` int32."""
        if self._query_start_loc is None:
            starts = torch.tensor(self.step.starts, pin_memory=self.device.type == "cuda")
            starts = starts.to(self.device, non_blocking=True)
            self._query_start_loc = torch.searchsorted(self.rows, starts).to(torch.int32)
        return self._query_start_loc

    def first_row(self, request: StepRequest) -> int:
        """Which of the rows is the first one of ``request``."""
        before = (other for other in self.kept if other.row < request.row)
        return request.row - sum(r.num_chunk_rows - self.kept[r].numel() for r in before)

    def row_of(self, request: StepRequest, position: int) -> int:
        """Which of the rows stands at ``position`` of a request's prompt, one that is computed; its
        chosen rows are on the host."""
        before = sum(
            min(end, position) - start for _, start, end in request.windows if start < position
        )
        row = self.first_row(request) + position - request.position
        kept = self.kept.get(request)
        return row if kept is None else row - before + int((kept < before).sum())

    def candidates(self, request: StepRequest) -> tuple[torch.Tensor, torch.Tensor]:
        """The request's chunk tokens that are still computed.

        Returns:
            Their indices into the frame's rows and into the request's ``chunk_rows``.
        """
        kept = self.kept.get(request)
        if kept is None:
            kept = torch.arange(request.num_chunk_rows, device=self.device)
        kept = kept.to(self.device)
        return torch.searchsorted(self.rows, request.chunk_rows[kept]), kept

    def shrink(self, kept: dict[StepRequest, torch.Tensor]) -> torch.Tensor:
        """Drops the chunk rows not in ``kept``; returns the indices of the rows that stay."""
        before = self._rows
        self.kept |= kept
        if all(index.device.type == "cpu" for index in self.kept.values()):
            self._take_from_host(self._kept_on_host())
        else:
            self._take(self._kept_on_device(), None)
        return self.rows if before is None else torch.searchsorted(before, self.rows)

    def own_rows_of(self, requests: Iterable[StepRequest]) -> None:
        """Leaves only the rows of ``requests`` that no stored KV stands for."""
        requests = list(requests)
        self.kept = {request: torch.empty(0, dtype=torch.int64) for request in requests}
        self.fused = {request for request in self.step.blended if request not in requests}
        own = np.zeros(self.step.num_rows, dtype=bool)
        for request in requests:
            own[request.row : request.row + request.num_rows] = True
            for _, start, end in request.windows:
                own[start + request.shift : end + request.shift] = False
        self._take_from_host(np.flatnonzero(own))

    def _kept_on_host(self) -> npt.NDArray[np.int64]:
        """The step's rows without the chunk rows that are not kept."""
        mask = np.ones(self.step.num_rows, dtype=bool)  # numpy: torch takes several times as long
        for request, index in self.kept.items():
            kept = np.zeros(request.num_chunk_rows, dtype=bool)
            kept[index.numpy()] = True
            first = 0
            for _, start, end in request.windows:
                mask[start + request.shift : end + request.shift] = kept[first : first + end - start]
                first += end - start
        return np.flatnonzero(mask)

    def _kept_on_device(self) -> torch.Tensor:
        """The same, where the host does not know what is kept."""
        mask = torch.ones(self.step.num_rows, dtype=torch.bool, device=self.device)
        count = self.step.num_rows
        for request, index in self.kept.items():
            count -= request.num_chunk_rows - index.numel()
            for _, start, end in request.windows:
                mask[start + request.shift : end + request.shift] = False
            # not `mask[rows] = True`: on a GPU that waits for the device, to copy the scalar there
            mask.index_fill_(0, request.chunk_rows[index.to(self.device)], True)
        return torch.nonzero_static(mask, size=count).flatten()

    def _take_from_host(self, rows: npt.NDArray[np.int64]) -> None:
        """Makes ``rows``, ascending, the frame's, by one copy to the device for all that is known."""
        starts = np.searchsorted(rows, self.step.starts)
        both = torch.from_numpy(np.concatenate([rows, starts]))
        if self.device.type == "cuda":
            both = both.pin_memory().to(self.device, non_blocking=True)
        self._take(both[: len(rows)], both[len(rows) :].to(torch.int32))

    def _take(self, rows: torch.Tensor, query_start_loc: torch.Tensor | None) -> None:
        self._rows, self._query_start_loc, self._positions = rows, query_start_loc, None
        self.num_choices += 1
        self.changed()

    def changed(self) -> None:
        """Called where other rows are chosen."""
