"""Engines of tiny models on XFORMERS, in fp32: the dense reference, the identities, every schedule.

On a GPU as they are; without one with vLLM's CPU worker, given this backend, and dense attention in
place of xformers' kernel (``paged_step.py``): what is the backend's own is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engines import Engine, make_engine, plan_for, relative_error, run
from oracle import blended_logits
from paged_step import replace_kernel


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def options(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """What makes an engine run on XFORMERS."""
    if request.param == "cuda":
        pytest.importorskip("xformers", reason="xformers is not installed")
        yield dict(attention_backend="XFORMERS", gpu_memory_utilization=0.15, max_num_seqs=16)
        return
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.selector import _cached_get_attn_backend

    def chosen(*args: Any, **kwargs: Any) -> str:
        return "vllm_blend.attention.xformers.XFormersBackend"

    with pytest.MonkeyPatch.context() as patch:
        replace_kernel(patch)
        patch.setattr(CpuPlatform, "get_attn_backend_cls", chosen)
        _cached_get_attn_backend.cache_clear()
        yield dict(max_num_seqs=16)
    _cached_get_attn_backend.cache_clear()


@pytest.mark.parametrize("family", ["llama", pytest.param("mistral_window", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "schedule",
    [
        dict(max_num_batched_tokens=64, max_num_seqs=4),  # windows, beside decodes
        dict(enable_prefix_caching=True),
        dict(num_gpu_blocks_override=24, max_model_len=256),  # too few: preemption
        dict(enforce_eager=False),
        dict(speculative_config=dict(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3)),
    ],
    ids=["windows", "prefix cache", "preemption", "compiled", "speculation"],
)
def test_answers_do_not_depend_on_the_schedule(
    tiny: Any, options: dict[str, Any], family: str, schedule: dict[str, Any]
) -> None:
    if family == "mistral_window" and "num_gpu_blocks_override" in schedule:
        pytest.skip("a sliding window's blocks are freed as it moves on")
    if "attention_backend" not in options and {"enforce_eager", "speculative_config"} & set(schedule):
        pytest.skip("only on a GPU: it takes long, or breaks the CPU engines after it")
    with make_engine(tiny(family), **options) as engine:
        head = engine.ids(100, 1)
        prompts = [head + engine.ids(30, 2), head + engine.ids(41, 3), head[:90], engine.ids(7, 4)]
        expected = [engine.generate([prompt], max_tokens=40)[0] for prompt in prompts]
    with make_engine(tiny(family), **(options | schedule)) as engine:
        assert engine.generate(prompts, max_tokens=40) == expected
        assert engine.generate(prompts[::-1], max_tokens=40) == expected[::-1]  # prefixes are there


def test_several_answers_of_one_prompt(tiny: Any, options: dict[str, Any]) -> None:
    from vllm import SamplingParams

    with make_engine(tiny("llama"), enable_prefix_caching=True, **options) as engine:
        prompt = {"prompt_token_ids": engine.ids(90, 41)}
        params = SamplingParams(n=3, temperature=0.8, seed=1, max_tokens=6, detokenize=False)
        (output,) = engine.llm.generate(prompt, params, use_tqdm=False)
        assert [len(answer.token_ids) for answer in output.outputs] == [6, 6, 6]


# --- families, last: their engine stays until the module ends ------------------------------------


@pytest.fixture(scope="module", params=["llama", "mistral_window", "qwen3"])
def engine(request: pytest.FixtureRequest, tiny: Any, options: dict[str, Any]) -> Iterator[Engine]:
    with make_engine(tiny(request.param), **options) as engine:
        yield engine


def test_the_backend_is_the_one_that_these_tests_are_about(engine: Engine) -> None:
    attn = engine.model.layers[0].self_attn.attn
    assert attn.attn_backend.get_name() == "XFORMERS"
    assert type(attn.impl).__name__ == "XFormersImpl"


@pytest.mark.parametrize("mask", ["exact", "bottom_right"])
@pytest.mark.parametrize("ratio", [0.0, 0.16, 1.0])
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
        [[tensor.cpu() for tensor in layer] for layer in old_kvs],
        len(prompt) - len(question),
        ratio,
        bottom_right=mask == "bottom_right",
    )
    assert engine.flags["imp_indices"].tolist() == rows.tolist()
    assert relative_error(logits[0].cpu(), expected) < 1e-4


@pytest.mark.parametrize("ratio", [0.0, 0.05, 0.16, 0.5, 1.0])
def test_exact_kv_reproduces_full_prefill(engine: Engine, ratio: float) -> None:
    prompt = engine.ids(220, 1)
    tokens, full = engine.run(prompt)
    with engine.blending(engine.collect(prompt), 9, recomp_ratio=ratio):
        blended, logits = engine.run(prompt)
    assert blended == tokens
    assert relative_error(logits, full) < 1e-4


def test_stored_kv_is_bit_equal_after_use(engine: Engine) -> None:
    chunks = [engine.ids(count, seed) for seed, count in enumerate((61, 1, 130))]
    old_kvs = engine.stored(chunks)
    before = [[tensor.clone() for tensor in layer] for layer in old_kvs]
    with engine.blending(old_kvs, 9):
        engine.run(sum(chunks, []) + engine.ids(9, 99))
    for layer, copy in zip(old_kvs, before, strict=True):
        for tensor, kept in zip(layer, copy, strict=True):
            assert torch.equal(tensor, kept)


def test_a_mixed_batch_answers_as_each_request_alone(engine: Engine) -> None:
    ids = engine.ids
    work: list[tuple[list[int], Any]] = [
        plan_for(engine, [ids(70, 1), ids(40, 2)], ids(3, 3), ids(9, 4)),
        (ids(120, 5), None),
        plan_for(engine, [ids(50, 6)], [], ids(5, 7), check_layers=(1, 3), recomp_ratios=(0.5, 0.1)),
        (ids(3, 11), None),
        plan_for(engine, [ids(66, 12)], ids(2, 13), ids(4, 14), mask="bottom_right"),
    ]
    alone = [run(engine, [prompt], [plan])[0] for prompt, plan in work]
    prompts, plans = [prompt for prompt, _ in work], [plan for _, plan in work]
    assert run(engine, prompts, plans) == alone
