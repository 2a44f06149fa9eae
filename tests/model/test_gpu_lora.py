"""LoRA on a GPU: two adapters and none in one batch, each as alone, eager and compiled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Engine, make_engine, relative_error, tiny_model
from lora import OPTIONS, run_batch, write_adapter

from vllm_blend.core.kv import StoredKV
from vllm_blend.core.plans import BlendPlan, ChunkSpan, CollectPlan
from vllm_blend.core.settings import BlendSettings

pytestmark = pytest.mark.gpu

START, END, LENGTH = 5, 150, 170
"""Of the chunk, and of the prompt."""

ROUNDING = 0.03
"""Of float16 here; adapters make ten times as much."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Narrower weights than others': the model does not amplify rounding."""
    return tiny_model("llama", tmp_path_factory.mktemp("llama"), initializer_range=0.08)


@pytest.fixture(scope="module")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The base model, and two adapters."""
    from vllm.lora.request import LoRARequest

    made = tmp_path_factory.mktemp("adapters")
    paths = [write_adapter(made / name, folder, seed) for seed, name in enumerate(("one", "two"), 1)]
    return [None, *(LoRARequest(path.name, n, str(path)) for n, path in enumerate(paths, 1))]


@pytest.fixture(scope="module", params=["eager", "compiled"])
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[Engine]:
    options = OPTIONS | dict(dtype="float16", max_num_seqs=16, enforce_eager=request.param == "eager")
    options |= dict(gpu_memory_utilization=0.3)
    with make_engine(folder, **options) as engine:
        yield engine


@pytest.fixture(scope="module")
def prompts(engine: Engine) -> list[list[int]]:
    return [engine.ids(LENGTH - 3 * seed, seed) for seed in range(3)]


@pytest.fixture(scope="module")
def alone(engine: Engine, adapters: list[Any], prompts: list[list[int]]) -> list[torch.Tensor]:
    """Logits of full prefill of each prompt by itself, with its adapter."""
    pairs = zip(prompts, adapters, strict=True)
    return [run_batch(engine, [ids], [None], [adapter])[1][0] for ids, adapter in pairs]


@pytest.fixture(scope="module")
def kv(engine: Engine, adapters: list[Any], prompts: list[list[int]]) -> list[StoredKV]:
    """Of whole prompts, from one batch."""
    digests = [engine.model.blending.adapters.digest(adapter) for adapter in adapters]
    plans = [CollectPlan(adapter=digest) for digest in digests]
    run_batch(engine, prompts, plans, adapters, max_tokens=1)
    return [StoredKV(tuple(plan.kv)) for plan in plans]


def plans_of(engine: Engine, adapters: list[Any], kv: list[StoredKV], **settings: Any) -> list[Any]:
    return [
        BlendPlan(
            (ChunkSpan(START, one.tokens(START, END)),),
            BlendSettings(**settings),
            adapter=engine.model.blending.adapters.digest(adapter),
        )
        for one, adapter in zip(kv, adapters, strict=True)
    ]


def test_adapters_change_the_answer(
    engine: Engine, adapters: list[Any], prompts: list[list[int]]
) -> None:
    _, logits = run_batch(engine, [prompts[0]] * 3, [None] * 3, adapters)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert relative_error(logits[one], logits[other]) > 10 * ROUNDING


@pytest.mark.covers("LoRA", backend="FLASH_ATTN", family="llama")
@pytest.mark.parametrize("policy", ["random", "ahead"])
@pytest.mark.parametrize("ratio", [0.0, 0.16, 0.5])
def test_exact_kv_in_one_batch_is_full_prefill_with_each_adapter(
    engine: Engine,
    adapters: list[Any],
    prompts: list[list[int]],
    alone: list[torch.Tensor],
    kv: list[StoredKV],
    policy: str,
    ratio: float,
) -> None:
    plans = plans_of(engine, adapters, kv, policy=policy, recomp_ratio=ratio)
    _, logits = run_batch(engine, prompts, plans, adapters)
    errors = [relative_error(logits[index], one) for index, one in enumerate(alone)]
    print(f"{policy} {ratio}: {errors}")
    assert max(errors) < ROUNDING


def test_kv_of_another_adapter_is_wrong_and_refused(
    engine: Engine, adapters: list[Any], prompts: list[list[int]], kv: list[StoredKV]
) -> None:
    for layers in ((0, 1), (1, 2)):
        one, other = (kv[index].tokens(START, START + 1).layers[2][1] for index in layers)
        assert relative_error(one, other) > ROUNDING
    plans = plans_of(engine, adapters, kv, policy="random")
    with pytest.raises(ValueError, match="KV is reused with the adapter that computed it alone"):
        run_batch(engine, prompts[:1], plans[:1], adapters[1:2])
