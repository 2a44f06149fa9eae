"""What stands before a token moves its K and V, whatever it says: a model's drift, and its correction.

K (before RoPE) and V of a token are not the same behind 2,000 tokens as behind 40. A good part of that
difference does not depend on the token: its mean is smooth in the logarithm of how many tokens stand
before, and nearly the same for the texts that were tried. It is measured once a model, on a text of our
own, and then added to stored KV where a chunk stands farther behind than where it was computed. No
token is recomputed for it; what is left is what recomputing is for (docs/quality.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from itertools import accumulate, cycle, pairwise, takewhile

import torch

from vllm_blend.core import DriftPart, StepRequest, StoredKV
from vllm_blend.layers import LayerKV

FIRST_OCTAVE, NUM_OCTAVES = 6, 4
"""Drift is linear in log2 of the position within each octave from 2^6 to 2^10, and constant outside."""

RIDGE = 5.0
"""In squared octaves: octaves that the text does not reach have no drift."""

PART_LENGTHS = (64, 128, 64, 256, 64, 128, 64, 512)
"""Of the parts that the text is cut into, in turn: as long as chunks are, and enough beginnings."""

MIN_TOKENS = 256
"""Of a text that is worth it."""


def text() -> str:
    """The text that drift is measured on."""
    return files("vllm_blend").joinpath("drift.txt").read_text(encoding="utf-8")


def part_spans(num_tokens: int) -> list[tuple[int, int]]:
    """``[start, end)`` of each part of a text: what is computed behind the head alone, to be compared
    with the same tokens in the whole."""
    ends = takewhile(lambda end: end < num_tokens, accumulate(cycle(PART_LENGTHS)))
    return list(pairwise([0, *ends, num_tokens]))


def octaves(positions: torch.Tensor) -> torch.Tensor:
    """How much of each octave of positions lies before, ``[num_positions, NUM_OCTAVES]`` float32."""
    log = torch.log2(positions.float().clamp(min=1))
    start = torch.arange(FIRST_OCTAVE, FIRST_OCTAVE + NUM_OCTAVES, device=positions.device)
    return (log[:, None] - start).clamp(0, 1)


@dataclass(frozen=True, eq=False)
class Drift:
    """A model's drift.

    Attributes:
        table: how far K and V move in each octave of positions,
            ``[num_layers, 2, NUM_OCTAVES, num_kv_heads, head_size]`` float32.
    """

    table: torch.Tensor

    @cached_property
    def _matrices(self) -> dict[tuple[torch.device, torch.dtype], torch.Tensor]:
        """The table by device and type, ``[num_layers, 2 * NUM_OCTAVES, num_kv_heads * head_size]``."""
        return {}

    def matrix(self, layer: int, like: torch.Tensor) -> torch.Tensor:
        """What ``weights`` are multiplied by, ``[2 * NUM_OCTAVES, num_kv_heads * head_size]``: the rows
        of K, then those of V.

        Args:
            like: it has the type and device of this.
        """
        kind = like.device, like.dtype
        if kind not in self._matrices:
            self._matrices[kind] = self.table.flatten(1, 2).flatten(2).to(like)
        return self._matrices[kind][layer]


def weights(positions: torch.Tensor, computed_at: torch.Tensor) -> torch.Tensor:
    """What stored tokens need of each octave's drift, ``[num_tokens, NUM_OCTAVES]`` float32.

    Args:
        positions: where each token stands, ``[num_tokens]``.
        computed_at: where it stood when its KV was computed, ``[num_tokens]``.
    """
    return octaves(positions) - octaves(computed_at)


def drift_weights(requests: Iterable[StepRequest]) -> dict[StepRequest, torch.Tensor]:
    """The weights of the ``chunk_rows`` of those requests that want to be corrected, and whose chunks
    do not all stand where they were computed."""
    found = {}
    for request in requests:
        if not request.settings.drift:
            continue
        positions = [torch.arange(lo, hi) for _, lo, hi in request.windows]
        moved_by = [
            0 if s.computed_at is None else s.start - s.computed_at for s, *_ in request.windows
        ]
        if any(moved_by):
            computed_at = [at - by for at, by in zip(positions, moved_by, strict=True)]
            found[request] = weights(torch.cat(positions), torch.cat(computed_at))
    return found


def correct(kv: LayerKV, weight: torch.Tensor, matrix: torch.Tensor) -> LayerKV:
    """K and V of one layer where they stand now; new tensors.

    Args:
        kv: K before RoPE and V, ``[num_tokens, num_kv_heads, head_size]`` each.
        weight: of each token, from ``weights``; any device and type.
        matrix: of the layer, from ``Drift.matrix``.
    """
    weight = weight.to(matrix)
    k, v = (
        torch.addmm(x.flatten(1), weight, part).view_as(x)
        for x, part in zip(kv, matrix.split(NUM_OCTAVES), strict=True)
    )
    return k, v


class Measurement:
    """The measurement of a server, in the model's process, request by request."""

    def __init__(self) -> None:
        self._whole: StoredKV | None = None
        self._fit, self._taken = DriftFit(), 0

    def take(self, part: DriftPart, kv: StoredKV, computed_at: int) -> Drift | None:
        """Takes a request's KV, whose first token stood at ``computed_at``.

        Returns:
            The drift, with the last of them; else None.
        """
        if part.start is None:
            self._whole, self._fit, self._taken = kv, DriftFit(), 0
            return None
        assert self._whole is not None
        here = self._whole.tokens(part.start, part.start + kv.num_tokens)
        self._fit.add(here.layers, kv.layers, computed_at + part.start, computed_at)
        self._taken += 1
        if self._taken < part.num_parts:
            return None
        self._whole = None
        return self._fit.fit()


class DriftFit:
    """Measures a model's drift: least squares over tokens that were computed twice."""

    def __init__(self) -> None:
        self._gram = torch.zeros(NUM_OCTAVES, NUM_OCTAVES, dtype=torch.float64)
        self._moment: torch.Tensor | None = None

    def add(
        self, here: Sequence[LayerKV], there: Sequence[LayerKV], position: int, computed_at: int
    ) -> None:
        """Takes the KV of consecutive tokens, layer by layer, in two places.

        Args:
            here: computed where the first token stands at ``position``.
            there: computed where it stands at ``computed_at``.
        """
        count, device = len(here[0][0]), here[0][0].device
        at = torch.arange(count, device=device)
        weight = weights(position + at, computed_at + at)
        moments = []
        for one, other in zip(here, there, strict=True):
            moved = [(x.float() - y.to(x).float()).flatten(1) for x, y in zip(one, other, strict=True)]
            moments.append(torch.stack([weight.T @ by for by in moved]))
        moment = torch.stack(moments).unflatten(-1, here[0][0].shape[1:])
        self._gram += (weight.T @ weight).double().cpu()
        moment = moment.double().cpu()
        self._moment = moment if self._moment is None else self._moment + moment

    def fit(self) -> Drift:
        """The drift of all that was added.

        Raises:
            RuntimeError: if nothing was.
        """
        if self._moment is None:
            raise RuntimeError("no tokens were added, so there is nothing to measure drift on")
        gram = self._gram + RIDGE * torch.eye(NUM_OCTAVES, dtype=torch.float64)
        solved = torch.linalg.solve(gram, self._moment.flatten(3))  # over the octaves of each K and V
        return Drift(solved.float().view(self._moment.shape))
