"""The OpenAI server, as users start it: several processes, the stock client, SmolLM2 on the CPU."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from servers import RedisServer, free_port, redis_binary
from serving import (
    GREEDY,
    NAME,
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

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
SEPARATOR = "<|8c1f|>"
KEY = "the key of an operator"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Settings of a tier in a Redis server of its own, if there is one on this machine."""
    binary = redis_binary()
    if binary is None:
        yield {}
        return
    server = RedisServer(binary, tmp_path_factory.mktemp("redis"))
    server.start()
    yield {"redis": {"url": server.url, "budget_gb": 1}}
    server.kill()


@pytest.fixture(scope="module")
def running() -> Iterator[ExitStack]:
    """The server that the tests share; closing this stops it."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the server's log, and of its chunks."""
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def url(smollm2: Path, redis: dict[str, Any], folder: Path, running: ExitStack) -> str:
    (folder / "key").write_text(KEY)
    key = {"file": str(folder / "key")}
    return running.enter_context(serving(smollm2, folder, disk(folder) | redis, operator_key=key))


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return connect(url)


def token_ids(url: str, prompt: str) -> list[int]:
    answer = httpx.post(f"{url}/tokenize", json={"model": NAME, "prompt": prompt}, timeout=30)
    found: list[int] = answer.json()["tokens"]
    return found


@pytest.fixture(scope="module")
def stock(smollm2: Path, url: str) -> list[str]:
    """Answers to plain prompts of the same vLLM without the plugin, in a process of its own."""
    code = """
import json, sys
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=4096)
outputs = llm.generate(json.loads(sys.argv[2]), SamplingParams(temperature=0, max_tokens=10))
print(json.dumps([output.outputs[0].text for output in outputs]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(smollm2), json.dumps([plain_prompt(n) for n in range(1, 5)])],
        env=os.environ | {"VLLM_PLUGINS": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def plain_prompt(number: int) -> str:
    texts, question = sample(number)
    return f"{texts[0]}\n\n{texts[1]}\n\nQuestion: {question}\nAnswer:"


def test_parts_of_a_message_are_chunks(client: openai.OpenAI, url: str) -> None:
    texts, question = sample(1)
    warm(client, texts, question)
    reset_prefix_cache(url)
    answer = chat(client, texts, question, **xargs({"report": True, "recomp_ratio": 1.0}))
    report = reported(answer)
    assert report["chunks"] == len(texts)
    assert report["prompt_tokens"] == answer.usage.prompt_tokens
    assert report["reused_tokens"] > 0.9 * (report["prompt_tokens"] - len(question))
    reset_prefix_cache(url)
    full = chat(client, texts, question, **xargs("off"))
    assert text_of(full) == text_of(answer)  # ratio 1 is full prefill
    shuffled = reported(chat(client, texts[::-1], "Why?", **xargs({"report": True})))
    assert shuffled["chunks"] == len(texts)
    for _ in range(60):  # vLLM keeps its prefix cache while the engine scores a chunk
        reset_prefix_cache(url)
        plain = chat(client, texts, question)
        if (plain.model_extra or {}).get("kv_transfer_params"):
            break
        time.sleep(0.5)
    assert reported(plain).keys() == {"reused_tokens", "recomputed_tokens"}
    off = chat(client, texts, question, **xargs("off"))
    assert (off.model_extra or {}).get("kv_transfer_params") is None


def test_separators_spans_and_auto_find_the_same_chunks(client: openai.OpenAI, url: str) -> None:
    texts, question = sample(2)
    warm(client, texts, question)

    def complete(prompt: Any, field: Any) -> Any:
        return client.completions.create(model=NAME, prompt=prompt, extra_body=xargs(field), **GREEDY)

    wish = {"report": True, "recomp_ratio": 0.3}
    text = SEPARATOR.join(["Read.\n", *texts, f"\n{question}"])
    separated = complete(text, wish | {"separator": SEPARATOR})
    pieces = [token_ids(url, text) for text in ["Read.\n", *texts, f"\n{question}"]]
    ends = [sum(map(len, pieces[: at + 1])) for at in range(len(pieces) - 1)]
    spans = [[start, end] for start, end in zip(ends, ends[1:], strict=False)]
    reset_prefix_cache(url)
    spanned = complete(sum(pieces, []), wish | {"spans": spans})
    reset_prefix_cache(url)
    found = complete(sum(pieces, []), wish | {"auto": True})
    counts = [reported(answer)["reused_tokens"] for answer in (separated, spanned, found)]
    assert counts == [ends[-1] - ends[0]] * 3
    assert text_of(separated) == text_of(spanned) == text_of(found)
    as_text = complete("Read.\n" + "\n".join(texts) + f"\n{question}", wish | {"auto": True})
    assert reported(as_text)["reused_tokens"] > 0.9 * counts[0]  # joined, the edges' tokens differ


def test_streams(client: openai.OpenAI, url: str) -> None:
    texts, question = sample(1)
    warm(client, texts, question)
    reset_prefix_cache(url)
    whole = text_of(chat(client, texts, question))
    reset_prefix_cache(url)
    parts: Any = [{"type": "text", "text": text} for text in [*texts, question]]
    stream = client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": parts}], stream=True, **GREEDY
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert len(pieces) > 3
    assert "".join(pieces) == whole


@pytest.mark.covers("server: HTTP, 16 clients", backend="CPU_ATTN", family="smollm2")
def test_sixteen_clients(client: openai.OpenAI, url: str, stock: list[str]) -> None:
    """Plain answers are stock vLLM's, blended ones those of the same request alone."""
    numbers = [1, 2, 3, 4]
    for number in numbers:
        warm(client, *sample(number))
    alone = {}
    for number in numbers:
        reset_prefix_cache(url)
        alone[number] = text_of(chat(client, *sample(number)))
    reset_prefix_cache(url)

    def ask(index: int) -> tuple[bool, int, str]:
        number, blended = numbers[index % 4], index % 8 < 4
        if blended:
            return True, number, text_of(chat(client, *sample(number)))
        answer = client.completions.create(model=NAME, prompt=plain_prompt(number), **GREEDY)
        return False, number, text_of(answer)

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(16)))
    for blended, number, text in answers:
        assert text == (alone[number] if blended else stock[number - 1])


