"""Collecting: keeping the K (before RoPE) and V that a stock layer computes anyway."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vllm_blend.core import CollectPlan
from vllm_blend.models.frame import Frame


@contextmanager
def collecting(frame: Frame, layer: int, self_attn: Any) -> Iterator[None]:
    """While it lasts, ``self_attn`` hands K and V of the step's collect requests to their plans."""
    requests = frame.step.collected
    if not requests:
        yield
        return
    keys: list[torch.Tensor] = []

    def before_rope(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if len(args) == 3:  # with two, it is a backend that rotates stored K (``fuse``)
            keys.append(args[2].clone())  # the rotary op works in place

    def before_attention(attn: Any, args: tuple[torch.Tensor, ...]) -> None:
        shape = (-1, attn.num_kv_heads, attn.head_size)
        k, v = keys.pop().view(shape), args[2].view(shape)
        for request in requests:
            # a collect request has no stored KV, so all its rows are in the frame
            at = int(torch.searchsorted(frame.rows, request.row))
            rows = slice(at, at + request.num_rows)
            assert isinstance(request.plan, CollectPlan)
            request.plan.write(layer, request.position, k[rows], v[rows])

    hooks = [
        self_attn.rotary_emb.register_forward_pre_hook(before_rope),
        self_attn.attn.register_forward_pre_hook(before_attention),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for request in requests:
        plan = request.plan
        assert isinstance(plan, CollectPlan)
        whole = request.position + request.num_rows >= plan.num_prompt_tokens
        if plan.on_model and whole:
            self_attn.hack_kv = list(plan.kv[layer])
