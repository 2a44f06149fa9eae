"""Weights that are replaced in a running engine: no KV of the old ones is reused, or taken for new."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from asking import REPORT, answer, come_to_waiting, drain, outputs, prompt_of, report, scheduler
from engines import Engine, make_engine, tiny_model
from safetensors.torch import load_file, save_file

from vllm_blend.server.scheduler import tier_fetches
from vllm_blend.store.disk import SUFFIX
from vllm_blend.store.fingerprint import parameters_digest


@pytest.fixture
def server(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(tier_fetches, "MIN_WAIT_S", 5.0)  # a busy machine loads no chunk in 0.01 s
    store = {"host_gb": 0.2, "disk": {"folder": str(tmp_path), "budget_gb": 1, "fsync": False}}
    settings = {"vllm_blend": {"store": store, "stand_in": ""}}
    with make_engine(tiny("llama"), enable_prefix_caching=True, additional_config=settings) as engine:
        drain(engine)
        yield engine


@pytest.fixture
def in_memory(tiny: Any) -> Iterator[Engine]:
    settings = {"vllm_blend": {"ram_gb": 0.05, "stand_in": "", "harvest": False}}
    with make_engine(tiny("llama"), enable_prefix_caching=True, additional_config=settings) as engine:
        drain(engine)
        yield engine


@pytest.fixture(scope="module")
def others(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same shape with other weights."""
    folder = tiny_model("llama", tmp_path_factory.mktemp("others"))
    (weights,) = folder.glob("*.safetensors")
    changed = {name: tensor * 1.1 + 0.01 for name, tensor in load_file(weights).items()}
    save_file(changed, weights, metadata={"format": "pt"})
    return folder


def ask(engine: Engine, prompt: list[int], spans: Any) -> tuple[list[int], dict[str, Any]]:
    engine.llm.reset_prefix_cache()
    (found,) = outputs(engine, [prompt], [{"spans": spans, "recomp_ratio": 1.0} | REPORT])
    return answer(found), report(found)


def load(engine: Engine, folder: Path) -> None:
    engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})


def flush(engine: Engine) -> None:
    drain(engine)
    assert engine.model.blending.chunks.tiers.store.flush()


def test_chunks_of_other_weights_are_not_reused(server: Engine, others: Path, tmp_path: Path) -> None:
    prompt, spans = prompt_of(server, [1, 2, 3])
    (old,) = outputs(server, [prompt], [None])
    ask(server, prompt, spans)
    flush(server)
    assert ask(server, prompt, spans)[1]["reused_tokens"] == 300
    written = {path.name for path in tmp_path.rglob("*" + SUFFIX)}

    load(server, server.folder)  # the same ones: nothing is lost
    assert ask(server, prompt, spans)[1]["reused_tokens"] == 300

    load(server, others)
    assert len(server.model.blending.chunks) == 0
    server.llm.reset_prefix_cache()
    (new,) = outputs(server, [prompt], [None])
    assert answer(new) != answer(old)
    found, told = ask(server, prompt, spans)
    assert (told["reused_tokens"], told["missed_chunks"]) == (0, 3)
    assert found == answer(new)
    flush(server)
    found, told = ask(server, prompt, spans)
    assert (told["reused_tokens"], found) == (300, answer(new))
    later = {path.name for path in tmp_path.rglob("*" + SUFFIX)}
    assert len(later - written) == 3 and written <= later  # under names of their own

    load(server, server.folder)  # back: what the disk has of these is right again
    found, told = ask(server, prompt, spans)
    assert (told["reused_tokens"], told["loaded_chunks"], found) == (300, 3, answer(old))


