"""What an operator may ask of an engine, in process; and who may ask, over HTTP, without one."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from asking import REPORT, drain, outputs, prompt_of, report, scheduler
from engines import Engine, make_engine
from fastapi import FastAPI
from fastapi.testclient import TestClient

from vllm_blend.core.settings import BlendSettings
from vllm_blend.server.config import ServerSettings
from vllm_blend.server.frontend.routes import BlendRoutes
from vllm_blend.server.scheduler import tier_fetches
from vllm_blend.store.disk import SUFFIX

KEY = "a key of an operator"


# --- the engine's side ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store") / "chunks"


@pytest.fixture(scope="module")
def server(tiny: Any, folder: Path) -> Iterator[Engine]:
    store = {"host_gb": 0.02, "disk": {"folder": str(folder), "budget_gb": 0.1, "fsync": False}}
    settings = {"vllm_blend": {"store": store, "stand_in": "", "auto": True}}
    options: dict[str, Any] = dict(enable_prefix_caching=True, additional_config=settings)
    with pytest.MonkeyPatch.context() as patch, make_engine(tiny("llama"), **options) as engine:
        patch.setattr(tier_fetches, "MIN_WAIT_S", 5.0)  # a busy machine loads no chunk in 0.01 s
        drain(engine)
        yield engine


def operate(server: Engine, name: str, **values: Any) -> dict[str, Any]:
    core = server.llm.llm_engine.engine_core.engine_core
    found: dict[str, Any] = core.blend_operation(name, values)
    return found


def learn(server: Engine, seeds: list[int], tenant: str) -> tuple[list[int], list[list[int]]]:
    prompt, spans = prompt_of(server, seeds)
    outputs(server, [prompt], [{"spans": spans, "auto": False}], cache_salt=tenant)
    drain(server)
    return prompt, spans


def reused(server: Engine, prompt: list[int], spans: list[list[int]], tenant: str) -> int:
    scheduler(server).reset_prefix_cache()
    field = {"spans": spans, "auto": False} | REPORT
    (found,) = outputs(server, [prompt], [field], cache_salt=tenant, max_tokens=1)
    drain(server)
    return int(report(found)["reused_tokens"])


def flush(server: Engine) -> None:
    tiers = server.model.blending.chunks.tiers
    tiers._claimer.submit(lambda: None).result(60)
    assert tiers.store.flush()


def files(folder: Path) -> int:
    return len(list(folder.rglob("*" + SUFFIX)))


def test_chunks_are_listed_by_tenant(server: Engine) -> None:
    prompt, spans = learn(server, [1, 2], "listed")
    found = operate(server, "list", tenant="listed", offset=0, limit=10)
    assert found["num_chunks"] == 2
    start = spans[0][0]
    assert found["chunks"][0]["beginning"] == prompt[start : start + 24]
    assert [(c["tokens"], c["in_use"]) for c in found["chunks"]] == [(100, False)] * 2
    assert len(operate(server, "list", tenant="listed", offset=1, limit=10)["chunks"]) == 1
    assert operate(server, "list", tenant="nobody", offset=0, limit=10)["num_chunks"] == 0
    told = operate(server, "stats")
    assert told["tenants"]["listed"] == {"chunks": 2, "tokens": 200, "in_use": 0}
    assert told["blending"] is True


def test_a_text_is_deleted_from_all_tiers_and_of_one_tenant_alone(server: Engine, folder: Path) -> None:
    prompt, spans = learn(server, [11, 12], "mine")
    learn(server, [11, 12], "theirs")
    flush(server)
    before = files(folder)
    start, end = spans[0]
    told = operate(server, "delete", tenant="mine", pieces=[prompt[start:end]])
    assert told == {"deleted": 1, "deleted_after_use": 0}
    flush(server)
    assert files(folder) == before - 1
    assert len(server.model.blending.chunks) == len(list(scheduler(server).blend_chunks.all()))
    assert reused(server, prompt, spans, "mine") == 100
    assert reused(server, prompt, spans, "theirs") == 200
    assert reused(server, prompt, spans, "mine") == 200  # it was sent again


def test_a_tenant_is_deleted_also_where_only_the_disk_has_it(server: Engine, folder: Path) -> None:
    prompt, spans = learn(server, [21, 22], "leaves")
    flush(server)
    for key, chunk in list(scheduler(server).blend_chunks.all()):  # as if memory were full
        if chunk.tenant == "leaves":
            scheduler(server).blend_chunks.evict(key)
    before = files(folder)
    operate(server, "delete_tenant", tenant="leaves")
    flush(server)
    assert files(folder) == before - 2
    assert operate(server, "list", tenant="leaves", offset=0, limit=9)["num_chunks"] == 0
    scheduler(server).reset_prefix_cache()
    (found,) = outputs(server, [prompt], [{"auto": True} | REPORT], cache_salt="leaves")
    assert report(found)["reused_tokens"] == 0
    drain(server)


def test_a_chunk_in_use_is_deleted_after_its_use(server: Engine) -> None:
    from vllm import SamplingParams

    prompt, spans = learn(server, [31, 32], "")
    flush(server)
    chunks = server.model.blending.chunks
    keys = [k for k, chunk in scheduler(server).blend_chunks.all() if chunk.tenant == ""]
    stored = [chunks.tiers._names[key] for key in keys]
    assert len(keys) == 2 and all(chunks.tiers.store.locate(name) for name in stored)
    scheduler(server).reset_prefix_cache()
    llm = server.llm.llm_engine
    field = {"spans": spans, "auto": False} | REPORT
    params = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, extra_args={"blend": field}
    )
    llm.add_request("user", {"prompt_token_ids": prompt}, params)
    while not len(scheduler(server).blend_plans):
        llm.step()
    ids = [prompt[start:end] for start, end in spans]
    assert operate(server, "delete", tenant="", pieces=ids) == {"deleted": 0, "deleted_after_use": 2}
    assert operate(server, "list", tenant="", offset=0, limit=99)["chunks"] == []
    # who asks meanwhile does not find them; for that one they are computed by themselves
    other = prompt[:-1] + server.ids(2, 7)
    second = SamplingParams(**REPORT_PARAMS, extra_args={"blend": field})
    llm.add_request("second", {"prompt_token_ids": other}, second)
    done = {}
    while llm.has_unfinished_requests():
        for output in llm.step():
            done |= {output.request_id: output} if output.finished else {}
    drain(server)
    assert report(done["user"])["reused_tokens"] == 200
    assert report(done["second"])["reused_tokens"] == 0
    flush(server)
    assert not any(chunks.tiers.store.locate(name) for name in stored)
    assert not set(keys) & set(chunks.whole())
    assert scheduler(server).blend_chunks.num_pinned == 0


REPORT_PARAMS: dict[str, Any] = {"temperature": 0, "max_tokens": 2, "detokenize": False}


def test_texts_are_computed_before_anyone_asks(server: Engine) -> None:
    prompt, spans = prompt_of(server, [41, 42])
    ids = [prompt[start:end] for start, end in spans]
    assert operate(server, "warm", tenant="early", pieces=ids) == {"known": 0, "asked": 2}
    drain(server)
    assert operate(server, "warm", tenant="early", pieces=ids) == {"known": 2, "asked": 0}
    assert reused(server, prompt, spans, "early") == 200


def test_kv_that_is_not_there_or_not_finite_is_found(server: Engine) -> None:
    prompt, spans = learn(server, [51, 52, 53], "checked")
    flush(server)
    known = operate(server, "verify")
    assert known["lost"] == 0 and known["chunks"] >= 3
    chunks = server.model.blending.chunks
    keys = [k for k, chunk in scheduler(server).blend_chunks.all() if chunk.tenant == "checked"]
    chunks.drop(keys[:1])
    (chunks._chunks[keys[1]].layers[1][0])[3] = torch.nan
    assert operate(server, "verify") == {"chunks": known["chunks"], "lost": 2}
    assert operate(server, "verify")["lost"] == 0
    assert len(chunks) == known["chunks"] - 2
    reused(server, prompt, spans, "checked")  # from the disk, where they are whole, or computed anew
    assert reused(server, prompt, spans, "checked") == 300
    assert operate(server, "verify")["lost"] == 0


def test_an_operator_switches_blending_off_and_on(server: Engine) -> None:
    prompt, spans = learn(server, [61, 62], "switched")
    assert operate(server, "switch", on=False) == {"blending": False}
    assert operate(server, "stats")["blending"] is False
    assert reused(server, prompt, spans, "switched") == 0
    operate(server, "switch", on=True)
    assert reused(server, prompt, spans, "switched") == 200


# --- HTTP -----------------------------------------------------------------------------------------


class FakeEngine:
    """Notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.engine_core = self.renderer = self

    async def call_utility_all_async(self, method: str, name: str, values: dict[str, Any]) -> list[Any]:
        assert method == "blend_operation"
        self.asked.append((name, values))
        return [{"chunks": [{"beginning": [104, 105]}]}]

    def get_tokenizer(self) -> Any:
        return self

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode()

    def forget_tenant(self, tenant: str) -> None:
        self.asked.append(("pieces", {"tenant": tenant}))


