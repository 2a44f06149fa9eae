"""Which rows of a forward step have a plan: of vLLM's V1 runner, and of its V2 runner by its hook for
model-specific state."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from vllm_blend.core.plans import EXTRA_ARG, BlendPlan, CollectPlan, KeyedPlan
from vllm_blend.core.step import BlendStep, StepRequest

if TYPE_CHECKING:
    from vllm_blend.model.blending import Blending

Plan = BlendPlan | CollectPlan | KeyedPlan


@dataclass(frozen=True, eq=False)
class Prefill:
    """A request of a step that is in prefill and has a plan; the same on all ranks.

    Attributes:
        index: of the request in the step.
        plans, key: where its plan is kept.
        position: its tokens that are in the paged cache already.
    """

    index: int
    request_id: str
    plans: MutableMapping[Any, Any]
    key: str
    position: int
    num_prompt_tokens: int

    @property
    def plan(self) -> Plan:
        found: Plan = self.plans[self.key]
        return found

    @property
    def blends(self) -> bool:
        """Whether it reuses KV; else what it computes is kept."""
        return not isinstance(self.plan, CollectPlan) and bool(self.plan.spans)


@dataclass(frozen=True, eq=False)
class Batch:
    """A step of vLLM's.

    Attributes:
        req_ids: of all its requests.
        starts: numpy array: the first row of each of them, then the number of rows.
        kv_cache_dtype: vLLM's name for the paged cache's type.
        with_media: ids of the requests in prefill that have images, audio or video.
    """

    req_ids: Sequence[str]
    starts: Any
    device: torch.device
    kv_cache_dtype: str
    with_media: Sequence[str] = ()


def begin(blending: Blending, prefills: Sequence[Prefill], batch: Batch) -> None:
    """Makes the model's next forward one that blends or collects, if any of the step's requests has a
    plan."""
    if prefills:
        to_blend = [one.request_id for one in prefills if one.blends]
        blending.begin(to_blend, lambda: plan_step(blending, prefills, batch))


@torch.inference_mode()
def settle(blending: Blending) -> None:
    """Ends a step of a pipeline stage that has sent what it computed; nothing on the last one, whose
    forward has done so."""
    if blending.settle() is not None:
        blending.end()


def plan_step(blending: Blending, prefills: Sequence[Prefill], batch: Batch) -> BlendStep | None:
    """The step of these requests; None where nothing of their plans is left."""
    requests = []
    for one in prefills:
        plan = blending.chunks.resolve(one.plan, one.request_id, one.position)
        one.plans[one.key] = plan
        if plan is None:
            continue
        first, end = batch.starts[one.index : one.index + 2]
        requests.append(
            StepRequest(
                plan=plan,
                row=int(first),
                position=one.position,
                num_rows=int(end - first),
                device=batch.device,
                request_id=one.request_id,
                num_prompt_tokens=one.num_prompt_tokens,
            )
        )
    if not requests:
        return None
    starts = batch.starts[: len(batch.req_ids) + 1].tolist()
    step = BlendStep(requests, starts, batch.kv_cache_dtype)
    if step.blended and batch.with_media:
        raise RuntimeError(
            f"request {batch.with_media[0]} of the step has images, audio or video, whose rows only "
            "vLLM's own forward computes: run it in another batch than prompts that blend"
        )
    return step


def _in_prefill(batch: Any) -> list[int]:
    """Which requests of the V1 runner's step are in prefill."""
    num_reqs = batch.num_reqs
    computed = batch.num_computed_tokens_cpu[:num_reqs]
    found: list[int] = (computed < batch.num_prompt_tokens[:num_reqs]).nonzero()[0].tolist()
    return found


def prefills_of(runner: Any) -> list[Prefill]:
    """Those of a step of the V1 runner."""
    batch = runner.input_batch
    computed = batch.num_computed_tokens_cpu
    prefills = []
    for index in _in_prefill(batch):
        req_id = batch.req_ids[index]
        params = runner.requests[req_id].sampling_params
        plans = (params.extra_args or {}) if params is not None else {}
        if plans.get(EXTRA_ARG) is not None:
            position, length = int(computed[index]), int(batch.num_prompt_tokens[index])
            prefills.append(Prefill(index, req_id, plans, EXTRA_ARG, position, length))
    return prefills


def batch_of(runner: Any) -> Batch:
    """The step of the V1 runner."""
    batch = runner.input_batch
    prefills = (batch.req_ids[index] for index in _in_prefill(batch))
    return Batch(
        batch.req_ids[: batch.num_reqs],
        runner.query_start_loc.np,
        torch.device(runner.device),
        runner.cache_config.cache_dtype,
        [req_id for req_id in prefills if runner.requests[req_id].mm_features],
    )


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
        self.plans: dict[str, Plan | None] = {}
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
            self.plans[new_req_data.req_id] = plan

    def remove_request(self, req_id: str) -> None:
        stock: Any = super()
        stock.remove_request(req_id)
        self.plans.pop(req_id, None)

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        stock: Any = super()
        self.step_req_ids = input_batch.req_ids
        batch = Batch(
            input_batch.req_ids,
            input_batch.query_start_loc_np,
            self.device,
            self.vllm_config.cache_config.cache_dtype,
            self._with_media(input_batch),
        )
        begin(self.blending, self.prefills(input_batch, req_states), batch)
        inputs: dict[str, Any] = stock.prepare_inputs(input_batch, req_states)
        return inputs

    def postprocess_state(self, *args: Any, **kwargs: Any) -> None:
        stock: Any = super()
        stock.postprocess_state(*args, **kwargs)
        self.blending.end()

    def _with_media(self, input_batch: Any) -> list[str]:
        cache = getattr(self, "encoder_cache", None)
        if cache is None:
            return []
        of_step = zip(input_batch.req_ids, input_batch.is_prefilling_np, strict=True)
        return [req_id for req_id, is_it in of_step if is_it and cache.mm_features.get(req_id)]

    def prefills(self, input_batch: Any, req_states: Any) -> list[Prefill]:
        """The step's requests that are in prefill and have a plan."""
        if not self.plans:
            return []
        computed = input_batch.num_computed_prefill_tokens_np
        prompt_len = req_states.prompt_len.np
        found = []
        for index, req_id in enumerate(input_batch.req_ids):
            length = int(prompt_len[input_batch.idx_mapping_np[index]])
            if self.plans.get(req_id) is not None and computed[index] < length:
                found.append(Prefill(index, req_id, self.plans, req_id, int(computed[index]), length))
        return found


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
