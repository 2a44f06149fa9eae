"""What steps of a server take, as its clients see it: measured for ``vllm-blend simulate``.

A server of the user's arguments is started and asked about random tokens, one prompt at a time: in
full, with half of it in vLLM's prefix cache, with all chunks new, all known, and half of them known.
So the processes, the compilation, the policy and the ratio are those that are simulated.

Where the question is asked first, the rows without stored KV go through a part of the layers twice
(``rows_of``).
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from vllm_blend.cli.client import Server, report_of
from vllm_blend.cli.server_process import server_process
from vllm_blend.core.settings import BlendSettings, asked_layers
from vllm_blend.server.config import CLIENT_FIELDS, ServerSettings
from vllm_blend.store.compute_time import ComputeTime

CHUNK_TOKENS = 256
HEAD_TOKENS, QUESTION_TOKENS = 16, 24
"""Of a prompt; both are new in each, so that no prompt is found in the prefix cache by accident."""
REPEAT = 3
"""Runs of each kind that count; the first of a length is run once more before, as it may compile."""
PAUSE_S, QUIET_S = 0.3, 300.0
"""Between the first looks whether the server still computes chunks in the background, and how long at
most. A look is a request, for which an idle server gives up what it computes: pauses get longer."""
SHORT_TOKENS = 4
"""Of a chunk that is too short to be one."""
BLOCK = 128
"""A multiple of the sizes of vLLM's blocks, in tokens."""


Sample = tuple[int, float, float]
"""Tokens, rows that were computed, seconds."""