@pytest.fixture
def key_file(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "key").write_text(KEY + "\n")
    return {"file": str(tmp_path / "key")}


def client(settings: dict[str, Any]) -> tuple[TestClient, FakeEngine]:
    app, engine = FastAPI(), FakeEngine()
    app.state.args = Namespace(additional_config={"vllm_blend": settings})
    BlendRoutes().attach_router(app)
    app.state.blend_engine = engine
    return TestClient(app), engine


ROUTES = [("GET", "stats"), ("GET", "chunks"), ("POST", "delete"), ("POST", "warm")]
ROUTES += [("POST", "verify"), ("POST", "on"), ("POST", "off")]


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_only_who_has_the_key_may_ask(method: str, path: str, key_file: dict[str, str]) -> None:
    server, engine = client({"operator_key": key_file})
    right = {"Authorization": f"Bearer {KEY}"}
    for headers, status in (
        ({}, 401),
        ({"Authorization": KEY}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"Authorization": f"Bearer {KEY[:-1]}"}, 403),
        ({"Authorization": "Bearer \u00e9"}, 403),
    ):
        raw = {name: value.encode("latin-1") for name, value in headers.items()}
        answer = server.request(method, f"/blend/{path}", headers=raw, json={})
        assert answer.status_code == status and KEY not in answer.text, headers
    assert not engine.asked
    body = {"texts": ["hi"]} if path in ("delete", "warm") else None
    assert server.request(method, f"/blend/{path}", headers=right, json=body).status_code == 200
    assert len(engine.asked) == 1
    closed, _ = client({})
    assert closed.request(method, f"/blend/{path}", headers=right, json=body).status_code == 404


