"""Q, K and V as a stock decoder layer of the four families with a layer loop would compute them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod


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
