"""The probes at an engine's start: what they find, what they refuse, and what is kept of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import make_engine, shut_down

from vllm_blend import blend_model
from vllm_blend.attention.cpu import CPUBlendImpl
from vllm_blend.core.plans import BlendPlan, CollectPlan
from vllm_blend.model import probe
from vllm_blend.model.probe import MOVED, QUESTION, Probing, token_error
from vllm_blend.model.select import early
from vllm_blend.model.verdicts import Verdict, write_verdict
from vllm_blend.ops.widen import widen
from vllm_blend.server.worker.chunk_cache import ChunkCache

OPTIONS: dict[str, Any] = dict(
    dtype="float32", enforce_eager=True, max_model_len=512, skip_tokenizer_init=True
)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the test's verdict is kept."""
    path = tmp_path / "folder" / "verdict.json"
    monkeypatch.setattr(probe, "verdict_path", lambda blending: path)
    return path


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Verdict]:
    """What the test's probes found."""
    found: list[Verdict] = []
    stock = Probing.run

    def run(self: Probing) -> Verdict:
        found.append(stock(self))
        return found[-1]

    monkeypatch.setattr(Probing, "run", run)
    return found


def test_what_was_found_is_kept(tiny: Any, kept: Path, runs: list[Verdict]) -> None:
    with make_engine(tiny("llama")) as engine:
        first = [attn.impl.blend.rotation for attn in engine.model.blending.attns]
        assert engine.model.blending.watch is None and engine.model.blending.shift == 0
    (verdict,) = runs
    assert verdict.refused == ""
    assert verdict.rotations == (0,) * 5
    assert verdict.shift_error < 1e-3 and verdict.identity_error < 1e-3
    assert verdict.control_error > 0.05  # the identity says something
    assert str(verdict).startswith("5 layers with RoPE, 0 without")
    assert json.loads(kept.read_text())["rotations"] == [0] * 5
    assert [path.name for path in kept.parent.iterdir()] == ["verdict.json"]
    with make_engine(tiny("llama")) as engine:
        again = [attn.impl.blend.rotation for attn in engine.model.blending.attns]
    assert len(runs) == 1
    for one, other in zip(first, again, strict=True):
        assert one.is_neox_style and not one.is_none
        assert torch.equal(one.table, other.table)


def test_layers_share_a_rotation_that_the_model_shares(tiny: Any, kept: Path) -> None:
    with make_engine(tiny("llama")) as engine:
        assert len({id(attn.impl.blend.rotation) for attn in engine.model.blending.attns}) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"refused": ""}', '{"rotations": [], "colour": 3}'])
def test_a_damaged_verdict_is_found_again(
    tiny: Any, kept: Path, runs: list[Verdict], text: str
) -> None:
    kept.parent.mkdir()
    kept.write_text(text)
    assert probe._known(kept) is None
    if text != "{":
        return  # one start of an engine is enough
    with make_engine(tiny("llama")):
        pass
    assert len(runs) == 1 and probe._known(kept) == runs[0]


def test_a_folder_that_cannot_be_written_to_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    (tmp_path / "file").write_text("")
    write_verdict(tmp_path / "file" / "verdict.json", Verdict())
    assert "could not be kept" in caplog.text
    write_verdict(tmp_path / "new" / "verdict.json", Verdict("no", (0, -1), 0.5))
    assert probe._known(tmp_path / "new" / "verdict.json") == Verdict("no", (0, -1), 0.5)


# --- refusals ------------------------------------------------------------------------------------


@contextmanager
def refusing(folder: Path, **options: Any) -> Iterator[Any]:
    """An engine whose model the probes refuse."""
    from vllm import LLM

    llm = LLM(str(folder), **(OPTIONS | options))
    try:
        yield llm
    finally:
        shut_down(llm)


def no_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "rotations_in", lambda *args: iter(()))


