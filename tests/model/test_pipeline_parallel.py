"""Two pipeline stages: as one rank, kept in parts of their own, and never apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from asking import REPORT, answer, drain, outputs, prompt_of, report, scheduler, with_known_chunks
from engines import Engine, SeveralRanks, make_llm, tiny_model

from vllm_blend.model.guard import MAX_FAILURES

pytestmark = pytest.mark.slow

# chunks of a prompt's own prefill would be its own full prefill
SETTINGS = {"ram_gb": 0.05, "stand_in": "", "policy": "static", "harvest": False}
COMPILED: dict[str, Any] = dict(enforce_eager=False, compilation_config={"mode": 3, "backend": "eager"})
FIELDS: dict[str, dict[str, Any]] = {
    "static": {"policy": "static", "recomp_ratio": 0.1},
    "random": {"policy": "random", "recomp_ratio": 0.2},
    "heads": {"policy": "heads", "recomp_ratio": 0.1},
    "nothing": {"recomp_ratio": 0.0},
    "everything": {"recomp_ratio": 1.0},
}


@contextmanager
def several_ranks(folder: Path, **options: Any) -> Iterator[SeveralRanks]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # a rank wants a NUMA node of its own
        with make_llm(
            folder,
            worker_extension_cls="failing_worker.Faults",
            enable_prefix_caching=True,
            **(COMPILED | {"additional_config": {"vllm_blend": SETTINGS}} | options),
        ) as llm:
            engine = SeveralRanks(llm, folder)
            drain(engine)
            yield engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five layers: three in the first stage, two in the second."""
    return tiny_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def stages(model: Path) -> Iterator[SeveralRanks]:
    with several_ranks(model, pipeline_parallel_size=2) as engine:
        yield engine


