"""An independent dense reference of a blended prefill, fp32, from the transformers model's modules.

No paged cache, no vLLM: K and V of all tokens are plain tensors, the mask comes from positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from vllm_blend.core.settings import asked_layers


def blended_logits(
    folder: Path,
    ids: list[int],
    old_kvs: Sequence[Sequence[torch.Tensor]],
    num_chunk_tokens: int,
    ratio: float,
    check_layer: int = 1,
    bottom_right: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the last token ``[vocab_size]`` and the rows that were recomputed, ascending.

    The prompt begins with ``num_chunk_tokens`` tokens of chunks. Those are recomputed whose V is
    farthest off at the check layer.
    """

    def choose(attention: Any, normed: torch.Tensor) -> torch.Tensor:
        v = heads(attention.v_proj(normed), attention.head_dim)
        stored = old_kvs[check_layer][1][:num_chunk_tokens]
        distance = (v[:num_chunk_tokens] - stored).pow(2).sum((1, 2))
        count = int(ratio * num_chunk_tokens)
        return distance.argsort(descending=True)[:count]

    held = range(num_chunk_tokens)
    logits, rows, _ = prefill(folder, ids, old_kvs, held, choose, check_layer, bottom_right)
    return logits, rows


def early_logits(
    folder: Path,
    ids: list[int],
    old_kvs: Sequence[Sequence[torch.Tensor]],
    held: Sequence[int],
    chosen: Sequence[int],
    asked: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, with the rows known before layer 0.

    Args:
        old_kvs: K and V of the tokens at the positions ``held``.
        chosen: which of those are recomputed.

    Returns:
        Logits of the last token, ``[vocab_size]``, and what each token gets of the attention of the
        ``asked`` last ones, all_reduce_sum over the layers that are asked and heads, ``[num_tokens]``.
    """
    logits, _, received = prefill(
        folder, ids, old_kvs, held, lambda *_: torch.tensor(chosen, dtype=torch.int64), asked=asked
    )
    return logits, received


def prefill(
    folder: Path,
    ids: list[int],
    old_kvs: Sequence[Sequence[torch.Tensor]],
    held: Sequence[int],
    choose: Callable[[Any, torch.Tensor], torch.Tensor],
    check_layer: int = 0,
    bottom_right: bool = False,
    asked: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All rows up to ``check_layer``; from it on those that no chunk holds, and those of ``held`` that
    ``choose`` names."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config, inner = model.config, model.model
    window = getattr(config, "sliding_window", None) if config.model_type == "mistral" else None
    positions, in_chunks = torch.arange(len(ids)), torch.tensor(held)
    own = positions[~torch.isin(positions, in_chunks)]
    with torch.no_grad():
        hidden = inner.embed_tokens(torch.tensor(ids))
        rows, received = positions, torch.zeros(len(ids))
        for index, layer in enumerate(inner.layers):
            attention, normed = layer.self_attn, layer.input_layernorm(hidden)
            if index == check_layer:
                rows = torch.cat([choose(attention, normed), own]).sort().values
                hidden, normed = hidden[rows], normed[rows]
            q = project(attention, normed, "q")
            k = project(attention, normed, "k")
            v = heads(attention.v_proj(normed), attention.head_dim)
            if index >= check_layer:  # stored KV everywhere, fresh rows over it
                all_k, all_v = (k.new_zeros(len(ids), *k.shape[1:]) for _ in range(2))
                all_k[in_chunks], all_v[in_chunks] = (x[: len(held)] for x in old_kvs[index])
                all_k[rows], all_v[rows] = k, v
            else:
                all_k, all_v = k, v
            q, all_k = rope(inner, q, rows), rope(inner, all_k, positions)
            last = rows
            if bottom_right and index >= check_layer:
                last = len(ids) - len(rows) + torch.arange(len(rows))
            mask = positions[None] <= last[:, None]
            if window is not None:
                mask &= positions[None] > last[:, None] - window
            groups = q.shape[1] // all_k.shape[1]
            logits = torch.einsum("qhd,khd->hqk", q, all_k.repeat_interleave(groups, 1))
            logits = (logits * q.shape[2] ** -0.5).masked_fill(~mask, float("-inf"))
            weights = logits.softmax(-1)
            if index in asked_layers(len(inner.layers)):
                received += weights[:, -asked:].sum((0, 1))
            out = torch.einsum("hqk,khd->qhd", weights, all_v.repeat_interleave(groups, 1))
            hidden = hidden + attention.o_proj(out.flatten(1))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return model.lm_head(inner.norm(hidden[-1])), rows, received


def heads(flat: torch.Tensor, head_dim: int) -> torch.Tensor:
    return flat.view(len(flat), -1, head_dim)


def project(attention: Any, normed: torch.Tensor, name: str) -> torch.Tensor:
    """Q or K before RoPE, ``[num_rows, heads, head_dim]``, with the family's norm if it has one."""
    flat = heads(getattr(attention, f"{name}_proj")(normed), attention.head_dim)
    norm = getattr(attention, f"{name}_norm", None)
    return flat if norm is None else norm(flat)


def rope(inner: Any, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    cos, sin = (t[0][:, None] for t in inner.rotary_emb(x, positions[None]))
    one, two = x.chunk(2, -1)
    return x * cos + torch.cat([-two, one], -1) * sin
