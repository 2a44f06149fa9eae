"""Auto mode: chunks that are not in memory are found by content, after a restart too."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from asking import REPORT, answer, drain, outputs, prompt_of, report, scheduler
from engines import Engine, make_engine

from vllm_blend.core.plans import ChunkIds
from vllm_blend.server.chunks.askers import Askers
from vllm_blend.server.chunks.chunk_contexts import Contexts
from vllm_blend.server.chunks.chunk_registry import ChunkRegistry
from vllm_blend.server.config import CLIENT_FIELDS
from vllm_blend.server.scheduler import tier_fetches, waiting
from vllm_blend.store.disk import DiskTier

AUTO = {"auto": True, "recomp_ratio": 0.3} | REPORT


def chunk_of(tenant: str, start: int, end: int) -> ChunkIds:
    return ChunkIds(tenant, tuple(range(start, end)), (1,))


@contextmanager
def server(tiny: Any, folder: Path, **config: Any) -> Iterator[Engine]:
    store = {"host_gb": 0.02, "disk": {"folder": str(folder), "budget_gb": 1, "fsync": False}}
    more = {"client_fields": list(CLIENT_FIELDS), "harvest": False}
    values = {"vllm_blend": {"store": store} | more | config}
    with (
        pytest.MonkeyPatch.context() as patch,
        make_engine(tiny("llama"), enable_prefix_caching=True, additional_config=values) as engine,
    ):
        patch.setattr(tier_fetches, "MIN_WAIT_S", 5.0)
        patch.setattr(waiting, "LOCATE_S", 5.0)
        yield engine


def ask(engine: Engine, prompt: list[int], **field: Any) -> tuple[list[int], dict[str, Any]]:
    scheduler(engine).reset_prefix_cache()
    (output,) = outputs(engine, [prompt], [AUTO | field])
    return answer(output), report(output)


@pytest.fixture(scope="module")
def written(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A folder that an engine wrote, and its answers: with three chunks, and with a tenant's two."""
    folder, answers = tmp_path_factory.mktemp("chunks"), []
    with server(tiny, folder) as engine:
        for seeds, tenant in (([1, 2, 3], ""), ([4, 5], "a")):
            prompt, spans = prompt_of(engine, seeds)
            for _ in range(2):
                found, told = ask(engine, prompt, spans=spans, tenant=tenant, auto=False)
                drain(engine)
            assert told["reused_tokens"] == 100 * len(seeds)
            answers.append(found)
        assert engine.model.blending.chunks.tiers.store.flush()
    return folder, answers


@pytest.mark.parametrize("auto", [False, True])
def test_the_first_requests_after_a_restart(
    tiny: Any, written: tuple[Path, list[list[int]]], auto: bool
) -> None:
    folder, answers = written
    with server(tiny, folder, auto=auto) as engine:
        if auto:
            drain(engine)  # as a server does before its first request
            assert scheduler(engine).blend_fetches.claim("")
        prompt, _ = prompt_of(engine, [1, 2, 3])
        found, told = ask(engine, prompt)
        assert (told["reused_tokens"], told["loaded_chunks"], told["missed_chunks"]) == (300, 3, 0)
        assert found == answers[0]
        # a tenant's are its own
        prompt, _ = prompt_of(engine, [4, 5])
        for tenant, reused in (("", 0), ("b", 0), ("a", 200)):
            found, told = ask(engine, prompt, tenant=tenant)
            assert told["reused_tokens"] == reused, tenant
        assert found == answers[1]
        # a part of a chunk, behind other text
        for key in list(scheduler(engine).blend_chunks._chunks):
            scheduler(engine).blend_chunks.evict(key)
        part = engine.ids(40, 70) + engine.ids(100, 1)[30:90] + engine.ids(10, 71)
        _, told = ask(engine, part)
        assert (told["reused_tokens"], told["loaded_chunks"]) == (60, 1)
        assert scheduler(engine).blend_internal.background.num_computed == 0
        drain(engine)


def test_tenants_that_were_not_seen_for_long_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_fetches, "FOUND_SHELVES", 3)
    background: Any = SimpleNamespace(askers=Askers())
    found = tier_fetches.Fetches(ChunkRegistry(1000), background, Contexts((1,), (1,)))
    for number, tenant in enumerate("abcab" + "defg"):
        if not found.claim(tenant):
            assert len(found) == 1
            found.claimed(tenant, [chunk_of(tenant, number, number + 50)])
    assert len(found) == 0
    assert [tenant for tenant, _ in found.take_commands(()).claim] == list("abcdefg")
    prompt = [*range(900, 910), *range(8, 58)]
    assert found.find("g", prompt, 16) == [chunk_of("g", 8, 58)]
    assert not found.find("b", prompt, 16)
    assert [tenant for tenant in "abcdefg" if found.claim(tenant)] == ["e", "f", "g"]


