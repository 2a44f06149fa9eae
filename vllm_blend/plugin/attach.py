"""What a model gets so that it can blend, when vLLM builds it: any model, by a subclass of its class.

    model class      ``__call__`` hands a step that blends to ``Blending``; vLLM's own outside of that
    attention        each layer's ``AttentionImpl`` gets its backend's blend path
    inner model      ``cache_fuse_metadata`` and ``old_kvs``, where the paper's scripts set them

``@support_torch_compile`` replaces ``__call__`` of what it compiles, so the subclass's stands outside.
Which rotation each layer's K has is found by the probe (``model/probe.py``) on the loaded weights.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from vllm_blend.attention import blend_impl
from vllm_blend.attention.base import LayerBlend
from vllm_blend.attention.rotation import Rotation
from vllm_blend.compat.engine_access import model_of
from vllm_blend.compat.support import (
    attention_layers,
    language_model,
    report_unsupported,
    why_attention_unsupported,
    why_unsupported,
)
from vllm_blend.core.cache_fuse_metadata import CacheFuseMetadata
from vllm_blend.core.kv import KVShape
from vllm_blend.core.pipeline import num_ranks
from vllm_blend.core.settings import LOOP_ARCHITECTURES
from vllm_blend.model.blending import Blending
from vllm_blend.model.loop import LayerLoop
from vllm_blend.plugin.step_requests import state_class
from vllm_blend.server.chunks.chunk_registry import bytes_per_token
from vllm_blend.server.config import ServerSettings
from vllm_blend.server.worker.chunk_cache import ChunkCache
from vllm_blend.server.worker.chunk_memory import ChunkMemory
from vllm_blend.server.worker.tier_io import TierIO
from vllm_blend.store.adapters import Adapters

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.vllm_blend")


class BlendModel:
    """Mixin for vLLM's model classes."""

    blending: Blending

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stock: Any = super().__call__  # type: ignore[misc]
        if not self.blending.is_on:
            held = self.blending.staging()
            try:
                return stock(*args, **kwargs)
            finally:
                del held
        return self.blending.forward(stock, *args, **kwargs)

    def get_model_state_cls(self) -> type[Any]:
        """Asked by the V2 runner."""
        return state_class(self, getattr(super(), "get_model_state_cls", None))


@cache
def blendable(
    stock: type[torch.nn.Module], on_attached: Callable[[Blending, VllmConfig], None]
) -> type[torch.nn.Module]:
    """``stock``, a class of vLLM's models, with a blend path; itself, if vLLM builds it another way.

    Args:
        on_attached: called for each model that was made to blend, or refuses to.
    """
    names = inspect.signature(stock.__init__).parameters
    if issubclass(stock, BlendModel) or not {"vllm_config", "prefix"} <= set(names):
        return stock

    def init(self: Any, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        stock.__init__(self, vllm_config=vllm_config, prefix=prefix)
        self.blending = Blending()
        if not prefix:  # else it is a part of another model
            attach(self, vllm_config, on_attached)

    members = {"__init__": init, "__module__": stock.__module__, "__qualname__": stock.__qualname__}
    return type(f"Blend{stock.__name__}", (BlendModel, stock), members)


def attach(
    model: Any, vllm_config: VllmConfig, on_attached: Callable[[Blending, VllmConfig], None]
) -> None:
    """Makes ``model``, which vLLM has just built, blend.

    Where it cannot, it stays on vLLM's own path: a warning says so at start-up, and a request that asks
    for blending is refused with the same sentence.

    Raises:
        ValueError: if blending was asked for in ``additional_config={"vllm_blend": {...}}`` and it
            cannot.
    """
    if model_of(vllm_config) is not None:  # this one drafts for it
        return
    blending: Blending = model.blending
    blending.vllm_config, blending.model = vllm_config, model
    blending.chunks, blending.adapters = ChunkCache(), Adapters()
    language = language_model(model)
    inner = blending.inner = getattr(language, "model", language)
    inner.cache_fuse_metadata, inner.old_kvs = CacheFuseMetadata(), None
    inner.__dict__["blending"] = blending  # not a module of its own
    blending.unsupported = why_unsupported(vllm_config) or prepare(blending, model, vllm_config)
    settings = ServerSettings.of(vllm_config)
    blending.guard.catches = settings is not None
    if settings is not None and blending.unsupported is None:
        if settings.store is not None:
            blending.chunks.tiers = TierIO.open(settings.store, vllm_config, blending.kv_shape)
        num_bytes = settings.collect_bytes(bytes_per_token(vllm_config))
        blending.chunks.memory = ChunkMemory(num_bytes // num_ranks())
    if blending.unsupported is not None:
        report_unsupported(vllm_config, blending.unsupported)
    on_attached(blending, vllm_config)


def prepare(blending: Blending, model: Any, vllm_config: VllmConfig) -> str | None:
    """Gives each layer's attention its blend path; returns why that cannot be, or None."""
    layers = attention_layers(vllm_config)
    if reason := why_attention_unsupported(layers):
        return reason
    attns: Sequence[Any] = list(layers.values())
    try:
        impls = [blend_impl(attn.attn_backend.get_name()) for attn in attns]
    except ValueError as error:
        return str(error)
    modules = dict(model.named_modules())
    blending.attns = attns
    blending.owners = [modules.get(name.rpartition(".")[0]) for name in layers]
    config = vllm_config.model_config
    # until the probe has found its rotation
    unknown = Rotation.none(1, config.dtype, torch.device("cpu"))
    for index, (attn, impl) in enumerate(zip(attns, impls, strict=True)):
        attn.impl.__class__ = impl
        attn.impl.blend = LayerBlend(index, unknown, blending)
    for owner in blending.owners:
        if owner is not None:
            owner.hack_kv = None
    blending.kv_shape = KVShape(
        num_layers=len(attns),
        num_kv_heads=attns[0].num_kv_heads,
        head_size=attns[0].head_size,
        dtype=config.dtype,
    )
    if type(model).__name__.removeprefix("Blend") in LOOP_ARCHITECTURES:
        blending.loop = LayerLoop(blending.inner)
    return None
