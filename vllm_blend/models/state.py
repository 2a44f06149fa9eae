"""The plan of a step in vLLM's V2 model runner, by its hook for model-specific state."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from vllm_blend.core import EXTRA_ARG, BlendPlan, BlendStep, CollectPlan, StepRequest

if TYPE_CHECKING:
    from vllm_blend.models.attach import BlendModel
    from vllm_blend.models.blending import Blending


class BlendModelState:
    """Mixin for the states of vLLM's V2 runner: remembers each request's plan, and tells the model
    which rows of a step have one.

    Attributes:
        plans: by request id; requests without a plan are not in it.
        step_req_ids: ids of the step's requests, in the order of its rows.
    """

    model: Any
    device: torch.device
    vllm_config: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.plans: dict[str, BlendPlan | CollectPlan] = {}
        self.step_req_ids: list[str] = []

    @property
    def blending(self) -> Blending:
        found: Blending = self.model.blending
        return found

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        stock: Any = super()
        stock.add_request(req_index, new_req_data)
        params = new_req_data.sampling_params
        plan = (params.extra_args or {}).get(EXTRA_ARG) if params is not None else None
        if plan is not None and self.blending.unsupported is None:
            plan = self.blending.chunks.resolve(
                plan, new_req_data.req_id, new_req_data.num_computed_tokens
            )
            if plan is not None:
                self.plans[new_req_data.req_id] = plan

    def remove_request(self, req_id: str) -> None:
        stock: Any = super()
        stock.remove_request(req_id)
        self.plans.pop(req_id, None)

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        stock: Any = super()
        self.step_req_ids = input_batch.req_ids
        self.blending.step = self.plan_step(input_batch, req_states)
        inputs: dict[str, Any] = stock.prepare_inputs(input_batch, req_states)
        return inputs

    def postprocess_state(self, *args: Any, **kwargs: Any) -> None:
        stock: Any = super()
        stock.postprocess_state(*args, **kwargs)
        self.blending.step = None  # it holds stored KV

    def plan_step(self, input_batch: Any, req_states: Any) -> BlendStep | None:
        """The step's requests that are in prefill and have a plan; None where there are none."""
        if not self.plans:
            return None
        start = input_batch.query_start_loc_np
        computed = input_batch.num_computed_prefill_tokens_np
        prompt_len = req_states.prompt_len.np
        requests = []
        for index, req_id in enumerate(input_batch.req_ids):
            plan = self.plans.get(req_id)
            num_prompt_tokens = int(prompt_len[input_batch.idx_mapping_np[index]])
            if plan is None or computed[index] >= num_prompt_tokens:
                continue
            requests.append(
                StepRequest(
                    plan=plan,
                    row=int(start[index]),
                    position=int(computed[index]),
                    num_rows=int(start[index + 1] - start[index]),
                    device=self.device,
                    request_id=req_id,
                    num_prompt_tokens=num_prompt_tokens,
                )
            )
        if not requests:
            return None
        starts = start[: len(input_batch.req_ids) + 1].tolist()
        return BlendStep(requests, starts, self.vllm_config.cache_config.cache_dtype)


def state_class(model: BlendModel) -> type[Any]:
    """The state class that vLLM would choose for ``model``, with the plans where it can blend."""
    from vllm.v1.worker.gpu.model_states import resolve_model_state_cls

    from vllm_blend.models.attach import BlendModel

    stock: Any = super(BlendModel, model)
    if hasattr(stock, "get_model_state_cls"):
        found = stock.get_model_state_cls()
    else:
        bare = torch.nn.Module()  # the model, without the method that asks this
        bare.add_module("model", model)  # type: ignore[arg-type]
        found = resolve_model_state_cls(model.blending.vllm_config, bare)
    return found if model.blending.unsupported is not None else _with_plans(found)


@cache
def _with_plans(stock: type[Any]) -> type[Any]:
    return type(f"Blend{stock.__name__}", (BlendModelState, stock), {})
