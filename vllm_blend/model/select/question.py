"""The question's last tokens, and the attention that the chunks' tokens get from them."""

from __future__ import annotations

import torch


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
    """What each key gets of the queries' attention, all_reduce_sum over queries and heads.

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
