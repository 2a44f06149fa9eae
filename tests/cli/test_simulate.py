"""What is simulated of a trace: by arithmetic where it is known, and by a real server."""

from __future__ import annotations

import gzip
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_tokenizers import make_tokenizer
from engines import tiny_model
from serving import NAME, sample, serving
from typer.testing import CliRunner

from vllm_blend.cli.app import app
from vllm_blend.cli.client import Server, report_of
from vllm_blend.cli.prompts import read_rows

ARGUMENTS = ("--", "--dtype", "float32", "--max-model-len", "4096")
TIMES = {
    "full": {"fixed": 0.01, "token": 0.0, "row": 1e-3, "pair": 0.0},
    "blended": {"fixed": 0.01, "token": 0.0, "row": 1e-3, "pair": 0.0},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a chat template."""
    folder = tiny_model(
        "llama", tmp_path_factory.mktemp("model"), vocab_size=1280, max_position_embeddings=4096
    )
    make_tokenizer("qwen").save_pretrained(folder)
    return folder


def simulate(trace: Path, model: Path, *options: Any) -> Any:
    call = ["simulate", str(trace), str(model), "--json", "--cache-gb", "0.05", *map(str, options)]
    result = CliRunner().invoke(app, [*call, *ARGUMENTS])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def documents() -> list[str]:
    return [text for number in range(1, 9) for text in sample(number)[0]]


def made_trace(path: Path, number: int = 40) -> Path:
    """Questions over four documents each, some documents more often than others; two tenants, and
    text with separators, and a chat of another form."""
    choose, texts = random.Random(5), documents()
    weights = [1 / (rank + 1) for rank in range(len(texts))]
    rows: list[dict[str, Any]] = []
    for index in range(number):
        chosen = list(dict.fromkeys(choose.choices(texts, weights, k=4)))
        row: dict[str, Any] = {"chunks": chosen, "question": f"What is told in text {index}?"}
        if index % 8 == 3:
            row = {"prompt": "<|cut|>".join(["Read this.", *chosen, "Why?"]), "separator": "<|cut|>"}
        elif index % 8 == 6:
            parts = [{"type": "text", "text": text} for text in (*chosen, "And then?")]
            row = {"messages": [{"role": "user", "content": parts}]}
        rows.append(row | ({"tenant": "b"} if index % 5 == 4 else {}))
    return write(path, rows)


def test_what_comes_back_is_found(model: Path, tmp_path: Path) -> None:
    texts = documents()[:3]
    rows = [
        {"chunks": texts, "question": "Who?"},
        {"chunks": texts[::-1], "question": "When?"},
        {"chunks": texts, "question": "Who?", "tenant": "another"},
    ]
    found = simulate(write(tmp_path / "t.jsonl", rows), model)
    assert (found["prompts"], found["chunks"]) == (3, 9)
    assert found["hit_rate"] == pytest.approx(3 / 9)
    assert 0.15 < found["reused_share"] < 1 / 3
    assert 0 < found["recomputed_share"] < 0.1 * found["reused_share"]
    assert "ttft_gain" not in found


def test_memory_is_counted_and_bounded(model: Path, tmp_path: Path) -> None:
    rows = [{"chunks": [text], "question": "Who?"} for text in documents()[:8]]
    trace = write(tmp_path / "t.jsonl", rows * 2)
    found = simulate(trace, model)
    host = found["memory"]["host"]
    assert host["chunks"] == 8 and host["bytes"] == found["all_chunks_bytes"]
    assert found["hit_rate_second_half"] == 1.0
    small = found["all_chunks_bytes"] * 0.4 / 1e9
    less = simulate(trace, model, "--settings", json.dumps({"ram_gb": small}))
    assert less["memory"]["host"]["evicted_chunks"] > 0
    assert less["memory"]["host"]["bytes"] <= small * 1e9
    assert less["hit_rate_second_half"] < 1.0
    store = {"host_gb": small, "disk": {"folder": "/nowhere", "budget_gb": 1}}
    tiered = simulate(trace, model, "--settings", json.dumps({"store": store}))
    assert tiered["hit_rate_second_half"] == 1.0, "what memory drops, the disk has"
    assert tiered["memory"]["disk"]["chunks"] >= 8


def test_times_follow_the_fit(model: Path, tmp_path: Path) -> None:
    fit = tmp_path / "times.json"
    fit.write_text(json.dumps(TIMES))
    texts = documents()[:4]
    rows = [{"chunks": texts, "question": "Who?"}, {"chunks": texts[::-1], "question": "When was it?"}]
    first = simulate(write(tmp_path / "1.jsonl", rows[:1]), model, "--times", fit)
    assert first["ttft_gain"] == pytest.approx(1.0)
    assert first["ttft_s"]["mean"] == pytest.approx(0.01 + 1e-3 * first["prompt_tokens"], rel=0.1)
    both = simulate(write(tmp_path / "2.jsonl", rows), model, "--times", fit)
    second = 2 * both["ttft_s"]["mean"] - first["ttft_s"]["mean"]
    fresh = both["prompt_tokens"] - first["prompt_tokens"]
    computed = 1 - (both["reused_share"] - both["recomputed_share"]) * both["prompt_tokens"] / fresh
    computed -= both["prefix_cached_share"] * both["prompt_tokens"] / fresh
    assert second == pytest.approx(0.01 + 1e-3 * fresh * computed, rel=0.1)
    assert both["ttft_gain"] > 1.3


def test_prompts_that_come_at_once_wait_for_each_other(model: Path, tmp_path: Path) -> None:
    fit = tmp_path / "times.json"
    fit.write_text(json.dumps(TIMES))
    rows = [{"token_ids": [7 + i] * 1500, "at": 0.0} for i in range(4)]
    queued = simulate(write(tmp_path / "1.jsonl", rows), model, "--times", fit)
    apart = [row | {"at": 10.0 * i} for i, row in enumerate(rows)]
    alone = simulate(write(tmp_path / "2.jsonl", apart), model, "--times", fit)
    assert alone["ttft_s"]["mean"] == pytest.approx(1.51, rel=0.01)
    assert queued["ttft_s"]["mean"] > 2 * alone["ttft_s"]["mean"]


def test_what_people_read(model: Path, tmp_path: Path) -> None:
    trace = made_trace(tmp_path / "t.jsonl", 6)
    result = CliRunner().invoke(app, ["simulate", str(trace), str(model), *ARGUMENTS])
    assert result.exit_code == 0, result.output
    assert "chunks found" in result.stdout and "host" in result.stdout


@pytest.mark.parametrize(
    ("line", "options", "said"),
    [
        ("{", [], "line 1 of t.jsonl is no JSON"),
        ('{"text": "a"}', [], "expected an object with one of chunks"),
        ('{"chunks": ["a"]}', [], "has chunks and no question"),
        ('{"prompt": "a", "at": -1}', [], "at is -1"),
        ('{"prompt": "a"}', ["--measure"], "name it by --times"),
        ('{"prompt": "a"}', ["--times", "/nowhere"], "is no fit"),
        (
            '{"prompt": "a"}',
            ["--settings", '{"recomp_ratio": "auto", "store": {}}'],
            "fixed recomp_ratio",
        ),
        ('{"prompt": "a"}', ["--settings", '{"polcy": 1}'], "unknown key 'polcy'"),
        ('{"token_ids": [1, 2], "spans": [[0, 9]]}', [], "spans"),
    ],
)
def test_wrong_calls(model: Path, tmp_path: Path, line: str, options: list[str], said: str) -> None:
    trace = tmp_path / "t.jsonl"
    trace.write_text(line + "\n")
    result = CliRunner().invoke(app, ["simulate", str(trace), str(model), *options, *ARGUMENTS])
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.stderr.replace("│", " ").split())


def test_lines_may_be_compressed(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "a|b|c", "separator": "|"}\n\n'))
    (row,) = read_rows(path)
    assert (row.chunks, row.question) == (["b"], "c")


# --- against a real server ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_trace(tmp_path_factory.mktemp("trace") / "trace.jsonl")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = {"parts": False, "report_sizes": True}
    with serving(model, tmp_path_factory.mktemp("server"), {}, **settings) as url:
        yield Server(url)


@pytest.mark.slow
def test_a_real_server_finds_as_much(server: Server, trace: Path, model: Path) -> None:
    """The same trace, each prompt sent once the server is idle."""
    there = chunks = reused = tokens = 0
    for row in read_rows(trace):
        path, body = row.request(NAME, chat=True, field={"report": True})
        report = report_of(server.post(path, body))
        hits = report["chunks"] + report["cached_chunks"]
        there, chunks = there + hits, chunks + hits + report["missed_chunks"] + report["short_chunks"]
        reused, tokens = reused + report["reused_tokens"], tokens + report["prompt_tokens"]
        time.sleep(0.1)  # an idle engine computes what was missed
    settings = json.dumps({"store": {"host_gb": 0.5}})
    found = simulate(trace, model, "--settings", settings)
    assert found["prompt_tokens"] == tokens and found["chunks"] == chunks
    assert there / chunks > 0.4, "a trace in which nothing comes back tells nothing"
    assert abs(found["hit_rate"] - there / chunks) < 0.05
    assert abs(found["reused_share"] - reused / tokens) < 0.05
