"""Attention from the question's tokens to the chunks' tokens.

``attention_here`` is one layer's, from fresh Q and K. ``attention_ahead`` sends the tokens that no
chunk holds through the later layers over the chunks' stored KV, and sums the question's attention: a
pass that costs about what a blend at ratio 0 costs. That the question tells which tokens to recompute
is the point of ProphetKV and FusionRAG; here it is computed by vLLM's own layers, over the paged
cache. Sliding windows are not looked at: a token that has left the window may be scored.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from vllm_blend.core import Status
from vllm_blend.ranks import summed
from vllm_blend.select.asked import Asked

if TYPE_CHECKING:
    from vllm_blend.select.view import View


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


def attention_sum(q: torch.Tensor, k: torch.Tensor, own_k: torch.Tensor, scale: float) -> torch.Tensor:
    """What each chunk token gets of the question's attention, summed over heads and question tokens.

    Args:
        q: of the question, rotated, ``[num_asked, num_heads, head_size]``.
        k: of the chunk tokens, rotated, ``[num_tokens, num_kv_heads, head_size]``.
        own_k: of the other tokens, of which the question's are the last, rotated,
            ``[num_own_rows, num_kv_heads, head_size]``; masked causally.
        scale: of the logits.

    Returns:
        ``[num_tokens]`` float32.
    """
    rows, kv_heads = q.shape[0], k.shape[1]
    grouped = q.view(rows, kv_heads, -1, q.shape[-1])
    keys = torch.cat([k, own_k])
    logits = torch.einsum("qhgd,khd->hgqk", grouped, keys).float() * scale
    own_rows = own_k.shape[0]
    later = torch.ones(rows, own_rows, dtype=torch.bool, device=q.device).triu(own_rows - rows + 1)
    logits[..., k.shape[0] :].masked_fill_(later, float("-inf"))
    return logits.softmax(-1)[..., : k.shape[0]].sum(dim=(0, 1, 2))


def attention_here(view: View) -> torch.Tensor | None:
    """The question's attention to the candidates at the check layer, ``[num_candidates]`` float32."""
    if not view.num_asked:
        return None
    at, layer = view.own_at, view.layers[view.index]
    own = project(layer, view.hidden[at], view.residual[at])
    self_attn = layer.self_attn
    q = normed_heads(self_attn, "q", own.q[-view.num_asked :])
    k = torch.cat([view.fresh_k, normed_heads(self_attn, "k", own.k)]).flatten(1)
    both = torch.cat([view.positions, view.frame.positions[at]])
    # the op rotates in place; Q alone stands in for K, which it may go without
    k = self_attn.rotary_emb(both, k)[0].view(both.numel(), -1, own.k.shape[-1])
    q = self_attn.rotary_emb(both[-view.num_asked :], q.flatten(1).clone())[0].view_as(q)
    count = view.at.numel()
    return summed(attention_sum(q, k[:count], k[count:], self_attn.attn.impl.scale))


def attention_ahead(view: View) -> torch.Tensor | None:
    """The question's attention to the candidates, summed over the check layer and all later ones.

    The request's own rows go through the stock layers, which fuses the stored KV of all of them; the
    blend then need not fuse it again. The KV of those rows it overwrites.
    """
    if not view.num_asked:
        return None
    frame = view.frame.alone(view.request, view.own_at, view.index)
    hidden, residual = view.hidden[view.own_at], view.residual[view.own_at]
    attns = [layer.self_attn.attn for layer in view.layers[view.index :]]
    asked = Asked.on_paged_cache(frame, attns, view.num_asked)
    replay = None
    if asked is not None and view.graphs is not None:
        replay = view.graphs.prepare(frame, view.index, hidden, residual, asked)
    request = view.request
    total = torch.zeros(request.chunk_rows.numel(), device=hidden.device)
    for index, attn in enumerate(attns, view.index):
        layer = view.layers[index]
        fusion = frame.fusion(index, attn, Status.AFTER_CHECK, None)
        if replay is not None and index in replay.layers:
            frame.fuse(attn, fusion)
            hidden, residual = replay.run(index)
        elif asked is not None:
            with frame.context(attn, fusion), asked.listening(attn):
                hidden, residual = layer(frame.positions, hidden, residual)
        else:
            k = frame.stored.old_kv(request, index)[0]
            k = layer.self_attn.rotary_emb(fusion.positions, k.flatten(1).clone())[0].view_as(k)
            with frame.context(attn, fusion), watching(attn, view.num_asked, k, total):
                hidden, residual = layer(frame.positions, hidden, residual)
        frame.stored.done(index)
    view.frame.fused.add(request)
    if asked is not None:
        if replay is not None and replay.received is not None:
            asked.received.add_(replay.received)
        total = asked.received[request.chunk_rows - request.row + request.position]
    return summed(total[view.chunk_index])


@contextmanager
def watching(attn: Any, num_asked: int, k: torch.Tensor, total: torch.Tensor) -> Iterator[None]:
    """While it lasts, ``attn`` adds to ``total`` what its last queries give to the keys ``k``."""

    def before(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        q, own_k = args[0], args[1]
        size = (q.shape[0], -1, k.shape[-1])
        asked = q.view(size)[-num_asked:]
        total.add_(attention_sum(asked, k, own_k.view(size), attn.impl.scale))

    hook = attn.register_forward_pre_hook(before)
    try:
        yield
    finally:
        hook.remove()
