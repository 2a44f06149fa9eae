"""How far a blended answer is from full prefill's: logits of question and answer, KL divergence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from vllm_blend.api.blender import Blender
from vllm_blend.api.prompts import BlendPrompt
from vllm_blend.compat.engine_access import of_this_step, running

if TYPE_CHECKING:
    from vllm import LLM

    from vllm_blend.core.settings import BlendSettings


def suffix_logits(
    blender: Blender,
    prompt: BlendPrompt,
    *,
    settings: BlendSettings | None = None,
    blend: bool = True,
) -> torch.Tensor:
    """Logits at every token after the last chunk, ``[num_suffix_tokens, vocab_size]`` float32.

    To score an answer by teacher forcing, append its tokens to the question. The prompt must fit one
    step (``max_num_batched_tokens``) and not be in the prefix cache.

    Raises:
        RuntimeError: if the engine computed the prompt in parts.
    """
    from vllm import SamplingParams

    outer = blender.llm.llm_engine.model_executor.driver_worker.model_runner.get_model()
    hidden: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> None:
        hidden.append(output)

    # a step that blends calls the model on some of its rows only, and more than once
    blending = blender.model.blending
    hook = None if blend else outer.register_forward_hook(keep, with_kwargs=True)
    blending.watch = hidden.append if blend else None
    try:
        params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
        blender.generate(prompt, params, settings=settings, blend=blend)
    finally:
        blending.watch = None
        if hook is not None:
            hook.remove()
    num_tokens = len(prompt.token_ids)
    if len(hidden) != 1 or hidden[0].shape[0] < num_tokens:
        raise RuntimeError(
            f"the engine computed the {num_tokens} tokens in {len(hidden)} steps of at most "
            f"{max(h.shape[0] for h in hidden)}; raise max_num_batched_tokens and turn prefix "
            "caching off"
        )
    suffix = hidden[0][prompt.spans[-1].end : num_tokens]
    logits: torch.Tensor = outer.compute_logits(suffix).float()
    return logits


def kl_divergence(full: torch.Tensor, blended: torch.Tensor) -> float:
    """Mean KL(full || blended) over tokens, in nats; both ``[num_tokens, vocab_size]`` logits."""
    return float(kl_by_token(full, blended).mean())


def kl_by_token(full: torch.Tensor, blended: torch.Tensor) -> torch.Tensor:
    """KL(full || blended) of each token, in nats, ``[num_tokens]``; logits as in ``kl_divergence``."""
    p, q = full.log_softmax(-1), blended.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


See = Callable[[list[int], list[int], torch.Tensor], None]
"""Is shown a step's logits, ``[num_requests, vocab_size]`` in the model's type: the requests' places in
the batch, and how many tokens each has had before."""


@contextmanager
def watching(llm: LLM, see: See, forced: Sequence[Sequence[int]] | None = None) -> Iterator[None]:
    """Around one ``generate``: shows the logits of all its requests, and may force their tokens.

    Prompts must be prefilled in one step each, and never be preempted.

    Args:
        llm: in process, without other requests.
        forced: what each request of the batch is to answer, whatever its logits say.
    """
    outer: Any = llm.llm_engine.model_executor.driver_worker.model_runner.get_model()
    stock = outer.compute_logits
    place: dict[str, int] = {}
    count: Counter[int] = Counter()

    def compute_logits(*args: Any, **kwargs: Any) -> Any:
        logits = stock(*args, **kwargs)
        if not place:
            place.update((name, index) for index, name in enumerate(running(llm)))
        requests = [place[name] for name in of_this_step(llm)]
        steps = [count[request] for request in requests]
        count.update(requests)
        see(requests, steps, logits)
        if forced is not None:
            # an engine that schedules ahead may run a step more than it needs
            tokens = [
                forced[request][min(step, len(forced[request]) - 1)]
                for request, step in zip(requests, steps, strict=True)
            ]
            logits.fill_(-1e4)
            logits.scatter_(1, torch.tensor(tokens, device=logits.device)[:, None], 0.0)
        return logits

    outer.compute_logits = compute_logits
    try:
        yield
    finally:
        del outer.compute_logits


def agreement(full: torch.Tensor, blended: torch.Tensor) -> float:
    """Share of tokens at which both have the same first choice; logits as in ``kl_divergence``."""
    return float((full.argmax(-1) == blended.argmax(-1)).float().mean())
