"""The model families that can blend: vLLM's classes, subclassed. No layer is copied.

``@support_torch_compile`` replaces ``__call__`` of the inner model, so ``BlendModel.__call__`` stands
outside the compiled region: a step that blends runs the stock layers one by one, any other step
takes vLLM's own path. The inner model gets its class after construction, since the outer classes
build it by name.
"""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.model_executor.models.llama import LlamaForCausalLM, LlamaModel
from vllm.model_executor.models.mistral import MistralForCausalLM, MistralModel
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM, Qwen2Model
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM, Qwen3Model

from vllm_blend.models.loop import BlendModel, enable_blending
from vllm_blend.models.state import HasBlendState


class BlendLlamaModel(BlendModel, LlamaModel):
    pass


class BlendMistralModel(BlendModel, MistralModel):
    pass


class BlendQwen2Model(BlendModel, Qwen2Model):
    pass


class BlendQwen3Model(BlendModel, Qwen3Model):
    pass


class BlendLlamaForCausalLM(HasBlendState, LlamaForCausalLM):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        enable_blending(self.model, BlendLlamaModel, vllm_config)


class BlendMistralForCausalLM(HasBlendState, MistralForCausalLM):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        enable_blending(self.model, BlendMistralModel, vllm_config)


class BlendQwen2ForCausalLM(HasBlendState, Qwen2ForCausalLM):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        enable_blending(self.model, BlendQwen2Model, vllm_config)


class BlendQwen3ForCausalLM(HasBlendState, Qwen3ForCausalLM):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        enable_blending(self.model, BlendQwen3Model, vllm_config)