@dataclass(frozen=True)
class StepCosts:
    """Seconds.

    Attributes:
        full: steps that reuse nothing but vLLM's prefix cache.
        blended: steps that reuse chunks.
        keep: more for each token of a chunk whose KV is kept.
        samples: what was measured, by kind: tokens, rows (``rows_of``), seconds.
    """

    full: ComputeTime
    blended: ComputeTime
    keep: float = 0.0
    samples: Mapping[str, Sequence[Sample]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> StepCosts:
        """Raises ValueError or OSError where the file is no such fit."""
        values = json.loads(path.read_text())
        try:
            fits = ComputeTime(**values["full"]), ComputeTime(**values["blended"])
            samples = {
                kind: [(int(tokens), float(rows), float(seconds)) for tokens, rows, seconds in some]
                for kind, some in values.get("samples", {}).items()
            }
            return cls(*fits, keep=float(values.get("keep", 0.0)), samples=samples)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            what = "full and blended, each with fixed, token, row and pair, in seconds"
            raise ValueError(f"expected {what} ({error!r})") from None

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def rows_of(
    num_fresh: int, num_reused: int, num_recomputed: int, settings: BlendSettings, num_layers: int
) -> float:
    """Rows that a step computes of a blended prompt, as if each went through all layers once.

    Args:
        num_fresh: tokens without stored KV; ``num_reused``: the others; ``num_recomputed``: of these.
    """
    asks = settings.for_rows(num_fresh, num_reused).asks
    again = asked_layers(num_layers).stop / num_layers if asks else 0.0
    return num_fresh * (1 + again) + num_recomputed


def measured(
    model: str, arguments: Sequence[str], settings: Mapping[str, Any], longest: int, config: Any
) -> StepCosts:
    """The costs of a server with these arguments and settings, started here.

    Args:
        longest: tokens of the longest prompt; others have a quarter and a half of them.
        config: vLLM's, of the same.

    Raises:
        ServerError: if it does not start, or refuses a request.
    """
    open_fields = {"client_fields": list(CLIENT_FIELDS), "auto": False}
    with server_process(model, arguments, dict(settings) | open_fields) as server:
        return StepTimer(server, config).measure((longest // 4, longest // 2, longest))


class StepTimer:
    """Asks a server that nobody else asks, each time once it has nothing left to compute."""

    def __init__(self, server: Server, config: Any, seed: int = 0) -> None:
        self._server, self._model = server, server.model()
        model, settings = config.model_config, ServerSettings.of(config)
        assert settings is not None
        self._settings, self._num_layers = settings.blend, model.get_num_layers(config.parallel_config)
        self._choose, self._vocab_size = random.Random(seed), model.get_vocab_size()

    def measure(self, sizes: Sequence[int]) -> StepCosts:
        full: list[Sample] = []
        blended: list[Sample] = []
        new: list[Sample] = []
        kept: list[float] = []  # seconds a token, more than in full
        for size in sizes:
            alone = self._in_full(size)
            full += alone
            in_full = median(seconds for n, m, seconds in alone if m == n)
            firsts, reused = self._with_chunks(size)
            new, blended = new + firsts, blended + reused
            kept.append((median(seconds for *_, seconds in firsts) - in_full) / size)
        fits = ComputeTime.fit(full), ComputeTime.fit(blended)
        samples = {"full": full, "blended": blended, "new": new}
        return StepCosts(*fits, keep=max(0.0, median(kept)), samples=samples)

    def _in_full(self, size: int) -> list[Sample]:
        """Prompts that are not blended: new ones, and such whose first half was asked before."""
        found: list[Sample] = []
        half = size // 2 // BLOCK * BLOCK
        self._quiet()
        for number in range(REPEAT + 1):
            ids = self._ids(size)
            seconds, _ = self._ask(ids, "off")
            again = [*ids[:half], *self._ids(size - half)]
            halved, _ = self._ask(again, "off")
            if number:
                found += [(size, size, seconds)]
                found += [(size, size - half, halved)] if half else []
        return found

    def _with_chunks(self, size: int) -> tuple[list[Sample], list[Sample]]:
        """Prompts whose chunks are new; prompts that reuse them, and half of them."""
        room = max(size - HEAD_TOKENS - QUESTION_TOKENS, 2 * BLOCK)
        count = max(2, room // CHUNK_TOKENS)
        chunks = [self._ids(room // count) for _ in range(count)]
        firsts: list[Sample] = []
        found: list[Sample] = []
        for number in range(REPEAT):
            self._quiet()
            new = chunks if not number else [self._ids(room // count) for _ in range(count)]
            firsts.append((size, size, self._ask_chunks(new)[0]))
        for number in range(REPEAT + 1):
            for part in (count, count // 2):
                self._quiet()
                self._choose.shuffle(chunks)
                known, rest = chunks[:part], [self._ids(room // count) for _ in range(count - part)]
                seconds, report = self._ask_chunks(known, rest)
                if number and (reused := report.get("reused_tokens", 0)):
                    n, again = report["prompt_tokens"], report["recomputed_tokens"]
                    rows = rows_of(n - reused, reused, again, self._settings, self._num_layers)
                    found.append((n, rows, seconds))
        return firsts, found

    def _ask_chunks(
        self, chunks: Sequence[list[int]], after: Sequence[list[int]] = ()
    ) -> tuple[float, dict[str, Any]]:
        """A prompt of chunks, and of such tokens after them as belong to none."""
        ids, spans = self._ids(HEAD_TOKENS), []
        for chunk in chunks:
            spans.append([len(ids), len(ids) + len(chunk)])
            ids += chunk
        for rest in after:
            ids += rest
        ids += self._ids(QUESTION_TOKENS)
        return self._ask(ids, json.dumps({"spans": spans, "report": True}))

    def _ask(self, ids: list[int], blend: str) -> tuple[float, dict[str, Any]]:
        """The seconds until the answer of one token, and its report."""
        body = {"model": self._model, "prompt": ids, "max_tokens": 1, "temperature": 0}
        start = time.perf_counter()
        answer = self._server.post("/v1/completions", body | {"vllm_xargs": {"blend": blend}})
        return time.perf_counter() - start, report_of(answer)

    def _quiet(self) -> None:
        """Waits until nothing is computed in the background."""
        end, pause = time.monotonic() + QUIET_S, PAUSE_S
        while time.monotonic() < end:
            self._ask_chunks([self._ids(SHORT_TOKENS)])  # gauges are set by requests; it is not kept
            if not any(waiting_chunks(self._server.get("/metrics").text)):
                return
            time.sleep(pause)
            pause *= 2

    def _ids(self, count: int) -> list[int]:
        return [self._choose.randrange(self._vocab_size) for _ in range(count)]


def waiting_chunks(metrics: str) -> Iterator[float]:
    """The chunks that wait in the background, of each engine."""
    for line in metrics.splitlines():
        if line.startswith("vllm:blend_waiting_chunks"):
            yield float(line.rpartition(" ")[2])
