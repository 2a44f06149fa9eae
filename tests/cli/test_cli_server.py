"""Commands against one real server, whose store was filled before it was started."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import NAME, disk, sample, serving
from traces import ARGUMENTS, made_trace, simulate, write
from typer.testing import CliRunner

from vllm_blend.cli.app import app
from vllm_blend.cli.client import Server, report_of, with_parts
from vllm_blend.cli.prompts import read_rows
from vllm_blend.cli.step_costs import StepCosts

pytestmark = pytest.mark.slow


def told(*arguments: Any, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [*map(str, arguments[:1]), "--json", *map(str, arguments[1:])])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def filled(model: Path, folder: Path) -> list[str]:
    """Texts in the store, by ``warm`` with the model itself."""
    texts = [text for number in (9, 10) for text in sample(number)[0]]
    source = write(folder / "passages.jsonl", [{"text": text} for text in texts])
    settings = json.dumps({"store": {"host_gb": 0.5} | disk(folder)})
    call = ("warm", source, "--model", model, "--settings", settings, "--tenant", "a")
    engine = ("--", "--dtype", "float32", "--max-model-len", "4096", "--enforce-eager")
    first = told(*call, *engine)
    gc.collect()
    assert (first["texts"], first["new"], first["known"], first["refused"]) == (
        len(texts),
        len(texts),
        0,
        0,
    )
    again = told(*call, *engine)
    gc.collect()
    assert (again["new"], again["known"]) == (0, len(texts))
    return texts


@pytest.fixture(scope="module")
def url(model: Path, folder: Path, filled: list[str]) -> Iterator[str]:
    with serving(model, folder, disk(folder), parts=False) as address:
        yield address


def ask(url: str, texts: list[str], tenant: str = "") -> dict[str, Any]:
    """The report of a chat over texts."""
    salt = {"cache_salt": tenant} if tenant else {}
    body = with_parts(texts, "Who was it?", {"report": True}, model=NAME, max_tokens=1, **salt)
    return report_of(Server(url).post("/v1/chat/completions", body))


def test_a_server_finds_what_was_computed_without_it(url: str, filled: list[str]) -> None:
    report = ask(url, filled[:4], "a")
    assert (report["chunks"], report["missed_chunks"]) == (4, 0)
    assert report["loaded_chunks"] == 4
    assert ask(url, filled[:4], "another")["missed_chunks"] == 4


def test_a_server_is_warmed_by_requests(url: str, tmp_path: Path) -> None:
    texts = [f"{text} Told again." for number in (1, 2, 3) for text in sample(number)[0]]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    (tmp_path / "short.md").write_text("Too short.")
    call = ("warm", tmp_path, "--url", url, "--progress", tmp_path / "done", "--per-request", 3)
    found = told(*call, code=1)
    assert found == {"texts": 10, "new": 9, "known": 0, "done": 0, "refused": 1}
    again = told(*call)
    assert again == {"texts": 10, "new": 0, "known": 0, "done": 10, "refused": 0}
    report = ask(url, texts[::-1][:4])
    assert (report["chunks"] + report["cached_chunks"], report["missed_chunks"]) == (4, 0)
    assert told("warm", tmp_path, "--url", url, code=1)["known"] == 9


def test_texts_that_are_too_long_together_go_alone(url: str, tmp_path: Path) -> None:
    words = " ".join(sample(4)[0])
    rows: list[dict[str, Any]] = [{"text": f"{number} {words}" * 3} for number in range(2)]
    source = write(tmp_path / "t.jsonl", [*rows, {"text": words * 30}])
    found = told("warm", source, "--url", url, code=1)
    assert found["new"] == 2 and found["refused"] == 1


def test_the_doctor_finds_it_well(url: str) -> None:
    found = told("doctor", "--url", url)
    assert found["wrong"] == 0
    assert any("prompt tokens reused" in one["what"] for one in found["findings"])


def test_as_much_is_found_as_was_simulated(url: str, model: Path, tmp_path: Path) -> None:
    """The same trace, each prompt sent once the server is idle."""
    trace = made_trace(tmp_path / "trace.jsonl")
    there = chunks = reused = tokens = 0
    for row in read_rows(trace):
        path, body = row.request(NAME, chat=True, field={"report": True})
        report = report_of(Server(url).post(path, body))
        hits = report["chunks"] + report["cached_chunks"]
        there, chunks = there + hits, chunks + hits + report["missed_chunks"] + report["short_chunks"]
        reused, tokens = reused + report["reused_tokens"], tokens + report["prompt_tokens"]
        time.sleep(0.1)  # an idle engine computes what was missed
    settings = json.dumps({"store": {"host_gb": 0.5} | disk(tmp_path)})
    found = simulate(trace, model, "--settings", settings)
    print(f"hit rate {there / chunks:.3f}, simulated {found['hit_rate']:.3f}")
    print(f"reused {reused / tokens:.3f}, simulated {found['reused_share']:.3f}")
    assert found["prompt_tokens"] == tokens and found["chunks"] == chunks
    assert there / chunks > 0.4, "a trace in which nothing comes back tells nothing"
    assert abs(found["hit_rate"] - there / chunks) < 0.05
    assert abs(found["reused_share"] - reused / tokens) < 0.05


def test_a_trace_is_sent_twice_and_finds_what_was_simulated(
    url: str, model: Path, tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in made_trace(tmp_path / "all.jsonl", 16).open()]
    trace = write(tmp_path / "trace.jsonl", [row for row in rows if "prompt" not in row])
    before = told("report", url)
    sent = tmp_path / "sent.jsonl"
    found = told_of_bench(trace, "--url", url, "--rate", 20, "--output-tokens", 4, "--sent", sent)
    blended, full = found["ways"]["blended"], found["ways"]["full prefill"]
    assert blended["failed"] == full["failed"] == 0
    assert blended["prompt_tokens"] == full["prompt_tokens"]
    assert blended["sent_at_s"] == pytest.approx(full["sent_at_s"], abs=0.2), "the same times"
    now = told("report", url)
    grew = {name: now["requests"][name] - before["requests"][name] for name in now["requests"]}
    assert sum(grew.values()) == len(blended["ttfts_s"]), "those with blend off are not counted"
    assert grew["blended"] == blended["reuse"]["requests"]["blended"] > 0
    simulated = simulate(sent, model, "--settings", json.dumps({"ram_gb": 0.5}))
    assert abs(simulated["hit_rate"] - blended["reuse"]["hit_rate"]) < 0.05
    warm = told_of_bench(trace, "--url", url, "--warm", "--concurrency", 2)["ways"]["blended"]
    assert warm["reuse"]["hit_rate"] > blended["reuse"]["hit_rate"]


def told_of_bench(*arguments: Any) -> Any:
    result = CliRunner().invoke(app, ["bench", "serve", "--json", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_steps_are_measured_on_a_server_of_the_same_arguments(model: Path, tmp_path: Path) -> None:
    times = tmp_path / "times.json"
    trace = made_trace(tmp_path / "trace.jsonl", 6)
    eager = ("--times", times, "--measure", "--settings", '{"policy": "static"}')
    found = simulate(trace, model, *eager, arguments=(*ARGUMENTS, "--enforce-eager"))
    assert found["ttft_gain"] > 0
    costs = StepCosts.read(times)
    longest = max(tokens for tokens, _, _ in costs.samples["full"])
    assert costs.full.seconds(longest, longest) > costs.full.seconds(longest, longest // 2) > 0
    assert costs.blended.seconds(longest, longest // 4) > 0 and costs.keep >= 0
    assert all(0 < rows < tokens for tokens, rows, _ in costs.samples["blended"])
    assert len(costs.samples["blended"]) == 3 * 2 * 3 and len(costs.samples["new"]) == 9
    again = simulate(trace, model, "--times", times, "--settings", '{"policy": "static"}')
    assert again["ttft_gain"] == pytest.approx(found["ttft_gain"]), "the file has all of it"
