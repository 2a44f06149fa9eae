"""Bad input is refused by name, and the engine serves the next request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from engines import Engine, plan_for, relative_error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_blend.core.cache_fuse_metadata import CacheFuseMetadata
from vllm_blend.core.kv import KVShape, StoredKV
from vllm_blend.core.plans import BlendPlan, ChunkSpan, CollectPlan
from vllm_blend.core.prompt import check_spans
from vllm_blend.core.settings import BlendSettings

numbers = st.one_of(st.integers(), st.floats(allow_nan=True), st.booleans(), st.text(), st.none())
lists = st.one_of(numbers, st.lists(numbers, max_size=4))


@given(st.lists(st.tuples(st.integers(-5, 60), st.integers(-5, 60)), max_size=5), st.integers(0, 50))
def test_spans_are_accepted_exactly_when_every_row_has_one_owner(
    spans: list[tuple[int, int]], length: int
) -> None:
    rows = [row for start, end in spans for row in range(start, end)]
    good = (
        bool(spans)
        and all(start < end for start, end in spans)
        and rows == sorted(set(rows))
        and rows[0] >= 0
        and rows[-1] < length - 1
    )
    if good:
        check_spans(spans, length)
    else:
        with pytest.raises(ValueError, match="span"):
            check_spans(spans, length)


@given(
    check_layers=lists,
    recomp_ratio=numbers,
    recomp_ratios=lists,
    mask=st.sampled_from(["exact", "bottom_right", "causal", "", None]),
)
def test_settings_are_valid_or_refused_by_name(**values: Any) -> None:
    try:
        accepted = BlendSettings(**values)
    except ValueError as error:
        assert any(name in str(error) for name in values)
        return
    assert list(accepted.check_layers) == sorted(set(accepted.check_layers))
    assert accepted.check_layers[0] >= 1
    for layer in accepted.check_layers:
        assert 0 <= accepted.ratio_at(layer) <= 1
    assert accepted.mask in ("exact", "bottom_right")


@given(st.text(max_size=12), numbers)
def test_flags_are_valid_or_refused_by_name(key: str, value: Any) -> None:
    flags = CacheFuseMetadata()
    if key not in flags:
        with pytest.raises(KeyError, match="known: check"):
            flags[key] = value
    for name in ("check", "collect", "recomp_ratio", "suffix_len", "check_layers", "mask", "policy"):
        before = flags[name]
        try:
            flags[name] = value
        except ValueError as error:
            assert name in str(error)
            assert flags[name] == before


def test_settings_name_an_unknown_key() -> None:
    assert BlendSettings.from_mapping({"recomp_ratio": 0.3}).recomp_ratio == 0.3
    with pytest.raises(ValueError, match="unknown blend setting 'ratio'; allowed: check_layers"):
        BlendSettings.from_mapping({"ratio": 0.3})


SHAPE = KVShape(num_layers=3, num_kv_heads=2, head_size=4, dtype=torch.float32)


@given(st.data())
def test_stored_kv_of_another_model_is_refused(data: st.DataObject) -> None:
    num_tokens = 5
    size, layers = list(SHAPE.of(num_tokens)), SHAPE.num_layers
    dtype, entries = SHAPE.dtype, 2
    spoiled = data.draw(st.sampled_from(["layers", "entries", "dtype", "rank", 0, 1, 2]))
    other = data.draw(st.integers(0, 9))
    if spoiled == "layers":
        layers = data.draw(st.integers(1, 9).filter(lambda n: n != SHAPE.num_layers))
    elif spoiled == "entries":
        entries = data.draw(st.sampled_from([1, 3]))
    elif spoiled == "dtype":
        dtype = data.draw(st.sampled_from([torch.float16, torch.bfloat16, torch.int8]))
    elif spoiled == "rank":
        size = [size[0], size[1] * size[2]]
    else:
        size[spoiled] = other if other != size[spoiled] else other + 1
    kv = StoredKV(
        tuple(tuple(torch.zeros(size, dtype=dtype) for _ in range(entries)) for _ in range(layers))
    )
    with pytest.raises(ValueError, match=r"spans\[0\]\.kv"):
        kv.check(SHAPE, num_tokens, name="spans[0].kv")


def made_kv(num_tokens: int, shape: KVShape = SHAPE) -> StoredKV:
    kv = torch.zeros(shape.of(num_tokens), dtype=shape.dtype)
    return StoredKV(((kv, kv),) * shape.num_layers)


@given(st.integers(-3, 12), st.integers(1, 10), st.none() | st.integers(1, 12))
def test_what_is_collected_lies_in_the_prompt(start: int, length: int, prefix: int | None) -> None:
    """And a prefix, which is not computed, before it."""
    plan = CollectPlan(start, prefix=None if prefix is None else made_kv(prefix))
    if not 0 <= start < length:
        with pytest.raises(ValueError, match=f"start is {start}; the prompt has {length} tokens"):
            plan.check([7] * length, SHAPE)
    elif prefix is not None and prefix > start:
        with pytest.raises(ValueError, match=f"prefix has {prefix} tokens; allowed: {start} at most"):
            plan.check([7] * length, SHAPE)
    else:
        plan.check([7] * length, SHAPE)
        assert plan.num_prompt_tokens == length


def test_a_prefix_of_another_model_is_refused() -> None:
    plan = CollectPlan(5, prefix=made_kv(5, replace(SHAPE, head_size=8)))
    with pytest.raises(ValueError, match=r"K of prefix\[0\] has shape \[5, 2, 8\]; expected"):
        plan.check([7] * 9, SHAPE)


def test_where_there_is_no_layer_loop_policies_choose_early() -> None:
    for policy in ("static", "ahead*static", "heads"):
        BlendSettings(policy=policy).check_architecture(["SomeModel"])
    for policy in ("hkvd", "ahead*hkvd", "query"):
        BlendSettings(policy=policy).check_architecture(["SomeModel", "LlamaForCausalLM"])
        with pytest.raises(ValueError, match="which looks at a check layer; SomeModel can .* ahead"):
            BlendSettings(policy=policy).check_architecture(["SomeModel"])


def test_a_server_of_transformers_model_has_no_layer_loop(tiny: Any) -> None:
    """vLLM's wrapper of transformers' model is another class than the one in config.json."""
    from vllm import EngineArgs

    options: dict[str, Any] = dict(skip_tokenizer_init=True, model_impl="transformers")
    values = {"vllm_blend": {"policy": "static"}}
    EngineArgs(str(tiny("llama")), additional_config=values, **options).create_engine_config()
    with pytest.raises(ValueError, match="policy is 'hkvd', which looks at a check layer"):
        values = {"vllm_blend": {"policy": "hkvd"}}
        EngineArgs(str(tiny("llama")), additional_config=values, **options).create_engine_config()


@pytest.fixture(scope="module")
def case(llama: Engine) -> Iterator[tuple[Engine, list[int], Any, int, torch.Tensor]]:
    """Engine, prompt, good old_kvs, suffix length, and the logits that blending gives."""
    chunks, question = [llama.ids(40, 1), llama.ids(30, 2)], llama.ids(6, 3)
    prompt = sum(chunks, []) + question
    old_kvs = llama.stored(chunks)
    with llama.blending(old_kvs, len(question)):
        _, logits = llama.run(prompt, max_tokens=1)
    yield llama, prompt, old_kvs, len(question), logits


def spoil(old_kvs: Any, change: Any) -> Any:
    """A copy of ``old_kvs`` whose layer 2 went through ``change``."""
    copy = [list(layer) for layer in old_kvs]
    copy[2] = [change(tensor) for tensor in copy[2]]
    return copy


BAD: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    # name: (old_kvs of the good ones, suffix_len of the good one, flags, message)
    "suffix_len unset": (lambda kv: kv, lambda n: None, {}, "suffix_len is not set"),
    "only chunks": (lambda kv: kv, lambda n: 76, {}, "suffix_len is 76, but the prompt has 76"),
    "suffix too long": (lambda kv: kv, lambda n: 500, {}, "suffix_len is 500, but the prompt has 76"),
    "no old_kvs": (lambda kv: None, lambda n: n, {}, "old_kvs is None"),
    "old_kvs a number": (lambda kv: 3, lambda n: n, {}, "old_kvs is int"),
    "old_kvs empty": (lambda kv: [], lambda n: n, {}, "old_kvs has 0 layers; the model has 5"),
    "a layer missing": (lambda kv: kv[:-1], lambda n: n, {}, "old_kvs has 4 layers"),
    "K alone": (lambda kv: [layer[:1] for layer in kv], lambda n: n, {}, r"old_kvs\[0\] has 1 entries"),
    "a token missing": (
        lambda kv: spoil(kv, lambda t: t[:-1]),
        lambda n: n,
        {},
        r"K of old_kvs\[2\] has shape \[69, 2, 32\]; expected .* = \[70, 2, 32\]",
    ),
    "suffix of another length": (
        lambda kv: kv,
        lambda n: n + 1,
        {},
        "old_kvs covers 70 tokens, the prompt has 76, 69 of them before its suffix",
    ),
    "text encoded again": (
        lambda kv: [[t[:-2] for t in layer] for layer in kv],
        lambda n: n,
        {},
        "old_kvs covers 68 tokens, .* Give token ids, not decoded text",
    ),
    "flat heads": (lambda kv: spoil(kv, lambda t: t.flatten(1)), lambda n: n, {}, r"old_kvs\[2\]"),
    "half precision": (lambda kv: spoil(kv, torch.Tensor.half), lambda n: n, {}, "torch.float16"),
    "lists": (lambda kv: spoil(kv, torch.Tensor.tolist), lambda n: n, {}, "is list; expected a tensor"),
    "check layer": (lambda kv: kv, lambda n: n, {"check_layers": [5]}, "allowed: 1 to 4"),
    "ratio a layer": (
        lambda kv: kv,
        lambda n: n,
        {"recomp_ratios": [0.5, 0.1]},
        "recomp_ratios has 2 values for 1 check_layers",
    ),
    "collect too": (lambda kv: kv, lambda n: n, {"collect": True}, "check and collect"),
}


@pytest.mark.parametrize("name", BAD)
def test_flags_refuse_and_the_engine_goes_on(case: Any, name: str) -> None:
    engine, prompt, old_kvs, suffix_len, expected = case
    spoil_kv, spoil_suffix, flags, message = BAD[name]
    with (
        engine.blending(spoil_kv(old_kvs), spoil_suffix(suffix_len), **flags),
        pytest.raises(ValueError, match=message),
    ):
        engine.run(prompt)
    with engine.blending(old_kvs, suffix_len):
        _, logits = engine.run(prompt, max_tokens=1)
    assert torch.equal(logits, expected)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    starts=st.lists(st.integers(-10, 90), min_size=1, max_size=4),
    ratio=st.floats(0, 1),
    policy=st.sampled_from(["hkvd", "random", "ahead", "ahead*static"]),
)
def test_plans_of_any_spans(case: Any, starts: list[int], ratio: float, policy: str) -> None:
    """Spans of 20 tokens anywhere: they run or are refused, and the next request is served."""
    engine, prompt, old_kvs, _, _ = case
    kv = StoredKV(tuple((k[:20], v[:20]) for k, v in old_kvs))
    settings = BlendSettings(recomp_ratio=ratio, policy=policy)
    plan = BlendPlan(tuple(ChunkSpan(start, kv) for start in starts), settings)
    fits = all(b - a >= 20 for a, b in zip(starts, starts[1:], strict=False))
    fits = fits and starts[0] >= 0 and starts[-1] + 20 < len(prompt)
    from engines import run

    if fits:
        assert len(run(engine, [prompt], [plan], max_tokens=2)[0]) == 2
    else:
        with pytest.raises(ValueError, match=r"spans\[\d\]|spans cover"):
            run(engine, [prompt], [plan], max_tokens=2)
    assert len(run(engine, [prompt], [None], max_tokens=2)[0]) == 2


def test_chunk_of_other_tokens_is_refused(llama: Engine) -> None:
    prompt, plan = plan_for(llama, [llama.ids(30, 5)], [], llama.ids(5, 6))
    prompt[7] += 1
    from engines import run

    with pytest.raises(ValueError, match=r"spans\[0\] was computed for other tokens"):
        run(llama, [prompt], [plan])


def test_prompt_logprobs_and_strange_plans_are_refused(llama: Engine) -> None:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    prompt, plan = plan_for(llama, [llama.ids(30, 5)], [], llama.ids(5, 6))
    for params, error, message in (
        (
            SamplingParams(prompt_logprobs=1, extra_args={"blend": plan}),
            ValueError,
            "prompt_logprobs is 1",
        ),
        (
            SamplingParams(extra_args={"blend": {"spans": []}}),
            VLLMValidationError,
            "blend is dict, .* BlendPlan",
        ),
    ):
        with pytest.raises(error, match=message):
            llama.llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)


def test_a_good_batch_is_dropped_whole_when_one_request_is_bad(case: Any) -> None:
    engine, prompt, old_kvs, suffix_len, expected = case
    with engine.blending(old_kvs, suffix_len), pytest.raises(ValueError, match="old_kvs"):
        engine.generate([prompt, prompt[:-1]])
    assert not engine.llm.llm_engine.has_unfinished_requests()
    with engine.blending(old_kvs, suffix_len):
        _, logits = engine.run(prompt, max_tokens=1)
    assert relative_error(logits, expected) == 0
