"""With approximate KV: the engine against an independent dense reference."""

from __future__ import annotations

import pytest
from engines import Engine, relative_error
from oracle import blended_logits


@pytest.mark.parametrize("mask", ["exact", "bottom_right"])
@pytest.mark.parametrize("ratio", [0.0, 0.16, 0.5])
def test_blend_equals_the_dense_reference(engine: Engine, ratio: float, mask: str) -> None:
    chunks = [engine.ids(count, seed) for seed, count in enumerate((33, 90, 7, 51))]
    question = engine.ids(12, seed=50)
    prompt = sum(chunks, []) + question
    old_kvs = engine.stored(chunks)
    with engine.blending(old_kvs, len(question), recomp_ratio=ratio, mask=mask):
        _, logits = engine.run(prompt, max_tokens=1)
    expected, rows = blended_logits(
        engine.folder,
        prompt,
        old_kvs,
        len(prompt) - len(question),
        ratio,
        bottom_right=mask == "bottom_right",
    )
    assert engine.flags["imp_indices"].tolist() == rows.tolist()
    assert relative_error(logits[0], expected) < 1e-4


def test_the_masks_differ(engine: Engine) -> None:
    chunks = [engine.ids(30, seed) for seed in range(8)]
    question = engine.ids(12, seed=50)
    old_kvs = engine.stored(chunks)
    results = []
    for mask in ("exact", "bottom_right"):
        with engine.blending(old_kvs, len(question), mask=mask):
            results.append(engine.run(sum(chunks, []) + question, max_tokens=1)[1])
    assert relative_error(results[1], results[0]) > 1e-3
