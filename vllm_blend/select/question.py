"""Attention from the question's tokens to the chunks' tokens.

``Questions`` sums it over some layers, in a pass of the model's own forward over the tokens that no
chunk holds, with the chunks' stored KV in the paged cache; the pass ends with the last of those layers.
That the question tells which tokens to recompute is the point of ProphetKV and FusionRAG.
``attention_here`` is one layer's, from fresh Q and K.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from vllm_blend.core import StepRequest
from vllm_blend.ranks import summed

if TYPE_CHECKING:
    from vllm_blend.models.frame import Frame
    from vllm_blend.select.view import View

MAX_ASKED = 32
"""Question tokens that are asked, its last ones; bounds the memory of a long question."""


ASKED_DEPTH = 1 / 3, 2 / 3
"""Which layers are asked: those in the middle third of the model's depth (docs/quality.md)."""


def asked_layers(num_layers: int) -> range:
    """The layers that are asked; the pass ends with the last of them."""
    first, end = (int(depth * num_layers) for depth in ASKED_DEPTH)
    return range(first, max(end, first + 1))


def num_asked(request: StepRequest) -> int:
    """How many of the window's last prompt tokens are the question's, ``MAX_ASKED`` at most.

    0 if this window of a chunked prefill does not hold the question.
    """
    end = request.prompt_end
    return max(0, end - max(request.plan.spans[-1].end, request.position, end - MAX_ASKED))


@dataclass(frozen=True, eq=False)
class Asked:
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


class Heard(Exception):
    """Ends a forward of the model once the last layer that is asked was heard."""


class Questions:
    """Hears what each layer's queries give to the keys (``models/frame.py``, ``Listener``).

    Args:
        frame: the rows of the pass: of ``requests`` those that no chunk holds.
        requests: in the step's order.
        layers: that are asked; the pass ends with the last of them.
    """

    def __init__(self, frame: Frame, requests: Sequence[StepRequest], layers: range) -> None:
        self._frame, self._layers = frame, layers
        self._asked: list[Asked] = []
        first = 0
        for request in requests:
            count = request.num_rows - request.num_chunk_rows
            asked, end = num_asked(request), first + count - (request.end - request.prompt_end)
            rows = torch.arange(end - asked, end - asked + MAX_ASKED).clamp_(max=end - 1)
            last_keys = torch.full((MAX_ASKED,), -1)
            last_keys[:asked] = torch.arange(request.prompt_end - asked, request.prompt_end)
            self._asked.append(
                Asked(
                    request,
                    first,
                    count,
                    bisect_right(frame.step.starts, request.row) - 1,
                    _to(rows, frame.device),
                    _to(last_keys, frame.device),
                    torch.zeros(request.end, device=frame.device),
                )
            )
            first += count

    def hear(
        self, impl: Any, layer: Any, query: torch.Tensor, key: torch.Tensor, stored_k: Any
    ) -> None:
        if impl.blend.index in self._layers:
            self._hear(impl, layer, query, key, stored_k)
        if impl.blend.index == self._layers[-1]:
            raise Heard

    def _hear(
        self, impl: Any, layer: Any, query: torch.Tensor, key: torch.Tensor, stored_k: Any
    ) -> None:
        query = query.view(len(query), -1, impl.head_size)
        softcap, sinks = getattr(impl, "logits_soft_cap", None) or 0.0, getattr(impl, "sinks", None)
        window = layer.sliding_window or 0
        if hasattr(impl, "caches"):
            from vllm_blend.ops.received_attention import run as received_attention  # needs Triton

            key_cache, _ = impl.caches(layer.kv_cache)
            block_table = self._frame.stock_metadata(layer).block_table
            for asked in self._asked:
                received_attention(
                    query.index_select(0, asked.rows),
                    key_cache,
                    block_table[asked.index],
                    asked.last_keys,
                    asked.total,
                    scale=impl.scale,
                    sliding_window=window,
                    softcap=softcap,
                    sinks=sinks,
                )
            return
        start = 0
        for asked in self._asked:
            request, own = asked.request, slice(asked.first, asked.first + asked.count)
            stored = stored_k[start : start + request.num_chunk_rows]
            start += request.num_chunk_rows
            real = asked.last_keys >= 0
            positions = self._frame.positions[own]
            chunk = request.chunk_rows - request.row + request.position
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
        """What the chunk rows of each request got, over layers and ranks, ``[num_chunk_rows]``."""
        found = {}
        for asked in self._asked:
            request = asked.request
            rows = request.chunk_rows - request.row + request.position
            found[request] = summed(asked.total[rows])
        return found


