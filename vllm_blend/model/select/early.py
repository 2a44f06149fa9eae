"""The choice of rows before layer 0: by what is known of a request without running any of it, and by
what its question attends to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import torch

from vllm_blend.core.plans import BlendPlan, ChunkSpan
from vllm_blend.core.settings import doubled, num_kept
from vllm_blend.core.static_scores import Window, static_scores
from vllm_blend.core.step import StepRequest
from vllm_blend.model.select.policies import make_policy


class EarlyCandidates:
    """What a policy may look at before layer 0; names are those of ``model/select/check_layer.py``.

    The candidates are the tokens of ``windows``.

    Args:
        windows: of one request, ascending.
        received: what they get of the question's attention, ``[num_candidates]`` float32; None: the
            question was not asked.
        device: of what is returned.
    """

    def __init__(
        self, windows: Sequence[Window], received: torch.Tensor | None, device: torch.device
    ) -> None:
        self._windows, self._device = windows, device
        self._received = received

    @cached_property
    def positions(self) -> torch.Tensor:
        """Prompt position of each candidate, ``[num_candidates]`` int64."""
        return self._joined([torch.arange(start, end) for _, start, end in self._windows])

    @cached_property
    def place_in_chunk(self) -> torch.Tensor:
        """How many tokens of its own chunk stand before each candidate, ``[num_candidates]`` int64."""
        return self._joined(
            [torch.arange(start - span.start, end - span.start) for span, start, end in self._windows]
        )

    @cached_property
    def stale(self) -> torch.Tensor:
        """Where recomputing changes anything at all, ``[num_candidates]`` bool."""
        return self._joined(
            [torch.full((end - start,), not span.exact) for span, start, end in self._windows]
        )

    @cached_property
    def static(self) -> torch.Tensor:
        """Scores kept with the chunks, ``[num_candidates]`` float32."""
        return self._joined([static_scores(self._windows)])

    @property
    def attention_ahead(self) -> torch.Tensor:
        """``received``, of a request whose question was asked."""
        assert self._received is not None
        return self._received

    def _joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        both = torch.cat(list(parts))
        if self._device.type != "cuda":
            return both
        return both.pin_memory().to(self._device, non_blocking=True)


FEW = 0.02


def num_few(num_tokens: int) -> int:
    """How many of a prompt's chunk tokens get more than half of the attention of a question that points
    nowhere: ``FEW`` of them, and no more than their number's square root, since the tokens that any
    text attends to grow more slowly than the text. Two models' requests for a summary gave them 0.44 to
    0.79 of it, nearly all more than half, their questions 0.14 to 0.55 (docs/quality.md)."""
    return math.ceil(min(FEW * num_tokens, math.sqrt(num_tokens)))


def points_nowhere(request: StepRequest, received: torch.Tensor) -> torch.Tensor:
    """Whether a question asks for no passage, as a request for a summary does: then it attends to the
    few tokens that any text attends to, which says little of what the answer reads.

    Args:
        received: what the request's ``chunk_rows`` get of the question's attention.

    Returns:
        A bool, on the device.
    """
    view = EarlyCandidates(request.windows, received, request.device)
    got = received * view.stale
    return got.topk(num_few(got.numel())).values.sum() > got.sum() / 2


def num_chosen(request: StepRequest, nowhere: bool) -> int:
    """How many rows are chosen of a request whose question was asked: twice as many where it points
    nowhere (``doubled``)."""
    ratio = request.settings.last_ratio
    return num_kept(doubled(ratio) if nowhere else ratio, request.num_chunk_rows)


def choose(request: StepRequest, received: torch.Tensor | None, nowhere: bool = False) -> torch.Tensor:
    """Which of the request's ``chunk_rows`` are recomputed, ascending, ``[num_chosen]`` int64.

    Where the question was asked, the ratio's share of this window's, on the device. Else of the whole
    prompt's, however it is cut into windows, on the host.
    """
    settings, plan = request.settings, request.plan
    if received is not None:
        view = EarlyCandidates(request.windows, received, request.device)
        return make_policy(settings).rows(view, num_chosen(request, nowhere))
    if not isinstance(plan, BlendPlan):
        return torch.empty(0, dtype=torch.int64)
    if "chosen" not in plan.made:
        windows = [(span, span.start, span.end) for span in plan.spans]
        view = EarlyCandidates(windows, None, torch.device("cpu"))
        total = sum(end - start for _, start, end in windows)
        plan.made["chosen"] = make_policy(settings).rows(view, num_kept(settings.last_ratio, total))
    return among(plan.made["chosen"], plan.spans, request)


def among(chosen: torch.Tensor, spans: Sequence[ChunkSpan], request: StepRequest) -> torch.Tensor:
    """Those of a prompt's chosen chunk tokens that a request's window holds.

    Args:
        chosen: ascending, as indices into the tokens of ``spans``.

    Returns:
        Indices into the request's ``chunk_rows``.
    """
    if request.num_chunk_rows == sum(span.end - span.start for span in spans):
        return chosen
    before = sum(max(0, min(span.end, request.position) - span.start) for span in spans)
    first, end = torch.searchsorted(chosen, torch.tensor([before, before + request.num_chunk_rows]))
    return chosen[first:end] - before
