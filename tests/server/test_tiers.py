"""A server's chunks in a store's lower tiers: found again, kept apart, never wrong, not waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from asking import REPORT, answer, drain, outputs, prompt_of, report, scheduler
from engines import Engine, make_engine

from vllm_blend.server.config import CLIENT_FIELDS, ServerSettings
from vllm_blend.server.scheduler import tier_fetches
from vllm_blend.store.disk import DiskTier

FIELD = {"recomp_ratio": 0.3} | REPORT


@contextmanager
def server(tiny: Any, store: dict[str, Any]) -> Iterator[Engine]:
    """An engine with a store below it."""
    more = {"client_fields": list(CLIENT_FIELDS), "report_sizes": True, "harvest": False}
    config = {"vllm_blend": {"store": {"host_gb": 0.02} | store} | more}
    with (
        pytest.MonkeyPatch.context() as patch,
        make_engine(tiny("llama"), enable_prefix_caching=True, additional_config=config) as engine,
    ):
        # a tiny model computes chunks in no time; its requests would not wait for a disk
        patch.setattr(tier_fetches, "MIN_WAIT_S", 5.0)
        yield engine


def disk(folder: Path, budget_gb: float = 1.0) -> dict[str, Any]:
    return {"disk": {"folder": str(folder), "budget_gb": budget_gb, "fsync": False}}


def flush(engine: Engine) -> None:
    """The engine's own requests are done, and what they computed is written."""
    drain(engine)
    assert engine.model.blending.chunks.tiers.store.flush()


@dataclass
class Written:
    """A folder that an engine wrote, three prompts of three chunks, and its answers to them.

    The chunks of the second are a tenant's; two of the third are damaged.
    """

    folder: Path
    prompts: list[list[int]] = field(default_factory=list)
    fields: list[dict[str, Any]] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)


