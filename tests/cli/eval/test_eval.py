"""The evaluation without an engine: scores, data, method names, statistics."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from commands import main
from hypothesis import given
from hypothesis import strategies as st

from vllm_blend.cli.eval import across, compare
from vllm_blend.cli.eval.data import Example, Passage, example_of, of_length, read_examples
from vllm_blend.cli.eval.methods import blend_settings, known_share, split_behind
from vllm_blend.cli.eval.metrics import score
from vllm_blend.cli.eval.run import methods_of, run_parser
from vllm_blend.cli.eval.runs import RESULTS, RUN, Protocol, Result
from vllm_blend.cli.eval.stats import bootstrap, bootstrap_gone, bootstrap_over, summarize
from vllm_blend.cli.eval.synthetic import synthetic
from vllm_blend.cli.eval.tables import HEADER, grid, markdown
from vllm_blend.cli.eval.tasks import TASKS
from vllm_blend.cli.eval.worst import worst
from vllm_blend.core.settings import BlendSettings


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
        ("holds", "It is 1EE3-4a.", "1ee3-4A", 1.0),
        ("holds", "It is 1ee3 4a.", "1ee3-4a", 0.0),
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
    with pytest.raises(ValueError, match="row 5 has no passages"):
        example_of(row | {"ctxs": [{"title": "T"}]}, "row 5")
    with pytest.raises(ValueError, match="row 6 is no object"):
        example_of(["one"], "row 6")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name, data, said",
    [
        ("a.json", b"[{", "Expecting property name"),
        ("a.json", b"[7]", "a.json\\[0\\] is no object"),
        ("a.jsonl", b'{"question": "q"}', "a.jsonl\\[0\\] has no passages"),
        ("a.jsonl.gz", b"{}", "Not a gzipped file"),
        ("a.json", b"\xff", "can't decode"),
        ("a.json", None, "is no file"),
    ],
)
def test_what_is_no_data_set_is_a_wrong_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, data: bytes | None, said: str
) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(SystemExit, match="2"):
        run_parser(None).parse_args(["--data", str(tmp_path / name)])
    assert re.search(said, capsys.readouterr().err)


@given(
    sizes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=8),
    gold=st.integers(0, 5),
    room=st.integers(0, 60),
)
def test_prompts_of_a_length(sizes: list[list[int]], gold: int, room: int) -> None:
    """A passage's text says its size; those of an example are told apart from all others'."""
    examples = [
        Example(
            f"e{i}",
            tuple(Passage(f"{i}.{j}" + "x" * size, gold=j == gold) for j, size in enumerate(own)),
            "q",
            ("a",),
        )
        for i, own in enumerate(sizes)
    ]

    def length(passage: Passage) -> int:
        return passage.text.count("x")

    total = sum(map(sum, sizes))
    try:
        found = of_length(examples, lambda example: room, length)
    except ValueError as error:
        no_passage = "and so for no passage" in str(error)
        assert (room < 9) if no_passage else (room > total and "'e0' has room for" in str(error))
        return
    assert room <= total
    assert all(example.passages for example in found)
    assert found == of_length(examples, lambda example: room, length)
    for before, after in zip(examples, found, strict=True):
        own, texts = set(before.passages), {passage.text for passage in after.passages}
        golden = [passage for passage in before.passages if passage.gold]
        assert replace(after, passages=before.passages) == before
        assert len(texts) == len(after.passages)
        assert [passage for passage in after.passages if passage.gold] == golden
        spare = room - sum(map(length, after.passages))
        assert spare >= 0 or texts == {passage.text for passage in golden}
        assert spare < 9  # the next one has no room
        # others' join only where its own are all there
        assert texts <= {p.text for p in own} or texts >= {p.text for p in own}


def test_passages_that_join_stand_anywhere() -> None:
    examples = [
        Example(f"e{i}", tuple(Passage(f"{i}.{j}") for j in range(3)), "q", ("a",)) for i in range(30)
    ]
    longer = of_length(examples, lambda example: 10, lambda passage: 1)
    places = {[p.text for p in example.passages].index(f"{i}.0") for i, example in enumerate(longer)}
    assert len(places) > 5
    joined = [{p.text for p in example.passages} for example in longer[:2]]
    assert joined[0] == {*(f"{i}.{j}" for i in range(3) for j in range(3)), "3.0"}


def test_fewer_passages_keep_the_gold_ones_in_order() -> None:
    passages = tuple(Passage(str(i), gold=i in (2, 5)) for i in range(6))
    example = Example("e", passages, "q", ("a",)).with_passages(4)
    assert [p.text for p in example.passages] == ["0", "1", "2", "5"]


def test_method_names_are_read() -> None:
    for name, values in (
        ("hkvd@0.16", {}),
        ("random@0.3:seed=7", {"seed": 7}),
        ("ahead*hkvd@0.05:mask=bottom_right", {"mask": "bottom_right"}),
        (
            "hkvd@0.16:check_layers=1,8:recomp_ratios=0.3,0.1",
            {"check_layers": (1, 8), "recomp_ratios": (0.3, 0.1)},
        ),
    ):
        policy, ratio = name.split(":")[0].split("@")
        expected = {"policy": policy, "recomp_ratio": float(ratio), **values}
        assert blend_settings(name) == BlendSettings.from_mapping(expected)
    assert blend_settings("full") is None
    nothing = BlendSettings(policy="hkvd", recomp_ratio=0.0)
    assert blend_settings("reuse") == blend_settings("reuse:behind=nothing") == nothing
    assert split_behind("hkvd@0.16:seed=3:behind=bos") == ("hkvd@0.16:seed=3", "bos")
    assert split_behind("ahead@0.1") == ("ahead@0.1", None)
    half = "static@0.1:known=0.5:behind=others"
    assert blend_settings(half) == BlendSettings(policy="static", recomp_ratio=0.1)
    assert (known_share(half), known_share("static@0.1")) == (0.5, 1.0)
    for name, message in (
        ("reuse:behind=me", "behind is 'me'; allowed at a method's end: nothing, bos, another"),
        ("best", "method is 'best'; allowed: full"),
        ("hkvd@x", "could not convert"),
        ("best@0.1", "policy is 'best'"),
        ("hkvd@0.1:color=red", "unknown blend setting 'color'"),
        ("hkvd@0.1:known=1.5", "known is 1.5; allowed: 0 to 1"),
    ):
        with pytest.raises(ValueError, match=message):
            blend_settings(name)


def test_one_option_computes_all_chunks_behind_something_else() -> None:
    names = ["--methods", "full", "reuse", "hkvd@0.1:behind=bos", "--policies", "ahead"]
    options = run_parser("").parse_args([*names, "--ratios", "0.2", "--behind", "nothing"])
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
    run = across.Run("m", "t", rows)
    found = compare.differences("hkvd@0.16", "reuse", "kl", run)
    assert list(found) == ["1"] and found["1"] == pytest.approx(-0.15)
    assert compare.differences("full", "reuse", "score", run) == {"0": 1.0, "1": 0.0}
    assert markdown([full]).splitlines()[2].count("|") == len(HEADER) + 1
    more = replace(hkvd, method="hkvd@0.05:mask=bottom_right")
    assert grid([full, reuse, hkvd, more], "t").splitlines() == [
        "| t: KL to full | 5% | 16% |",
        "|---|---|---|",
        "| `hkvd` |  | 0.0500 (75%) |",
        "| `hkvd:mask=bottom_right` | 0.0500 (75%) |  |",
    ]
    assert grid([full, reuse, hkvd], "t") == ""


def test_the_fastest_within_a_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Slow loses nothing, middle 1.8% in the mean, fast 10%; only another run has their times."""
    base = Result("t", "0", "full", 9, 0, "a", 1.0, None, True)
    lost = {"full": 0.0, "hkvd@0.5": 0.0, "static@0.16": 0.018, "reuse": 0.1, "mapreduce": -1.0}
    speed = {"full": 1.0, "hkvd@0.5": 1.5, "static@0.16": 4.0, "reuse": 8.0, "mapreduce": 9.0}

    def write(name: str, rows: list[Result], tokens: int | None, behind: str = "") -> str:
        (tmp_path / name).mkdir()
        ends = {r.method: r.method + behind * (blend_settings(r.method) is not None) for r in rows}
        lines = [json.dumps(asdict(replace(r, method=ends[r.method]))) + "\n" for r in rows]
        (tmp_path / name / RESULTS).write_text("".join(lines))
        protocol = Protocol("m", prompt_tokens=tokens)
        (tmp_path / name / RUN).write_text(json.dumps(asdict(protocol)))
        return str(tmp_path / name)

    scores = [
        replace(base, example=str(i), method=method, score=0.5 + 0.5 * (i % 2) - loss * 0.75)
        for method, loss in lost.items()
        for i in range(4)
    ]
    times = [replace(base, method=m, score=None, ttft=6 / factor) for m, factor in speed.items()]
    run = write("run", scores, 8192, ":behind=harvested")
    short = write("short", [replace(r, ttft=1.0) for r in times], 2048)
    main(["across", "within", run, "--times", short, write("long", times, 8192)])
    head, _, row = capsys.readouterr().out.splitlines()
    assert head == "|  | n | full prefill's score | at most 1% lost | at most 2% lost |"
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:3] == ["m, t, 8192 tokens", "4", "0.750"]
    assert cells[3] == "1.5x, `hkvd@0.5` (0% [0%, 0%])"
    assert cells[4].startswith("4.0x, `static@0.16` (2% [")
    other = write("other", [replace(r, task="u") for r in scores], 8192, ":behind=harvested")
    main(["across", "within", run, other, "--times", str(tmp_path / "long")])
    *_, mean = capsys.readouterr().out.splitlines()
    assert mean.startswith(
        "| m, mean of 2 |  | 0.750 | 1.5x, `hkvd@0.5` (0% [0%, 0%]) | 4.0x, `static@0.16` (2% ["
    )
    main(["across", "within", run, "--times", short, "--losses", "0.01", "-0.5"])
    assert capsys.readouterr().out.splitlines()[2].split("|")[-3:-1] == [" not timed ", " none "]
    names = [f"{m}:behind=harvested" for m in ("static@0.16", "hkvd@0.5", "hkvd@0.05")]
    main(["across", "share", run, other, "--methods", *names])
    tu = ("t, 8192 tokens", "u, 8192 tokens")
    shares = [row.split(" | ") for row in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in shares] == [f"| m, {of}" for of in (*tu, "mean of 2")]
    assert all(row[1].startswith("1.8% [") for row in shares)
    assert all(row[2:] == ["0.0% [0.0%, 0.0%]", "- |"] for row in shares)
    seldom = [replace(r, score=float(r.example == "0")) for r in scores]
    rarely = write("rarely", seldom, 8192, ":behind=harvested")
    main(["across", "within", rarely, "--times", str(tmp_path / "long")])
    assert "8.0x, `reuse` (0% [too few])" in capsys.readouterr().out