def test_cached_tokens_are_counted(client: openai.OpenAI, url: str) -> None:
    texts, question = sample(3)
    warm(client, texts, question)
    reset_prefix_cache(url)

    def ask(field: Any) -> tuple[int, str]:
        answer = chat(client, texts, question, **xargs(field))
        details = answer.usage.prompt_tokens_details
        return (details.cached_tokens or 0) if details else 0, text_of(answer)

    exact = ask("off")
    reset_prefix_cache(url)
    assert ask({"recomp_ratio": 0.1})[1]
    assert ask("off") == exact  # found nothing approximate
    assert ask({"recomp_ratio": 1.0})[1] == exact[1]


def test_two_thousand_malformed_requests(client: openai.OpenAI, url: str) -> None:
    generator = random.Random(0)
    atoms = [None, True, -1, 3, 2**40, 0.5, "x", "", [], [1], [[1, 2]], [[2, 1]], {}, {"a": 1}, "auto"]
    keys = ["spans", "auto", "tenant", "report", "recomp_ratio", "recomp_ratios", "check_layers"]
    keys += ["mask", "policy", "nonsense"]

    def field() -> str:
        kind = generator.random()
        if kind < 0.2:
            return "".join(generator.choices('{}[]":,spantrue0123 ', k=generator.randrange(12)))
        chosen = generator.sample(keys, generator.randrange(1, 4))
        return json.dumps({key: generator.choice(atoms) for key in chosen})

    body = {"model": NAME, "prompt": "one two three", "max_tokens": 1}
    with httpx.Client(base_url=url, timeout=60) as http:

        def send(value: str) -> int:
            answer = http.post("/v1/completions", json=body | {"vllm_xargs": {"blend": value}})
            assert answer.status_code in (200, 400), (value, answer.text)
            if answer.status_code == 400:
                assert "blend" in answer.text, (value, answer.text)
            return answer.status_code

        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(send, [field() for _ in range(2000)]))
    assert found.count(400) > 1500
    assert text_of(client.completions.create(model=NAME, prompt="one two three", **GREEDY))


def test_metrics(client: openai.OpenAI, url: str) -> None:
    texts, question = sample(1)
    warm(client, texts, question)

    labels = f'{{engine="0",model_name="{NAME}"}}'  # as vLLM's own metrics have them
    some = labels.rstrip("}") + ","

    def read() -> dict[str, float]:
        lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if line.startswith("vllm:blend_")]
        return {name.replace(labels, ""): float(value) for name, value in pairs}

    before = read()
    reset_prefix_cache(url)
    report = reported(chat(client, texts, question, **xargs({"report": True})))
    after = read()

    def rose(name: str) -> float:
        name = name.replace("{", some)
        return after[name] - before.get(name, 0)

    assert rose('vllm:blend_requests_total{result="blended"}') == 1
    assert rose('vllm:blend_prompt_tokens_total{source="reused"}') == report["reused_tokens"]
    assert rose("vllm:blend_recomputed_tokens_total") == report["recomputed_tokens"]
    assert rose('vllm:blend_chunks_total{result="hit"}') == report["chunks"]
    for stage in ("lookup", "load", "select", "fuse"):
        assert rose(f"vllm:blend_{stage}_seconds_count") == 1
        took = rose(f"vllm:blend_{stage}_seconds_sum")
        assert took == pytest.approx(report[f"{stage}_seconds"], rel=1e-3)
        assert 0 < took < 10
    for tier, count in report["stored_chunks"].items():
        assert after[f'vllm:blend_stored_chunks{some}tier="{tier}"}}'] == count >= 3
        assert (
            after[f'vllm:blend_stored_bytes{some}tier="{tier}"}}'] == report["stored_bytes"][tier] > 0
        )
    assert {"host", "disk"} <= report["stored_chunks"].keys()


