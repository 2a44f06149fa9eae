"""Where one of two tensor-parallel ranks fails to blend, both compute the step in full and serve on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from asking import REPORT, answer, drain, outputs, prompt_of, report, scheduler, with_known_chunks
from engines import SeveralRanks, make_llm, tiny_model
from serving import (
    chat,
    connect,
    disk,
    reported,
    reset_prefix_cache,
    sample,
    serving,
    text_of,
    warm,
    xargs,
)

from vllm_blend.core.step import MAX_FAILURES

pytestmark = pytest.mark.slow

STAGES = {
    "resolve": ("server.worker.chunk_cache:ChunkCache.resolve", "static", 1),
    "plan": ("plugin.step_requests:plan_step", "static", 1),
    "frame": ("model.blending:Blending._frame_of", "static", 1),
    "ask": ("model.lookahead:Questions.received", "ahead", 1),
    "hear": ("model.lookahead:Questions.hear", "ahead", 1),
    "load asked": ("model.kv_loader:StoredLayers.old_kv", "ahead*static", 2),
    "choose": ("model.select.early:choose", "static", 1),
    "look": ("model.select.early:points_nowhere", "ahead", 1),
    "choose asked": ("model.select.early:choose", "ahead", 1),
    "shrink": ("model.active_rows:ActiveRows.shrink", "static", 1),
    "describe": ("model.active_rows:ActiveRows.describe", "static", 1),
    "load": ("model.kv_loader:StoredLayers.old_kv", "static", 2),
    "fuse": ("attention.cpu:CPUBlendImpl.fuse", "static", 1),
    "fuse late": ("attention.cpu:CPUBlendImpl.fuse", "static", 4),
    "scatter": ("model.rows:scattered", "static", 1),
    "loop: load": ("model.kv_loader:StoredLayers.old_kv", "hkvd", 1),
    "loop: fresh": ("model.select.check_layer:CheckLayerCandidates.fresh_v", "hkvd*query", 1),
    "loop: candidates": ("model.active_rows:ActiveRows.candidates", "hkvd", 1),
    "loop: choose": ("model.loop:choose_rows", "hkvd", 1),
    "loop: shrink": ("model.active_rows:ActiveRows.shrink", "hkvd", 1),
    "loop: fuse": ("attention.cpu:CPUBlendImpl.fuse", "hkvd", 2),
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeveralRanks]:
    folder = tiny_model("llama", tmp_path_factory.mktemp("model"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # a rank wants a NUMA node of its own
        options: dict[str, Any] = dict(
            tensor_parallel_size=2,
            worker_extension_cls="failing_worker.Faults",
            additional_config={"vllm_blend": {"ram_gb": 0.05, "stand_in": ""}},
            enable_prefix_caching=True,
        )
        with make_llm(folder, **options) as llm:
            engine = SeveralRanks(llm, folder)
            drain(engine)
            yield engine


@pytest.fixture(autouse=True)
def mended(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "engine" in request.fixturenames:
        engine = request.getfixturevalue("engine")
        engine.tell("mend")
        engine.tell("forgive")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_that_fails_makes_the_step_a_full_prefill(
    engine: SeveralRanks, stage: str, rank: int
) -> None:
    """Beside it in the same step: a plain request. After it: one that blends again."""
    place, policy, nth = STAGES[stage]
    (prompt, other), field, (full, plain) = with_known_chunks(engine, policy)
    engine.tell("fail_at", rank, f"vllm_blend.{place}", nth)
    found, beside = outputs(engine, [prompt, other], [field, None])
    assert sum(engine.tell("mend")) >= nth
    assert answer(found) == full and answer(beside) == plain
    assert report(found)["reused_tokens"] == 0 and "blending failed" in report(found)["why_not"]
    scheduler(engine).reset_prefix_cache()
    (after,) = outputs(engine, [prompt], [field])
    assert report(after)["reused_tokens"] == 300 and not report(after)["why_not"]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("stage", ["keep", "collect"])
def test_a_chunk_that_a_rank_cannot_keep_is_kept_by_none(
    engine: SeveralRanks, rank: int, stage: str
) -> None:
    place, nth = {
        "keep": ("server.worker.chunk_cache:ChunkCache.keep", 1),
        "collect": ("core.plans:CollectPlan.write", 3),
    }[stage]
    harvest = scheduler(engine).blend_settings.harvest
    prompt, spans = prompt_of(engine, [100 + 10 * nth + rank, 200 + 10 * nth + rank])
    full = answer(*outputs(engine, [prompt], [None]))
    engine.tell("fail_at", rank, f"vllm_blend.{place}", nth)
    outputs(engine, [prompt], [{"spans": spans}])
    drain(engine)
    assert sum(engine.tell("mend")) >= nth
    scheduler(engine).reset_prefix_cache()
    (found,) = outputs(engine, [prompt], [{"spans": spans, "recomp_ratio": 1.0} | REPORT])
    # what was not kept of a client's prefill was computed in the background meanwhile
    assert answer(found) == full and report(found)["reused_tokens"] == (200 if harvest else 100)
    drain(engine)
    scheduler(engine).reset_prefix_cache()
    (again,) = outputs(engine, [prompt], [{"spans": spans} | REPORT])
    assert report(again)["reused_tokens"] == 200


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("stage", ["apply", "collect_events"])
def test_messages_that_a_rank_loses(engine: SeveralRanks, rank: int, stage: str) -> None:
    """All ranks and the scheduler forget their chunks, and know the same ones afterwards."""
    (prompt, other), field, (full, plain) = with_known_chunks(engine, "static")
    field |= {"recomp_ratio": 1.0}
    engine.tell("fail_at", rank, f"vllm_blend.server.worker.chunk_cache:ChunkCache.{stage}", 1)
    scheduler(engine).blend_chunks.refuse(b"a chunk that is not there")  # a command to drop it
    for _ in range(2):  # the second rank's events are missed when the ranks blend next
        found, beside = outputs(engine, [prompt, other], [field, None])
        assert answer(found) == full and answer(beside) == plain
        scheduler(engine).reset_prefix_cache()
    drain(engine)
    assert sum(engine.tell("mend")) > 1
    known = sorted(key for key, _ in scheduler(engine).blend_chunks.all())
    assert engine.tell("chunks") == [known, known]
    for _ in range(2):
        scheduler(engine).reset_prefix_cache()
        (after,) = outputs(engine, [prompt], [field])
        drain(engine)
        assert answer(after) == full
    assert report(after)["reused_tokens"] == 300 and not report(after)["why_not"]
    assert engine.tell("is_open") == [True, True]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_operation_that_a_rank_cannot_do(engine: SeveralRanks, rank: int) -> None:
    """The operator is told, no rank's answer is left for the next question, and serving goes on."""
    (prompt, other), field, (full, plain) = with_known_chunks(engine, "static")
    field |= {"recomp_ratio": 1.0}
    core = engine.llm.llm_engine.engine_core.engine_core
    engine.tell("fail_at", rank, "vllm_blend.server.worker.chunk_cache:ChunkCache.apply", 1)
    start, end = field["spans"][0]
    with pytest.raises(RuntimeError, match=f"rank {rank}: MemoryError: none left"):
        core.blend_operation("delete", {"tenant": "", "pieces": [prompt[start:end]]})
    assert sum(engine.tell("mend")) >= 1 and engine.tell("is_open") == [True, True]
    for _ in range(3):
        scheduler(engine).reset_prefix_cache()
        found, beside = outputs(engine, [prompt, other], [field, None])
        drain(engine)
        assert answer(found) == full and answer(beside) == plain
    assert report(found)["reused_tokens"] == 300 and not report(found)["why_not"]
    known = sorted(key for key, _ in scheduler(engine).blend_chunks.all())
    assert engine.tell("chunks") == [known, known]


