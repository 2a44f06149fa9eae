"""CacheBlend inside stock vLLM: reuse the KV of retrieved chunks at any position.

Nothing heavy is imported before it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_blend.api.blender import Blender as Blender
    from vllm_blend.api.embedded import embedded_model as embedded_model
    from vllm_blend.compat.engine_access import blend_model as blend_model
    from vllm_blend.core.settings import BlendSettings as BlendSettings
    from vllm_blend.core.step import Status as Status

__version__ = "0.1.0"

_NAMES = {
    "BlendSettings": "vllm_blend.core.settings",
    "Blender": "vllm_blend.api.blender",
    "Status": "vllm_blend.core.step",
    "blend_model": "vllm_blend.compat.engine_access",
    "embedded_model": "vllm_blend.api.embedded",
}

__all__ = ["BlendSettings", "Blender", "Status", "__version__", "blend_model", "embedded_model"]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'vllm_blend' has no attribute {name!r}")
    return getattr(import_module(_NAMES[name]), name)
