"""Times this engine's prefills at start-up, and decides by them for a request.

The engine itself runs them, on random tokens: a prefill whose KV is kept, then those of
``store/compute_time.py``. From these times and those of the store's loads the controller decides, for
each request, which chunks to wait for and at which ratio to blend (``store/controller.py``).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from vllm_blend.core.plans import ChunkKey, CollectPlan, KeyedPlan, KeyedSpan
from vllm_blend.core.settings import BlendSettings
from vllm_blend.server.config import ServerSettings
from vllm_blend.store.compute_time import RATIOS, Measurement
from vllm_blend.store.controller import HIDE, Controller, Decision, Located
from vllm_blend.store.load_time import LoadTime

KEY: ChunkKey = b"vllm_blend: calibration"
LONGEST_GPU, LONGEST_CPU = 8192, 1024
"""Tokens of the longest prefill that is measured, where the engine takes as many in a step."""
HEAD, TAIL = 4, 8
"""Tokens of a prompt that are not reused."""
TRIES = 5
"""Runs beside which other requests ran are repeated, but not for ever."""


class Calibration:
    """The measuring requests, one after the other; then decisions.

    Args:
        vocab_size, num_layers: of the model.
        max_tokens: of a prompt that is measured.
        repeat: runs of each that count.
        settings: the server's default.
        floor: no ratio below it.
        make_request: an engine request of ``(request_id, token_ids, plan)``.

    Attributes:
        wanted: whether anything is to be measured; some request asked for it.
        measurement: what is timed, and what came of it.
    """

    def __init__(
        self,
        vocab_size: int,
        num_layers: int,
        max_tokens: int,
        repeat: int,
        settings: BlendSettings,
        floor: float,
        make_request: Callable[[str, list[int], Any], Any],
    ) -> None:
        self.wanted = False
        self.measurement = Measurement(max_tokens, HEAD + TAIL, repeat=repeat)
        self._num_layers = num_layers
        self._settings = settings
        self._floor = floor
        self._make_request = make_request
        choose = random.Random(1)
        self._token_ids = [choose.randrange(vocab_size) for _ in range(max_tokens)]
        self._collected = False
        self._current = ""
        self._clean, self._step_s = True, 0.0
        self._tries = 0
        self._number = 0

    @classmethod
    def of(
        cls, vllm_config: Any, settings: ServerSettings, make_request: Callable[..., Any]
    ) -> Calibration:
        """For an engine."""
        model, on_gpu = vllm_config.model_config, torch.cuda.is_available()
        longest = min(
            LONGEST_GPU if on_gpu else LONGEST_CPU,
            model.max_model_len - 1,
            vllm_config.scheduler_config.max_num_batched_tokens,
        )
        layers = model.get_total_num_hidden_layers()
        repeat = 3 if on_gpu else 1
        calibration = cls(
            model.get_vocab_size(),
            layers,
            longest,
            repeat,
            settings.blend,
            settings.quality_floor,
            make_request,
        )
        calibration.wanted = settings.paced
        return calibration

    def __str__(self) -> str:
        """What was measured, in words."""
        size, seconds = self.longest
        blended = self.measurement.seconds[size, RATIOS[0]]
        return (
            f"a prefill of {size} tokens takes {1e3 * seconds:.0f} ms, {1e3 * blended:.0f} ms where "
            f"{RATIOS[0]:.0%} are recomputed"
        )

    @property
    def longest(self) -> tuple[int, float]:
        """Tokens and seconds of the longest full prefill that was measured."""
        size = self.measurement.sizes[-1]
        return size, self.measurement.seconds[size, None]

    @property
    def done(self) -> bool:
        """Whether the engine is measured."""
        return self.measurement.times is not None

    def is_mine(self, request_id: str) -> bool:
        return bool(self._current) and request_id == self._current

    def start(self) -> list[Any]:
        """The next engine request, if one is wanted and none runs."""
        if not self.wanted or self.done or self._current:
            return []
        self._number += 1
        self._current = f"vllm_blend-calibration-{self._number}"
        self._clean, self._step_s = True, 0.0
        size, plan = self._next()
        return [self._make_request(self._current, self._token_ids[:size], plan)]

    def step_took(self, request_ids: Iterable[str], seconds: float) -> None:
        """A step with these requests took this long."""
        if self._current:
            ids = set(request_ids)
            self._clean &= ids <= {self._current}
            self._step_s += seconds if self._current in ids else 0.0

    def finish(self, completed: bool) -> None:
        """The running request has ended, or was aborted."""
        self._current = ""
        if not completed:
            return
        if not self._collected:
            self._collected = True
            return
        self._tries += 1
        if not self._clean and self._tries < TRIES:
            return
        self._tries = 0
        self.measurement.took(self._step_s)

    def forget_kv(self) -> None:
        """The KV that it measures with is gone: it is computed again, if it is needed."""
        self._collected = False

    def decide(
        self,
        chunks: Sequence[Located],
        loads: Mapping[str, LoadTime],
        num_other_tokens: int,
        *,
        overlap: bool,
    ) -> Decision:
        """What to load and how much to recompute.

        Args:
            overlap: whether the prefill computes while layers are loaded.
        """
        times = self.measurement.times
        assert times is not None
        controller = Controller(
            times.blended,
            loads,
            self._num_layers,
            floor=self._floor,
            full=times.full,
            overlap=overlap,
            hide=HIDE,
        )
        return controller.decide(chunks, num_other_tokens)

    def _next(self) -> tuple[int, CollectPlan | KeyedPlan | None]:
        """Tokens and plan of the next request."""
        if not self._collected:
            size = len(self._token_ids)
            return size, CollectPlan(num_prompt_tokens=size, key=KEY)
        assert self.measurement.next is not None
        size, ratio = self.measurement.next
        if ratio is None:
            return size, None
        settings = BlendSettings(
            check_layers=self._settings.check_layers[:1],
            recomp_ratio=ratio,
            policy=self._settings.policy,
        )
        return size, KeyedPlan((KeyedSpan(HEAD, size - TAIL, KEY, HEAD),), settings)