@pytest.mark.parametrize("policy", ["static", "ahead*static"])
def test_ranks_that_choose_differently_take_the_first_ones_rows(
    engine: SeveralRanks, policy: str
) -> None:
    before, _ = prompt_of(engine, [4, 3, 2, 1])  # else the KV is exact, whatever is chosen
    prompt, spans = prompt_of(engine, [4, 1, 2, 3])
    field = {"spans": spans, "policy": policy, "recomp_ratio": 0.1} | REPORT
    outputs(engine, [before], [field])
    drain(engine)
    for _ in range(2):  # scores come with the first
        scheduler(engine).reset_prefix_cache()
        expected = answer(*outputs(engine, [prompt], [field]))
        drain(engine)
    for rank in (1, 0):
        engine.tell("choose_others", rank)
        scheduler(engine).reset_prefix_cache()
        (found,) = outputs(engine, [prompt], [field])
        assert sum(engine.tell("mend"))
        assert report(found)["reused_tokens"] == 400 and not report(found)["why_not"]
        assert (answer(found) == expected) == (rank == 1)


def test_after_several_failures_of_one_rank_no_rank_blends(engine: SeveralRanks) -> None:
    prompt, spans = prompt_of(engine, [1, 2, 3])
    field = {"spans": spans, "policy": "static"} | REPORT
    full = answer(*outputs(engine, [prompt], [None]))
    outputs(engine, [prompt], [field])
    drain(engine)
    for _ in range(MAX_FAILURES):
        assert engine.tell("is_open") == [True, True]
        engine.tell("fail_at", 1, "vllm_blend.model.rows:scattered", 1)
        scheduler(engine).reset_prefix_cache()
        (found,) = outputs(engine, [prompt], [field])
        assert answer(found) == full and report(found)["reused_tokens"] == 0
        engine.tell("mend")
    assert engine.tell("is_open") == [False, False]
    scheduler(engine).reset_prefix_cache()
    (found,) = outputs(engine, [prompt], [field])
    assert answer(found) == full and "it failed too often" in report(found)["why_not"]


