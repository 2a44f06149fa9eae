"""Steps on rows from CUDA graphs give what they give without; on a CPU, by stand-ins for graphs,
streams and xformers' kernel. The real ones: ``test_gpu.py``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from engines import Engine, collect, make_engine, plan_for, relative_error, run
from graph_stand_in import Graph, stood_in
from paged_step import replace_kernel
from streams import Device

from vllm_blend.core import tensor_parallel
from vllm_blend.core.plans import CollectPlan
from vllm_blend.model import graphs
from vllm_blend.model.graphs import RowGraphs

SIZES = (16, 64, 128)


@pytest.fixture(scope="module", params=["llama", "mistral_window"])
def engine(request: pytest.FixtureRequest, tiny: Any) -> Iterator[Engine]:
    """An engine on XFORMERS, its graphs captured."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.selector import _cached_get_attn_backend

    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        replace_kernel(patch)
        stack.enter_context(stood_in())
        name = "vllm_blend.attention.xformers.XFormersBackend"
        patch.setattr(CpuPlatform, "get_attn_backend_cls", lambda *args, **kwargs: name)
        patch.setattr(graphs, "ROW_SIZES", SIZES)
        _cached_get_attn_backend.cache_clear()
        with make_engine(tiny(request.param), max_num_seqs=16) as engine:
            blending = engine.model.blending
            for attn in blending.attns:
                attn.use_direct_call = True  # the stand-in cannot end a graph within an op
            blending.graphs = RowGraphs(blending)
            blending.graphs.wanted = True
            with on_gpu():
                blend(engine, policy="random", recomp_ratio=0.1)
            assert blending.graphs.sizes == list(SIZES)
            yield engine
    _cached_get_attn_backend.cache_clear()


@contextmanager
def without_graphs(engine: Engine) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.model.blending, "graphs", None)
        yield


