"""Blend attention, one file a vLLM attention backend.

Each file subclasses the stock ``AttentionImpl`` of its backend, and adds three things: ``metadata``,
which describes the rows that are computed; ``fuse``, which writes a layer's stored KV to the paged
cache; and a ``forward`` that calls ``join`` (``base.py``), which keeps collected KV and fuses stored
KV. They run where vLLM calls its attention op, compiled graphs or not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from vllm_blend.attention.base import BlendAttention

BACKENDS = {
    "CPU_ATTN": "vllm_blend.attention.cpu:CPUBlendImpl",
    "FLASH_ATTN": "vllm_blend.attention.flash_attn:FlashAttentionBlendImpl",
    "XFORMERS": "vllm_blend.attention.xformers:XFormersImpl",
}


def blend_impl(backend: str) -> type[BlendAttention]:
    """The blend attention of a vLLM backend name; ValueError if there is none."""
    if backend not in BACKENDS:
        raise ValueError(
            f"attention backend {backend} cannot blend yet; supported: {', '.join(BACKENDS)}"
        )
    from importlib import import_module

    module, name = BACKENDS[backend].split(":")
    impl = getattr(import_module(module), name)
    return cast("type[BlendAttention]", impl)
