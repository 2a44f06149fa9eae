"""An independent dense reference of a blended prefill, fp32, from the transformers model's modules.

No paged cache, no vLLM: K and V of all tokens are plain tensors, the mask comes from positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def blended_logits(
    folder: Path,
    ids: list[int],
    old_kvs: Sequence[Sequence[torch.Tensor]],
    num_chunk_tokens: int,
    ratio: float,
    check_layer: int = 1,
    bottom_right: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the last token ``[vocab_size]`` and the rows that were recomputed, ascending."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config, inner = model.config, model.model
    window = getattr(config, "sliding_window", None) if config.model_type == "mistral" else None
    positions = torch.arange(len(ids))
    with torch.no_grad():
        hidden = inner.embed_tokens(torch.tensor(ids))
        rows = positions
        for index, layer in enumerate(inner.layers):
            attention, normed = layer.self_attn, layer.input_layernorm(hidden)
            if index == check_layer:
                v = heads(attention.v_proj(normed), attention.head_dim)
                stored = old_kvs[index][1][:num_chunk_tokens]
                distance = (v[:num_chunk_tokens] - stored).pow(2).sum((1, 2))
                count = int(ratio * num_chunk_tokens)
                chosen = distance.argsort(descending=True)[:count]
                rows = torch.cat([chosen.sort().values, positions[num_chunk_tokens:]])
                hidden, normed = hidden[rows], normed[rows]
            q = project(attention, normed, "q")
            k = project(attention, normed, "k")
            v = heads(attention.v_proj(normed), attention.head_dim)
            if index >= check_layer:  # stored KV everywhere, fresh rows over it
                rest = (len(ids) - num_chunk_tokens, *k.shape[1:])  # overwritten below
                all_k = torch.cat([old_kvs[index][0][:num_chunk_tokens], k.new_zeros(rest)])
                all_v = torch.cat([old_kvs[index][1][:num_chunk_tokens], v.new_zeros(rest)])
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
            out = torch.nn.functional.scaled_dot_product_attention(
                q.transpose(0, 1),
                all_k.repeat_interleave(groups, 1).transpose(0, 1),
                all_v.repeat_interleave(groups, 1).transpose(0, 1),
                attn_mask=mask,
            ).transpose(0, 1)
            hidden = hidden + attention.o_proj(out.flatten(1))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return model.lm_head(inner.norm(hidden[-1])), rows


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
