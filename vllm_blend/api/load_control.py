"""Prompts whose chunks lie in a store: loaded, recomputed, or both, whichever is faster.

paced = PacedBlender(blender)  # times the engine
answer = paced.generate(texts, "Who founded the bakery?")
print(answer.output.outputs[0].text, answer.decision.ratio, answer.decision.reason)

KV is loaded layer by layer while the layers before it are computed. The ratio rises until recomputation
just hides behind the load, and never falls below the quality floor. A chunk whose tier is too slow is
computed with the prompt.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from vllm_blend.api.blender import Blender
from vllm_blend.api.prompts import BlendPrompt, Chunk
from vllm_blend.compat import engine_access
from vllm_blend.core import tensor_parallel
from vllm_blend.core.prompt import TokenIds, text_ids
from vllm_blend.store.compute_time import EngineTimes, Measurement
from vllm_blend.store.controller import FLOOR, HIDE, Controller, Decision, Located
from vllm_blend.store.record import Layout
from vllm_blend.store.store import IN_MEMORY
from vllm_blend.store.streaming_layers import ChunkLost

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams

logger = logging.getLogger("vllm.vllm_blend")

LONGEST_GPU, LONGEST_CPU = 8192, 2048
"""Tokens of the longest prompt that is timed, where the engine takes as many."""
QUESTION_TOKENS = 16
RATIOS = (FLOOR, 0.5, 1.0)
"""Up to 1: what hides behind a slow load may be all of a prompt."""


def measure_engine(blender: Blender, longest: int | None = None, repeat: int = 3) -> EngineTimes:
    """Times prompts of random tokens, alone on the engine; empties its prefix cache.

    Args:
        longest: tokens of the longest prompt; None: of usual ones, as far as the engine goes.
        repeat: runs of each that count.
    """
    if longest is None:
        longest = LONGEST_GPU if torch.cuda.is_available() else LONGEST_CPU
        longest = min(longest, blender.llm.llm_engine.model_config.max_model_len - 1)
    vocab = blender.llm.llm_engine.model_config.get_vocab_size()
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> TokenIds:
        return tuple(torch.randint(vocab, (count,), generator=generator).tolist())

    question, frame = ids(QUESTION_TOKENS), blender.frame
    other = len(frame.tail) + len(question)
    prompts: dict[int, BlendPrompt] = {}
    measurement = Measurement(longest, other, RATIOS, repeat)
    for size in measurement.sizes:
        room = size - len(frame.head) - other
        parts = [ids(min(256, room - at)) for at in range(0, room, 256)]
        made = zip(parts, blender.collect(parts), strict=True)
        chunks = [Chunk(*both, adapter=blender.adapter) for both in made]
        prompts[size] = blender.prompt(chunks, question)
    while (run := measurement.next) is not None:
        size, ratio = run
        settings = None if ratio is None else replace(blender.settings, recomp_ratio=ratio)
        blender.llm.reset_prefix_cache()
        start = time.perf_counter()
        blender.generate(prompts[size], _one_token(), settings=settings, blend=ratio is not None)
        measurement.took(time.perf_counter() - start)
    assert measurement.times is not None
    return measurement.times


@dataclass(frozen=True, eq=False)
class PacedOutput:
    """An answer, and how its chunks were had.

    Attributes:
        output: vLLM's.
        decision: what was loaded, at which ratio, what was expected, and why.
        tiers: for each chunk where it was found: ``"gpu"``, ``"host"``, a tier's name, or None.
        lost: why a load that had begun could not be finished, so that the prompt was computed in
            full; else None.
    """

    output: RequestOutput
    decision: Decision
    tiers: tuple[str | None, ...]
    lost: str | None = None


class PacedBlender:
    """Decides for each prompt what to load and how much to recompute; see ``store/controller.py``.

    How long loads take is learned from the store's own, tier by tier.

    Args:
        blender: with a store; its ``recomp_ratio`` is not used.
        floor: the least ratio, below which this model's answers suffer.
        times: of the engine; None: they are measured now.
        hide: share of a load's time that recomputation may fill.

    Raises:
        ValueError: if the blender has no store, or several ratios, or the engine several ranks.
    """

    def __init__(
        self,
        blender: Blender,
        *,
        floor: float = FLOOR,
        times: EngineTimes | None = None,
        hide: float = HIDE,
    ) -> None:
        if blender.store is None:
            raise ValueError("the blender has no store; make it with Blender(llm, store=...)")
        if blender.settings.recomp_ratios is not None:
            raise ValueError("recomp_ratios is set; what is paced is recomp_ratio")
        if tensor_parallel.num_ranks() > 1:
            raise ValueError(
                f"tensor_parallel_size is {tensor_parallel.num_ranks()}; allowed: 1. Ranks that "
                "measure for themselves would decide differently; a server with recomp_ratio "
                '"auto" decides for all'
            )
        self.blender = blender
        self.store = blender.store
        self.times = times or measure_engine(blender)
        self.controller = Controller(
            self.times.blended,
            {lane.name: lane.load_time for lane in self.store.lanes},
            blender.model.blending.kv_shape.num_layers,
            floor=floor,
            full=self.times.full,
            hide=hide,
        )

    def generate(
        self,
        texts: Sequence[str | Sequence[int]],
        question: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        decision: Decision | None = None,
    ) -> PacedOutput:
        """Answers a question about chunks, in this order.

        Once the answer is there, chunks that no tier had are computed for the store, and those that
        were slower to load than to compute are fetched to host memory, which also times their tier.

        Args:
            texts: of the chunks, or their token ids.
            question: text or token ids.
            sampling_params: vLLM's; None: the model's defaults.
            decision: instead of the controller's.
        """
        blender = self.blender
        ids = blender.token_ids(texts)
        contexts = blender.contexts(len(ids))
        keys = [blender.key(*pair) for pair in zip(ids, contexts, strict=True)]
        tiers = tuple(self.store.locate(key) for key in keys)
        question = text_ids(blender.tokenizer, question, "question")
        if decision is None:
            located = [
                Located(len(one), 0, None)
                if tier in IN_MEMORY
                else Located(len(one), Layout.of(key).num_bytes, tier)
                for one, key, tier in zip(ids, keys, tiers, strict=True)
            ]
            other = len(blender.frame.head) + len(question) + len(blender.frame.tail)
            decision = self.controller.decide(located, other)
        _log(decision, tiers)
        wanted = [key for key, load in zip(keys, decision.load, strict=True) if load]
        found = iter(self.store.get_many(wanted, layerwise=True))
        chunks = [
            Chunk(one, next(found) if load else None, context, blender.adapter)
            for one, context, load in zip(ids, contexts, decision.load, strict=True)
        ]
        prompt = blender.prompt(chunks, question)
        settings = replace(blender.settings, recomp_ratio=decision.ratio)
        blend = any(chunk.kv is not None for chunk in chunks)
        lost = None
        try:
            output = blender.generate(prompt, sampling_params, settings=settings, blend=blend)
        except ChunkLost as error:
            logger.warning("vllm_blend: %s; the prompt is computed in full", error)
            lost = str(error)
            engine_access.abort_all(blender.llm)
            output = blender.generate(prompt, sampling_params, blend=False)
        self._catch_up(chunks, tiers)
        return PacedOutput(output, decision, tiers, lost)

    def _catch_up(self, chunks: Sequence[Chunk], tiers: Sequence[str | None]) -> None:
        """Chunks that were computed with the prompt are kept for the next one."""
        left_out = [(c, tier) for c, tier in zip(chunks, tiers, strict=True) if c.kv is None]
        below = [self.blender.key(c.token_ids, c.context) for c, tier in left_out if tier is not None]
        self.store.prefetch(below)
        self.blender.obtain([(c.context, c.token_ids) for c, tier in left_out if tier is None])


def _log(decision: Decision, tiers: Sequence[str | None]) -> None:
    loaded = Counter(tier for tier, load in zip(tiers, decision.load, strict=True) if load)
    where = ", ".join(f"{count} from {tier}" for tier, count in sorted(loaded.items(), key=str))
    logger.info(
        "vllm_blend: %d chunks, reused %s; ratio %.2f; %s",
        len(tiers),
        where or "none",
        decision.ratio,
        decision.reason,
    )


def _one_token() -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=1, temperature=0, detokenize=False)
