"""The evaluation on SmolLM2: a run, diagnosis, report and tuner."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import main

from vllm_blend import Blender
from vllm_blend.api.prompts import Chunk
from vllm_blend.cli.eval import run as run_module
from vllm_blend.cli.eval.data import Example, Passage, read_examples
from vllm_blend.cli.eval.diagnose import Diagnosis, diagnose
from vllm_blend.cli.eval.forcing import check_forced, forced_params
from vllm_blend.cli.eval.logits import watching
from vllm_blend.cli.eval.report import render
from vllm_blend.cli.eval.run import asked, make_blender, run_parser
from vllm_blend.cli.eval.runner import Runner, others
from vllm_blend.cli.eval.runs import RESULTS, RUN, Protocol, Result, read_results
from vllm_blend.cli.eval.stats import summarize
from vllm_blend.cli.eval.synthetic import synthetic
from vllm_blend.cli.eval.tasks import TASKS
from vllm_blend.cli.eval.tune import settings_of, tune
from vllm_blend.core.plans import CollectPlan
from vllm_blend.core.prompt import TokenIds
from vllm_blend.core.settings import PAPER, BlendSettings
from vllm_blend.core.static_scores import movement


@pytest.fixture(scope="module")
def blender(smollm2: Path) -> Iterator[Any]:
    from engines import shut_down

    made = make_blender(smollm2, 2048, max_num_seqs=8, kv_cache_memory_bytes=2**28)
    yield made
    shut_down(made.llm)


METHODS = ["reuse", "prefix", "mapreduce", "maprerank", "hkvd@1", "hkvd@0.3"]


@pytest.fixture(scope="module")
def run(blender: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Result]]:
    folder = tmp_path_factory.mktemp("run")
    runner = Runner(blender, Protocol("SmolLM2"), folder)
    return folder, runner.run(TASKS["synthetic"], synthetic("cut", 1), METHODS)


def test_a_run_pairs_methods_with_full_prefill(run: tuple[Path, list[Result]]) -> None:
    by = {result.method: result for result in run[1]}
    assert list(by) == ["full", *METHODS]
    assert by["hkvd@1"].kl == pytest.approx(0, abs=1e-5)
    assert by["hkvd@1"].same and by["prefix"].same and by["full"].same
    assert by["prefix"].answer == by["full"].answer
    reuse, hkvd = by["reuse"].kl, by["hkvd@0.3"].kl
    assert reuse is not None and hkvd is not None and reuse > 1e-3 and hkvd > 1e-3
    for result in by.values():
        assert result.ttft > 0 and result.answer is not None
    assert by["reuse"].num_reused > 0.5 * by["reuse"].num_tokens


def test_a_stopped_run_goes_on_where_it_was(run: tuple[Path, list[Result]], blender: Any) -> None:
    folder, first = run
    path = folder / RESULTS
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]) + lines[-1][:20])  # cut off while it was written
    assert len(read_results(folder)) == len(lines) - 1
    again = Runner(blender, Protocol("SmolLM2"), folder).run(
        TASKS["synthetic"], synthetic("cut", 1), METHODS
    )
    assert [r.method for r in again] == [r.method for r in first]
    assert again[:-1] == first[:-1]
    assert again[-1].kl == pytest.approx(first[-1].kl)
    nothing = Runner(blender, Protocol("SmolLM2"), folder)
    nothing.blender = None  # type: ignore[assignment]
    assert nothing.run(TASKS["synthetic"], synthetic("cut", 1), METHODS) == again
    with pytest.raises(ValueError, match="holds results of"):
        Runner(blender, Protocol("another"), folder)
    with pytest.raises(ValueError, match="2 examples have the id 'cut3-0-0'"):
        nothing.run(TASKS["synthetic"], synthetic("cut", 1) * 2, METHODS)


def test_examples_in_a_batch_get_what_they_get_alone(blender: Any, tmp_path: Path) -> None:
    methods = ["reuse", "prefix", "mapreduce", "ahead@0.3", "hkvd@0.16:behind=nothing"]
    methods += ["static@0.3", "ahead*static@0.3:behind=harvested", "reuse:known=0.5"]
    runs = [
        Runner(blender, Protocol("SmolLM2"), tmp_path / str(batch), batch).run(
            TASKS["synthetic"], synthetic("whole", 2), methods
        )
        for batch in (1, 2)
    ]
    assert len(runs[0]) == len(runs[1]) == 2 * 9
    reused = {(r.example, r.method): r.num_reused for r in runs[0]}
    for example in synthetic("whole", 2):
        share = reused[example.id, "reuse:known=0.5"] / reused[example.id, "reuse"]
        assert 0.2 < share < 0.7  # of three chunks one
    for alone, together in zip(*runs, strict=True):
        assert (together.example, together.method) == (alone.example, alone.method)
        assert together.answer == alone.answer and together.same == alone.same
        assert together.ttft is None and alone.ttft is not None
        assert (together.kl is None) == (alone.method in ("prefix", "mapreduce"))
        if alone.kl is not None:
            assert together.kl == pytest.approx(alone.kl, rel=1e-3, abs=1e-5)
            assert together.first_kl == pytest.approx(alone.first_kl, rel=1e-3, abs=1e-5)
    with pytest.raises(ValueError, match="batch is 0"):
        Runner(blender, Protocol("SmolLM2"), tmp_path, 0)


def test_a_long_passages_chunks_may_be_computed_behind_what_precedes_them(
    blender: Any, tmp_path: Path
) -> None:
    (example,) = synthetic("cut", 1)
    whole = Passage(" ".join(passage.text for passage in example.passages))
    kl: dict[tuple[int, str], float | None] = {}
    for passages in ((whole,), example.passages):  # one of several chunks, or several of one
        runner = Runner(
            blender, Protocol("SmolLM2", chunk_tokens=16), tmp_path / f"{len(passages)} passages"
        )
        one = replace(example, passages=passages)
        for result in runner.run(TASKS["synthetic"], [one], ["reuse", "reuse:behind=before"]):
            kl[len(passages), result.method] = result.kl
    apart, near = kl[1, "reuse"], kl[1, "reuse:behind=before"]
    assert apart is not None and near is not None and near < 0.5 * apart
    assert kl[6, "reuse:behind=before"] == pytest.approx(kl[6, "reuse"])


def test_kv_harvested_of_the_same_prompt_is_exact(
    blender: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "vllm_blend.cli.eval.runner.others", lambda examples, pool: {e: e for e in examples}
    )
    runner = Runner(blender, Protocol("SmolLM2"), tmp_path, batch=2)
    methods = ["reuse", "reuse:behind=harvested", "static@0.1:behind=harvested"]
    for result in runner.run(TASKS["synthetic"], synthetic("whole", 2), methods):
        assert result.kl is not None
        assert (result.kl < 1e-5) == (result.method != "reuse")


def test_methods_share_the_kv_of_their_chunks(
    blender: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each chunk is computed once in each context, and what stands before several of them once."""
    task, examples = TASKS["synthetic"], synthetic("whole", 2)
    head, text = blender.frame.head, blender.own_text
    assert len(text) == 512
    asked: list[tuple[TokenIds, TokenIds]] = []
    stand_in = text + blender.separator
    expected = Counter([head + text, *[head + stand_in] * 2])  # the latter in each batch
    for one, other in (examples, examples[::-1]):
        ids = blender.token_ids(task.chunks(blender.tokenizer, one, 512))
        before = list(accumulate(blender.token_ids(task.chunks(blender.tokenizer, other, 512))))
        expected[head + before[-1]] += 1
        expected.update(context + chunk for context in (head, head + text) for chunk in ids)
        for texts in ([before[-1]] * 2, before[:-1], [stand_in] * 2):
            asked += [(head + text, chunk) for text, chunk in zip(texts, ids[1:], strict=True)]
    expected.update(context + chunk for context, chunk in asked)

    computed: Counter[TokenIds] = Counter()
    kept: list[Chunk] = []
    run, obtain = blender.collector.run, blender.obtain

    def see_run(prompts: Any, params: Any, plans: Any, use_tqdm: bool) -> Any:
        if plans and isinstance(plans[0], CollectPlan):
            computed.update(map(tuple, prompts))
        return run(prompts, params, plans, use_tqdm)

    def see_obtain(wanted: Any) -> Any:
        kept.extend(found := obtain(wanted))
        return found

    monkeypatch.setattr(blender.collector, "run", see_run)
    monkeypatch.setattr(blender, "obtain", see_obtain)
    monkeypatch.setattr(blender.collector, "_prefixes", {})
    behinds = ["", *(f":behind={name}" for name in ("others", "harvested", "text"))]
    methods = [name + behind for behind in behinds for name in ("reuse", "static@0.3")]
    runner = Runner(blender, Protocol("SmolLM2", answers=False), tmp_path)
    found = runner.run(task, examples, methods)
    assert len(found) == 2 * 9
    assert computed == expected
    assert len(kept) == 2 * 4 * 3 and set(asked) < {(c.context, c.token_ids) for c in kept}
    for chunk in kept[-1], kept[-4], kept[0]:  # behind the text, harvested, behind the head
        other = head if chunk.context else text
        contexts = [chunk.context, other]
        scores = movement(*blender.collect([chunk.token_ids] * 2, contexts=contexts))
        assert torch.allclose(chunk.kv.scores, scores, rtol=1e-3, atol=1e-4)


