"""When an engine keeps what its layers hand over; without a model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engines import make_engine, tiny_model

from vllm_blend.attention.base import LayerBlend
from vllm_blend.attention.rotation import Rotation
from vllm_blend.core.plans import CollectPlan
from vllm_blend.core.step import BlendStep, StepRequest
from vllm_blend.model.blending import Blending

CPU = torch.device("cpu")


def test_the_first_layer_waits_for_the_second_though_its_memory_does_not() -> None:
    """In compiled code, or a graph's memory, the second layer's K and V may be where the first one's
    were."""
    plan = CollectPlan(start=1, num_prompt_tokens=4)
    blending = Blending()
    blending.step = BlendStep([StepRequest(plan, 0, 0, 5, CPU)], [0, 5], "auto")
    memory = torch.empty(5, 1, 2)
    seen = []
    for index in range(3):
        layer = LayerBlend(index, Rotation.none(8, torch.float32, CPU), blending)
        memory.fill_(index)
        blending.collect(layer, memory, memory + 0.5)
        seen.append(len(plan.kv))
    assert seen == [0, 2, 3]
    found = [(k.unique().tolist(), v.unique().tolist(), len(k)) for k, v in plan.kv]
    assert found == [([0.0], [0.5], 3), ([1.0], [1.5], 3), ([2.0], [2.5], 3)]


def test_what_a_failed_forward_left_is_not_kept_by_the_next_one() -> None:
    blending = Blending()
    layer = LayerBlend(0, Rotation.none(8, torch.float32, CPU), blending)
    plans = [CollectPlan(num_prompt_tokens=3), CollectPlan(num_prompt_tokens=2)]
    for plan, length in zip(plans, (3, 2), strict=True):
        step = BlendStep([StepRequest(plan, 0, 0, length, CPU)], [0, length], "auto")
        blending.begin([], lambda step=step: step)
        blending.collect(layer, torch.ones(length, 1, 2), torch.ones(length, 1, 2))
        assert not plan.kv  # it waits
    blending.collect(replace(layer, index=1), torch.ones(2, 1, 2), torch.ones(2, 1, 2))
    assert [len(plan.kv) for plan in plans] == [0, 2]


def test_a_model_of_one_layer_is_kept(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tiny_model("llama", tmp_path_factory.mktemp("one"), num_hidden_layers=1)
    with make_engine(folder) as engine:
        ((k, v),) = engine.collect(engine.ids(40, 3))
        assert len(k) == len(v) == 40
        assert float(torch.stack([k, v]).norm(dim=-1).min()) > 0
