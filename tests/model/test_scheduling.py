"""Blending under schedulers that cut prompts or seat few requests; each test makes its own engine."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from engines import make_engine, plan_for, relative_error, run

from vllm_blend.core.kv import StoredKV
from vllm_blend.core.plans import BlendPlan, ChunkSpan, CollectPlan
from vllm_blend.core.settings import BlendSettings


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
        # where nothing is recomputed, a window may hold reused tokens alone
        for policy, ratio in product(("hkvd", "static", "random", "ahead"), (0.0, 0.16, 1.0)):
            with engine.blending(exact, len(question), recomp_ratio=ratio, policy=policy):
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
            plan_for(engine, [ids(60, 10)], ids(2, 11), ids(5, 12), policy="ahead"),
            plan_for(engine, [ids(40, 13), ids(9, 14)], [], ids(5, 15), policy="static"),
        ]
        alone = [run(engine, [prompt], [plan])[0] for prompt, plan in work]
        # two seats: each blend starts while the request in the other seat decodes
        prompts, plans = [prompt for prompt, _ in work], [plan for _, plan in work]
        assert run(engine, prompts, plans) == alone


@pytest.mark.parametrize("budget", [33, 4096])
def test_kv_is_collected_beside_blends(tiny: Any, budget: int) -> None:
    """In the same steps, whose rows are chosen early or at a check layer, after the question was asked
    or not: the same KV as alone, behind a prefix that is not computed too."""
    with make_engine(tiny("llama"), max_num_batched_tokens=budget, max_num_seqs=8) as engine:
        head, tail = engine.ids(70, 1), engine.ids(40, 2)

        def collected() -> list[CollectPlan]:
            return [CollectPlan(start=9), CollectPlan(start=70, prefix=prefix)]

        whole = CollectPlan()
        run(engine, [head + tail], [whole], max_tokens=1)
        prefix = StoredKV(tuple((k[:70], v[:70]) for k, v in whole.kv))
        chunk = StoredKV(tuple((k[9:90], v[9:90]) for k, v in whole.kv))
        for policies in (("ahead",), ("static",), ("hkvd",), ("ahead*hkvd", "random", "ahead")):
            blends = [
                BlendPlan((ChunkSpan(9, chunk),), BlendSettings(policy=policy)) for policy in policies
            ]
            first, behind = collected()
            plans = [first, *blends, behind]
            answers = run(engine, [head + tail] * len(plans), plans)
            assert all(answer == answers[0] for answer in answers)
            for plan in (first, behind):
                for layer, pair in zip(plan.kv, whole.kv, strict=True):
                    for found, expected in zip(layer, pair, strict=True):
                        assert relative_error(found, expected[plan.start :]) < 1e-5
