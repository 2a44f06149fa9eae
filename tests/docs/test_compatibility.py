"""The page of what runs on what: it is that of the tests' results, whose tests are there."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from covered import Cover, Row, read, write
from test_docs import DOCS, ROOT

pytest_plugins = ["pytester"]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("make_compatibility")


def test_the_page_is_up_to_date(module: Any) -> None:
    assert (DOCS / "compatibility.md").read_text(encoding="utf-8") == module.page(), (
        "run make compatibility"
    )


def test_nothing_of_it_fails(module: Any) -> None:
    assert [row for row in module.read() if row.failed or row.passed > row.cases] == []


def marked(path: Path) -> Iterator[str]:
    """Functions of a file that say what they cover, by a mark of theirs or of a parameter."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and any(
            isinstance(part, ast.Attribute) and part.attr == "covers"
            for decorator in node.decorator_list
            for part in ast.walk(decorator)
        ):
            yield f"{path.relative_to(ROOT).as_posix()}::{node.name}"


def test_the_results_are_of_the_tests_that_there_are(module: Any) -> None:
    here = Path(__file__)
    paths = [path for path in (ROOT / "tests").rglob("test_*.py") if path != here]
    found = {name for path in paths for name in marked(path)}
    assert len(found) > 20
    assert {row.test for row in module.read()} == found, "run make compatibility"


TESTS = """
import pytest

@pytest.mark.covers("one", backend="A", family="{family}")
@pytest.mark.parametrize("family", ["x", "y"])
@pytest.mark.parametrize("number", [0, 1])
def test_one(family, number):
    assert family == "x" or number

@pytest.mark.covers("{name}", refused=True)
@pytest.mark.parametrize("name", ["two"])
def test_two(name):
    pass

@pytest.mark.covers("three")
@pytest.mark.gpu
def test_three():
    pass

def test_four():
    pass
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_results_are_kept(pytester: pytest.Pytester, workers: int) -> None:
    helpers = ROOT / "tests" / "helpers"
    pytester.makeini(f"[pytest]\nmarkers = gpu\npythonpath = {helpers}\n")
    pytester.makeconftest('pytest_plugins = ["covered"]')
    pytester.makepyfile(test_some=TESTS)
    path = pytester.path / "found.csv"
    run = ("-p", "no:cacheprovider", f"--covered={path}", "-p", "xdist", f"-n{workers}")
    collect = ("--collect-only", "-m", "covers", *run[:3])
    pytester.runpytest_subprocess(*collect).assert_outcomes()

    def found() -> dict[tuple[str, str, bool], tuple[int, int, int]]:
        rows = read(path).values()
        return {
            (r.cover.feature, r.cover.family, r.cover.refused): (r.cases, r.passed, r.failed)
            for r in rows
        }

    keys = [("one", "x", False), ("one", "y", False), ("two", "every", True), ("three", "every", False)]
    assert found() == dict(zip(keys, [(2, 0, 0), (2, 0, 0), (1, 0, 0), (1, 0, 0)], strict=True))
    pytester.runpytest_subprocess("-m", "not gpu", *run).assert_outcomes(passed=5, failed=1)
    assert found() == dict(zip(keys, [(2, 2, 0), (2, 1, 1), (1, 1, 0), (1, 0, 0)], strict=True))
    pytester.runpytest_subprocess("-m", "gpu", *run).assert_outcomes(passed=1)
    after = found()
    assert after == dict(zip(keys, [(2, 2, 0), (2, 1, 1), (1, 1, 0), (1, 1, 0)], strict=True))
    # a part of a test's cases says nothing, and collecting forgets what is not there any more
    pytester.runpytest_subprocess("-k", "1-y", *run).assert_outcomes(passed=1)
    assert found() == after
    pytester.makepyfile(test_some=TESTS.replace('["x", "y"]', '["x"]').replace("[0, 1]", "[0]"))
    pytester.runpytest_subprocess(*collect)
    assert found() == {("one", "x", False): (1, 0, 0)} | {key: after[key] for key in keys[2:]}


def row(state: str, family: str = "llama", test: str = "one") -> Row:
    passed, failed = {"yes": (3, 0), "refused": (3, 0), "not run": (0, 0), "fails": (2, 1)}[state]
    return Row(Cover("feature", "CPU_ATTN", family, state == "refused", test), 3, passed, failed)


@pytest.mark.parametrize(
    ("rows", "cell"),
    [
        ([row("yes")], "**yes** (llama, 3)"),
        ([row("yes"), row("yes", family="qwen3")], "**yes** (llama, qwen3, 6)"),
        ([row("yes", family=name) for name in "abcd"], "**yes** (4 families, 12)"),
        ([row("refused", family="every")], "refused (3)"),
        ([row("not run"), row("yes", test="two")], "not run (llama, 3); **yes** (llama, 3)"),
        ([row("fails"), row("yes", test="two")], "fails (llama, 3); **yes** (llama, 3)"),
    ],
)
def test_a_cell_says_how_its_tests_went(
    module: Any, tmp_path: Path, rows: list[Row], cell: str
) -> None:
    write(tmp_path / "kept.csv", rows)
    assert module.cell(module.read(tmp_path / "kept.csv")) == cell
