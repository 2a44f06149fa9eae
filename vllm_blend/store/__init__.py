"""The store of chunks' KV: one object over host memory, disk, Redis and S3."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_blend.store.config import open_store as open_store
    from vllm_blend.store.disk import DiskTier as DiskTier
    from vllm_blend.store.fingerprint import model_key as model_key
    from vllm_blend.store.keys import ChunkKey as ChunkKey
    from vllm_blend.store.keys import ModelKey as ModelKey
    from vllm_blend.store.redis_tier import RedisTier as RedisTier
    from vllm_blend.store.s3_tier import S3Tier as S3Tier
    from vllm_blend.store.store import ChunkStore as ChunkStore
    from vllm_blend.store.streaming_layers import ChunkLost as ChunkLost

_NAMES = {
    "ChunkKey": "keys",
    "ChunkLost": "streaming_layers",
    "ChunkStore": "store",
    "DiskTier": "disk",
    "ModelKey": "keys",
    "RedisTier": "redis_tier",
    "S3Tier": "s3_tier",
    "model_key": "fingerprint",
    "open_store": "config",
}

__all__ = [
    "ChunkKey",
    "ChunkLost",
    "ChunkStore",
    "DiskTier",
    "ModelKey",
    "RedisTier",
    "S3Tier",
    "model_key",
    "open_store",
]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'vllm_blend.store' has no attribute {name!r}")
    return getattr(import_module(f"vllm_blend.store.{_NAMES[name]}"), name)
