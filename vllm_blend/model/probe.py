"""Can this model blend? Two probes on the loaded weights decide, layer by layer, before any request.

    shift      a prompt at its positions, and again at later ones: each layer's K must be turned by one
               of the model's rotary modules ("rope"), or stay as it is ("nope"), and the question's
               hidden states must not move, in the median of its tokens: in 16 bits one may by much
    identity   the prompt's exact KV, with some of its rows chosen at random and computed again, must
               give full prefill's last hidden state; the same KV seven tokens off must not

They run through vLLM's own runner, on blocks that nobody uses yet. What was found is kept in vLLM's
cache folder, so the next start of the same model takes no time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vllm_blend.attention.rotation import Rotation, rotations_in
from vllm_blend.compat.kv_connectors import unseen
from vllm_blend.compat.support import FP8_CACHE_DTYPES, first_layer
from vllm_blend.core.kv import StoredKV
from vllm_blend.core.layers import LayerKV
from vllm_blend.core.pipeline import all_reduce_min
from vllm_blend.core.plans import EXTRA_ARG, BlendPlan, ChunkSpan, CollectPlan
from vllm_blend.core.settings import BlendSettings
from vllm_blend.model.graphs import RowGraphs
from vllm_blend.model.rows import Hidden, copied
from vllm_blend.model.verdicts import Verdict, about, read_verdict, verdict_path, write_verdict

if TYPE_CHECKING:
    from vllm_blend.model.blending import Blending

logger = logging.getLogger("vllm.vllm_blend")

NUM_TOKENS, SHIFT, QUESTION = 256, 137, 20
"""Of the prompt; how far it is shifted; its last tokens, which are always computed."""

CONTROL = 7
"""How many tokens off the KV is that must not give full prefill's answer."""

MOVED = {torch.float32: 0.01, torch.float16: 0.1, torch.bfloat16: 0.15}
"""Largest relative error of a layer's K, of shifted hidden states (the median of the tokens), and
of the last hidden state. Rounding is some ten times smaller; a wrong rotation, or a wrong position, is
off by about 1."""


WARM_UP_KEY = b"warm-up"
"""Of a chunk that is kept for a moment."""

AT_RANDOM = BlendSettings(policy="random")
"""How the probes choose rows."""

MOVED_FP8 = 0.5
"""The same of a shifted prompt over a paged cache in eight bits: K at other positions is rounded to
other values there. (Exact KV at its own positions is rounded as full prefill's is.)"""


def probe(worker: Any, blending: Blending) -> str | None:
    """Gives each layer its rotation; returns why the model cannot blend, or None.

    Args:
        worker: vLLM's, at the end of its start.
    """
    with unseen(worker.model_runner):
        return _probe(worker, blending)


def _probe(worker: Any, blending: Blending) -> str | None:
    probing = Probing(worker, blending)
    path = verdict_path(blending)
    verdict = known = _known(path)
    if verdict is None:
        verdict = probing.run()
        write_verdict(path, verdict, about(blending))
    name = type(blending.inner).__name__
    if verdict.refused:
        return f"blending does not support {name}: {verdict.refused}"
    probing.give(verdict.rotations)
    probing.capture()
    if torch.device(worker.device).type == "cuda":
        probing.warm_up()
    before = "" if known is None else " (probed before)"
    logger.info("vllm_blend: %s blends%s: %s.", name, before, verdict)
    return None