def test_what_is_recovered_is_of_chunks_computed_behind_the_same() -> None:
    base = Result("t", "0", "full", 9, 0, "a", 1.0, 2.0, True, 0.0, 0.0, 1.0)
    rows = [base] + [
        replace(base, method=method, kl=kl)
        for method, kl in (
            ("reuse", 0.2),
            ("hkvd@0.16", 0.1),
            ("reuse:behind=nothing", 0.8),
            ("hkvd@0.16:behind=nothing", 0.2),
            ("hkvd@0.16:behind=bos", 0.1),
        )
    ]
    found = {summary.method: summary.recovered for summary in summarize(rows)}
    assert found["hkvd@0.16"] == pytest.approx(0.5)
    assert found["hkvd@0.16:behind=nothing"] == pytest.approx(0.75)
    assert found["reuse:behind=nothing"] == 0 and found["hkvd@0.16:behind=bos"] is None


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


def runs_of(folder: Path) -> list[Path]:
    """Folders of two models on two sets, 40 examples each; ``hkvd@0.16`` loses a fifth of ``reuse``."""
    draw, folders = np.random.default_rng(3), []
    for model in ("big", "small"):
        for task in ("t", "u"):
            folders.append(folder / f"{model}-{task}")
            folders[-1].mkdir()
            base = Result(task, "", "full", 9, 0, "a", 1.0, None, True, 0.0, 0.0, 1.0)
            rows = []
            for example in range(40):
                kl = float(draw.uniform(0.1, 0.3)) + (model == "small")
                for method, share in (
                    ("full", 0.0),
                    ("reuse", 1.0),
                    ("hkvd@0.16", 0.2),
                    ("mapreduce", 3.0),
                ):
                    found = replace(base, example=str(example), method=method, score=1 - share * kl / 2)
                    rows.append(replace(found, kl=None if method == "mapreduce" else share * kl))
            (folders[-1] / RESULTS).write_text("".join(json.dumps(asdict(r)) + "\n" for r in rows))
            (folders[-1] / RUN).write_text(json.dumps(asdict(Protocol(model))))
    return folders


