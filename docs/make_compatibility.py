"""Writes compatibility.md, what runs on what, from the results of the tests.

    pytest tests --collect-only -q -m covers --covered docs/results/compatibility.csv  # which there are
    pytest tests -m "covers and not gpu" --covered docs/results/compatibility.csv        # how they go
    python docs/make_compatibility.py            # writes docs/compatibility.md
    python docs/make_compatibility.py --check    # exits with 1 if it is not up to date

The first three are `make compatibility`. On a GPU: `pytest tests -m "covers and gpu" --covered ...`.
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PATH = HERE / "compatibility.md"
RESULTS = HERE / "results" / "compatibility.csv"

BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "XFORMERS")
EVERY = "every"
SHOWN = 3
"""Families that a cell names."""

MISSED = (
    "on one fp8 weights [miss a bound](start.md#eight-and-four-bits) in four of six cases, an fp8 "
    "cache in four of 18"
)

HEAD = """# What runs on what

Made from [the tests' results](results/compatibility.csv) by `make compatibility`; do not edit. {counts}

| a cell says | |
|---|---|
| **yes** | tests pass; in brackets the model families they use, and how many cases there are |
| refused | the engine says so at its start, with the reason; a test holds that |
| not run | there are tests, which have not run, or not passed: most need a GPU; {missed} |
| fails | a test fails |
| (empty) | no test |
"""


@dataclass(frozen=True)
class Row:
    """A line of the results: a test, for one feature on one backend with one family."""

    feature: str
    backend: str
    family: str
    refused: bool
    test: str
    cases: int
    passed: int
    failed: int

    @property
    def state(self) -> str:
        if self.failed:
            return "fails"
        if self.passed < self.cases:
            return "not run"
        return "refused" if self.refused else "**yes**"


def read(path: Path = RESULTS) -> list[Row]:
    with path.open(newline="") as file:
        return [
            Row(
                *(line[name] for name in ("feature", "backend", "family")),
                line["refused"] == "yes",
                line["test"],
                *(int(line[name]) for name in ("cases", "passed", "failed")),
            )
            for line in csv.DictReader(file)
        ]


def cell(rows: Sequence[Row], name_families: bool = True) -> str:
    """What a cell says of its tests, the worst first."""
    words = []
    for state in ("fails", "not run", "**yes**", "refused"):
        found = [row for row in rows if row.state == state]
        if not found:
            continue
        families = sorted({row.family for row in found} - {EVERY})
        told = [] if not name_families else families
        if len(told) > SHOWN:
            told = [f"{len(told)} families"]
        cases = sum(row.cases for row in found)
        words.append(f"{state} ({', '.join([*told, str(cases)])})")
    return "; ".join(words)


def table(rows: Sequence[Row], key: str, name_families: bool) -> list[str]:
    """A line for each value of a field, a column for each backend."""
    by_line: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        for backend in BACKENDS if row.backend == EVERY else (row.backend,):
            by_line[getattr(row, key)][backend].append(row)
    lines = [f"| {key} | {' | '.join(BACKENDS)} |", "|---" * (len(BACKENDS) + 1) + "|"]
    for name in sorted(by_line, key=str.lower):
        cells = (cell(by_line[name][backend], name_families) for backend in BACKENDS)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def page() -> str:
    rows = read()
    tests = len({row.test for row in rows})
    cases = {
        state: sum(row.cases for row in rows if row.state == state) for state in {r.state for r in rows}
    }
    counts = (
        f"{tests} tests with {sum(cases.values()):,} cases: "
        f"{cases.get('**yes**', 0) + cases.get('refused', 0):,} pass, "
        f"{cases.get('fails', 0) + cases.get('not run', 0):,} have not run, or not passed."
    )
    refused = {row.feature for row in rows} - {row.feature for row in rows if not row.refused}
    families = [row for row in rows if row.family != EVERY and row.feature.startswith("rows chosen")]
    parts = [
        HEAD.format(counts=counts, missed=MISSED),
        "## Features\n",
        *table([row for row in rows if row.feature not in refused], "feature", True),
        "\n## Refused\n",
        *table([row for row in rows if row.feature in refused], "feature", True),
        "\n## Model families\n",
        "Tiny random models of each family, and SmolLM2: exact KV with some rows computed again gives",
        "full prefill's logits.\n",
        *table(families, "family", False),
        "\n## Which tests\n",
        "| feature | tests |",
        "|---|---|",
    ]
    for feature in sorted({row.feature for row in rows}, key=str.lower):
        named = sorted({row.test for row in rows if row.feature == feature})
        parts.append(f"| {feature} | {'<br>'.join(f'`{name}`' for name in named)} |")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        if PATH.read_text(encoding="utf-8") != page():
            sys.exit("docs/compatibility.md is not up to date: run python docs/make_compatibility.py")
    else:
        PATH.write_text(page(), encoding="utf-8")