@pytest.fixture(autouse=True)
def mended(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "stages" in request.fixturenames:
        engine = request.getfixturevalue("stages")
        engine.tell("mend")
        engine.tell("forgive")


def told(engine: Any) -> dict[str, Any]:
    """What an engine answers, and reports, with logprobs; chunks are known, one prompt is plain."""
    prompt, spans = prompt_of(engine, [1, 2, 3])
    other, _ = prompt_of(engine, [4])
    found: dict[str, Any] = {}

    def note(name: str, output: Any) -> None:
        (completion,) = output.outputs
        places = [{t: one.logprob for t, one in place.items()} for place in completion.logprobs]
        found[name] = list(completion.token_ids), places

    note("full", *outputs(engine, [prompt], [None], logprobs=5))
    outputs(engine, [prompt], [{"spans": spans}])
    drain(engine)
    for name, field in FIELDS.items():
        scheduler(engine).reset_prefix_cache()
        both = outputs(engine, [prompt, other], [field | {"spans": spans} | REPORT, None], logprobs=5)
        for label, output in zip((name, f"beside {name}"), both, strict=True):
            note(label, output)
        counts = report(both[0])
        keys = ("reused_tokens", "recomputed_tokens", "recomputed_spans")
        found[f"report of {name}"] = [counts[key] for key in keys]
    return found


@pytest.fixture(scope="module")
def one_rank(model: Path) -> dict[str, Any]:
    settings = {"vllm_blend": SETTINGS}
    with make_llm(model, enable_prefix_caching=True, additional_config=settings) as llm:
        engine = Engine(llm, model)
        drain(engine)
        return told(engine)


def compare(one: dict[str, Any], several: dict[str, Any]) -> None:
    for name, expected in one.items():
        if name.startswith("report"):
            assert several[name] == expected, name
            continue
        assert several[name][0] == expected[0], name
        for place, there in zip(several[name][1], expected[1], strict=True):
            for token, logprob in there.items():
                assert place[token] == pytest.approx(logprob, abs=1e-3), (name, token)


@pytest.mark.covers("pipeline parallelism", backend="CPU_ATTN", family="llama")
def test_two_stages_answer_as_one_rank(one_rank: dict[str, Any], stages: SeveralRanks) -> None:
    compare(one_rank, told(stages))


@pytest.mark.covers("pipeline and tensor parallelism together", backend="CPU_ATTN", family="llama")
def test_two_stages_of_two_ranks_answer_as_one(one_rank: dict[str, Any], model: Path) -> None:
    with several_ranks(model, pipeline_parallel_size=2, tensor_parallel_size=2) as engine:
        compare(one_rank, told(engine))


@pytest.mark.covers("pipeline parallelism", backend="XFORMERS", family="llama")
@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_as_stages_answer_as_one(model: Path) -> None:
    options: dict[str, Any] = dict(
        attention_backend="XFORMERS",
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 30,
        gpu_memory_utilization=0.1,
        additional_config={"vllm_blend": SETTINGS},
    )
    with make_llm(model, enable_prefix_caching=True, **options) as llm:
        engine = Engine(llm, model)
        drain(engine)
        one = told(engine)
    with several_ranks(model, pipeline_parallel_size=2, **options) as stages:
        compare(one, told(stages))


FAILURES = {
    "resolve": ("server.worker.chunk_cache:ChunkCache.resolve", 1),
    "plan": ("plugin.step_requests:plan_step", 1),
    "choose": ("model.select.early:choose", 1),
    "describe": ("model.active_rows:ActiveRows.describe", 1),
    "load": ("model.kv_loader:StoredLayers.old_kv", 2),
    "fuse": ("attention.cpu:CPUBlendImpl.fuse", 1),
    "scatter": ("model.rows:scattered", 1),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_stage_that_fails_makes_the_step_a_full_prefill(
    stages: SeveralRanks, failure: str, rank: int
) -> None:
    """Beside it in the same step: a plain request. After it: one that blends again."""
    place, nth = FAILURES[failure]
    (prompt, other), field, (full, plain) = with_known_chunks(stages, "static")
    stages.tell("fail_at", rank, f"vllm_blend.{place}", nth)
    found, beside = outputs(stages, [prompt, other], [field, None])
    assert sum(stages.tell("mend")) >= nth
    assert answer(found) == full and answer(beside) == plain
    assert report(found)["reused_tokens"] == 0 and "blending failed" in report(found)["why_not"]
    scheduler(stages).reset_prefix_cache()
    (after,) = outputs(stages, [prompt], [field])
    assert report(after)["reused_tokens"] == 300 and not report(after)["why_not"]


@pytest.mark.parametrize("rank", [0, 1])
def test_stages_that_choose_differently_make_the_step_a_full_prefill(
    stages: SeveralRanks, rank: int
) -> None:
    (prompt, _), field, (full, _) = with_known_chunks(stages, "static")
    stages.tell("choose_others", rank)
    (found,) = outputs(stages, [prompt], [field])
    assert sum(stages.tell("mend"))
    assert answer(found) == full and report(found)["reused_tokens"] == 0


def test_after_several_failures_of_one_stage_none_blends(stages: SeveralRanks) -> None:
    (prompt, _), field, (full, _) = with_known_chunks(stages, "static")
    for _ in range(MAX_FAILURES):
        assert stages.tell("is_open") == [True, True]
        stages.tell("fail_at", 1, "vllm_blend.model.rows:scattered", 1)
        scheduler(stages).reset_prefix_cache()
        (found,) = outputs(stages, [prompt], [field])
        assert answer(found) == full and report(found)["reused_tokens"] == 0
        stages.tell("mend")
    assert stages.tell("is_open") == [False, False]
    scheduler(stages).reset_prefix_cache()
    (found,) = outputs(stages, [prompt], [field])
    assert answer(found) == full and "it failed too often" in report(found)["why_not"]


def test_each_stage_keeps_its_layers_under_keys_of_its_own(model: Path, tmp_path: Path) -> None:
    """Three layers and two."""
    store = {"host_gb": 0.05, "disk": {"folder": str(tmp_path / "chunks"), "budget_gb": 1}}
    settings = {"vllm_blend": {k: v for k, v in SETTINGS.items() if k != "ram_gb"} | {"store": store}}
    settings["vllm_blend"]["harvest"] = True
    reused = []
    for number in range(2):
        with several_ranks(model, pipeline_parallel_size=2, additional_config=settings) as engine:
            prompt, spans = prompt_of(engine, [1, 2, 3])
            field = {"spans": spans, "policy": "static", "recomp_ratio": 0.1} | REPORT
            outputs(engine, [prompt], [field])
            drain(engine)
            scheduler(engine).reset_prefix_cache()
            (found,) = outputs(engine, [prompt], [field])
            reused.append((report(found)["reused_tokens"], answer(found)))
            if number == 0:
                engine.tell("flush")
        records = list((tmp_path / "chunks").rglob("*.safetensors"))
        assert len(records) == 2 * 3  # a part of each chunk of each stage
    assert reused[0] == reused[1] and reused[0][0] == 300
