"""A server that measures its model's drift at start-up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from asking import REPORT, drain, outputs, report, scheduler
from engines import make_engine
from vllm.exceptions import VLLMValidationError

from vllm_blend import Blender
from vllm_blend.core import BlendPlan
from vllm_blend.server import fetches
from vllm_blend.settings import PAPER

INPUTS = Path(__file__).parents[2] / "inputs"


def test_it_measures_and_corrects_as_a_blender_does(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetches, "MIN_WAIT_S", 30.0)  # for chunks that are there, on a busy machine too
    store = {"host_gb": 0.5, "disk": {"folder": str(tmp_path), "budget_gb": 1}}
    config = {"vllm_blend": {"drift": True, "store": store, "stand_in": "", "policy": "hkvd"}}
    with make_engine(smollm2, additional_config=config) as engine:
        own = scheduler(engine).blend_own
        assert "drift is still being measured" in own.undone
        drain(engine)
        assert own.undone == "" and own.drift.done
        found = engine.model.blending.chunks.drift
        assert found is not None
        blender = Blender(engine.llm, stand_in="")
        assert blender.frame.head == own.contexts.first
        torch.testing.assert_close(found.table, blender.measure_drift().table, atol=2e-3, rtol=1e-3)

        sample = json.loads((INPUTS / "2.json").read_text())
        texts = [sample[str(i)] for i in range(sample["chunk_num"])]
        prompt = blender.prompt(blender.chunks(texts), sample["query"])
        spans = [[span.start, span.end] for span in prompt.spans[1:]]
        outputs(engine, [prompt.token_ids], [{"spans": spans}])
        drain(engine)

        def logprobs(field: object) -> dict[int, float]:
            (output,) = outputs(engine, [prompt.token_ids], [field], max_tokens=1, logprobs=20)
            assert not isinstance(field, dict) or report(output)["missed_chunks"] == 0
            return {token: one.logprob for token, one in output.outputs[0].logprobs[0].items()}

        def plan(drift: bool) -> BlendPlan:
            return BlendPlan(prompt.spans[1:], replace(PAPER, drift=drift))

        def distance(one: dict[int, float], other: dict[int, float]) -> float:
            return max(abs(one[token] - other[token]) for token in one.keys() & other.keys())

        corrected, as_it_is = (logprobs({"spans": spans, "drift": on} | REPORT) for on in (True, False))
        assert corrected == logprobs({"spans": spans} | REPORT)  # the default
        assert distance(corrected, logprobs(plan(True))) < 1e-3
        assert distance(as_it_is, logprobs(plan(False))) < 1e-3
        assert distance(as_it_is, corrected) > 0.05
        assert engine.model.blending.chunks.tiers.store.flush()

    with make_engine(smollm2, additional_config=config) as engine:  # the first request waits for all
        (output,) = outputs(engine, [prompt.token_ids], [{"spans": spans} | REPORT], max_tokens=1)
        told = report(output)
        assert (told["loaded_chunks"], told["missed_chunks"]) == (len(spans), 0)
        assert engine.model.blending.chunks.drift is not None


def test_what_was_not_measured_is_refused(tiny: Any) -> None:
    with make_engine(tiny("llama"), additional_config={"vllm_blend": {}}) as engine:
        assert scheduler(engine).blend_own.drift.done
        with pytest.raises(VLLMValidationError, match="the server did not measure it"):
            outputs(engine, [[5] * 40], [{"spans": [[0, 20]], "drift": True}])
    with (
        pytest.raises(ValueError, match="drift of vllm_blend needs a tokenizer"),
        make_engine(tiny("llama"), additional_config={"vllm_blend": {"drift": True}}),
    ):
        pass
