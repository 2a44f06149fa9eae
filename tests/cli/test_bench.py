"""What ``vllm-blend bench serve`` sends, and what it makes of the answers; a real server is asked in
test_cli_server.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from answering import answering
from servers import free_port
from traces import write
from typer.testing import CliRunner

from vllm_blend.cli.app import app
from vllm_blend.cli.prompts import SEPARATOR

EVENTS = [
    {"choices": [{"text": "Ada", "delta": {"content": "Ada"}}]},
    {"choices": [{"text": ".", "delta": {"content": "."}}]},
    {"choices": [], "usage": {"prompt_tokens": 90, "completion_tokens": 2}},
]
STREAM = "".join(f"data: {json.dumps(event)}\n\n" for event in EVENTS) + "data: [DONE]\n\n"
HIT = """# TYPE vllm:blend_chunks counter
vllm:blend_chunks_total{result="hit"} 3.0
"""
ROWS: list[dict[str, Any]] = [
    {"chunks": ["one", "two"], "question": "who?", "tenant": "a"},
    {"chunks": ["two"], "question": "when?"},
]
REFUSED = (400, {"error": {"message": "no chat template"}})


def server(sent: list[Any], chat: tuple[int, Any] = (200, STREAM)) -> Any:
    answers: dict[str, tuple[int, Any]] = {
        "/v1/models": (200, {"data": [{"id": "m"}]}),
        "/v1/completions": (200, STREAM),
        "/v1/chat/completions": chat,
        "/metrics": (200, HIT),
    }
    return answering(answers, sent)


def bench(trace: Path, *options: Any, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["bench", "serve", str(trace), *map(str, options)])
    assert result.exit_code == code, result.output
    return result


def prompts_of(sent: list[Any]) -> list[tuple[str, Any]]:
    """Those of the benchmark, which are streamed."""
    return [(path, body) for path, body in sent if body.get("stream")]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(tmp_path / "trace.jsonl", ROWS)


def test_both_ways_send_the_same_prompts(trace: Path, tmp_path: Path) -> None:
    sent: list[Any] = []
    with server(sent) as url, pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm_blend.cli.bench.has_chat_template", lambda server: True)
        options = ("--url", url, "--json", "--output-tokens", 2, "--sent", tmp_path / "sent.jsonl")
        found = json.loads(bench(trace, *options).stdout)
    assert found["prompts"] == 2
    full, blended = (prompts_of(sent)[at : at + 2] for at in (0, 2))
    for (path, one), (_, other) in zip(full, blended, strict=True):
        assert path == "/v1/chat/completions"
        assert one["messages"] == other["messages"] and one["ignore_eos"]
        assert one["vllm_xargs"] == {"blend": "off"} and other["vllm_xargs"] == {"blend": "{}"}
        assert one["cache_salt"] != other["cache_salt"], "neither finds what the other left"
        assert one["max_completion_tokens"] == 2
    assert [body["cache_salt"][-2:] for _, body in blended] == ["-a", blended[1][1]["cache_salt"][-2:]]
    assert full[0][1]["cache_salt"][:-1] == full[1][1]["cache_salt"]
    for way in found["ways"].values():
        assert way["failed"] == 0 and way["prompt_tokens"] == 180
        assert way["ttft_s"]["p99"] >= way["ttft_s"]["median"] > 0
    assert found["ttft_gain"] > 0
    lines = [json.loads(line) for line in (tmp_path / "sent.jsonl").read_text().splitlines()]
    assert [line.pop("at") for line in lines][0] == 0.0 and lines == ROWS


def test_texts_of_a_server_without_a_chat_template(trace: Path) -> None:
    sent: list[Any] = []
    with server(sent, REFUSED) as url:
        shown = bench(trace, "--url", url, "--rate", 50).stdout
    assert {path for path, _ in prompts_of(sent)} == {"/v1/completions"}
    off, blended = prompts_of(sent)[1][1], prompts_of(sent)[3][1]
    assert off["prompt"] == "twowhen?" and blended["prompt"] == f"{SEPARATOR}two{SEPARATOR}when?"
    assert "full prefill" in shown and "times sooner (means)" in shown


def test_lines_with_times_are_sent_at_them(tmp_path: Path) -> None:
    rows = [row | {"at": 0.4 * number} for number, row in enumerate(ROWS)]
    sent: list[Any] = []
    with server(sent, REFUSED) as url:
        found = json.loads(bench(write(tmp_path / "t.jsonl", rows), "--url", url, "--json").stdout)
    for way in found["ways"].values():
        assert way["sent_at_s"][1] >= 0.39  # no sooner


def test_requests_that_fail_are_told(trace: Path) -> None:
    answers: dict[str, tuple[int, Any]] = {"/v1/models": (200, {"data": [{"id": "m"}]})}
    with answering(answers | {"/metrics": (200, HIT)}) as url:
        result = bench(trace, "--url", url, code=1)
    assert "4 requests failed, the first one so: Not Found" in result.stderr


def test_a_server_that_is_not_there(trace: Path) -> None:
    result = bench(trace, "--url", f"http://127.0.0.1:{free_port()}", code=1)
    assert "does not answer" in result.stderr


@pytest.mark.parametrize(
    ("more", "options", "said"),
    [
        ({}, [], "give --url, or --model"),
        ({}, ["--url", "http://x", "--model", "m"], "give --url, or --model"),
        ({}, ["--model", "m", "--", "--nonsense"], "unrecognized arguments: --nonsense"),
        ({"token_ids": [1, 2]}, ["--url"], "both chats and texts"),
    ],
)
def test_wrong_calls(tmp_path: Path, more: dict[str, Any], options: list[str], said: str) -> None:
    trace = write(tmp_path / "t.jsonl", ROWS + ([more] if more else []))
    with server([], (200, {})) as url:
        given = [*options, url] if options == ["--url"] else options
        result = bench(trace, *given, code=2)
    assert said in " ".join(result.stderr.replace("│", " ").split())