class Probing:
    """The probes of one model.

    Args:
        worker: vLLM's.
        blending: of its model.
    """

    def __init__(self, worker: Any, blending: Blending) -> None:
        self._worker, self._blending = worker, blending
        config = self._config = blending.vllm_config
        longest = config.model_config.max_model_len
        budget = config.scheduler_config.max_num_batched_tokens
        self._num_tokens = min(NUM_TOKENS, longest // 2, budget)
        self._shift = min(SHIFT, longest - self._num_tokens - 1)
        self._dtype = config.model_config.dtype
        self._tolerance = MOVED.get(self._dtype, 0.15)
        is_fp8 = config.cache_config.cache_dtype in FP8_CACHE_DTYPES
        self._shift_tolerance = MOVED_FP8 if is_fp8 else self._tolerance
        self._device = torch.device(worker.device)
        self._known: dict[int, list[Rotation]] = {}
        generator = torch.Generator().manual_seed(0)
        vocab = config.model_config.get_vocab_size()
        self._ids = torch.randint(vocab, (self._num_tokens,), generator=generator).tolist()

    def run(self) -> Verdict:
        """Probes the model."""
        here, expected = self._collect(0)
        there, shifted = self._collect(self._shift)
        found: list[int] = []
        why = ""
        for index, (k, moved) in enumerate(zip(here, there, strict=True), first_layer(self._config)):
            rotation, errors = self._kind(len(found), k[0], moved[0])
            if rotation is None:
                why = why or (
                    f"layer {index}'s K moves with its position otherwise than any rotary module of "
                    f"the model turns it (off by {min(errors):.2g}, allowed {self._shift_tolerance})"
                )
            found.append(-1 if rotation is None else rotation)
        if refused := agreed(why):
            return refused
        shift_error = token_error(shifted, expected)
        if not shift_error < self._shift_tolerance:
            why = (
                f"its answer depends on where a prompt's positions begin (its hidden states move "
                f"by {shift_error:.2g}, allowed {self._shift_tolerance})"
            )
        if refused := agreed(why):
            return refused
        self.give(found)
        kv = self._stored(here)
        identity = token_error(self._blend(kv), expected[-1:])
        wrong = [(k.roll(CONTROL, 0), v.roll(CONTROL, 0)) for k, v in kv]
        control = token_error(self._blend(wrong), expected[-1:])
        if not identity < self._tolerance:
            why = (
                f"with exact KV and random rows its last hidden state is off by {identity:.2g} "
                f"(allowed {self._tolerance})"
            )
        elif not control > 2 * identity:
            why = (
                f"wrong KV moves its last hidden state no more than exact KV does ({control:.2g} and "
                f"{identity:.2g}), so stored KV is not what its layers attend to"
            )
        return agreed(why) or Verdict("", tuple(found), shift_error, identity, control)

    def give(self, rotations: Sequence[int]) -> None:
        """Gives each layer the rotation that was found."""
        for index, (attn, which) in enumerate(zip(self._blending.attns, rotations, strict=True)):
            attn.impl.blend.rotation = self._none if which < 0 else self._candidates(index)[which]

    def capture(self) -> None:
        """Captures steps on rows as CUDA graphs, where the engine uses them; with exact KV they must
        give full prefill's last hidden state, or they are dropped."""
        blending = self._blending
        graphs = RowGraphs.of(blending)
        if graphs is None:
            return
        here, expected = self._collect(0)
        blending.graphs, graphs.wanted = graphs, True
        error = token_error(self._blend(self._stored(here)), expected[-1:])
        if all_reduce_min([int(bool(graphs.sizes) and error < self._tolerance)]) == [0]:
            blending.graphs = None
            if graphs.sizes:
                logger.warning(
                    "vllm_blend: blended steps run without CUDA graphs, from which the last hidden "
                    "state is off by %.2g with exact KV (allowed %s)",
                    error,
                    self._tolerance,
                )

    def warm_up(self) -> None:
        """Prefills a prompt whose KV is kept, then one that reuses it and asks its question, then one
        that is kept in host memory; and widens a chunk's KV from eight bits. Kernels are compiled, and
        copies set up, at their first use, and no request shall wait for that."""
        from vllm_blend.ops.fp8 import FP8
        from vllm_blend.ops.widen import widen  # both need Triton

        plan = CollectPlan(num_prompt_tokens=self._num_tokens)
        self._run(plan)
        self._blend(plan.kv, BlendSettings())
        self._run(CollectPlan(num_prompt_tokens=self._num_tokens, key=WARM_UP_KEY))
        self._blending.chunks.drop([WARM_UP_KEY])
        k, _ = plan.kv[0]
        scales = k.new_zeros((*k.shape[:2], 1), dtype=torch.float32)
        widen(torch.zeros_like(k, dtype=FP8), scales, torch.empty_like(k))

    def _stored(self, collected: Sequence[LayerKV]) -> list[LayerKV]:
        """Collected KV without its positions."""
        at = self._positions()
        return [(self._rotation(i).undo(k, at), v) for i, (k, v) in enumerate(collected)]

    @property
    def _none(self) -> Rotation:
        longest = self._blending.vllm_config.model_config.max_model_len
        return Rotation.none(longest, self._dtype, self._device)

    def _rotation(self, index: int) -> Rotation:
        found: Rotation = self._blending.attns[index].impl.blend.rotation
        return found

    def _positions(self) -> torch.Tensor:
        return torch.arange(self._num_tokens, device=self._device)

    def _candidates(self, index: int) -> list[Rotation]:
        """Rotations that a layer may have."""
        blending = self._blending
        return list(
            rotations_in(
                blending.owners[index],
                blending.model,
                blending.kv_shape.head_size,
                blending.vllm_config.model_config.max_model_len,
                torch.empty(0, dtype=self._dtype, device=self._device),
                self._known,
            )
        )

    def _kind(self, index: int, k: torch.Tensor, moved: torch.Tensor) -> tuple[int | None, list[float]]:
        """Which rotation takes K here to K there: -1: none; None: no rotation of the model does."""
        here = self._positions()
        errors = [token_error(k, moved)]
        if errors[0] >= self._shift_tolerance / 10:  # else it stays as it is
            for rotation in self._candidates(index):
                turned = rotation.rotate(rotation.undo(k, here), here + self._shift)
                errors.append(token_error(turned, moved))
                if errors[-1] < self._shift_tolerance / 10:
                    break
        best = min(range(len(errors)), key=errors.__getitem__)
        return (best - 1 if errors[best] < self._shift_tolerance else None), errors

    def _collect(self, shift: int) -> tuple[list[LayerKV], torch.Tensor]:
        """K as attention writes it and V of each layer, and the question's hidden states."""
        plan = CollectPlan(num_prompt_tokens=self._num_tokens, as_written=True)
        self._blending.shift = shift
        try:
            hidden = self._run(plan)
        finally:
            self._blending.shift = 0
        return plan.kv, hidden

    def _blend(self, kv: Sequence[LayerKV], settings: BlendSettings = AT_RANDOM) -> torch.Tensor:
        """The last hidden state with some rows computed again, and ``kv`` for the others."""
        start, end = 3, self._num_tokens - QUESTION
        spans = (ChunkSpan(start, StoredKV(tuple((k[start:end], v[start:end]) for k, v in kv))),)
        return self._run(BlendPlan(spans, settings))[-1:]

    def _run(self, plan: BlendPlan | CollectPlan) -> torch.Tensor:
        """Prefills the prompt with ``plan``; returns hidden states of its last tokens, the question,
        ``[QUESTION, hidden_size]``."""
        hidden: list[torch.Tensor] = []

        def watch(output: Hidden) -> None:
            hidden.append(copied(output, max(0, self._num_tokens - QUESTION), self._num_tokens))

        self._blending.watch = watch
        try:
            with self._request(plan) as outputs:
                for output in outputs:
                    self._worker.execute_model(output)
                    self._worker.sample_tokens(None)
        finally:
            self._blending.watch = None
        (last,) = hidden
        return last

    @contextmanager
    def _request(self, plan: BlendPlan | CollectPlan) -> Iterator[list[Any]]:
        """What vLLM's scheduler says to prefill the prompt in one step; forgets it in the end."""
        from vllm import SamplingParams
        from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

        request_id = "vllm_blend-probe"
        groups = self._worker.model_runner.kv_cache_config.kv_cache_groups
        first, block_ids = 1, []  # block 0 is nobody's
        for group in groups:
            count = -(-(self._num_tokens + 1) // group.kv_cache_spec.block_size)
            block_ids.append(list(range(first, first + count)))
            first += count
        params = SamplingParams(
            max_tokens=1, temperature=0, detokenize=False, extra_args={EXTRA_ARG: plan}
        )
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs = [
            NewRequestData(
                req_id=request_id,
                prompt_token_ids=self._ids,
                mm_features=[],
                sampling_params=params,
                pooling_params=None,
                block_ids=tuple(block_ids),
                num_computed_tokens=0,
                lora_request=None,
                prefill_token_ids=self._ids,
            )
        ]
        output.num_scheduled_tokens = {request_id: self._num_tokens}
        output.total_num_scheduled_tokens = self._num_tokens
        output.num_common_prefix_blocks = [0] * len(groups)
        yield [output]
        ended = SchedulerOutput.make_empty()
        ended.finished_req_ids = {request_id}
        self._worker.execute_model(ended)


def agreed(why: str) -> Verdict | None:
    """All ranks refuse where one does.

    Args:
        why: this one does; empty: it does not.
    """
    if all_reduce_min([int(not why)]) == [1]:
        return None
    return Verdict(why or "another rank's part of it fails the probe")


def token_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The median over tokens of ``|found - expected| / |expected|``, NaN counted as infinite: a few
    tokens whose experts rounding has made others do not count."""
    found, expected = found.float().flatten(1), expected.float().flatten(1)
    error = (found - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-30)
    return float(error.median().nan_to_num(nan=float("inf")))


def _known(path: Path) -> Verdict | None:
    """What was found before, on all ranks; None: nothing on one of them, or it cannot be read."""
    found: Verdict | None = None
    with suppress(OSError, ValueError, TypeError, KeyError):
        found = read_verdict(path)[1]
    return found if all_reduce_min([int(found is not None)]) == [1] else None
