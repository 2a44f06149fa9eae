"""Keys, and KV that any process can check, with scores and without."""

from __future__ import annotations

import torch

from vllm_blend.core.kv import KVShape, StoredKV
from vllm_blend.store.keys import ChunkKey, ModelKey

SHAPE = KVShape(num_layers=3, num_kv_heads=2, head_size=8, dtype=torch.float32)
MODEL = ModelKey(weights="w", rope="{}", shape=SHAPE)


def make_key(seed: int = 0, num_tokens: int = 20, model: ModelKey = MODEL, salt: str = "") -> ChunkKey:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 50_000, (num_tokens,), generator=generator).tolist()
    return model.chunk(ids, context=(1,), salt=salt)


def make_kv(key: ChunkKey, scored: bool = False) -> StoredKV:
    """KV that is a function of the key, so that any process can say what is right."""
    shape = key.model.shape
    generator = torch.Generator().manual_seed(int.from_bytes(key.digest[:6], "little"))
    size = (shape.num_layers, 2, *shape.of(key.num_tokens))
    both = torch.randn(size, generator=generator).to(shape.dtype)
    scores = torch.rand(key.num_tokens, generator=generator) if scored else None
    return StoredKV(tuple((pair[0].clone(), pair[1].clone()) for pair in both), scores)


def same(one: StoredKV | None, other: StoredKV) -> bool:
    """Whether K, V and scores are the same, or neither has scores."""
    assert one is not None
    if one.scores is None or other.scores is None:
        scores = one.scores is other.scores
    else:
        scores = torch.equal(one.scores, other.scores)
    return scores and all(
        torch.equal(a, b)
        for left, right in zip(one.layers, other.layers, strict=True)
        for a, b in zip(left, right, strict=True)
    )