def test_a_server_whose_second_rank_fails(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "helpers"), prepend=":")
    large = dict(vocab_size=49152, max_position_embeddings=4096, hidden_size=192)
    model = tiny_model("llama", tmp_path / "model", **large)
    for path in smollm2.glob("*token*"):
        shutil.copy(path, model)
    arguments = (*("--tensor-parallel-size", "2"), "--worker-extension-cls", "failing_worker.Faults")
    key = {"file": str(tmp_path / "key")}
    (tmp_path / "key").write_text("the operator's key")
    expected = (  # the first of each kind: a step; what the model tells; what the operator asked
        *("MemoryError: none left", "NewsFailed: MemoryError: none left"),
        *("what the operator asked for failed", "RankFailed: rank 1: MemoryError: none left"),
        "Invocation of blend_operation method failed",
    )
    settings = dict(policy="static", operator_key=key)
    with serving(model, tmp_path, disk(tmp_path), arguments, tracebacks=expected, **settings) as url:
        client = connect(url)

        def ask() -> tuple[str, dict[str, Any]]:
            reset_prefix_cache(url)
            found = chat(client, *sample(1), **xargs({"report": True}))
            return text_of(found), reported(found)

        def fail_at(place: str, nth: int) -> None:
            order = dict(method="fail_at", args=[1, f"vllm_blend.{place}", nth])
            assert httpx.post(f"{url}/collective_rpc", json=order, timeout=60).status_code == 200

        def mend() -> int:
            """How often what was to fail was called."""
            found = httpx.post(f"{url}/collective_rpc", json=dict(method="mend"), timeout=60).json()
            return sum(map(int, found["results"]))

        def delete(*texts: str) -> httpx.Response:
            asked, bearer = {"texts": list(texts)}, {"Authorization": "Bearer the operator's key"}
            return httpx.post(f"{url}/blend/delete", json=asked, headers=bearer, timeout=60)

        def goes_on(texts: list[str], full: str, least: int = 4, most: int = 30) -> None:
            """The chunks are forgotten, kept again, reused; all answers are full prefill's."""
            for number in range(1, most + 1):
                reset_prefix_cache(url)
                extra = xargs({"report": True, "recomp_ratio": 1.0})
                found = chat(client, texts, sample(1)[1], **extra)
                assert text_of(found) == full
                told = reported(found)
                if number >= least and told["reused_tokens"] and not told["why_not"]:
                    break
            else:
                raise AssertionError(told)
            assert httpx.get(f"{url}/health", timeout=60).status_code == 200

        fail_at("server.worker.chunk_cache:ChunkCache.distances", 1)  # one chunk gets no scores
        warm(client, *sample(1))
        blended, _ = ask()
        full = text_of(chat(client, *sample(1), **xargs("off")))
        fail_at("attention.cpu:CPUBlendImpl.fuse", 2)
        text, told = ask()
        assert text == full and "blending failed" in told["why_not"]
        again, told = ask()
        assert again == blended and told["reused_tokens"] and not told["why_not"]

        mend()
        fail_at("server.worker.chunk_cache:ChunkCache.collect_events", 1)  # what the model tells
        goes_on(sample(1)[0], full, 3, 3)
        assert mend() > 1

        texts = [*sample(1)[0], sample(2)[0][0]]  # the last is looked for: a command, with a step
        full = text_of(chat(client, texts, sample(1)[1], **xargs("off")))
        fail_at("server.worker.chunk_cache:ChunkCache.apply", 1)  # what the model is told
        goes_on(texts, full)
        assert mend() > 1

        fail_at("server.worker.chunk_cache:ChunkCache.apply", 1)  # what the operator asks between steps
        told = delete(texts[-1])
        assert told.status_code == 500 and "rank 1: MemoryError: none left" in told.text
        goes_on(texts, full)
        assert mend() > 1
        assert delete(texts[-1]).json()["engines"][0]["deleted"]
