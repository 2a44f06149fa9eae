"""Blending among other work: batches, chunked prefill, decodes, the prefix cache, other settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import Engine, plan_for, relative_error, run


@pytest.mark.covers("mixed batches", backend="CPU_ATTN", family="llama")
def test_mixed_batch_equals_each_request_alone(llama: Engine) -> None:
    ids = llama.ids
    work: list[tuple[list[int], Any]] = [
        plan_for(llama, [ids(70, 1), ids(40, 2)], ids(3, 3), ids(9, 4)),
        (ids(120, 5), None),
        plan_for(llama, [ids(50, 6)], [], ids(5, 7), check_layers=(1, 3), recomp_ratios=(0.5, 0.1)),
        plan_for(llama, [ids(64, 8)], ids(1, 9), ids(20, 10), check_layers=(2,), recomp_ratio=0.3),
        (ids(3, 11), None),
        plan_for(llama, [ids(66, 12)], ids(2, 13), ids(4, 14), mask="bottom_right"),
    ]
    alone = [run(llama, [prompt], [plan])[0] for prompt, plan in work]
    together = run(llama, [prompt for prompt, _ in work], [plan for _, plan in work])
    assert together == alone


@pytest.mark.covers("prefix caching", backend="CPU_ATTN", family="llama")
def test_blended_blocks_are_not_found_by_exact_requests(llama: Engine) -> None:
    chunks, question = [llama.ids(300, 21), llama.ids(200, 22)], llama.ids(9, 23)
    prompt = sum(chunks, []) + question
    old_kvs = llama.stored(chunks)
    with llama.blending(old_kvs, len(question), recomp_ratio=0.0):
        blended = llama.run(prompt, max_tokens=2)
    after = llama.run(prompt, max_tokens=2)  # would hit the blended blocks without a salt
    again = llama.run(prompt, max_tokens=2)  # hits the exact blocks
    with llama.blending(old_kvs, len(question), recomp_ratio=0.0):
        reblended = llama.run(prompt, max_tokens=2)
    exact = llama.run(prompt, max_tokens=2, cache_salt="apart")
    assert relative_error(after[1], exact[1]) < 1e-5
    assert relative_error(again[1], exact[1]) < 1e-5
    assert relative_error(blended[1][:1], exact[1][:1]) > 1e-3
    assert torch.equal(reblended[1], blended[1])


def test_collecting_sees_the_whole_prompt_despite_the_prefix_cache(llama: Engine) -> None:
    prompt = llama.ids(400, 31)
    expected = llama.collect(prompt)  # and now it is in the prefix cache
    kv = llama.collect(prompt)
    assert kv[0][0].shape == (
        400,
        llama.model.blending.kv_shape.num_kv_heads,
        llama.model.blending.kv_shape.head_size,
    )
    for layer, other in zip(kv, expected, strict=True):
        assert relative_error(layer[0], other[0]) < 1e-5
        assert relative_error(layer[1], other[1]) < 1e-5


@pytest.mark.covers("several answers (n > 1)", backend="CPU_ATTN", family="llama")
def test_several_answers_of_one_blended_prompt(llama: Engine) -> None:
    from vllm import SamplingParams

    prompt, plan = plan_for(llama, [llama.ids(90, 41)], [], llama.ids(7, 42))
    params = SamplingParams(
        n=3, temperature=0.8, seed=1, max_tokens=4, detokenize=False, extra_args={"blend": plan}
    )
    (output,) = llama.llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    assert [len(answer.token_ids) for answer in output.outputs] == [4, 4, 4]


def test_status_of_each_layer(llama: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_blend.core.step import Status
    from vllm_blend.model.active_rows import ActiveRows

    seen: dict[int, Status] = {}
    stock = ActiveRows.status

    def status(frame: ActiveRows, layer: int) -> Status:
        seen[layer] = stock(frame, layer)
        return seen[layer]

    monkeypatch.setattr(ActiveRows, "status", status)
    prompt, plan = plan_for(llama, [llama.ids(60, 51)], [], llama.ids(5, 52), check_layers=(2,))
    seen.clear()
    run(llama, [prompt], [plan], max_tokens=4)
    full, check, after = Status.FULL_PREFILL, Status.CHECK, Status.AFTER_CHECK
    assert list(seen.values()) == [full, full, check, after, after]
    prompt, plan = plan_for(llama, [llama.ids(60, 51)], [], llama.ids(5, 52), policy="static")
    seen.clear()
    run(llama, [prompt], [plan], max_tokens=4)
    assert list(seen.values()) == [after] * 5
