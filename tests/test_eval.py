"""The evaluation without an engine: scores, data, method names, statistics."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from vllm_blend.eval.cli import methods_of, parser_of
from vllm_blend.eval.compare import difference
from vllm_blend.eval.data import Example, Passage, example_of, read_examples
from vllm_blend.eval.methods import blend_settings, method_name, split_behind
from vllm_blend.eval.metrics import score
from vllm_blend.eval.runner import Result
from vllm_blend.eval.stats import bootstrap, summarize
from vllm_blend.eval.synthetic import synthetic
from vllm_blend.eval.tables import HEADER, grid, markdown
from vllm_blend.eval.tasks import TASKS
from vllm_blend.eval.worst import worst
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
    assert blend_settings("reuse:behind=nothing") == BlendSettings(recomp_ratio=0.0)
    assert split_behind("hkvd@0.16:seed=3:behind=bos") == ("hkvd@0.16:seed=3", "bos")
    assert split_behind("ahead@0.1") == ("ahead@0.1", None)
    for name, message in (
        ("reuse:behind=me", "behind is 'me'; allowed at a method's end: nothing, bos, another"),
        ("best", "method is 'best'; allowed: full"),
        ("hkvd@x", "could not convert"),
        ("best@0.1", "policy is 'best'"),
        ("hkvd@0.1:color=red", "unknown blend setting 'color'"),
    ):
        with pytest.raises(ValueError, match=message):
            blend_settings(name)


def test_one_option_computes_all_chunks_behind_something_else() -> None:
    names = ["--methods", "full", "reuse", "hkvd@0.1:behind=bos", "--policies", "ahead"]
    options = parser_of("").parse_args([*names, "--ratios", "0.2", "--behind", "nothing"])
    assert methods_of(options) == [
        "full",
        "reuse:behind=nothing",
        "hkvd@0.1:behind=bos",
        "ahead@0.2:behind=nothing",
    ]


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
    count, mean = difference(rows, "hkvd@0.16", "reuse")
    assert count == 1 and mean.value == pytest.approx(-0.15)
    assert difference(rows, "full", "reuse", "score")[1].value == 0.5
    assert markdown([full]).splitlines()[2].count("|") == len(HEADER) + 1
    more = replace(hkvd, method="hkvd@0.05:mask=bottom_right")
    assert grid([full, reuse, hkvd, more], "t").splitlines() == [
        "| t: KL to full | 5% | 16% |",
        "|---|---|---|",
        "| `hkvd` |  | 0.0500 (75%) |",
        "| `hkvd:mask=bottom_right` | 0.0500 (75%) |  |",
    ]
    assert grid([full, reuse, hkvd], "t") == ""


def test_the_worst_examples_come_first() -> None:
    base = Result("t", "0", "full", 9, 0, "a", 1.0, 2.0, True, 0.0, 0.0, 1.0)
    rows = [
        replace(base, method=method, example=example, kl=kl)
        for example, kl in (("0", 0.1), ("1", 0.5), ("2", 0.3), ("3", None))
        for method in ("reuse", "hkvd@0.16")
    ]
    found = worst(rows, "hkvd@0.16", 2)
    assert [(r.example, r.kl) for r, _ in found] == [("1", 0.5), ("2", 0.3)]
    assert list(found[0][1]) == ["reuse", "hkvd@0.16"] and found[0][1]["reuse"].example == "1"


def test_synthetic_examples_need_more_than_one_chunk() -> None:
    cut, whole = synthetic("cut", 20, people=4), synthetic("whole", 20, people=4)
    assert cut == synthetic("cut", 20, people=4) != synthetic("cut", 20, people=4, seed=1)
    for example in cut:
        name = example.question.split("Answer: ")[1].removesuffix(" lives in")
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
    task = TASKS["musique"]
    chunks = task.chunks(Letters(), example, 10)
    assert [len(chunk) for chunk in chunks] == [10, 10, 7, 2]
    assert "".join(map(chr, sum(chunks[:3], []))) == "T\n" + "x" * 25
    assert [len(chunk) for chunk in task.chunks(Letters(), example, 10, 12)] == [10, 2, 2]