def test_what_was_evicted_is_found_again(tiny: Any, tmp_path: Path) -> None:
    with server(tiny, tmp_path) as engine:
        state = scheduler(engine)
        prompt, spans = prompt_of(engine, [1, 2])
        ask(engine, prompt, spans=spans)
        drain(engine)
        known, _ = ask(engine, prompt)
        for key in list(state.blend_chunks._chunks):
            state.blend_chunks.evict(key)
        found, told = ask(engine, prompt)
        assert (told["reused_tokens"], told["loaded_chunks"]) == (200, 2)
        assert found == known
        # and where the disk does not have it any more, it is computed
        for key in list(state.blend_chunks._chunks):
            state.blend_chunks.evict(key)
        outputs(engine, [engine.ids(20, 7)], [None])
        store = engine.model.blending.chunks.tiers.store
        for name in list(store._host._entries.values()):
            store.discard(name.key)
            store.lanes[0].tier.discard(name.key)
        assert ask(engine, prompt)[1]["reused_tokens"] == 0
        drain(engine)
        assert ask(engine, prompt)[0] == known
        assert state.blend_internal.background.num_computed == 4


def test_a_slow_disk_is_not_waited_for(
    tiny: Any, written: tuple[Path, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, read = DiskTier.token_ids, threading.Event()

    def slow(self: DiskTier) -> Iterator[Any]:
        read.wait(60)
        yield from stock(self)

    monkeypatch.setattr(DiskTier, "token_ids", slow)
    with server(tiny, written[0]) as engine:
        drain(engine)
        prompt, _ = prompt_of(engine, [1, 2, 3])
        with monkeypatch.context() as patch:  # before the engine's own is undone
            patch.setattr(waiting, "LOCATE_S", 0.2)
            assert ask(engine, prompt)[1]["reused_tokens"] == 0
        read.set()
        drain(engine)  # waits for the disk
        assert ask(engine, prompt)[1]["reused_tokens"] == 300


def test_what_another_server_writes_is_found_without_a_restart(
    tiny: Any, written: tuple[Path, list[list[int]]], tmp_path: Path
) -> None:
    """Its files appear in the folder while this one runs."""
    with server(tiny, tmp_path / "shared", auto=True) as engine:
        prompt, _ = prompt_of(engine, [1, 2, 3])
        theirs, _ = prompt_of(engine, [4, 5])
        for ids in (prompt[:90], theirs[:90]):
            assert ask(engine, ids)[1]["reused_tokens"] == 0
        assert ask(engine, theirs[:90], tenant="a")[1]["reused_tokens"] == 0
        shutil.copytree(written[0], tmp_path / "shared", dirs_exist_ok=True)
        time.sleep(tier_fetches.REFRESH_S)
        found, told = ask(engine, prompt)
        assert (told["reused_tokens"], told["loaded_chunks"]) == (300, 3)
        assert found == written[1][0]
        for tenant, reused in (("", 0), ("a", 200)):
            found, told = ask(engine, theirs, tenant=tenant)
            assert told["reused_tokens"] == reused, tenant
        assert found == written[1][1]
        drain(engine)


def test_a_busy_engine_asks_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(tier_fetches.time, "monotonic", lambda: now)
    background: Any = SimpleNamespace(askers=Askers())
    found = tier_fetches.Fetches(ChunkRegistry(1000), background, Contexts((1,), (1,)))
    assert not found.claim("a")
    assert [tenant for tenant, _ in found.take_commands(()).claim] == ["a"]
    found.claimed("a", [])
    assert found.claim("a") and len(found) == 0
    assert not found.take_commands(()).refresh
    now = 0.75
    assert [tenant for tenant, _ in found.take_commands(()).refresh] == ["a"]
    assert found.claim("a"), "a request does not wait for what a step has asked for"
    assert not found.take_commands(()).refresh and not found.take_commands(()).claim
    now = 1.25
    assert not found.claim("a"), "what is known is too old by now, though steps go on"
    assert not found.take_commands(()).refresh and not found.take_commands(()).claim
    found.claimed("a", [chunk_of("a", 1, 51)])
    assert found.claim("a")
    assert found.find("a", [*range(900, 910), *range(1, 51)], 16) == [chunk_of("a", 1, 51)]
    now = 9.0
    assert not found.claim("a"), "nobody has asked for a long time"
    assert [tenant for tenant, _ in found.take_commands(()).refresh] == ["a"]
    assert not found.claim("a"), "the answer takes longer than a step"
    found.claimed("a", [])
    assert found.claim("a")
    now = 10.5
    assert [tenant for tenant, _ in found.take_commands(()).refresh] == ["a"]
    now = 20.0
    assert not found.claim("a"), "the last step asked, and none has brought the answer"
    found.claimed("a", [])
    assert found.claim("a")