def test_tables_over_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = list(map(str, runs_of(tmp_path)))

    def rows(*argv: str) -> list[list[str]]:
        (compare.main if argv[0] == "compare" else across.main)([*argv[argv[0] == "compare" :]])
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]

    kl = rows("kl", *folders, "--methods", "reuse", "hkvd@0.16")
    labels = ["big, t", "big, u", "small, t", "small, u"]
    assert kl[0] == ["", "n", "`reuse`", "`hkvd@0.16`"]
    means = [f"{name}, mean of 2" for name in ("big", "small", "t", "u")] + ["all, mean of 4"]
    assert [row[0] for row in kl[2:]] == labels + means
    numbers = [float(row[2].split()[0]) for row in kl[2:]]
    assert numbers[4] == pytest.approx((numbers[0] + numbers[1]) / 2, abs=1e-3)
    assert numbers[6] == pytest.approx((numbers[0] + numbers[2]) / 2, abs=1e-3)
    assert numbers[8] == pytest.approx(sum(numbers[:4]) / 4, abs=1e-3)
    assert [row[1] for row in kl[2:]] == ["40"] * 4 + [""] * 5
    each = rows("methods", *folders, "--methods", "hkvd@0.16", "mapreduce")
    assert [row[0] for row in each[2:4]] == ["`hkvd@0.16`", "`mapreduce`"] and len(each) == 4 * 4
    assert each[3][2] == "-" and each[3][6].startswith("0.") and each[2][2] == kl[2][3]
    (lost,) = (row for row in rows("lost", *folders, "--methods", "reuse") if row[0] == "big, t")
    shares = rows("recovered", *folders, "--methods", "hkvd@0.16")
    assert shares[2] == ["big, t", lost[2], "80% [80%, 80%]", "80% [80%, 80%]"]
    assert [row[0] for row in shares[2:]] == labels + means
    assert shares[-1][2:] == ["80% [80%, 80%]", "80% [80%, 80%]"]
    less = rows("compare", *folders, "--methods", "hkvd@0.16", "reuse", "--what", "kl")
    assert less[0][2] == "kl: `hkvd@0.16` less `reuse`"
    assert float(less[2][2].split()[0]) == pytest.approx(-0.8 * numbers[0], abs=2e-3)
    main(["across", "plot", *folders, "--policies", "hkvd", "--output", str(tmp_path / "kl.svg")])
    picture = (tmp_path / "kl.svg").read_text()
    assert all(label in picture for label in labels)
    with pytest.raises(SystemExit):
        main(["across", "kl", *folders])
    with pytest.raises(SystemExit):
        main(["compare", *folders, "--methods", "reuse"])


