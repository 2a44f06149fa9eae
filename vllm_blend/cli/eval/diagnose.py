"""What reuse does to a prompt, layer by layer: the quantities of the paper's Figures 6 to 8.

Deviation is that of stored V from full prefill's, relative to the latter's size, so that layers can be
compared; attention deviation is that of the question's attention output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_blend.core.plans import EXTRA_ARG, CollectPlan
from vllm_blend.core.settings import BlendSettings

if TYPE_CHECKING:
    from vllm_blend.api.blender import Blender
    from vllm_blend.api.prompts import BlendPrompt


@dataclass(frozen=True)
class Diagnosis:
    """One prompt.

    Attributes:
        tokens: text of each chunk token, ``num_chunk_tokens`` of them.
        chunk: number of the span that each stands in, ``[num_chunk_tokens]``.
        deviation: ``|V_stored - V_full| / mean |V_full|``, ``[num_layers, num_chunk_tokens]``.
        attention: by method's ratio, mean over layers of ``|O - O_full| / |O_full|`` of the question's
            rows (O: attention output before the output projection).
        kept: whether the settings recompute a token, ``[num_chunk_tokens]`` bool.
    """

    tokens: list[str]
    chunk: np.ndarray
    deviation: np.ndarray
    attention: dict[float, float]
    kept: np.ndarray

    def rank_correlation(self) -> np.ndarray:
        """Spearman's, of the tokens' deviation in each layer and the next, ``[num_layers - 2]``; from
        layer 1 on, since layer 0 does not deviate."""
        ranks = self.deviation[1:].argsort(axis=1).argsort(axis=1)
        pairs = zip(ranks, ranks[1:], strict=False)
        return np.array([np.corrcoef(one, two)[0, 1] for one, two in pairs])


def diagnose(
    blender: Blender, prompt: BlendPrompt, settings: BlendSettings, ratios: Sequence[float]
) -> Diagnosis:
    """Runs a prompt by full prefill and at each ratio.

    Args:
        blender: its engine must compute the prompt in one step.
        prompt: with its chunks.
        settings: whose policy is looked at; its own ratio decides ``kept``.
        ratios: for the attention deviation.
    """
    exact = _exact_v(blender, prompt)
    layers = []
    for index, v in enumerate(exact):
        stored = torch.cat([span.kv.layers[index][1] for span in prompt.spans]).float().cpu()
        size = v.norm(dim=(1, 2)).mean().clamp(min=1e-9)
        layers.append((stored - v).norm(dim=(1, 2)) / size)
    positions = [p for span in prompt.spans for p in range(span.start, span.end)]
    num_question = len(prompt.token_ids) - prompt.spans[-1].end
    full = _attention(blender, prompt, None, num_question)
    attention = {}
    for ratio in ratios:
        found = _attention(blender, prompt, replace(settings, recomp_ratio=ratio), num_question)
        errors = [float((o - f).norm() / f.norm()) for o, f in zip(found, full, strict=True)]
        attention[ratio] = sum(errors) / len(errors)
    _attention(blender, prompt, settings, num_question)
    kept = set(blender.model.cache_fuse_metadata["imp_indices"].tolist())
    return Diagnosis(
        tokens=[blender.tokenizer.decode([prompt.token_ids[p]]) for p in positions],
        chunk=np.concatenate([np.full(s.end - s.start, i) for i, s in enumerate(prompt.spans)]),
        deviation=torch.stack(layers).numpy(),
        attention=attention,
        kept=np.array([p in kept for p in positions]),
    )


def _exact_v(blender: Blender, prompt: BlendPrompt) -> list[torch.Tensor]:
    """Full prefill's V, each layer ``[num_chunk_tokens, num_kv_heads, head_size]`` float32."""
    from vllm import SamplingParams

    plan = CollectPlan()
    params = SamplingParams(max_tokens=1, temperature=0, extra_args={EXTRA_ARG: plan})
    blender.llm.generate({"prompt_token_ids": prompt.token_ids}, params, use_tqdm=False)
    rows = torch.cat([torch.arange(span.start, span.end) for span in prompt.spans])
    return [v.float().cpu()[rows] for _, v in plan.kv]


def _attention(
    blender: Blender, prompt: BlendPrompt, settings: BlendSettings | None, num_question: int
) -> list[torch.Tensor]:
    """The question's attention output in each layer, ``[num_question, num_heads * head_size]``."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
    with _outputs(blender) as found:
        if settings is None:  # collecting keeps the prompt out of the prefix cache
            params.extra_args = {EXTRA_ARG: CollectPlan()}
            blender.llm.generate({"prompt_token_ids": prompt.token_ids}, params, use_tqdm=False)
        else:
            blender.generate(prompt, params, settings=settings)
    return [found[index][-num_question:] for index in range(len(blender.model.layers))]


@contextmanager
def _outputs(blender: Blender) -> Iterator[dict[int, torch.Tensor]]:
    """While it lasts, keeps what each layer's attention gave last: a layer may be asked more than once
    for a prompt, by a policy's pass ahead and for K and V alone, and the answer comes last."""
    found: dict[int, torch.Tensor] = {}

    def watch(index: int, attn: torch.nn.Module) -> Any:
        def after(_: torch.nn.Module, args: object, output: torch.Tensor) -> None:
            found[index] = output.flatten(1).float().cpu().clone()

        return attn.register_forward_hook(after)

    hooks = [watch(i, layer.self_attn.attn) for i, layer in enumerate(blender.model.layers)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