def wrong_fuse(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = CPUBlendImpl.fuse

    def fuse(self: Any, layer: Any, kv_cache: Any, fusion: Any) -> Any:
        return stock(self, layer, kv_cache, replace(fusion, positions=fusion.positions + 1))

    monkeypatch.setattr(CPUBlendImpl, "fuse", fuse)


def absolute_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = Probing._collect

    def collect(self: Probing, shift: int) -> Any:
        kv, hidden = stock(self, shift)
        return kv, hidden * (1 + shift)

    monkeypatch.setattr(Probing, "_collect", collect)


def not_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = Probing._collect

    def collect(self: Probing, shift: int) -> Any:
        kv, hidden = stock(self, shift)
        return kv, hidden * float("nan")

    monkeypatch.setattr(Probing, "_collect", collect)


REASONS = {
    no_rotation: "layer 0's K moves with its position otherwise than any rotary module of the model",
    wrong_fuse: "with exact KV and random rows its last hidden state is off by",
    absolute_positions: "its answer depends on where a prompt's positions begin",
    not_a_number: "its answer depends on where a prompt's positions begin",
}


@pytest.mark.parametrize("spoil", REASONS, ids=lambda spoil: spoil.__name__)
def test_a_model_that_fails_a_probe_serves_and_says_why(
    tiny: Any, kept: Path, runs: list[Verdict], monkeypatch: pytest.MonkeyPatch, spoil: Any
) -> None:
    from vllm import SamplingParams

    with monkeypatch.context() as patch:
        spoil(patch)
        with refusing(tiny("llama")) as llm:
            with pytest.raises(RuntimeError) as error:
                blend_model(llm)
            params = SamplingParams(max_tokens=3, detokenize=False, ignore_eos=True)
            (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
            assert len(output.outputs[0].token_ids) == 3
    assert str(error.value).startswith("blending does not support LlamaModel: ")
    assert REASONS[spoil] in str(error.value)
    # it is known from now on
    assert probe._known(kept) == runs[0]
    assert runs[0].refused in str(error.value)


def test_a_single_token_that_rounding_moves_refuses_nobody(
    tiny: Any, kept: Path, runs: list[Verdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As some do in 16 bits: the prompt's last one at that."""
    stock = Probing._collect

    def collect(self: Probing, shift: int) -> Any:
        kv, hidden = stock(self, shift)
        assert hidden.shape == (QUESTION, self._config.model_config.get_hidden_size())
        last = hidden[-1:] * (1 + shift)
        return kv, torch.cat([hidden[:-1], last])

    monkeypatch.setattr(Probing, "_collect", collect)
    with make_engine(tiny("llama")):
        assert not runs[0].refused


def test_exact_kv_must_give_the_last_token_of_all(
    tiny: Any, kept: Path, runs: list[Verdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its logits are the answer's first: no other token's state makes up for it."""
    stock = Probing._run

    def run(self: Probing, plan: Any) -> torch.Tensor:
        hidden = stock(self, plan)
        moved = hidden[-1:] * (1 + isinstance(plan, BlendPlan))
        return torch.cat([hidden[:-1], moved])

    monkeypatch.setattr(Probing, "_run", run)
    with refusing(tiny("llama")) as llm, pytest.raises(RuntimeError, match="with exact KV"):
        blend_model(llm)


def test_an_identity_that_says_nothing_is_no_proof(
    tiny: Any, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where wrong KV gives full prefill's answer too, stored KV was not used."""
    monkeypatch.setattr(early, "choose", lambda request, *_: torch.arange(request.num_chunk_rows))
    with refusing(tiny("llama")) as llm, pytest.raises(RuntimeError, match="wrong KV"):
        blend_model(llm)


def test_a_refusal_stops_the_start_of_an_engine_that_is_to_blend(
    tiny: Any, kept: Path, runs: list[Verdict]
) -> None:
    write_verdict(kept, Verdict("it is too small"))
    message = "additional_config asks for vllm_blend, but blending does not .*: it is too small"
    with (
        pytest.raises(ValueError, match=message),
        refusing(tiny("llama"), additional_config={"vllm_blend": {}}),
    ):
        pass
    assert not runs


# --- errors --------------------------------------------------------------------------------------


def test_what_is_warmed_up_is_what_requests_do(
    tiny: Any, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question is asked, of KV that a prefill has left: with the same hidden state. A chunk is kept,
    and dropped again; and one is widened."""
    asked: list[bool] = []
    kept_tokens: list[int] = []
    keep = ChunkCache.keep

    def note(chunks: ChunkCache, plan: CollectPlan, scores: torch.Tensor | None = None) -> None:
        keep(chunks, plan, scores)
        kept_tokens.extend(kv.num_tokens for kv in chunks._chunks.values())

    choose = early.choose
    widened: list[tuple[torch.Size, torch.dtype]] = []

    def note_widened(values: torch.Tensor, scales: torch.Tensor, target: torch.Tensor) -> None:
        widen(values, scales, target)
        widened.append((target.shape, target.dtype))

    def look(request: Any, received: torch.Tensor | None, *more: bool) -> torch.Tensor:
        asked.append(received is not None)
        return choose(request, received, *more)

    with make_engine(tiny("llama")) as engine:
        worker = engine.llm.llm_engine.model_executor.driver_worker
        probing, hidden = Probing(worker, engine.model.blending), list[torch.Tensor]()
        run = probing._run
        monkeypatch.setattr(probing, "_run", lambda plan: hidden.append(run(plan)) or hidden[-1])
        monkeypatch.setattr(early, "choose", look)
        monkeypatch.setattr(ChunkCache, "keep", note)
        monkeypatch.setattr("vllm_blend.ops.widen.widen", note_widened)
        probing.warm_up()
        shape = engine.model.blending.kv_shape
        assert widened == [(torch.Size(shape.of(probing._num_tokens)), shape.dtype)]
        assert kept_tokens == [probing._num_tokens]
        assert len(engine.model.blending.chunks) == 0
        assert engine.model.blending.chunks.collect_events() is None
    full, blended, again = hidden
    assert torch.equal(again, full)
    assert asked == [True]
    assert token_error(blended[-1:], full[-1:]) < MOVED[torch.float32] / 10


def test_errors_are_relative() -> None:
    expected = torch.randn(200, 2, 8)
    for dtype, allowed in MOVED.items():
        rounded = expected.to(dtype)
        assert token_error(rounded.float(), expected) < allowed / 5
    assert token_error(expected.roll(1, 0), expected) > 0.5
    outliers = expected.clone()
    outliers[:60] *= 100  # of a few tokens other experts were asked
    assert token_error(outliers, expected) == 0
    assert token_error(expected * 0, expected * 0) == 0
    spoiled = expected.clone()
    spoiled[3] = float("nan")
    assert token_error(spoiled, expected) == float("inf")
