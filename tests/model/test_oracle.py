"""With approximate KV: the engine against an independent dense reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engines import Engine, plan_for, relative_error, run
from oracle import blended_logits, early_logits
from slow_policies import check_rows, slow_points_nowhere

from vllm_blend.core.kv import StoredKV
from vllm_blend.model.select.early import EarlyCandidates


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


@pytest.mark.parametrize("policy", ["static", "random", "heads", "ahead", "ahead*static"])
@pytest.mark.parametrize("ratio", [0.0, 0.16, 0.5])
def test_rows_chosen_early_equal_the_dense_reference(engine: Engine, ratio: float, policy: str) -> None:
    """A head, text between chunks, and stored KV that is off; the question is asked over that KV."""
    chunks = [engine.ids(count, seed) for seed, count in enumerate((33, 90, 7, 51))]
    question = engine.ids(12, seed=50)
    prompt, plan = plan_for(
        engine, chunks, engine.ids(4, seed=51), question, policy=policy, recomp_ratio=ratio
    )
    generator = torch.Generator().manual_seed(0)
    spans = []
    for span in plan.spans:
        scores = torch.rand(span.kv.num_tokens, generator=generator)
        spans.append(replace(span, kv=StoredKV(span.kv.layers, scores)))
    plan = replace(plan, spans=tuple(spans))
    with engine.watched() as logits:
        run(engine, [prompt], [plan], max_tokens=1)

    held = [at for span in spans for at in range(span.start, span.end)]
    rows = engine.flags["imp_indices"].tolist()
    assert set(range(len(prompt))) - set(held) <= set(rows)
    chosen = [held.index(row) for row in rows if row in set(held)]
    old_kvs = [
        [torch.cat([span.kv.layers[layer][kind] for span in spans]) for kind in (0, 1)]
        for layer in range(len(engine.model.layers))
    ]
    folder, asked = engine.folder, len(question)
    _, received = early_logits(folder, prompt, old_kvs, held, [], asked)
    windows = [(span, span.start, span.end) for span in spans]
    view = EarlyCandidates(windows, received[held], torch.device("cpu"))
    twice = "ahead" in policy and slow_points_nowhere(view)
    count = len(held) * (max(ratio, min(0.5, 2 * ratio)) if twice else ratio)
    check_rows(chosen, policy, view, 0, int(count))
    expected, _ = early_logits(folder, prompt, old_kvs, held, [held[index] for index in chosen])
    assert relative_error(logits[0][-1], expected) < 1e-4