def test_requests_and_chunks_under_way_use_no_old_kv(
    in_memory: Engine, others: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import SamplingParams

    server = in_memory
    engine, state = server.llm.llm_engine, scheduler(server)
    prompt, spans = prompt_of(server, [1, 2, 3])
    more, places = prompt_of(server, [4])
    ask(server, prompt, spans)
    drain(server)
    server.llm.reset_prefix_cache()  # its blocks are vLLM's, who leaves them to the operator
    outputs(server, [more], [{"spans": places}])  # a missed chunk
    background = state.blend_internal.background
    monkeypatch.setattr(background, "window", 40)
    while not background.num_running:
        engine.step()
    extra: dict[str, Any] = {"blend": {"spans": spans, "recomp_ratio": 0.0} | REPORT}
    params = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, extra_args=extra
    )
    engine.add_request("waits", {"prompt_token_ids": prompt}, params)
    come_to_waiting(server)
    assert state.blend_chunks.num_pinned == 3
    load(server, others)
    assert (state.blend_chunks.num_pinned, background.num_running) == (0, 0)
    done: list[Any] = []
    while engine.has_unfinished_requests():
        done += [output for output in engine.step() if output.finished]
    (found,) = done
    assert report(found)["reused_tokens"] == 0 and "replaced" in report(found)["why_not"]
    server.llm.reset_prefix_cache()
    (full,) = outputs(server, [prompt], [None])
    assert answer(found) == answer(full)
    drain(server)
    full_more = answer(*outputs(server, [more], [None]))
    assert ask(server, more, places)[0] == full_more


def test_a_prefill_under_way_leaves_no_kv(tiny: Any, others: Path) -> None:
    from vllm import SamplingParams

    settings = {"vllm_blend": {"ram_gb": 0.05, "stand_in": "", "background_share": 0}}
    options: dict[str, Any] = dict(max_num_batched_tokens=150, max_num_seqs=4)
    with make_engine(tiny("llama"), additional_config=settings, **options) as server:
        drain(server)
        prompt, spans = prompt_of(server, [1, 2, 3])
        engine = server.llm.llm_engine
        params = SamplingParams(max_tokens=2, extra_args={"blend": {"spans": spans}})
        engine.add_request("begun", {"prompt_token_ids": prompt}, params)
        engine.step()  # the first chunk, and a part of the second
        load(server, others)
        while engine.has_unfinished_requests():
            engine.step()
        drain(server)
        assert len(server.model.blending.chunks) == 0
        assert (len(scheduler(server).blend_chunks), scheduler(server).blend_chunks.num_tokens) == (
            0,
            0,
        )


def test_weights_that_are_changed_by_any_call_are_seen(server: Engine) -> None:
    def scale(worker: Any) -> None:
        with torch.no_grad():
            for parameter in worker.model_runner.model.parameters():
                parameter.mul_(1.01)

    prompt, spans = prompt_of(server, [1, 2])
    ask(server, prompt, spans)
    flush(server)
    assert ask(server, prompt, spans)[1]["reused_tokens"] == 200
    server.llm.collective_rpc(scale)
    assert ask(server, prompt, spans)[1]["missed_chunks"] == 2
    flush(server)
    assert ask(server, prompt, spans)[1]["reused_tokens"] == 200
    scale(server.llm.llm_engine.model_executor.driver_worker)  # past the engine
    server.llm.reset_prefix_cache()
    assert ask(server, prompt, spans)[1]["missed_chunks"] == 2


def test_weights_that_changed_in_sleep_are_seen_once_awake(
    server: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it sleeps the workers are not asked: their weights may not be there."""
    core = server.llm.llm_engine.engine_core.engine_core
    prompt, spans = prompt_of(server, [1, 2])
    ask(server, prompt, spans)
    flush(server)
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(type(core.model_executor), "is_sleeping", property(lambda executor: True))
        for parameter in server.model.parameters():
            parameter.mul_(1.01)
        core.reset_prefix_cache()
        assert len(server.model.blending.chunks) == 2
    core.wake_up()
    assert len(server.model.blending.chunks) == len(scheduler(server).blend_chunks) == 0
    assert ask(server, prompt, spans)[1]["missed_chunks"] == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_a_digest_sees_one_changed_value(dtype: torch.dtype) -> None:
    model = torch.nn.Module()
    values = torch.randint(0, 100, (300, 70)).to(dtype)
    model.register_parameter("weight", torch.nn.Parameter(values, requires_grad=False))
    before = parameters_digest(model)
    assert parameters_digest(model) == before
    model.get_parameter("weight")[123, 45] = 101
    assert parameters_digest(model) != before