@pytest.fixture(scope="module")
def written(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Written:
    found = Written(tmp_path_factory.mktemp("chunks"))
    with server(tiny, disk(found.folder)) as engine:
        for seed, tenant in ((301, ""), (311, "a"), (321, "")):
            before = set(found.folder.rglob("*.safetensors"))
            prompt, spans = prompt_of(engine, [seed, seed + 1, seed + 2])
            asked = FIELD | {"spans": spans, "tenant": tenant}
            assert report(*outputs(engine, [prompt], [asked]))["missed_chunks"] == 3
            flush(engine)
            scheduler(engine).reset_prefix_cache()
            (output,) = outputs(engine, [prompt], [asked])
            assert (report(output)["reused_tokens"], report(output)["loaded_chunks"]) == (300, 0)
            found.prompts.append(prompt)
            found.fields.append(asked)
            found.answers.append(answer(output))
    for path in sorted(set(found.folder.rglob("*.safetensors")) - before)[:2]:
        data = bytearray(path.read_bytes())
        data[-5] ^= 1
        path.write_bytes(data)
    return found


@pytest.fixture(scope="module")
def started(tiny: Any, written: Written) -> Iterator[Engine]:
    """An engine on that folder."""
    with server(tiny, disk(written.folder)) as engine:
        yield engine


def ask(
    engine: Engine, written: Written, number: int, **other: Any
) -> tuple[list[int], dict[str, Any]]:
    scheduler(engine).reset_prefix_cache()
    (output,) = outputs(engine, [written.prompts[number]], [written.fields[number] | other])
    return answer(output), report(output)


@pytest.mark.covers("server: chunks in store tiers", backend="CPU_ATTN", family="llama")
def test_a_started_server_finds_what_one_before_it_computed(started: Engine, written: Written) -> None:
    first, told = ask(started, written, 0)
    assert (told["reused_tokens"], told["loaded_chunks"], told["missed_chunks"]) == (300, 3, 0)
    assert told["wait_seconds"] > 0
    assert first == written.answers[0]
    assert scheduler(started).blend_internal.background.num_computed == 0
    time.sleep(1.1)  # the store's counters come once a second
    again, told = ask(started, written, 0)
    assert again == first
    assert told["loaded_chunks"] == 0
    assert told["store_hits"] == {"host": 0, "disk": 3}
    assert told["stored_chunks"] == {"host": 3, "disk": 9}
    assert told["stored_bytes"]["disk"] > 2 * told["stored_bytes"]["host"] > 0


def test_tenants_do_not_share(started: Engine, written: Written) -> None:
    for tenant, reused in (("b", 0), ("", 0), ("\u00e9", 0), ("a", 300)):
        assert ask(started, written, 1, tenant=tenant)[1]["reused_tokens"] == reused, tenant
    drain(started)


def test_a_damaged_record_is_computed_again(
    started: Engine, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the step begins after the loads; test_late_layers.py has those that begin before."""
    monkeypatch.setattr(tier_fetches, "EARLY", 0.0)
    computed = scheduler(started).blend_internal.background.num_computed
    _, told = ask(started, written, 2)
    assert (told["reused_tokens"], told["missed_chunks"]) == (100, 2)
    flush(started)
    after, told = ask(started, written, 2)
    assert told["reused_tokens"] == 300
    assert after == written.answers[2]
    assert scheduler(started).blend_internal.background.num_computed == computed + 2
    assert started.model.blending.chunks.tiers.store.stats()["misses.corrupt"] == 2


def test_a_lost_chunk_is_fetched_before_it_is_computed(started: Engine, written: Written) -> None:
    state = scheduler(started)
    computed = state.blend_internal.background.num_computed
    started.model.blending.chunks.drop(list(started.model.blending.chunks._chunks))
    assert ask(started, written, 0)[1]["lost_chunks"] == {"gone": 3}
    drain(started)
    assert ask(started, written, 0)[1]["reused_tokens"] == 300
    assert state.blend_internal.background.num_computed == computed


def test_what_memory_dropped_comes_back(tiny: Any, tmp_path: Path) -> None:
    """Memory for twelve chunks; the answers of twelve prompts of two stay what they were."""
    with server(tiny, {"host_gb": 0.0035} | disk(tmp_path)) as engine:
        state = scheduler(engine)
        fields, prompts, known = [], [], []
        for seed in range(400, 412):
            prompt, spans = prompt_of(engine, [seed, seed + 50])
            prompts.append(prompt)
            fields.append({"spans": spans} | REPORT)
        assert state.blend_chunks.max_tokens // 100 == 12
        for prompt, field in zip(prompts, fields, strict=True):
            outputs(engine, [prompt], [field])
            flush(engine)
            state.reset_prefix_cache()
            known.append(answer(*outputs(engine, [prompt], [field])))
            state.reset_prefix_cache()
        assert state.blend_chunks.num_evicted > 10
        loaded = 0
        for prompt, field, expected in zip(prompts, fields, known, strict=True):
            (found,) = outputs(engine, [prompt], [field])
            loaded += report(found)["loaded_chunks"]
            assert report(found)["reused_tokens"] == 200
            assert answer(found) == expected
        assert loaded >= 12
        drain(engine)
        assert state.blend_internal.background.num_computed == 24  # each once
        assert state.blend_chunks.num_pinned == 0
        flush(engine)
        outputs(engine, [prompts[0]], [None])
        # they lie in the store's memory, but where it has no piece large enough
        stats = engine.model.blending.chunks.tiers.store.stats()
        assert stats["entries_in_use.host"] >= 10


def test_chunks_that_come_back_lie_on_the_gpu(tiny: Any, written: Written) -> None:
    """On this build the host's memory stands for the GPU's."""
    with server(tiny, {"gpu_gb": 0.01} | disk(written.folder)) as engine:
        for hits in (0, 3):
            found, told = ask(engine, written, 0)
            assert found == written.answers[0]
            assert told["reused_tokens"] == 300
            flush(engine)
            assert engine.model.blending.chunks.tiers.store.stats().get("hits.gpu", 0) == hits
        time.sleep(1.1)
        found, told = ask(engine, written, 0)
        assert found == written.answers[0]
        assert told["stored_chunks"]["gpu"] == told["stored_chunks"]["host"] == 3
        tiers = engine.model.blending.chunks.tiers
        assert len(tiers._names) == 3
        engine.model.blending.chunks.drop(list(engine.model.blending.chunks._chunks))
        assert not tiers._names


def test_a_server_with_a_checksum_key_does_not_read_records_without(
    tiny: Any, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLEND_KEY", "a secret of many bytes")
    before = set(written.folder.rglob("*.safetensors"))
    keyed = disk(written.folder) | {"checksum_key": {"env": "BLEND_KEY"}}
    for missed in (3, 0):
        with server(tiny, keyed) as engine:
            found, told = ask(engine, written, 0)
            assert (told["missed_chunks"], told["loaded_chunks"]) == (missed, 3 - missed)
            flush(engine)
    assert found == written.answers[0]
    assert len(set(written.folder.rglob("*.safetensors")) - before) == 3


def test_a_slow_tier_is_not_waited_for(
    tiny: Any, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others go on; the request is computed; its chunks come later; an abort leaves nothing behind."""
    prompt, spans = written.prompts[0], written.fields[0]["spans"]
    awake = threading.Event()
    stock = DiskTier.open
    monkeypatch.setattr(DiskTier, "open", lambda *args: awake.wait(30) and stock(*args))
    with server(tiny, disk(written.folder)) as engine:
        drain(engine)
        state, core = scheduler(engine), engine.llm.llm_engine
        monkeypatch.setattr(tier_fetches, "MIN_WAIT_S", 0.5)
        other = engine.ids(40, 5)
        start = time.monotonic()
        late, plain = outputs(engine, [prompt, other], [{"spans": spans} | REPORT, None])
        assert 0.5 < time.monotonic() - start < 10
        assert (report(late)["reused_tokens"], report(late)["missed_chunks"]) == (0, 3)
        assert report(late)["wait_seconds"] >= 0.5
        assert answer(plain)

        from vllm import SamplingParams

        params = SamplingParams(max_tokens=2, extra_args={"blend": {"spans": spans}}, detokenize=False)
        core.add_request("gone", {"prompt_token_ids": prompt}, params)
        core.step()
        assert state.blend_waiting
        core.abort_request(["gone"])
        assert not state.blend_waiting
        awake.set()
        drain(engine)
        assert len(state.blend_fetches) == 0
        assert state.blend_internal.background.num_computed == 0  # they came, and need not be computed
        scheduler(engine).reset_prefix_cache()
        (found,) = outputs(engine, [prompt], [{"spans": spans} | REPORT])
        assert (report(found)["reused_tokens"], report(found)["loaded_chunks"]) == (300, 0)


@pytest.mark.parametrize(
    "store, says",
    [
        ({"host_gb": 0.01, "dsk": {}}, "unknown key 'dsk' of store"),
        ({"host_gb": 0.01, "disk": {"folder": "/tmp"}}, "disk has no 'budget_gb'"),
        ({}, "host_gb of store is None"),
        ("redis://:secret@host", "store is a str; expected an object"),
    ],
)
def test_bad_settings_end_the_start(tiny: Any, store: Any, says: str) -> None:
    with (
        pytest.raises(ValueError, match=says),
        make_engine(tiny("llama"), additional_config={"vllm_blend": {"store": store}}),
    ):
        pass


def test_memory_is_set_once() -> None:
    with pytest.raises(ValueError, match="ram_gb and store are both set"):
        ServerSettings.from_mapping({"ram_gb": 1, "store": {"host_gb": 1}})
