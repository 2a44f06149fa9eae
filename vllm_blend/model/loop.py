"""The paper's path: a layer loop in which rows are chosen at check layers.

It calls the stock layers, with all rows before the check layer (status 0) and with the chosen rows from
it on (status 1 and 2), under a context that describes those rows. It knows how four families' layers
are called; everything else that chooses its rows before layer 0 does without it (``model/rows.py``).
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import Any

import torch

from vllm_blend.compat import cuda
from vllm_blend.core.settings import num_kept
from vllm_blend.core.step import Status
from vllm_blend.core.tensor_parallel import broadcast_rank0
from vllm_blend.model.active_rows import ActiveRows
from vllm_blend.model.guard import Guard
from vllm_blend.model.rows import Inputs
from vllm_blend.model.select import CheckLayerCandidates, choose_rows


class LayerLoop:
    """The loop over a model's layers.

    Args:
        inner: vLLM's inner model, of one of ``LOOP_ARCHITECTURES``.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._fusable_ops = cuda.fusable_ops(inner.layers)

    def run(self, frame: ActiveRows, inputs: Inputs, guard: Guard) -> torch.Tensor:
        """Hidden states of all rows, ``[num_tokens, hidden_size]``; 0 where none are computed.

        Raises:
            StepFailed: where the choice of rows failed on some rank.
        """
        hidden = inputs.inputs_embeds
        if hidden is None:
            hidden = self._inner.embed_input_ids(inputs.input_ids)
        with cuda.fused_ops(self._fusable_ops if hidden.is_cuda else None):
            return self._run_layers(frame, hidden, guard)

    def _run_layers(self, frame: ActiveRows, hidden: torch.Tensor, guard: Guard) -> torch.Tensor:
        inner = self._inner
        output = torch.zeros_like(hidden)
        residual: torch.Tensor | None = None
        if frame.kept:  # some requests' rows are chosen already
            hidden = hidden[frame.rows]
        layers = list(islice(inner.layers, inner.start_layer, inner.end_layer))
        for index, layer in enumerate(layers):
            attn = layer.self_attn.attn
            if frame.status(index) == Status.CHECK:
                assert residual is not None  # a check layer is never layer 0
                with frame.clock.stage("select"):
                    take = choose(frame, index, layers, hidden, residual, guard)
                hidden, residual = hidden[take], residual[take]
            if frame.num_rows:
                with frame.on_rows(attn):
                    hidden, residual = layer(frame.positions, hidden, residual)
            else:  # a window of chunked prefill may hold reused tokens alone
                guard.attempt(partial(frame.fuse, attn.impl, attn), None)
            guard.attempt(frame.stored.begin, None)  # once layer 0 is launched
        if frame.num_rows:
            hidden, _ = inner.norm(hidden, residual)
            output[frame.rows] = hidden[: frame.num_rows]
        return output


def choose(
    frame: ActiveRows,
    index: int,
    layers: Any,
    hidden: torch.Tensor,
    residual: torch.Tensor,
    guard: Guard,
) -> torch.Tensor:
    """Chooses rows at check layer ``index``, by each request's policy; returns the frame's rows that go
    on, which are described then."""
    kept = {}
    for request in frame.step.blended:
        if request.settings.early or index not in request.settings.check_layers:
            continue
        view = CheckLayerCandidates(frame, request, layers, index, hidden, residual, guard)
        view.sum_over_ranks()
        settings = request.settings
        count = num_kept(settings.ratio_at(index), request.num_chunk_rows)
        chosen = guard.attempt(
            partial(choose_rows, settings, view, count), torch.arange(count, device=frame.device)
        )
        kept[request] = view.chunk_index[broadcast_rank0(chosen)]

    def shrink() -> torch.Tensor:
        take = frame.shrink(kept)
        for layer in layers[index:] if frame.num_rows else ():
            frame.describe(layer.self_attn.attn)
        frame.cache_fuse_metadata.record(frame.results())
        return take

    take = guard.attempt(shrink, frame.rows)
    guard.agree()
    return take
