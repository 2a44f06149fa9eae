"""Keys, and KV that any process can check."""

from __future__ import annotations

import torch

from vllm_blend.core import KVShape, StoredKV
from vllm_blend.store.keys import ChunkKey, ModelKey

SHAPE = KVShape(num_layers=3, num_kv_heads=2, head_size=8, dtype=torch.float32)
MODEL = ModelKey(weights="w", rope="{}", shape=SHAPE)


def make_key(seed: int = 0, num_tokens: int = 20, model: ModelKey = MODEL, salt: str = "") -> ChunkKey:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 50_000, (num_tokens,), generator=generator).tolist()
    return model.chunk(ids, context=(1,), salt=salt)


def make_kv(key: ChunkKey) -> StoredKV:
    """KV that is a function of the key, so that any process can say what is right."""
    shape = key.model.shape
    generator = torch.Generator().manual_seed(int.from_bytes(key.digest[:6], "little"))
    size = (shape.num_layers, 2, *shape.of(key.num_tokens))
    both = torch.randn(size, generator=generator).to(shape.dtype)
    return StoredKV(tuple((pair[0].clone(), pair[1].clone()) for pair in both))


def same(one: StoredKV | None, other: StoredKV) -> bool:
    assert one is not None
    return all(
        torch.equal(a, b)
        for left, right in zip(one.layers, other.layers, strict=True)
        for a, b in zip(left, right, strict=True)
    )
