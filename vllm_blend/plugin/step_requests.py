"""Which rows of a forward step have a plan: of vLLM's V1 runner, and of its V2 runner by its hook for
model-specific state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from vllm_blend.core.plans import EXTRA_ARG, BlendPlan, CollectPlan, KeyedPlan
from vllm_blend.core.step import BlendStep, StepRequest

if TYPE_CHECKING:
    from vllm_blend.model.blending import Blending


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
            try:
                plan = self.blending.chunks.resolve(
                    plan, new_req_data.req_id, new_req_data.num_computed_tokens
                )
            except Exception as error:
                self.blending.guard.caught(error)
                plan = None  # the request is computed in full
            if plan is not None:
                self.plans[new_req_data.req_id] = plan

    def remove_request(self, req_id: str) -> None:
        stock: Any = super()
        stock.remove_request(req_id)
        self.plans.pop(req_id, None)

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        stock: Any = super()
        self.step_req_ids = input_batch.req_ids
        try:
            self.blending.step = self.plan_step(input_batch, req_states)
        except Exception as error:
            self.blending.guard.caught(error)
            self.blending.step = None  # every request of the step is computed in full
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
        computed = input_batch.num_computed_prefill_tokens_np
        prompt_len = req_states.prompt_len.np
        rows = []
        for index, req_id in enumerate(input_batch.req_ids):
            num_prompt_tokens = int(prompt_len[input_batch.idx_mapping_np[index]])
            if req_id in self.plans and computed[index] < num_prompt_tokens:
                rows.append((index, self.plans[req_id], int(computed[index]), num_prompt_tokens))
        return make_step(
            rows,
            input_batch.req_ids,
            input_batch.query_start_loc_np,
            self.device,
            self.vllm_config.cache_config.cache_dtype,
        )


def state_class(model: Any, of_model: Any) -> type[Any]:
    """The state class that vLLM would choose for ``model``, with the plans where it can blend.

    Args:
        of_model: the model's own ``get_model_state_cls``, or None.
    """
    from vllm.v1.worker.gpu.model_states import resolve_model_state_cls

    if of_model is not None:
        found = of_model()
    else:
        bare = torch.nn.Module()  # the model, without the method that asks this
        bare.add_module("model", model)
        found = resolve_model_state_cls(model.blending.vllm_config, bare)
    return found if model.blending.unsupported is not None else _with_plans(found)


@cache
def _with_plans(stock: type[Any]) -> type[Any]:
    return type(f"Blend{stock.__name__}", (BlendModelState, stock), {})


def drop_plans(runner: Any) -> None:
    """Lets a runner's unfinished requests be computed in full."""
    if hasattr(runner, "model_state"):  # the V2 runner
        runner.model_state.plans.clear()
        return
    for request in runner.requests.values():
        if request.sampling_params is not None and request.sampling_params.extra_args:
            request.sampling_params.extra_args.pop(EXTRA_ARG, None)


def plan_step(runner: Any, blending: Blending) -> BlendStep | None:
    """The same of a step of the V1 runner."""
    batch = runner.input_batch
    num_reqs = batch.num_reqs
    computed = batch.num_computed_tokens_cpu[:num_reqs]
    prefill = (computed < batch.num_prompt_tokens[:num_reqs]).nonzero()[0]
    rows = []
    for index in prefill.tolist():
        req_id, position = batch.req_ids[index], int(computed[index])
        params = runner.requests[req_id].sampling_params
        plan = (params.extra_args or {}).get(EXTRA_ARG) if params is not None else None
        if isinstance(plan, KeyedPlan):
            plan = params.extra_args[EXTRA_ARG] = blending.chunks.resolve(plan, req_id, position)
        if plan is not None:
            rows.append((index, plan, position, int(batch.num_prompt_tokens[index])))
    return make_step(
        rows,
        batch.req_ids[:num_reqs],
        runner.query_start_loc.np,
        torch.device(runner.device),
        runner.cache_config.cache_dtype,
    )


def make_step(
    rows: Iterable[tuple[int, BlendPlan | CollectPlan, int, int]],
    req_ids: Sequence[str],
    starts: Any,
    device: torch.device,
    kv_cache_dtype: str,
) -> BlendStep | None:
    """A step of these requests; None where there are none.

    Args:
        rows: of each request with a plan: its index in the step, its plan, how many of its tokens are
            in the paged cache already, and its prompt's length.
        req_ids: of all requests of the step.
        starts: numpy array: the first row of each of them, then the number of rows.
    """
    requests = [
        StepRequest(
            plan=plan,
            row=int(starts[index]),
            position=position,
            num_rows=int(starts[index + 1] - starts[index]),
            device=device,
            request_id=req_ids[index],
            num_prompt_tokens=num_prompt_tokens,
        )
        for index, plan, position, num_prompt_tokens in rows
    ]
    if not requests:
        return None
    return BlendStep(requests, starts[: len(req_ids) + 1].tolist(), kv_cache_dtype)
