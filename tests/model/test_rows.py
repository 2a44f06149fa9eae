"""The model's own forward on some rows: what it is called with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import (
    BatchDescriptor,
    ForwardContext,
    get_forward_context,
    override_forward_context,
)

from vllm_blend.core.plans import CollectPlan
from vllm_blend.core.step import BlendStep, StepRequest
from vllm_blend.model import rows
from vllm_blend.model.blending import Blending

NUM_ROWS, NUM_TOKENS, HIDDEN = 11, 16, 3


def test_what_is_placed_is_taken_back() -> None:
    target = torch.arange(6)
    with rows.placed(target, torch.tensor([9, 8])):
        assert target.tolist() == [9, 8, 2, 3, 4, 5]
    with pytest.raises(KeyError), rows.placed(target, torch.tensor([7])):
        raise KeyError
    assert target.tolist() == list(range(6))
    with rows.placed(None, torch.tensor([1])), rows.placed(target, None):
        assert target.tolist() == list(range(6))


class Runner:
    """vLLM's: it keeps inputs where they are, and says what a step is like."""

    def __init__(self, embeds: bool, padded: bool = True) -> None:
        self.positions = torch.arange(100, 100 + NUM_TOKENS)
        self.input_ids = None if embeds else torch.arange(NUM_TOKENS)
        self.embeds = torch.rand(NUM_TOKENS, HIDDEN) if embeds else None
        self.is_padding = torch.arange(NUM_TOKENS) >= NUM_ROWS if padded else None
        self.context = ForwardContext(
            no_compile_layers={},
            attn_metadata={},
            slot_mapping={},
            cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE,
            batch_descriptor=BatchDescriptor(NUM_TOKENS),
            is_padding=self.is_padding,
        )
        self.calls: list[dict[str, Any]] = []

    @property
    def kept(self) -> list[torch.Tensor]:
        """Where graphs read."""
        tensors = [self.positions, self.input_ids, self.embeds, self.is_padding]
        return [tensor for tensor in tensors if tensor is not None]

    def model(self, **arguments: Any) -> torch.Tensor:
        """The model's forward: tells what it is called with, and where that lies."""
        context = get_forward_context()
        of_rows = ("input_ids", "positions", "inputs_embeds")
        given = {name: arguments.pop(name) for name in of_rows}
        self.calls.append(
            dict(
                more=arguments,
                given={n: None if t is None else t.clone() for n, t in given.items()},
                at=[t.data_ptr() for t in given.values() if t is not None],
                mode=context.cudagraph_runtime_mode,
                graph=context.batch_descriptor,
                is_padding=None if context.is_padding is None else context.is_padding.clone(),
                context=context,
            )
        )
        return given["positions"].float()[:, None].expand(-1, HIDDEN).clone()

    def inputs(self) -> rows.Inputs:
        return rows.Inputs(
            self.model, self.input_ids, self.positions, None, self.embeds, {"extra": "kept"}
        )

    def frame(self, chosen: Sequence[int]) -> Any:
        def context(attns: Any, **changes: Any) -> ForwardContext:
            return ForwardContext({}, {"of": "rows"}, {}, **({"is_padding": self.is_padding} | changes))  # type: ignore[dict-item]

        index = torch.tensor(chosen)
        return SimpleNamespace(
            rows=index, num_rows=len(chosen), positions=self.positions[index], context=context
        )


@pytest.fixture(params=[False, True], ids=["ids", "embeds"])
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    runner = Runner(embeds=request.param)
    with override_forward_context(runner.context):
        yield runner


CHOSEN = [1, 4, 5, 9, 10]


def test_the_rows_alone(runner: Runner) -> None:
    before = [tensor.clone() for tensor in runner.kept]
    hidden = runner.inputs().run_on(runner.frame(CHOSEN), [])
    (call,) = runner.calls
    assert call["given"]["positions"].tolist() == [100 + row for row in CHOSEN]
    for name, kept in (("input_ids", runner.input_ids), ("inputs_embeds", runner.embeds)):
        assert (call["given"][name] is None) == (kept is None)
        assert kept is None or torch.equal(call["given"][name], kept[CHOSEN])
    assert call["more"] == dict(intermediate_tensors=None, extra="kept")
    assert call["mode"] is CUDAGraphMode.NONE
    assert call["graph"] is None and call["is_padding"] is None
    assert call["context"].attn_metadata == {"of": "rows"}
    assert get_forward_context() is runner.context
    assert hidden[:, 0].tolist() == [100 + row for row in CHOSEN]
    assert all(map(torch.equal, runner.kept, before))


def test_after_an_error_the_runner_finds_its_inputs(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [tensor.clone() for tensor in runner.kept]
    monkeypatch.setattr(runner, "model", lambda **arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runner.inputs().run_on(runner.frame(CHOSEN), [])
    assert all(map(torch.equal, runner.kept, before))
    assert get_forward_context() is runner.context


def test_hidden_states_go_back_to_their_places(runner: Runner) -> None:
    frame = runner.frame(CHOSEN)
    output = rows.scattered(frame, runner.inputs().run_on(frame, []), NUM_TOKENS)
    assert output.shape == (NUM_TOKENS, HIDDEN)
    expected = [100.0 + row if row in CHOSEN else 0.0 for row in range(NUM_TOKENS)]
    assert output[:, 0].tolist() == expected


def test_a_probes_shift_reaches_a_graph() -> None:
    """vLLM replays its graphs for a step that only collects: they read positions where they were
    captured, whatever tensor the model is called with."""
    kept = torch.arange(NUM_TOKENS)
    before, seen = kept.clone(), []

    def replay(**arguments: Any) -> torch.Tensor:
        seen.append(kept.clone())
        return torch.zeros(NUM_TOKENS, HIDDEN)

    blending = Blending()
    blending.chunks = SimpleNamespace(keep=lambda step: None)
    plan = CollectPlan(num_prompt_tokens=NUM_TOKENS)
    request = StepRequest(plan, 0, 0, NUM_TOKENS, torch.device("cpu"))
    blending.step = BlendStep([request], [0, NUM_TOKENS], "auto")
    blending.shift = 5
    with override_forward_context(ForwardContext({}, {}, {})):
        blending.forward(replay, torch.zeros(NUM_TOKENS, dtype=torch.int32), kept)
    assert torch.equal(seen[0], before + 5)
    assert torch.equal(kept, before)
