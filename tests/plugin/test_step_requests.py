"""The plan of a step in vLLM's V2 runner, whose state is a stand-in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.forward_context import ForwardContext, override_forward_context

from vllm_blend.core.kv import StoredKV
from vllm_blend.core.plans import BlendPlan, ChunkSpan, CollectPlan, KeyedPlan, KeyedSpan
from vllm_blend.model.blending import Blending
from vllm_blend.plugin.attach import BlendModel
from vllm_blend.plugin.step_requests import BlendModelState, state_class


class Stock:
    """vLLM's state of a model."""

    def __init__(self, model: Any) -> None:
        self.model, self.device = model, torch.device("cpu")
        self.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(cache_dtype="auto"))
        self.told: list[Any] = []

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        self.told.append(("add", req_index))

    def remove_request(self, req_id: str) -> None:
        self.told.append(("remove", req_id))

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        return {"step": self.model.blending.step}

    def postprocess_state(self, *args: Any) -> None:
        self.told.append(("after", args, self.model.blending.step))


class State(BlendModelState, Stock):
    pass


def new(req_id: str, plan: Any = None, computed: int = 0, pooling: bool = False) -> Any:
    params = SimpleNamespace(extra_args=None if plan is None else {"blend": plan})
    return SimpleNamespace(
        req_id=req_id,
        sampling_params=None if pooling else params,
        num_computed_tokens=computed,
    )


@pytest.fixture
def state() -> State:
    kv = torch.empty(4, 1, 1)
    found = BlendPlan((ChunkSpan(0, StoredKV(((kv, kv),))),))

    def resolve(plan: Any, request_id: str, computed: int) -> Any:
        if not isinstance(plan, KeyedPlan):
            return plan
        return found if (request_id, computed) == ("keyed", 3) else None

    chunks = SimpleNamespace(resolve=resolve)
    blending = Blending()
    blending.chunks = chunks
    return State(SimpleNamespace(blending=blending))


def batch_of(*requests: tuple[str, int, int, int]) -> tuple[Any, Any]:
    """Of each request its id, rows in this step, tokens computed before it, and prompt length."""
    ids, rows, computed, lengths = zip(*requests, strict=True)
    order = list(range(len(ids)))[::-1]  # the runner keeps requests elsewhere than in a step's order
    prompt_len = np.zeros(len(ids), dtype=np.int32)
    prompt_len[order] = lengths
    batch = SimpleNamespace(
        req_ids=list(ids),
        query_start_loc_np=np.array([0, *np.cumsum(rows), 999], dtype=np.int32),  # padded
        num_computed_prefill_tokens_np=np.array(computed, dtype=np.int32),
        idx_mapping_np=np.array(order),
    )
    return batch, SimpleNamespace(prompt_len=SimpleNamespace(np=prompt_len))


def test_a_step_has_the_prefills_with_a_plan(state: State) -> None:
    collect, blend = CollectPlan(), BlendPlan(())
    state.add_request(0, new("collect", collect))
    state.add_request(1, new("plain"))
    state.add_request(2, new("pooling", pooling=True))
    state.add_request(3, new("blend", blend))
    state.add_request(4, new("keyed", KeyedPlan(()), computed=3))
    state.add_request(5, new("lost", KeyedPlan(())))
    assert set(state.plans) == {"collect", "blend", "keyed", "lost"}
    assert [index for _, index in state.told] == [0, 1, 2, 3, 4, 5]
    batch, states = batch_of(
        ("plain", 7, 0, 7),
        ("blend", 1, 20, 20),
        ("keyed", 5, 3, 12),
        ("lost", 2, 0, 9),
        ("collect", 4, 8, 12),
    )
    step = state.prepare_inputs(batch, states)["step"]  # vLLM's own finds it there
    assert step is state.model.blending.step
    assert state.step_req_ids == ["plain", "blend", "keyed", "lost", "collect"]
    # "blend" decodes by now
    assert [r.request_id for r in step.requests] == ["keyed", "collect"]
    assert [(r.row, r.position, r.num_rows) for r in step.requests] == [(8, 3, 5), (15, 8, 4)]
    assert [r.plan for r in step.requests] == [state.plans["keyed"], collect]
    assert step.starts == [0, 7, 8, 13, 15, 19] and step.num_rows == 19
    assert step.kv_cache_dtype == "auto"
    state.postprocess_state("output")
    assert state.told[-1] == ("after", ("output",), step)
    assert state.model.blending.step is None


