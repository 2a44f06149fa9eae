"""What is simulated of a trace: by arithmetic where it is known, and by a real server."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from traces import ARGUMENTS, documents, made_trace, simulate, write
from typer.testing import CliRunner

from vllm_blend.cli.app import app
from vllm_blend.cli.engine_args import engine_config
from vllm_blend.cli.prompts import read_rows
from vllm_blend.cli.simulation import Simulation
from vllm_blend.cli.step_costs import StepCosts, rows_of
from vllm_blend.core.settings import BlendSettings
from vllm_blend.store.compute_time import ComputeTime

TIMES = {
    "full": {"fixed": 0.01, "token": 0.0, "row": 1e-3, "pair": 0.0},
    "blended": {"fixed": 0.01, "token": 0.0, "row": 1e-3, "pair": 0.0},
}


BUDGET = "--max-num-batched-tokens"


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


def test_a_window_without_the_question_recomputes_twice_as_much(model: Path, tmp_path: Path) -> None:
    """As the model's process does: the question is asked where a step holds it."""
    texts = documents()[:6]
    rows = [{"chunks": order, "question": "Who?"} for order in (texts, texts[::-1], texts)]
    trace = write(tmp_path / "t.jsonl", rows)
    whole, cut = (
        simulate(trace, model, arguments=(*ARGUMENTS, "--max-num-seqs", "8", BUDGET, tokens))
        for tokens in ("4096", "800")
    )
    assert cut["reused_share"] == pytest.approx(whole["reused_share"], abs=0.01)
    shares = [found["recomputed_share"] / found["reused_share"] for found in (whole, cut)]
    assert shares[0] == pytest.approx(0.08, rel=0.15)
    assert 0.11 < shares[1] < 0.16  # the last window has the question


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
    options = ("--times", fit, "--settings", '{"policy": "static"}')  # each row once
    texts = documents()[:4]
    rows = [{"chunks": texts, "question": "Who?"}, {"chunks": texts[::-1], "question": "When was it?"}]
    first = simulate(write(tmp_path / "1.jsonl", rows[:1]), model, *options)
    assert first["ttft_gain"] == pytest.approx(1.0)
    assert first["ttft_s"]["mean"] == pytest.approx(0.01 + 1e-3 * first["prompt_tokens"], rel=0.1)
    both = simulate(write(tmp_path / "2.jsonl", rows), model, *options)
    second = 2 * both["ttft_s"]["mean"] - first["ttft_s"]["mean"]
    fresh = both["prompt_tokens"] - first["prompt_tokens"]
    computed = 1 - (both["reused_share"] - both["recomputed_share"]) * both["prompt_tokens"] / fresh
    computed -= both["prefix_cached_share"] * both["prompt_tokens"] / fresh
    assert second == pytest.approx(0.01 + 1e-3 * fresh * computed, rel=0.1)
    assert both["ttft_gain"] > 1.3


def test_chunks_that_are_kept_take_their_time(model: Path, tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl", [{"chunks": documents()[:4], "question": "Who?"}])
    plain, keeping = tmp_path / "plain.json", tmp_path / "keeping.json"
    plain.write_text(json.dumps(TIMES))
    keeping.write_text(json.dumps(TIMES | {"keep": 0.5e-3}))
    first, second = (simulate(trace, model, "--times", fit) for fit in (plain, keeping))
    kept = second["all_chunks_bytes"] / first["all_chunks_bytes"]
    assert kept == 1.0
    more = second["ttft_s"]["mean"] - first["ttft_s"]["mean"]
    assert 0.8 * 0.5e-3 * first["prompt_tokens"] < more <= 0.5e-3 * first["prompt_tokens"]
    assert second["full_prefill_ttft_s"] == first["full_prefill_ttft_s"]


def test_rows_without_kv_go_twice_through_the_layers_before_the_question() -> None:
    static, asking = BlendSettings(policy="static"), BlendSettings(policy="ahead*static")
    assert rows_of(300, 1200, 40, static, 30) == 340
    assert rows_of(300, 1200, 40, asking, 30) == pytest.approx(300 * (1 + 20 / 30) + 40)
    assert rows_of(300, 1199, 40, asking, 30) == 340  # too many to be computed twice
    assert rows_of(0, 1200, 40, asking, 30) == 40


def test_steps_of_the_background_are_as_short_as_on_a_server(model: Path, tmp_path: Path) -> None:
    """An idle server scores chunks in steps of 0.1 s, by the simulated clock."""
    trace = write(tmp_path / "t.jsonl", [{"chunks": documents()[:6], "question": "Who?"}])
    config = engine_config(["--model", str(model), *ARGUMENTS[1:]], {})
    step = ComputeTime(fixed=0.0, token=0.0, row=0.5e-3, pair=0.0)
    server = Simulation(config, 0.05, StepCosts(step, step))
    server.serve(read_rows(trace))
    assert server.scheduler.blend_internal.background.window == pytest.approx(0.1 / 0.5e-3, rel=0.05)


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


def test_several_servers_find_more_where_chunks_say_which(model: Path, tmp_path: Path) -> None:
    """Two topics, asked for in pairs: in turn, both servers have to learn both."""
    topics = documents()[:2], documents()[2:4]
    rows = [
        {"chunks": topics[number // 2 % 2], "question": f"What is told in text {number}?"}
        for number in range(12)
    ]
    found = simulate(write(tmp_path / "t.jsonl", rows), model, "--replicas", 2, "--replicas", 3)
    in_turn, by_chunks, *of_three = found["replicas"]
    assert [(one["servers"], one["routed"]) for one in of_three] == [(3, "in turn"), (3, "by chunks")]
    assert in_turn["hit_rate"] == pytest.approx((24 - 8) / 24)
    assert by_chunks["hit_rate"] == pytest.approx((24 - 4) / 24) == found["hit_rate"]
    assert by_chunks["reused_share"] > 1.15 * in_turn["reused_share"]
    assert (in_turn["busiest"], by_chunks["busiest"]) == (1.0, 1.0)
    assert "ttft_s" not in by_chunks


def test_times_over_several_servers(model: Path, tmp_path: Path) -> None:
    """One server's queue is gone where two share what came at once, and what is found shortens both."""
    fit = tmp_path / "times.json"
    fit.write_text(json.dumps(TIMES))
    topics = documents()[:2], documents()[2:4]
    rows = [
        {"chunks": topics[number // 2 % 2], "question": f"What? {number}", "at": 0.0}
        for number in range(8)
    ]
    found = simulate(write(tmp_path / "t.jsonl", rows), model, "--times", fit, "--replicas", 2)
    in_turn, by_chunks = (one["ttft_s"]["mean"] for one in found["replicas"])
    assert in_turn < found["ttft_s"]["mean"]
    assert by_chunks < in_turn


def test_a_rest_is_a_step_of_the_simulated_clock(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine rests before it scores what nobody has reused: no steps are spent on waiting."""
    config = engine_config(["--model", str(model), *ARGUMENTS[1:]], {})
    server, steps = Simulation(config, 0.05), []
    schedule = server.scheduler.schedule
    monkeypatch.setattr(server.scheduler, "schedule", lambda: steps.append(1) or schedule())
    rows = [{"chunks": documents()[at : at + 3], "question": "Who?"} for at in (0, 3)]
    server.serve(read_rows(write(tmp_path / "t.jsonl", rows)))
    background = server.scheduler.blend_internal.background
    assert background.num_waiting == 0 and background.clock() == server.now > 0
    assert len(steps) < 60