def test_an_interval_over_groups_and_of_a_share() -> None:
    """A small group moves the mean as much as a large one; pairs are not torn apart."""
    draw = np.random.default_rng(5)
    small, large = draw.normal(0, 1, 25).tolist(), draw.normal(3, 1, 400).tolist()
    mean = bootstrap_over([small, large])
    assert mean.value == pytest.approx((np.mean(small) + np.mean(large)) / 2)
    assert mean.high - mean.low == pytest.approx(4 * (1 / 5) / 2, rel=0.3)
    whole = draw.uniform(1, 9, 50)
    share = bootstrap_gone([(whole / 4, whole)])
    assert share.value == pytest.approx(0.75) and share.high - share.low < 1e-9
    few = draw.uniform(1, 3, 5)
    both = bootstrap_gone([(whole / 4, whole), (few / 2, few)])
    expected = 1 - (whole.mean() / 4 + few.mean() / 2) / (whole.mean() + few.mean())
    assert both.value == pytest.approx(expected) and both.low < expected < both.high
    noisy = bootstrap_gone([(whole / 4 + draw.normal(0, 1, 50), whole)])
    assert noisy.low < 0.75 < noisy.high and noisy.high - noisy.low < 0.3


def test_the_worst_of_several_runs_keep_to_their_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = runs_of(tmp_path)  # both models have the same examples
    main(["worst", *map(str, folders), "--count", "3"])
    blocks = capsys.readouterr().out.strip().split("\n\n")
    assert len(blocks) == 3
    for block in blocks:
        name, _, rest = block.partition(", ")
        assert name.startswith("small-")  # its KL is higher
        (hkvd,) = re.findall(r"hkvd@0\.16 +KL ([\d.]+)", rest)
        (reuse,) = re.findall(r"reuse +KL ([\d.]+)", rest)
        assert float(hkvd) == pytest.approx(0.2 * float(reuse), abs=1e-3) and float(reuse) > 1


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