def test_what_is_asked_reaches_the_engine(key_file: dict[str, str]) -> None:
    server, engine = client({"operator_key": key_file, "max_chunk_tokens": 64})
    server.headers["Authorization"] = f"Bearer {KEY}"
    server.post("/blend/delete", json={"texts": ["a" * 100, ""], "tenant": "t"})
    server.post("/blend/delete", json={"tenant": "t"})
    (listed,) = server.get("/blend/chunks?tenant=t&limit=5").json()["engines"]
    assert listed["chunks"] == [{"beginning": "hi"}]
    assert engine.asked == [
        ("delete", {"tenant": "t", "pieces": [[97] * 50] * 2}),
        ("pieces", {"tenant": "t"}),
        ("delete_tenant", {"tenant": "t"}),
        ("list", {"tenant": "t", "offset": 0, "limit": 5}),
    ]


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({}, "tenant"),
        ([], "object"),
        ({"text": "a"}, "'text'"),
        ({"tenant": 3}, "tenant"),
        ({"texts": "a"}, "texts"),
        ({"texts": []}, "texts"),
        ({"texts": ["a"] * 1025}, "1025"),
    ],
)
def test_a_wrong_body_is_refused_by_name(body: Any, word: str, key_file: dict[str, str]) -> None:
    server, engine = client({"operator_key": key_file})
    server.headers["Authorization"] = f"Bearer {KEY}"
    answer = server.post("/blend/delete", json=body)
    assert answer.status_code == 400 and word in answer.text
    assert not engine.asked


def test_a_key_in_the_settings_or_a_short_one_is_refused(
    monkeypatch: pytest.MonkeyPatch, key_file: dict[str, str]
) -> None:
    with pytest.raises(ValueError, match="operator_key is a str") as told:
        ServerSettings.from_mapping({"operator_key": KEY})
    assert KEY not in str(told.value)
    monkeypatch.setenv("SHORT", "tooshort")
    for place in ({"env": "SHORT"}, {"env": "MISSING"}, {"file": "/nowhere"}, {}):
        with pytest.raises(ValueError, match="operator_key") as told:
            client({"operator_key": place})
        assert "tooshort" not in str(told.value)


def test_settings_are_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Namespace(additional_config={"vllm_blend": {"recomp_ratio": 0.3}})
    calls = 0

    def counts(values: Any) -> BlendSettings:
        nonlocal calls
        calls += 1
        return parse(values)

    parse = BlendSettings.from_mapping
    monkeypatch.setattr(BlendSettings, "from_mapping", counts)
    found: Any = [ServerSettings.of(config) for _ in range(3)]
    assert calls == 1 and found[0].blend.recomp_ratio == 0.3
    other: Any = ServerSettings.of(Namespace(additional_config={"vllm_blend": {"recomp_ratio": 0.4}}))
    assert other.blend.recomp_ratio == 0.4
