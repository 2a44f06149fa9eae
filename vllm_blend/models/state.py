"""The plan of a step in vLLM's V2 model runner, by its hook for model-specific state."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from vllm_blend.core import EXTRA_ARG, BlendPlan, BlendStep, CollectPlan, StepRequest


class BlendModelState(DefaultModelState):
    """Remembers each request's plan, and tells the model which rows of a step have one.

    Attributes:
        plans: by request id; requests without a plan are not in it.
        step_req_ids: ids of the step's requests, in the order of its rows.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.plans: dict[str, BlendPlan | CollectPlan] = {}
        self.step_req_ids: list[str] = []

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        super().add_request(req_index, new_req_data)
        params = new_req_data.sampling_params
        plan = (params.extra_args or {}).get(EXTRA_ARG) if params is not None else None
        if plan is not None and self.model.model.unsupported is None:
            plan = self.model.model.chunks.resolve(
                plan, new_req_data.req_id, new_req_data.num_computed_tokens
            )
            if plan is not None:
                self.plans[new_req_data.req_id] = plan

    def remove_request(self, req_id: str) -> None:
        super().remove_request(req_id)
        self.plans.pop(req_id, None)

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        self.step_req_ids = input_batch.req_ids
        self.model.model.blend_step = self.plan_step(input_batch, req_states)
        inputs: dict[str, Any] = super().prepare_inputs(input_batch, req_states)
        return inputs

    def postprocess_state(self, *args: Any, **kwargs: Any) -> None:
        super().postprocess_state(*args, **kwargs)
        self.model.model.blend_step = None  # it holds stored KV

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
            if plan is None or computed[index] >= prompt_len[input_batch.idx_mapping_np[index]]:
                continue
            requests.append(
                StepRequest(
                    plan=plan,
                    row=int(start[index]),
                    position=int(computed[index]),
                    num_rows=int(start[index + 1] - start[index]),
                    device=self.device,
                    request_id=req_id,
                )
            )
        if not requests:
            return None
        cache_dtype = self.vllm_config.cache_config.cache_dtype
        return BlendStep(requests, input_batch.num_tokens, cache_dtype)


class HasBlendState:
    """Mixin for the outer models: names their state to the V2 runner."""

    model: Any

    def get_model_state_cls(self) -> type[Any]:
        from vllm.v1.attention.backend import AttentionType

        attn_types = {layer.self_attn.attn.attn_type for layer in self.model.layers}
        if attn_types == {AttentionType.ENCODER_ONLY}:  # cannot blend; as vLLM would choose
            from vllm.v1.worker.gpu.model_states.encoder_only import EncoderOnlyModelState

            return EncoderOnlyModelState
        return BlendModelState
