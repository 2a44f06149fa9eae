"""A server's store on a GPU: pinned host memory, the GPU's own, a disk; the engine measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from asking import REPORT, answer, drain, outputs, prompt_of, report, scheduler
from engines import Engine, make_engine

from vllm_blend.server.scheduler import tier_fetches
from vllm_blend.store import gpu
from vllm_blend.store.compute_time import ComputeTime, EngineTimes

pytestmark = pytest.mark.gpu

SLOW = EngineTimes(ComputeTime(0, 0, 1e-3, 0), ComputeTime(0, 0, 1e-3, 0))
"""An engine that computes a thousand tokens a second, so that loads are worth it."""


def ask(engine: Engine, seeds: list[int]) -> tuple[list[int], dict[str, Any]]:
    scheduler(engine).reset_prefix_cache()
    prompt, spans = prompt_of(engine, seeds)
    (output,) = outputs(engine, [prompt], [REPORT | {"spans": spans}])
    drain(engine)
    assert engine.model.blending.chunks.tiers.store.flush()
    return answer(output), report(output)


@pytest.mark.covers("server: chunks in store tiers", backend="FLASH_ATTN", family="smollm2")
@pytest.mark.parametrize("eager", [True, False])
def test_chunks_are_found_wherever_they_lie(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eager: bool
) -> None:
    monkeypatch.setattr(gpu, "DELAY_S", 0.0)
    monkeypatch.setattr(tier_fetches, "MIN_WAIT_S", 5.0)
    disk = {"folder": str(tmp_path), "budget_gb": 1, "fsync": False}
    values = {"store": {"host_gb": 0.1, "gpu_gb": 0.05, "disk": disk}, "recomp_ratio": "auto"}
    options: dict[str, Any] = dict(dtype="bfloat16", enforce_eager=eager, enable_prefix_caching=True)
    options |= dict(gpu_memory_utilization=0.3)
    known: list[int] = []
    for start in range(2):
        with make_engine(tiny("qwen3"), additional_config={"vllm_blend": values}, **options) as engine:
            drain(engine)
            calibration, store = (
                scheduler(engine).blend_internal.calibration,
                engine.model.blending.chunks.tiers.store,
            )
            assert calibration.done and calibration.longest[1] > 0
            calibration.measurement.times = SLOW
            place = "cuda" if torch.cuda.is_available() else "cpu"
            assert store._gpu.device.type == place
            assert store._host._arena._block.device.type == "cpu"
            assert store._host._arena._block.is_pinned() == torch.cuda.is_available()
            found, told = ask(engine, [1, 2, 3])
            if start == 0:
                assert told["why_not"] == "no chunk is known yet"
                known, told = ask(engine, [1, 2, 3])
                assert told["reused_tokens"] == 300
            else:
                assert (told["reused_tokens"], told["loaded_chunks"]) == (300, 3)
                assert found == known
            for _ in range(2):  # from host memory, and from the GPU's
                assert ask(engine, [1, 2, 3])[0] == known
            assert store.stats()["hits.gpu"] >= 3
            kv = store._gpu.get(next(iter(engine.model.blending.chunks.tiers._names.values())))
            assert kv.layers[0][0].device.type == place