def test_a_plan_that_cannot_be_made_is_reported(state: State) -> None:
    """The step's forward is the model's own; what was to be collected is no blended request."""
    blending = state.model.blending
    blending.guard.catches = True

    def fails(plan: Any, request_id: str, computed: int) -> Any:
        raise MemoryError("none left")

    blending.chunks = SimpleNamespace(resolve=fails)
    state.add_request(0, new("keyed", KeyedPlan((KeyedSpan(0, 2, b"a"),))))
    state.add_request(1, new("collect", CollectPlan()))
    state.prepare_inputs(*batch_of(("keyed", 5, 3, 12), ("collect", 4, 8, 12), ("plain", 1, 0, 1)))
    assert blending.is_on
    with override_forward_context(ForwardContext({}, {}, {})):
        output = blending.forward(
            lambda input_ids, positions, **_: positions * 2, None, torch.arange(10)
        )
    assert torch.equal(output, torch.arange(10) * 2)
    state.postprocess_state("output")
    assert not blending.is_on
    assert blending.guard.take_prefilled() == ("keyed",)
    blending.chunks = SimpleNamespace(resolve=lambda plan, *_: BlendPlan(()))  # it is tried again
    step = state.prepare_inputs(*batch_of(("keyed", 4, 8, 12)))["step"]
    assert [r.request_id for r in step.requests] == ["keyed"]


def test_a_step_that_computes_an_image_blends_nothing(state: State) -> None:
    state.add_request(0, new("keyed", KeyedPlan((KeyedSpan(0, 4, b"a"),)), computed=3))
    state.encoder_cache = SimpleNamespace(mm_features={"image": ["of it"], "plain": []})
    for in_prefill in (True, False):
        batch, states = batch_of(("image", 5, 0, 8), ("plain", 2, 0, 2), ("keyed", 9, 3, 12))
        batch.is_prefilling_np = np.array([in_prefill, True, True])
        step = state.prepare_inputs(batch, states)["step"]
        assert (step is None) == in_prefill
        if in_prefill:
            failure = pytest.raises(
                RuntimeError, match="request image of the step has images, audio or"
            )
            with override_forward_context(ForwardContext({}, {}, {})), failure:
                state.model.blending.forward(lambda **_: None, None, torch.arange(16))
        state.postprocess_state("output")


def test_a_step_without_plans_is_vllms_own(state: State) -> None:
    batch, states = batch_of(("plain", 7, 0, 7))
    assert state.prepare_inputs(batch, states)["step"] is None
    state.add_request(0, new("blend", BlendPlan(())))
    batch, states = batch_of(("plain", 7, 0, 7), ("blend", 1, 20, 20))
    assert state.prepare_inputs(batch, states)["step"] is None
    state.remove_request("blend")
    state.remove_request("plain")
    assert not state.plans
    assert state.told[-2:] == [("remove", "blend"), ("remove", "plain")]


def test_where_the_model_cannot_blend_no_plan_is_kept(state: State) -> None:
    state.model.blending.unsupported = "it is too small"
    state.add_request(0, new("blend", BlendPlan(())))
    assert not state.plans and state.told == [("add", 0)]


def test_the_state_is_the_models_own_with_plans() -> None:
    class Own:
        pass

    class Model:
        def get_model_state_cls(self) -> type:
            return Own

    class BlendOwn(BlendModel, Model):
        pass

    model = BlendOwn()
    blending: Any = SimpleNamespace(unsupported=None)
    model.blending = blending
    found = state_class(model, super(BlendModel, model).get_model_state_cls)  # type: ignore[misc]
    assert found.__name__ == "BlendOwn" and found.__mro__[1:3] == (BlendModelState, Own)
    assert model.get_model_state_cls() is found
    blending.unsupported = "it is too small"
    assert model.get_model_state_cls() is Own