def test_an_operator_sees_deletes_and_warms(client: openai.OpenAI, url: str, folder: Path) -> None:
    texts, question = sample(2)
    tenant = {"cache_salt": "seen"}

    def ask() -> dict[str, Any]:
        reset_prefix_cache(url)
        return reported(chat(client, texts, question, **xargs({"report": True}), **tenant))

    def operate(method: str, path: str, body: Any = None) -> dict[str, Any]:
        answer = operator.request(method, f"/blend/{path}", json=body)
        assert answer.status_code == 200, answer.text
        (found,) = answer.json()["engines"]
        return dict(found)

    def wait_until_known() -> None:
        end = time.monotonic() + 60
        while operate("POST", "warm", {"texts": texts, "tenant": "seen"})["known"] < len(texts):
            assert time.monotonic() < end
            time.sleep(0.5)

    def listed() -> list[str]:
        return [chunk["beginning"] for chunk in operate("GET", "chunks?tenant=seen")["chunks"]]

    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=url, headers=headers, timeout=60) as operator:
        wait_until_known()
        assert operate("GET", "stats")["tenants"]["seen"]["chunks"] == len(texts)
        for beginning in listed():
            assert any(text.startswith(beginning[:20]) for text in texts)
        gone = operate("POST", "delete", {"texts": texts[:1], "tenant": "seen"})
        assert gone["deleted"] + gone["deleted_after_use"] == 1
        assert len(listed()) == len(texts) - 1
        assert not any(texts[0].startswith(beginning[:20]) for beginning in listed())
        wait_until_known()
        assert operate("POST", "verify")["lost"] == 0
        operate("POST", "off")
        assert ask()["why_not"].startswith("blending is off")
        operate("POST", "on")
        assert ask()["missed_chunks"] == 0
        operate("POST", "delete", {"tenant": "seen"})
        assert "seen" not in operate("GET", "stats")["tenants"]
    assert KEY not in (folder / "log.txt").read_text()


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Debian's package prometheus")
def test_prometheus_answers_the_dashboards_queries(
    client: openai.OpenAI, url: str, tmp_path: Path
) -> None:
    texts, question = sample(1)
    config = tmp_path / "prometheus.yml"
    target = url.removeprefix("http://")
    config.write_text(
        "global: {scrape_interval: 1s}\n"
        f"scrape_configs: [{{job_name: vllm, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    port = free_port()
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    server = subprocess.Popen(
        [*command, f"--web.listen-address=127.0.0.1:{port}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        panels = json.loads(DASHBOARD.read_text())["panels"]
        left = [target["expr"] for panel in panels for target in panel["targets"]]
        end = time.monotonic() + 60
        while left and time.monotonic() < end:
            reset_prefix_cache(url)  # else there is nothing to select or fuse
            chat(client, texts, question)
            left = [query for query in left if not answered(port, query)]
        assert not left
    finally:
        server.terminate()
        server.wait(30)


def answered(port: int, query: str) -> bool:
    """Whether Prometheus has numbers for a dashboard's query."""
    query = query.replace("$__rate_interval", "30s")
    try:
        answer = httpx.get(f"http://127.0.0.1:{port}/api/v1/query", params={"query": query}).json()
    except httpx.HTTPError:  # it is starting
        return False
    assert answer["status"] == "success", answer
    return any(series["value"][1] != "NaN" for series in answer["data"]["result"])


def test_a_server_finds_what_others_computed(
    client: openai.OpenAI,
    url: str,
    smollm2: Path,
    redis: dict[str, Any],
    folder: Path,
    running: ExitStack,
) -> None:
    """On the disk after a restart, and in a Redis that servers share.

    The last test: it stops the server.
    """
    expected = {}
    for number in (4, 5):
        texts, question = sample(number)
        warm(client, texts, question)
        reset_prefix_cache(url)
        expected[number] = text_of(chat(client, texts, question))
    running.close()
    by_age = sorted(folder.rglob("*.safetensors"), key=lambda path: path.stat().st_ctime)
    if redis:
        for path in by_age[-3:]:  # those of the last sample; Redis has them
            path.unlink()
    report = {"report": True}
    with serving(smollm2, folder, disk(folder) | redis) as address:
        other = connect(address)
        for number in (4, 5):
            answer = chat(other, *sample(number), **xargs(report))
            told = reported(answer)
            assert (told["loaded_chunks"], told["missed_chunks"]) == (3, 0)
            assert text_of(answer) == expected[number]
        foreign = reported(chat(other, *sample(4), **xargs(report | {"tenant": "b"})))
        assert foreign["reused_tokens"] == 0
        time.sleep(1.1)  # the store's counters come once a second
        hits = reported(chat(other, *sample(4), **xargs(report)))["store_hits"]
        assert (hits["disk"], hits.get("redis", 0)) == ((3, 3) if redis else (6, 0))
        metrics = httpx.get(f"{address}/metrics", timeout=30).text
        (line,) = [x for x in metrics.splitlines() if x.startswith("vllm:blend_loaded_chunks_total")]
        assert line.endswith(" 6.0")
