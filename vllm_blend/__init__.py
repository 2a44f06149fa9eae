"""CacheBlend inside stock vLLM: reuse the KV of retrieved chunks at any position.

Nothing heavy is imported before it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_blend.blender import Blender as Blender
    from vllm_blend.compat import blend_model as blend_model
    from vllm_blend.core import Status as Status
    from vllm_blend.embedded import embedded_model as embedded_model
    from vllm_blend.settings import BlendSettings as BlendSettings

__version__ = "0.1.0"

_NAMES = {
    "BlendSettings": "vllm_blend.settings",
    "Blender": "vllm_blend.blender",
    "Status": "vllm_blend.core",
    "blend_model": "vllm_blend.compat",
    "embedded_model": "vllm_blend.embedded",
}

__all__ = ["BlendSettings", "Blender", "Status", "__version__", "blend_model", "embedded_model"]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'vllm_blend' has no attribute {name!r}")
    return getattr(import_module(_NAMES[name]), name)
