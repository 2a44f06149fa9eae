"""LoRA on the CPU: two adapters and none in one batch, each as alone, and nothing between them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Engine, make_engine, relative_error, tiny_model
from lora import OPTIONS, run_batch, write_adapter
from vllm import SamplingParams

from vllm_blend.api.blender import Blender
from vllm_blend.core.kv import StoredKV
from vllm_blend.core.plans import BlendPlan, ChunkSpan, CollectPlan
from vllm_blend.core.settings import BlendSettings
from vllm_blend.model.adapter_rows import with_adapters

START, END, LENGTH = 5, 150, 170
"""Of the chunk, and of the prompt."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The base model, and two adapters."""
    from vllm.lora.request import LoRARequest

    made = tmp_path_factory.mktemp("adapters")
    return [
        None,
        *(
            LoRARequest(name, number, str(write_adapter(made / name, folder, number)))
            for number, name in enumerate(("one", "two"), 1)
        ),
    ]


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with make_engine(folder, **OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="module")
def digests(engine: Engine, adapters: list[Any]) -> list[str]:
    return [engine.model.blending.adapters.digest(adapter) for adapter in adapters]


@pytest.fixture(scope="module")
def prompts(engine: Engine) -> list[list[int]]:
    return [engine.ids(LENGTH - 3 * seed, seed) for seed in range(3)]


@pytest.fixture(scope="module")
def alone(
    engine: Engine, adapters: list[Any], prompts: list[list[int]]
) -> list[tuple[list[int], torch.Tensor]]:
    """Full prefill of each prompt by itself with its adapter: tokens, first logits."""
    found = []
    for ids, adapter in zip(prompts, adapters, strict=True):
        (tokens,), logits = run_batch(engine, [ids], [None], [adapter])
        found.append((tokens, logits[0]))
    return found


def collected(
    engine: Engine, prompts: list[list[int]], adapters: list[Any], digests: list[str]
) -> list[StoredKV]:
    """KV of whole prompts, from one batch."""
    plans = [CollectPlan(adapter=digest) for digest in digests]
    run_batch(engine, prompts, plans, adapters, max_tokens=1)
    return [StoredKV(tuple(plan.kv)) for plan in plans]


def plan_of(
    kv: StoredKV, adapter: str, start: int = START, end: int = END, **settings: Any
) -> BlendPlan:
    span = ChunkSpan(start, kv.tokens(start, end))
    return BlendPlan((span,), BlendSettings(**(dict(policy="random") | settings)), adapter=adapter)


def test_adapters_change_the_answer(
    engine: Engine, adapters: list[Any], prompts: list[list[int]]
) -> None:
    _, logits = run_batch(engine, [prompts[0]] * 3, [None] * 3, adapters)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert relative_error(logits[one], logits[other]) > 0.05


@pytest.mark.covers("LoRA", backend="CPU_ATTN", family="llama")
@pytest.mark.parametrize("ratio", [0.0, 0.16, 0.5])
def test_exact_kv_in_one_batch_is_full_prefill_with_each_adapter(
    engine: Engine,
    adapters: list[Any],
    digests: list[str],
    prompts: list[list[int]],
    alone: list[tuple[list[int], torch.Tensor]],
    ratio: float,
) -> None:
    kv = collected(engine, prompts, adapters, digests)
    plans = [plan_of(one, d, recomp_ratio=ratio) for one, d in zip(kv, digests, strict=True)]
    tokens, logits = run_batch(engine, prompts, plans, adapters)
    for index, (expected, of_first) in enumerate(alone):
        assert tokens[index] == expected
        assert relative_error(logits[index], of_first) < 1e-4


