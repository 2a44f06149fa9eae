"""The packages of vllm_blend and the direction of their imports (docs/architecture.md)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "vllm_blend"

LOWER = {
    "core": set(),
    "ops": {"core"},
    "compat": {"ops", "core"},
    "store": {"compat", "core"},
    "attention": {"compat", "ops", "core"},
    "model": {"attention", "compat", "ops", "core"},
    "server": {"store", "compat", "core"},
    "api": {"store", "compat", "core"},
    "plugin": {"server", "model", "attention", "store", "compat", "core"},
    "cli": {"api", "server", "model", "attention", "store", "compat", "ops", "core"},
    "__main__": {"cli"},
}
"""What each package may import of the others: nothing that is above it, and no more than it needs."""


def modules(root: Path) -> dict[str, Path]:
    """Files by dotted name below the package, e.g. ``store.disk``."""
    found = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts).removesuffix("__init__").rstrip(".")] = path
    return found


def imports(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The package's modules that a file imports anywhere in it, for type checkers too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "vllm_blend":
                below = name.removeprefix("vllm_blend").lstrip(".")
                yield below if below in known else below.rpartition(".")[0]


def graph(root: Path) -> dict[str, set[str]]:
    known = modules(root)
    return {name: set(imports(path, known)) - {name} for name, path in known.items()}


def upward(arrows: dict[str, set[str]]) -> list[str]:
    """Imports that ``LOWER`` does not allow; ``vllm_blend/__init__.py`` may name what is public."""
    wrong = []
    for name, targets in arrows.items():
        room = name.split(".")[0]
        for target in targets if name else ():
            there = target.split(".")[0]
            if there != room and there not in LOWER[room]:
                wrong.append(f"{name} imports {target or 'vllm_blend'}")
    return sorted(wrong)


def circles(arrows: dict[str, set[str]]) -> list[str]:
    """Modules that import each other, in one step or in several."""
    reached = {name: set(targets) for name, targets in arrows.items() if name}
    for middle in reached:
        for targets in reached.values():
            if middle in targets:
                targets |= reached[middle]
    return sorted(name for name, targets in reached.items() if name in targets)


def test_the_packages_are_these() -> None:
    entries = {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()}
    assert entries == set(LOWER) - {"__main__"}
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "__main__.py"}


def test_no_import_runs_up() -> None:
    assert upward(graph(ROOT)) == []


def test_no_modules_import_each_other() -> None:
    assert circles(graph(ROOT)) == []


@pytest.mark.parametrize("line", ["from vllm_blend.model import rows", "import vllm_blend.model.rows"])
def test_an_arrow_up_and_a_circle_are_found(tmp_path: Path, line: str) -> None:
    for name, code in {
        "model/rows.py": "from vllm_blend.core.step import Status",
        "core/step.py": line,
    }.items():
        path = tmp_path / name
        path.parent.mkdir()
        path.write_text(code + "\n")
    arrows = graph(tmp_path)
    assert upward(arrows) == ["core.step imports model.rows"]
    assert circles(arrows) == ["core.step", "model.rows"]