def to_be_captured(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> RowGraphs:
    """Graphs in place of the engine's, to be captured in its next step."""
    blending = engine.model.blending
    others = RowGraphs(blending)
    others.wanted = True
    monkeypatch.setattr(blending, "graphs", others)
    return others


@contextmanager
def on_gpu(copies: str = "early") -> Iterator[None]:
    """Stored KV comes through the ring meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        Device(patch, copies)
        yield


CHUNKS = (33, 90, 7, 51)


def blend(engine: Engine, **settings: Any) -> tuple[list[int], torch.Tensor]:
    chunks = [engine.ids(count, seed) for seed, count in enumerate(CHUNKS)]
    prompt, plan = plan_for(engine, chunks, engine.ids(2, 9), engine.ids(12, 50), **settings)
    with engine.watched() as logits:
        (tokens,) = run(engine, [prompt], [plan], max_tokens=6)
    return tokens, torch.cat(logits)


@pytest.mark.parametrize("copies", ["early", "late"])
@pytest.mark.parametrize("policy", ["static", "ahead*static", "random"])
@pytest.mark.parametrize("ratio", [0.0, 0.16, 0.5])
def test_replayed_rows_are_what_they_are_without_graphs(
    engine: Engine, policy: str, ratio: float, copies: str
) -> None:
    with without_graphs(engine):
        expected, logits = blend(engine, policy=policy, recomp_ratio=ratio)
    before = Graph.replayed
    with on_gpu(copies):
        tokens, found = blend(engine, policy=policy, recomp_ratio=ratio)
    assert Graph.replayed > before
    assert relative_error(found, logits) < 1e-5
    assert tokens == expected


def test_steps_that_are_too_large_run_without(engine: Engine) -> None:
    before = Graph.replayed
    with on_gpu():
        blend(engine, policy="static", recomp_ratio=0.9)  # over 128 rows
    assert Graph.replayed == before


def test_the_papers_mask_runs_without(engine: Engine) -> None:
    before = Graph.replayed
    with on_gpu():
        blend(engine, policy="static", recomp_ratio=0.1, mask="bottom_right")
    assert Graph.replayed == before


def test_a_batch_of_all_kinds(engine: Engine) -> None:
    """Asked, not asked, plain and collected requests share steps, and answer as alone."""
    chunks = [engine.ids(count, seed) for seed, count in enumerate(CHUNKS)]
    one, asked = plan_for(engine, chunks, [], engine.ids(9, 51), policy="ahead*static")
    two, early = plan_for(engine, chunks[::-1], engine.ids(3, 5), engine.ids(5, 52), policy="static")
    plain = engine.ids(11, 53)
    kept = engine.ids(17, 54)
    (expected,) = collect(engine, [kept])
    plan = CollectPlan()
    plans: list[Any] = [asked, None, early, plan]
    prompts = [one, plain, two, kept]
    with without_graphs(engine):
        alone = [run(engine, [p], [each])[0] for p, each in zip(prompts[:3], plans[:3], strict=True)]
    before = Graph.replayed
    with on_gpu():
        together = run(engine, prompts, plans)
    assert Graph.replayed > before
    assert together[:3] == alone
    for (k, v), (k_alone, v_alone) in zip(plan.kv, expected.layers, strict=True):
        assert relative_error(k, k_alone) < 1e-5 and relative_error(v, v_alone) < 1e-5


def test_too_many_pieces_run_without(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_SEGMENTS", 3)
    before = Graph.replayed
    with on_gpu():
        blend(engine, policy="static", recomp_ratio=0.1)
    assert Graph.replayed == before


def test_a_capture_that_fails_leaves_the_engine_as_it_was(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with on_gpu():
        expected, _ = blend(engine, policy="static", recomp_ratio=0.1)
    others = to_be_captured(engine, monkeypatch)

    def fail(self: Graph, **_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Graph, "capture_begin", fail)
    with on_gpu():
        tokens, _ = blend(engine, policy="static", recomp_ratio=0.1)
    assert tokens == expected and others.sizes == []
    assert not others.wanted


def test_a_capture_that_fails_is_that_sizes_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps of its rows run from the graphs of the next size."""
    with on_gpu():
        expected, _ = blend(engine, policy="static", recomp_ratio=0.1)
    others = to_be_captured(engine, monkeypatch)
    begin, begun = Graph.capture_begin, 0

    def fail(self: Graph, **options: Any) -> None:
        nonlocal begun
        begun += 1
        if begun == len(engine.model.blending.attns) + 3:  # in the second size
            raise RuntimeError("out of memory")
        begin(self, **options)

    monkeypatch.setattr(Graph, "capture_begin", fail)
    with on_gpu():
        assert blend(engine, policy="static", recomp_ratio=0.1)[0] == expected
        assert others.sizes == [16, 128]
        before = Graph.replayed
        assert blend(engine, policy="static", recomp_ratio=0.1)[0] == expected
    assert Graph.replayed > before
    said = [record.getMessage() for record in caplog.records if "no CUDA graphs" in record.getMessage()]
    assert len(said) == 1 and "64 rows" in said[0] and "out of memory" in said[0]


@pytest.mark.parametrize("here", [True, False])
def test_a_capture_that_fails_on_one_of_two_ranks_is_missed_on_both(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, here: bool
) -> None:
    """Whichever it is, they meet as often: none waits for the other. The second one is a stand-in."""
    with on_gpu():
        expected, _ = blend(engine, policy="static", recomp_ratio=0.1)
    others = to_be_captured(engine, monkeypatch)
    begin, capture, begun = Graph.capture_begin, others.capture, 0
    meetings: list[bool] = []  # whether this rank had failed

    def begin_or_fail(self: Graph, **options: Any) -> None:
        nonlocal begun
        begun += 1
        if here and begun == len(engine.model.blending.attns) + 3:  # in the second size
            raise RuntimeError("out of memory")
        begin(self, **options)

    def all_reduce_min(values: list[int]) -> list[int]:
        meetings.append(values[0] != 0)
        # after the memory and the two forwards of the first size, and one of the second
        fails = not here and len(meetings) == 5
        return [-7 if fails else values[0], *values[1:]]

    def captured(*args: Any) -> None:
        meetings.clear()
        with monkeypatch.context() as patch:
            patch.setattr(tensor_parallel, "num_ranks", lambda: 2)
            patch.setattr(tensor_parallel, "all_reduce_min", all_reduce_min)
            capture(*args)

    monkeypatch.setattr(Graph, "capture_begin", begin_or_fail)
    monkeypatch.setattr(others, "capture", captured)
    with on_gpu():
        assert blend(engine, policy="static", recomp_ratio=0.1)[0] == expected
        assert others.sizes == [16, 128]
        assert meetings == [False, False, False, False, here, False, False]
        before = Graph.replayed
        assert blend(engine, policy="static", recomp_ratio=0.1)[0] == expected
    assert Graph.replayed > before


def test_no_request_makes_an_engine_capture(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever layers it names, and however many rows it has."""

    def fail(self: Graph, **_: Any) -> None:
        raise AssertionError("a capture")

    monkeypatch.setattr(Graph, "capture_begin", fail)
    sizes = engine.model.blending.graphs.sizes
    with on_gpu():
        for check_layers in ((1,), (2,), (3,), (1, 3)):
            for policy in ("static", "hkvd", "ahead*static"):
                blend(engine, policy=policy, check_layers=check_layers, recomp_ratio=0.1)
        blend(engine, policy="static", recomp_ratio=0.9)
    assert engine.model.blending.graphs.sizes == sizes


def test_engines_that_use_none_capture_none(engine: Engine) -> None:
    assert RowGraphs.of(engine.model.blending) is None  # eager, and on a CPU
