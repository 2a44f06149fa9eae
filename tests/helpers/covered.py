"""What tests say that they cover, and how they went, for docs/compatibility.md: a plugin of pytest.

A test names what it shows; names in braces are its parameters':

    @pytest.mark.covers("LoRA", backend="CPU_ATTN", family="Llama")
    @pytest.mark.covers("exact KV is full prefill", backend="CPU_ATTN", family="{engine}")
    @pytest.mark.covers("context parallelism", refused=True)    # shows that it is refused

``--covered FILE`` keeps there, with ``--collect-only``, which tests there are, and else how those went
that ran.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest

EVERY = "every"
"""Backend or family of what does not depend on it."""


@dataclass(frozen=True)
class Cover:
    """What a test covers.

    Attributes:
        feature, backend, family: as its mark names them.
        refused: it shows that an engine refuses this, with the reason.
        test: file and function.
    """

    feature: str
    backend: str
    family: str
    refused: bool
    test: str


@dataclass(frozen=True)
class Row:
    """How a test went: of its ``cases`` some ``passed`` and some ``failed``; others did not run."""

    cover: Cover
    cases: int
    passed: int = 0
    failed: int = 0


NAMES = ("feature", "backend", "family", "refused", "test", "cases", "passed", "failed")


def covers_of(item: pytest.Item) -> list[Cover]:
    """What a test's marks say."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    found = []
    for mark in item.iter_markers("covers"):
        names = [mark.args[0], mark.kwargs.get("backend", EVERY), mark.kwargs.get("family", EVERY)]
        names = [name.format_map(parameters) for name in names]
        found.append(Cover(*names, mark.kwargs.get("refused", False), item.nodeid.partition("[")[0]))
    return found


def read(path: Path) -> dict[Cover, Row]:
    """The file's rows; none where it is not there."""
    if not path.exists():
        return {}
    found = {}
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            cover = Cover(
                *(line[f.name] for f in fields(Cover) if f.name not in ("refused", "test")),
                line["refused"] == "yes",
                line["test"],
            )
            found[cover] = Row(cover, *(int(line[name]) for name in NAMES[-3:]))
    return found


def write(path: Path, rows: Iterable[Row]) -> None:
    with path.open("w", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(NAMES)
        for row in sorted(rows, key=lambda row: astuple(row.cover)):
            feature, backend, family, refused, test = astuple(row.cover)
            words = (feature, backend, family, "yes" if refused else "no", test)
            lines.writerow([*words, row.cases, row.passed, row.failed])


class Recorder:
    """Brings a file up to date with the tests of this session."""

    def __init__(self, path: Path, collects: bool) -> None:
        self._path, self._collects = path, collects
        self._passed: Counter[Cover] = Counter()
        self._failed: Counter[Cover] = Counter()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if self._collects:
            cases = Counter(cover for item in session.items for cover in covers_of(item))
            before = read(self._path)
            rows = [before.get(cover, Row(cover, count)) for cover, count in cases.items()]
            write(
                self._path,
                [
                    row if row.cases == cases[row.cover] else Row(row.cover, cases[row.cover])
                    for row in rows
                ],
            )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.failed:
            counts = self._failed if report.failed else self._passed
            if not report.skipped:
                counts.update(Cover(*said) for name, said in report.user_properties if name == "covers")

    def pytest_sessionfinish(self) -> None:
        if self._collects:
            return
        rows = read(self._path)
        for cover in self._passed.keys() | self._failed.keys():
            if cover not in rows:
                raise pytest.UsageError(f"{cover.test} is not in {self._path}: collect first")
            passed, failed = self._passed[cover], self._failed[cover]
            if failed or passed == rows[cover].cases:  # part of a test's cases says nothing
                rows[cover] = replace(rows[cover], passed=passed, failed=failed)
        write(self._path, rows.values())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--covered", type=Path, metavar="FILE", help="keep there what tests cover")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "covers(feature, backend, family, refused): what the test shows, for docs/compatibility.md",
    )
    path: Any = config.getoption("--covered")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(path, config.getoption("collectonly")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.user_properties += [("covers", astuple(cover)) for cover in covers_of(item)]