def test_the_command_line_reaches_engine_and_runner(
    blender: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    scheduler = blender.llm.llm_engine.vllm_config.scheduler_config
    assert scheduler.max_num_seqs == 8  # what the fixture asked for
    asked: dict[str, Any] = {}

    def make(model: Path | None, max_model_len: int, head: str, **engine: Any) -> Any:
        asked.update(engine)
        return blender

    monkeypatch.setattr(run_module, "make_blender", make)
    engine = {"dtype": "float32", "max_num_seqs": 8}
    run = ["--task", "synthetic", "--synthetic", "cut", "--limit", "4", "--skip", "1"]
    more = ["--batch", "2", "--engine", json.dumps(engine), "--methods", "reuse"]
    main(["run", *run, *more, "--output", str(tmp_path)])
    assert asked == engine
    found = read_results(tmp_path)
    assert [r.example for r in found] == [e.id for e in synthetic("cut", 4)[1:] for _ in "01"]
    assert all(r.ttft is None for r in found)
    assert json.loads((tmp_path / RUN).read_text())["dtype"] == "float32"
    assert "| synthetic | `reuse` | 3 |" in capsys.readouterr().out


def test_the_tuner_s_command_line_cuts_answers_and_writes_settings(
    blender: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, settings = tmp_path / "data.jsonl", tmp_path / "blend.json"
    (example,) = synthetic("whole", 1)
    texts = [{"text": passage.text} for passage in example.passages]
    row = {"passages": texts, "question": example.question, "answers": example.answers}
    data.write_text(json.dumps(row) + "\n")
    monkeypatch.setattr(run_module, "make_blender", lambda *args, **engine: blender)
    run = ["--task", "synthetic", "--data", str(data), "--max-tokens", "1", "--policies", "random"]
    more = ["--ratios", "1", "--settings", str(settings), "--output", str(tmp_path / "tune")]
    main(["tune", *run, *more])
    expected = {"recomp_ratio": 1.0, "policy": "random", "stand_in": ""}
    assert json.loads(settings.read_text()) == expected
    assert json.loads((tmp_path / "tune" / RUN).read_text())["max_tokens"] == 1
    for result in read_results(tmp_path / "tune"):
        assert result.kl == result.first_kl  # there is one token


def test_the_tuner_gives_a_stand_in_of_the_user_s_own_prompts(
    blender: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, file, folder = tmp_path / "data.jsonl", tmp_path / "blend.json", tmp_path / "tune"
    examples = synthetic("whole", 2)
    rows = [
        {
            "passages": [{"text": passage.text} for passage in example.passages],
            "question": example.question,
            "answers": example.answers,
        }
        for example in examples
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(run_module, "make_blender", lambda *args, **engine: blender)
    run = ["--task", "synthetic", "--data", str(data), "--policies", "hkvd"]
    run += ["--ratios", "0.3", "--settings", str(file), "--output", str(folder)]
    main(["tune", *run, "--quality", "0"])
    values = json.loads(file.read_text())
    found = {s.method: s.kl.value for s in summarize(read_results(folder)) if s.kl is not None}
    assert {"reuse", "hkvd@0.3", "hkvd@0.3:behind=others"} <= found.keys()
    assert found["hkvd@0.3:behind=others"] < found["hkvd@0.3"]
    stand_in = values.pop("stand_in")
    assert stand_in == "".join(f"{passage.text}\n\n" for passage in examples[0].passages)
    assert values == {"recomp_ratio": 0.3, "policy": "hkvd"}
    Blender(blender.llm, BlendSettings.from_mapping(values), stand_in=stand_in)
    # a text that all have
    rows[1]["passages"].append(rows[0]["passages"][0])
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(SystemExit):
        main(["tune", *run[:-1], str(tmp_path / "shared")])
    main(["tune", *run[:-1], str(tmp_path / "alone"), "--no-stand-in", "--quality", "0"])
    assert json.loads(file.read_text())["stand_in"] == ""


def test_others_have_nothing_in_common() -> None:
    texts = ["ab", "bc", "cd", "xy"]
    examples = [Example(one, tuple(map(Passage, one)), "?", ("!",)) for one in texts]
    found = {one.id: other.id for one, other in others(examples, examples).items()}
    assert found == {"ab": "cd", "bc": "xy", "cd": "xy", "xy": "ab"}
    with pytest.raises(ValueError, match="'ab' has a passage in common with every other example"):
        others(examples[:2], examples[:2])
    assert others(examples[:1], examples)[examples[0]].id == "cd"  # not one of those that are asked


def test_a_run_asks_prompts_of_the_length_that_it_was_told(blender: Any, tmp_path: Path) -> None:
    """Also where fewer are asked than it takes to fill a prompt, and to find a context for chunks."""
    data, task = tmp_path / "data.jsonl", TASKS["synthetic"]
    rows = [asdict(example) | {"id": f"e{i}"} for i, example in enumerate(synthetic("whole", 12))]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    call = ["--data", str(data), "--prompt-tokens", "300", "--skip", "1", "--limit", "2"]
    options = run_parser(None).parse_args(call)
    runner = Runner(blender, Protocol("SmolLM2"), tmp_path / "out")
    examples = asked(runner, task, read_examples(data), options)
    results = runner.run(task, examples, ["reuse:behind=harvested"])
    assert {result.example for result in results} == {"e1"}
    assert all(250 < result.num_tokens <= 300 for result in results)
    (asked_for,) = examples
    assert {p.text for p in read_examples(data)[1].passages} <= {p.text for p in asked_for.passages}


def test_forced_tokens_are_not_seen_by_the_question(blender: Any) -> None:
    """The choice of rows must not depend on the answer that is forced."""
    task, (example,) = TASKS["synthetic"], synthetic("whole", 1)
    chunks = blender.chunks(task.chunks(blender.tokenizer, example, 512))
    prompt = blender.prompt(chunks, task.ask(example))
    settings = BlendSettings(policy="ahead", recomp_ratio=0.1)

    def forced(answer: list[int]) -> list[np.ndarray]:
        kept: list[np.ndarray] = []

        def see(requests: list[int], steps: list[int], logits: Any) -> None:
            kept.append(logits[0].float().numpy().copy())

        with watching(blender.llm, see, [answer]):
            output = blender.generate(prompt, forced_params(answer), settings=settings)
        check_forced(output, answer)
        return kept

    one = forced([20, 30, 40])
    rows = blender.model.cache_fuse_metadata["imp_indices"].tolist()
    two = forced([21, 30])
    assert blender.model.cache_fuse_metadata["imp_indices"].tolist() == rows
    assert len(one) == 3
    assert np.allclose(one[0], two[0], atol=1e-4)
    assert not np.allclose(one[1], two[1], atol=1e-2)


@pytest.fixture(scope="module")
def found(blender: Any) -> dict[str, Diagnosis]:
    task, (example,) = TASKS["synthetic"], synthetic("whole", 1)
    chunks = blender.chunks(task.chunks(blender.tokenizer, example, 512))
    prompt = blender.prompt(chunks, task.ask(example))
    return {
        policy: diagnose(blender, prompt, replace(PAPER, policy=policy), (0.0, 0.3, 1.0))
        for policy in ("hkvd", "ahead")
    }


def test_deviation_is_none_where_nothing_came_before(found: dict[str, Diagnosis]) -> None:
    for policy, diagnosis in found.items():
        num_tokens = len(diagnosis.tokens)
        assert diagnosis.deviation.shape == (30, num_tokens) and len(diagnosis.chunk) == num_tokens
        assert diagnosis.deviation[0].max() < 1e-4  # layer 0 sees no other token
        first = diagnosis.chunk == 0
        assert diagnosis.deviation[:, first].max() < 1e-3  # it stands where it was computed
        assert diagnosis.deviation[1:, ~first].min(axis=1).max() > 1e-3
        share = 0.32 if "ahead" in policy else 0.16  # too few chunk tokens for asking the question
        assert diagnosis.kept.sum() == int(share * num_tokens) and not diagnosis.kept[first].any()
        correlation = diagnosis.rank_correlation()
        assert len(correlation) == 28 and np.abs(correlation).max() <= 1


def test_attention_deviates_less_at_a_higher_ratio_and_not_at_one(found: dict[str, Diagnosis]) -> None:
    for diagnosis in found.values():
        errors = list(diagnosis.attention.values())
        assert errors[0] > errors[1] > errors[2]
        assert errors[2] < 1e-4


def test_the_page_holds_all_that_it_shows(
    found: dict[str, Diagnosis], run: tuple[Path, list[Result]]
) -> None:
    page = render(found, PAPER, "a <model>", summarize(run[1]))
    sources = re.findall(r'(?:src|href)\s*=\s*"([^"]*)"', page)
    assert len(sources) == 6 and all(source.startswith("data:image/png;base64,") for source in sources)
    rest = re.sub(r"base64,[^\"]*", "", page).lower()
    for word in ("http", "//", "url(", "@import", "srcset", "<link", "<script", "<iframe", "<object"):
        assert word not in rest
    assert "a &lt;model&gt;" in page
    assert page.count('class="kept"') == found["hkvd"].kept.sum()
    assert "<td>hkvd@0.3</td>" in page


def test_the_page_of_a_run_in_batches_shows_no_times(
    found: dict[str, Diagnosis], run: tuple[Path, list[Result]]
) -> None:
    untimed = [replace(result, ttft=None) for result in run[1]]
    page = render(found, PAPER, "a model", summarize(untimed))
    assert page.count("data:image/png;base64,") == 5 and "time to first token" not in page


def test_a_page_of_no_results_is_refused_before_anything_is_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ["--data", str(Path(__file__).parents[3] / "inputs/eval/musique.json"), "--task", "musique"]
    with pytest.raises(SystemExit):
        main(["report", *data, "--results", str(tmp_path / "none")])
    assert "none: no results there" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    ["worst FOLDER", "across kl FOLDER --methods reuse", "compare FOLDER --methods static hkvd"],
)
def test_a_folder_without_results_is_a_wrong_call(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main([str(tmp_path) if word == "FOLDER" else word for word in command.split()])
    assert raised.value.code == 2
    assert f"{tmp_path}: no results there" in capsys.readouterr().err


def test_data_that_is_not_there_is_a_wrong_call(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["report", "--data", "nowhere.json", "--task", "musique"])
    assert raised.value.code == 2 and "nowhere.json is no file" in capsys.readouterr().err


def test_tuning_finds_the_smallest_ratio_that_does(blender: Any, tmp_path: Path) -> None:
    runner = Runner(blender, Protocol("SmolLM2", answers=False), tmp_path)
    examples = synthetic("whole", 1)
    best = tune(runner, TASKS["synthetic"], examples, 0.9, ("random", "ahead"), (0.1, 1.0))
    assert not any("behind" in r.method for r in runner.results)  # there is no other example
    assert best is not None and best.recovered is not None and best.recovered >= 0.9
    tried = {r.method for r in runner.results}
    assert {"random@0.1", "ahead@0.1"} <= tried
    smaller = [s for s in summarize(runner.results) if "@0.1" in s.method]
    assert "@0.1" in best.method or all((s.recovered or 0) < 0.9 for s in smaller)
    assert not any("@1" in m for m in tried) or "@1" in best.method
    values = json.loads(json.dumps(settings_of(best.method)))
    found = BlendSettings.from_mapping(values)
    assert found.policy == best.method.split("@")[0]
    assert tune(runner, TASKS["synthetic"], examples, 1.0, ("random",), (0.1,)) is None
    with pytest.raises(ValueError, match="quality is 2"):
        tune(runner, TASKS["synthetic"], examples, 2)


def test_keys_are_looked_up_and_scored_as_ruler_counts_them(blender: Any, tmp_path: Path) -> None:
    """The question's end begins the answer, and the model talks on after it."""
    keys = ["the red kite", "the tall mill", "the old pier", "the north gate"]
    texts = [f"The magic number for {key} is {71 + 6 * i}." for i, key in enumerate(keys)]
    examples = [
        Example(key, tuple(map(Passage, texts)), f"The magic number for {key} is", (str(71 + 6 * i),))
        for i, key in enumerate(keys)
    ]
    runner = Runner(blender, Protocol("SmolLM2"), tmp_path, batch=4)
    found = runner.run(replace(TASKS["ruler"], max_tokens=8), examples, ["hkvd@1"])
    right = {example.id: example.answers[0] for example in examples}
    assert all(r.answer and r.score == (right[r.example] in r.answer) for r in found)
    assert {r.score for r in found} == {0.0, 1.0}  # it looks up some of them
    assert [r.score for r in found if r.method == "full"] == [
        r.score for r in found if r.method != "full"
    ]
