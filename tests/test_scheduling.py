"""Blending under schedulers that cut prompts or seat few requests; each test makes its own engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import make_engine, plan_for, relative_error, run


@pytest.mark.parametrize("budget", [32, 97])
def test_chunked_prefill_with_exact_kv_equals_one_step(tiny: Any, budget: int) -> None:
    with make_engine(tiny("llama")) as engine:
        chunks, question = [engine.ids(70, 1), engine.ids(61, 2)], engine.ids(9, 3)
        prompt = chunks[0] + chunks[1] + question
        expected = engine.run(prompt, max_tokens=4)
        whole = engine.collect(prompt)
    with make_engine(tiny("llama"), max_num_batched_tokens=budget, max_num_seqs=4) as engine:
        exact = engine.collect(prompt)  # over several steps itself
        for layer, other in zip(exact, whole, strict=True):
            assert relative_error(torch.stack(layer), torch.stack(other)) < 1e-5
        for ratio in (0.0, 0.16, 1.0):
            with engine.blending(exact, len(question), recomp_ratio=ratio):
                tokens, logits = engine.run(prompt, max_tokens=4)
            assert tokens == expected[0]
            assert relative_error(logits[-4:], expected[1]) < 1e-4


def test_blends_join_running_decodes(tiny: Any) -> None:
    with make_engine(tiny("llama"), max_num_seqs=2) as engine:
        ids = engine.ids
        work: list[tuple[list[int], Any]] = [
            (ids(30, 1), None),
            plan_for(engine, [ids(70, 2), ids(40, 3)], ids(3, 4), ids(9, 5)),
            plan_for(engine, [ids(50, 6)], ids(1, 7), ids(5, 8)),
            (ids(44, 9), None),
        ]
        alone = [run(engine, [prompt], [plan])[0] for prompt, plan in work]
        # two seats: each blend starts while the request in the other seat decodes
        prompts, plans = [prompt for prompt, _ in work], [plan for _, plan in work]
        assert run(engine, prompts, plans) == alone
