"""How far blended prompts are from full prefill over the answer that full prefill gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from vllm_blend.cli.eval.asking import Answer, Asker, answer_of, batches, run
from vllm_blend.cli.eval.logits import kl_by_token, watching
from vllm_blend.core.settings import BlendSettings

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

ROWS = 16
"""Tokens that are compared at once; a row of logits is up to 600 KB in float32, and needs copies."""


@dataclass(frozen=True)
class Full:
    """Full prefill's answer; logits of its first tokens, ``[num_tokens, vocab_size]`` float32."""

    answer: Answer
    logits: torch.Tensor

    @property
    def forced(self) -> tuple[int, ...]:
        """The tokens that other methods are compared over."""
        return self.answer.token_ids[: len(self.logits)]


@dataclass(frozen=True)
class Distance:
    """Of a method to full prefill: over all forced tokens, at the first, and first choices in common.

    ``ttft``: seconds to the first token; it means something where the prompt ran alone.
    """

    kl: float
    first_kl: float
    top1: float
    ttft: float


def full_prefill(askers: Sequence[Asker], num_tokens: int) -> list[Full]:
    """By full prefill, with the logits of at most ``num_tokens`` tokens of each answer."""
    found: list[Full] = []
    for batch in batches(askers, lambda asker: asker):
        kept: list[list[torch.Tensor]] = [[] for _ in batch]

        def see(
            requests: list[int],
            steps: list[int],
            logits: torch.Tensor,
            kept: list[list[torch.Tensor]] = kept,
        ) -> None:
            for row, (request, step) in enumerate(zip(requests, steps, strict=True)):
                if step < num_tokens:
                    kept[request].append(logits[row].to(torch.float32, copy=True))

        with watching(batch[0].blender.llm, see):
            outputs = run(batch, [asker.prompt.token_ids for asker in batch])
        for output, logits in zip(outputs, kept, strict=True):
            answer = answer_of(output)
            # a text that ends the answer is found when a further step may be under way
            found.append(Full(answer, torch.stack(logits[: len(answer.token_ids)])))
    return found


def distances(blended: Sequence[tuple[Asker, BlendSettings, Full]]) -> list[Distance]:
    """By blending, with the tokens of full prefill's answer forced."""
    found: list[Distance] = []
    for batch in batches(blended, lambda item: item[0]):
        found += _distances(batch)
    return found


def _distances(batch: Sequence[tuple[Asker, BlendSettings, Full]]) -> list[Distance]:
    blender = batch[0][0].blender
    forced = [full.forced for _, _, full in batch]
    where: list[tuple[int, int]] = []  # request and step of each row compared
    rows: list[torch.Tensor] = []  # KL, and whether the first choice is the same; [2, num_rows]

    def see(requests: list[int], steps: list[int], logits: torch.Tensor) -> None:
        there = [
            (row, request, step)
            for row, (request, step) in enumerate(zip(requests, steps, strict=True))
            if step < len(forced[request])
        ]
        for start in range(0, len(there), ROWS):
            part = there[start : start + ROWS]
            blended = logits[[row for row, _, _ in part]].float()
            full = torch.stack([batch[request][2].logits[step] for _, request, step in part])
            same = (full.argmax(-1) == blended.argmax(-1)).float()
            rows.append(torch.stack([kl_by_token(full, blended), same]))
            where.extend((request, step) for _, request, step in part)

    with watching(blender.llm, see, forced):
        outputs = blender.generate(
            [asker.prompt for asker, _, _ in batch],
            settings=[settings for _, settings, _ in batch],
            sampling_params=[forced_params(ids) for ids in forced],
        )
    numbers = torch.cat(rows, dim=1).T.tolist()
    tokens: list[list[tuple[float, float]]] = [[(0.0, 0.0)] * len(ids) for ids in forced]
    for (request, step), (kl, same) in zip(where, numbers, strict=True):
        tokens[request][step] = kl, same
    found = []
    for output, ids, each in zip(outputs, forced, tokens, strict=True):
        check_forced(output, ids)
        kls, same = zip(*each, strict=True)
        ttft = answer_of(output).ttft
        found.append(Distance(sum(kls) / len(kls), kls[0], sum(same) / len(same), ttft))
    return found


def forced_params(answer: Sequence[int]) -> SamplingParams:
    """Of a request whose tokens are forced."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=len(answer), temperature=0, ignore_eos=True, detokenize=False)


def check_forced(output: RequestOutput, answer: Sequence[int]) -> None:
    """Raises RuntimeError if the request did not answer what was forced."""
    if list(output.outputs[0].token_ids) != list(answer):
        raise RuntimeError(
            f"the engine computed a prompt of {len(output.prompt_token_ids or ())} tokens in parts, or "
            "twice; raise max_num_batched_tokens to the prompt's length and leave the engine to this "
            "call alone"
        )