def _to(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type != "cuda":
        return values
    return values.pin_memory().to(device, non_blocking=True)


class Projection(NamedTuple):
    """A layer's Q, K and V, before norms and RoPE: ``[num_rows, heads, head_size]`` each."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def project(layer: Any, hidden: torch.Tensor, residual: torch.Tensor) -> Projection:
    """Q, K, V that a stock decoder layer would compute.

    Args:
        layer: a decoder layer of any family here: they share these names.
        hidden, residual: its inputs, ``[num_rows, hidden_size]``; overwritten.
    """
    normed, _ = layer.input_layernorm(hidden, residual)
    qkv, _ = layer.self_attn.qkv_proj(normed)
    attn, kv_size = layer.self_attn.attn, layer.self_attn.kv_size
    size = (qkv.shape[0], -1, attn.head_size)
    q, k, v = qkv.split([layer.self_attn.q_size, kv_size, kv_size], dim=-1)
    return Projection(q.view(size), k.view(size), v.view(size))


def project_v(layer: Any, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor | None:
    """V alone, a small part of the product; None where the weight has no rows of its own for it.

    Quantized weights do not, nor those that vLLM packs for a CPU. Arguments as ``project``'s.
    """
    proj, attn = layer.self_attn.qkv_proj, layer.self_attn.attn
    kv_size = layer.self_attn.kv_size
    num_rows = layer.self_attn.q_size + 2 * kv_size
    if not (
        hidden.is_cuda
        and isinstance(proj.quant_method, UnquantizedLinearMethod)
        and proj.weight.shape == (num_rows, hidden.shape[1])
    ):
        return None
    normed, _ = layer.input_layernorm(hidden, residual)
    bias = None if proj.bias is None else proj.bias[-kv_size:]
    v = torch.nn.functional.linear(normed, proj.weight[-kv_size:], bias)
    return v.view(v.shape[0], -1, attn.head_size)


def normed_heads(self_attn: Any, name: str, x: torch.Tensor) -> torch.Tensor:
    """Q or K as RoPE gets it: some families norm each head first."""
    norm = getattr(self_attn, f"{name}_norm", None)
    return x if norm is None else norm(x.contiguous())


def attention_received(
    q: torch.Tensor,
    k: torch.Tensor,
    last_keys: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """What each key gets of the queries' attention, summed over queries and heads.

    Args:
        q: rotated, ``[num_asked, num_heads, head_size]``.
        k: rotated, ``[num_keys, num_kv_heads, head_size]``, in any order.
        last_keys: position of the last key that each query sees, ``[num_asked]``.
        positions: of the keys, ``[num_keys]``.
        scale: of the logits.
        window: a query sees this many keys, its own included; 0: all.
        softcap: bound of the logits; 0: none.
        sinks: a logit of each head that takes its share, ``[num_heads]``.

    Returns:
        ``[num_keys]`` float32.
    """
    num_kv_heads = k.shape[1]
    grouped = q.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
    # [num_kv_heads, queries of all heads of a group, num_keys]
    logits = torch.bmm(grouped, k.permute(1, 2, 0)).float() * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    # most keys are seen by all
    some = positions > last_keys.min()
    if window:
        some |= positions <= last_keys.max() - window
    at = some.nonzero().flatten()
    hidden = positions[at] > last_keys[:, None]
    if window:
        hidden |= positions[at] <= last_keys[:, None] - window
    parts = logits[..., at].unflatten(1, (-1, len(last_keys))).masked_fill(hidden, float("-inf"))
    logits[..., at] = parts.flatten(1, 2)
    if sinks is not None:
        sink = sinks.float().view(num_kv_heads, -1, 1, 1).expand(-1, -1, len(last_keys), 1)
        logits = torch.cat([logits, sink.flatten(1, 2)], dim=-1)
    return logits.softmax(-1)[..., : len(positions)].sum(dim=(0, 1))


def attention_here(view: View) -> torch.Tensor | None:
    """The question's attention to the candidates at the check layer, ``[num_candidates]`` float32."""
    if not view.num_asked:
        return None
    at, layer = view.own_at, view.layers[view.index]
    own = project(layer, view.hidden[at], view.residual[at])
    self_attn = layer.self_attn
    end = len(at) - (view.request.end - view.request.prompt_end)
    asked_rows = slice(end - view.num_asked, end)
    q = normed_heads(self_attn, "q", own.q[asked_rows])
    k = torch.cat([view.fresh_k, normed_heads(self_attn, "k", own.k)])
    own_positions = view.frame.positions[at]
    both = torch.cat([view.positions, own_positions])
    rotation, asked = self_attn.attn.impl.blend.rotation, own_positions[asked_rows]
    k, q = rotation.rotate(k, both), rotation.rotate(q, asked)
    got = attention_received(q, k, asked, both, self_attn.attn.impl.scale)
    return summed(got[: view.at.numel()])
