"""The evaluation: scores, data, method names, statistics; then a run on SmolLM2."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_blend.eval.data import Example, Passage, example_of, read_examples
from vllm_blend.eval.methods import blend_settings, method_name
from vllm_blend.eval.metrics import score
from vllm_blend.eval.runner import RESULTS, Protocol, Result, Runner, read_results
from vllm_blend.eval.stats import bootstrap, summarize
from vllm_blend.eval.synthetic import synthetic
from vllm_blend.eval.tables import HEADER, markdown
from vllm_blend.eval.tasks import TASKS
from vllm_blend.settings import BlendSettings


@pytest.mark.parametrize(
    "metric, found, answer, expected",
    [
        ("F1", "The Eiffel Tower.", "eiffel tower", 1.0),
        ("F1", "in Paris, France", "Paris", 0.5),
        ("F1", "no no no", "no", 0.5),
        ("F1", "", "Paris", 0.0),
        ("exact", "A dog!", "dog", 1.0),
        ("exact", "dog cat", "cat dog", 0.0),
        ("begins", "Rome and so on", "Rome", 1.0),
        ("begins", "in Rome", "Rome", 0.0),
        ("Rouge-L", "the cats sat", "the cat sat down", 6 / 7),
    ],
)
def test_scores(metric: str, found: str, answer: str, expected: float) -> None:
    assert score(metric, found, ["zebra", answer]) == pytest.approx(expected)


def test_data_in_three_forms(tmp_path: Path) -> None:
    row = {"ctxs": [{"title": "T", "text": "one"}, {"text": "two"}], "question": "q?", "answers": ["a"]}
    (tmp_path / "list.json").write_text(json.dumps([row, row]))
    lines = json.dumps(row | {"id": "x"}) + "\n" + json.dumps(row) + "\n"
    (tmp_path / "lines.jsonl").write_text(lines)
    (tmp_path / "lines.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    plain = read_examples(tmp_path / "list.json")
    assert [p.title for p in plain[0].passages] == ["T", ""]
    assert plain[0].id != plain[1].id
    packed = read_examples(tmp_path / "lines.jsonl.gz")
    assert packed[0].id == "x" and packed[0].passages == plain[0].passages
    assert [e.question for e in read_examples(tmp_path / "lines.jsonl", limit=1)] == ["q?"]
    with pytest.raises(ValueError, match="row 3 has no answers"):
        example_of({"passages": [{"text": "x"}], "question": "q"}, "row 3")
    with pytest.raises(ValueError, match="row 4 has no passages"):
        example_of({"question": "q", "answers": ["a"]}, "row 4")


def test_fewer_passages_keep_the_gold_ones_in_order() -> None:
    passages = tuple(Passage(str(i), gold=i in (2, 5)) for i in range(6))
    example = Example("e", passages, "q", ("a",)).with_passages(4)
    assert [p.text for p in example.passages] == ["0", "1", "2", "5"]


def test_method_names_are_read_and_written() -> None:
    for name in (
        "hkvd@0.16",
        "heads+hkvd@0.08:first_share=0.25",
        "random@0.3:seed=7",
        "ahead*hkvd@0.05:mask=bottom_right",
        "hkvd@0.16:check_layers=1,8:recomp_ratios=0.3,0.1",
    ):
        settings = blend_settings(name)
        assert settings is not None
        parts = method_name(settings).split(":")
        assert parts[0] == name.split(":")[0] and set(parts) == set(name.split(":"))
    assert blend_settings("full") is None
    assert blend_settings("reuse") == BlendSettings(recomp_ratio=0.0)
    for name, message in (
        ("best", "method is 'best'; allowed: full"),
        ("hkvd@x", "could not convert"),
        ("best@0.1", "policy is 'best'"),
        ("hkvd@0.1:color=red", "unknown blend setting 'color'"),
    ):
        with pytest.raises(ValueError, match=message):
            blend_settings(name)


def test_bootstrap_interval_is_that_of_the_mean() -> None:
    draw = np.random.default_rng(1)
    inside = 0
    for seed in range(60):
        mean = bootstrap(draw.normal(3, 2, 100).tolist(), seed)
        assert mean.low < mean.value < mean.high
        assert mean.high - mean.low == pytest.approx(4 * 2 / 10, rel=0.35)
        inside += mean.low < 3 < mean.high
    assert inside > 50
    assert bootstrap([2.0, 2.0]).low == bootstrap([2.0, 2.0]).high == 2.0


def test_summaries_pair_each_example_with_full_prefill() -> None:
    base = Result("t", "0", "full", 9, 0, "a", 1.0, 2.0, True, 0.0, 0.0, 1.0)
    rows = [
        base,
        replace(base, example="1", score=0.5, ttft=4.0),
        replace(base, method="reuse", score=0.0, kl=0.4, ttft=1.0, same=False),
        replace(base, method="reuse", example="1", score=0.5, kl=0.2, ttft=1.0),
        replace(base, method="hkvd@0.16", example="1", score=0.5, kl=0.05, ttft=1.0),
    ]
    full, reuse, hkvd = summarize(rows)
    assert (full.n, reuse.n, hkvd.n) == (2, 2, 1)
    assert reuse.loss.value == 0.5 and hkvd.loss.value == 0.0
    assert reuse.speedup == 3.0 and hkvd.speedup == 4.0
    assert hkvd.recovered == pytest.approx(0.75) and reuse.recovered == 0
    assert reuse.same == 0.5
    assert markdown([full]).splitlines()[2].count("|") == len(HEADER) + 1


def test_synthetic_examples_need_more_than_one_chunk() -> None:
    cut, whole = synthetic("cut", 20, people=4), synthetic("whole", 20, people=4)
    assert cut == synthetic("cut", 20, people=4) != synthetic("cut", 20, people=4, seed=1)
    for example in cut:
        name = example.question.removeprefix("In which city does ").removesuffix(" live?")
        (first,) = [i for i, p in enumerate(example.passages) if name in p.text]
        assert example.answers[0] in example.passages[first + 1].text
        assert example.answers[0] not in example.passages[first].text
    for example in whole:
        assert sum(example.answers[0] in p.text for p in example.passages) == 1
    with pytest.raises(ValueError, match="people is 99"):
        synthetic("cut", 1, people=99)


def test_long_passages_are_cut_and_nothing_is_lost() -> None:
    class Letters:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [ord(c) for c in text]

    example = Example("e", (Passage("x" * 25, "T"), Passage("yy")), "q", ("a",))
    task = replace(TASKS["musique"], header="")
    chunks = task.chunks(Letters(), example, 10)
    assert [len(chunk) for chunk in chunks] == [10, 10, 7, 2]
    assert "".join(map(chr, sum(chunks[:3], []))) == "T\n" + "x" * 25


@pytest.fixture(scope="module")
def blender(smollm2: Path) -> Any:
    from engines import make_engine

    from vllm_blend import Blender

    with make_engine(smollm2, enable_prefix_caching=True, disable_log_stats=False) as engine:
        yield Blender(engine.llm, chat=False)


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


def test_forced_tokens_are_not_seen_by_the_question(blender: Any) -> None:
    """The choice of rows must not depend on the answer that is forced."""
    from vllm_blend.quality import forced_logits

    task, (example,) = TASKS["synthetic"], synthetic("whole", 1)
    chunks = blender.chunks(task.chunks(blender.tokenizer, example, 512))
    prompt = blender.prompt(chunks, task.ask(example))
    settings = BlendSettings(policy="ahead", recomp_ratio=0.1)
    one = forced_logits(blender, prompt, [20, 30, 40], settings=settings)
    rows = blender.model.cache_fuse_metadata["imp_indices"].tolist()
    two = forced_logits(blender, prompt, [21, 30], settings=settings)
    assert blender.model.cache_fuse_metadata["imp_indices"].tolist() == rows
    assert one.logits.shape[0] == 3 and one.ttft > 0
    assert np.allclose(one.logits[0], two.logits[0], atol=1e-4)
    assert not np.allclose(one.logits[1], two.logits[1], atol=1e-2)