def test_rows_of_a_batch_must_be_told_their_adapters(
    engine: Engine,
    adapters: list[Any],
    digests: list[str],
    prompts: list[list[int]],
    alone: list[tuple[list[int], torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control: with the adapters of other rows answers are wrong."""
    kv = collected(engine, prompts, adapters, digests)
    plans = [plan_of(one, digest) for one, digest in zip(kv, digests, strict=True)]
    monkeypatch.setattr(
        "vllm_blend.model.blending.with_adapters",
        lambda model, rows, run: with_adapters(model, rows.flip(0), run),
    )
    _, logits = run_batch(engine, prompts, plans, adapters, max_tokens=1)
    errors = [relative_error(logits[i], of_first) for i, (_, of_first) in enumerate(alone)]
    assert max(errors) > 0.05


@pytest.mark.parametrize("policy", ["random", "ahead"])
def test_blended_requests_in_one_batch_answer_as_each_alone(
    engine: Engine, adapters: list[Any], digests: list[str], prompts: list[list[int]], policy: str
) -> None:
    text = engine.ids(END - START, seed=7)
    kv = collected(engine, [text] * 3, adapters, digests)
    for one, other in ((0, 1), (0, 2), (1, 2)):  # the same text, and another KV with each adapter
        assert relative_error(kv[one].layers[2][1], kv[other].layers[2][1]) > 0.05
    mixed = [ids[:START] + text + ids[END:] for ids in prompts]
    plans = [
        BlendPlan((ChunkSpan(START, one),), BlendSettings(policy=policy, recomp_ratio=0.2), adapter=d)
        for one, d in zip(kv, digests, strict=True)
    ]
    tokens, logits = run_batch(engine, mixed, plans, adapters)
    for index in range(3):
        (expected,), of_first = run_batch(engine, [mixed[index]], [plans[index]], [adapters[index]])
        assert tokens[index] == expected
        assert relative_error(logits[index], of_first[0]) < 1e-4


@pytest.mark.covers("LoRA", backend="CPU_ATTN", family="llama")
@pytest.mark.parametrize(("kv_of", "asked"), [(0, 1), (1, 0), (1, 2)])
def test_kv_of_another_adapter_is_refused(
    engine: Engine,
    adapters: list[Any],
    digests: list[str],
    prompts: list[list[int]],
    kv_of: int,
    asked: int,
) -> None:
    (kv,) = collected(engine, prompts[:1], [adapters[kv_of]], [digests[kv_of]])
    plan = plan_of(kv, digests[kv_of])
    with pytest.raises(ValueError, match="KV is reused with the adapter that computed it alone"):
        run_batch(engine, prompts[:1], [plan], [adapters[asked]])


def test_policies_with_a_check_layer_are_refused(engine: Engine, prompts: list[list[int]]) -> None:
    (kv,) = collected(engine, prompts[:1], [None], [""])
    with pytest.raises(ValueError, match="an engine with LoRA can choose rows before layer 0 only"):
        run_batch(engine, prompts[:1], [plan_of(kv, "", policy="hkvd")], [None])


class NoTokenizer:
    """Of texts that are token ids."""

    chat_template = None

    def encode(self, text: str, **options: Any) -> list[int]:
        return []


def test_a_blender_for_each_adapter(
    engine: Engine, adapters: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of one are not another's, though their tokens are."""
    monkeypatch.setattr(engine.llm, "get_tokenizer", NoTokenizer)
    text, question = engine.ids(60, seed=3), engine.ids(9, seed=4)
    options: dict[str, Any] = dict(head=engine.ids(4, seed=5), stand_in="", separator="", chat=False)
    settings = BlendSettings(policy="random", recomp_ratio=0.0)
    blenders = [Blender(engine.llm, settings, lora_request=a, **options) for a in adapters]
    chunks = [blender.chunk(text) for blender in blenders]
    prompts = [b.prompt([chunk], question) for b, chunk in zip(blenders, chunks, strict=True)]
    for blender, prompt, adapter in zip(blenders, prompts, adapters, strict=True):
        # it stands where it was computed, so its KV is exact
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
        blended = blender.generate(prompt, params).outputs[0].token_ids
        (expected,), _ = run_batch(engine, [prompt.token_ids], [None], [adapter])
        assert list(blended) == expected
    with pytest.raises(ValueError, match="allowed: chunks of this blender's"):
        blenders[2].prompt([chunks[1]], question)
