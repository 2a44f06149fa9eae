"""That a vLLM fits is remembered, for as long as nothing changes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vllm_blend.compat import fit
from vllm_blend.compat.kept import kept_misfits
from vllm_blend.compat.member import Member
from vllm_blend.compat.source import Source


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.setattr(fit, "members", lambda: [Member("things", "act", "a")])
    root = tmp_path / "vllm"
    root.mkdir()
    (root / "things.py").write_text("def act(a): ...\n")
    return root


def read(root: Path, version: str = "0.32.0") -> tuple[int, list[str]]:
    """How many files were read, and what was found."""
    source = Source(root)
    found = kept_misfits(source, version)
    return len(source.files), found


def test_what_fits_is_read_once(root: Path) -> None:
    assert read(root) == (1, [])
    assert read(root) == (0, [])
    assert read(root, "0.32.1") == (1, [])


def test_a_changed_file_is_read_again(root: Path) -> None:
    read(root)
    (root / "things.py").write_text("def act(b): ...\n")
    assert read(root) == (1, ["vllm.things.act takes (b); expected (a)"])
    assert read(root)[0] == 1  # what does not fit is not kept
    (root / "things.py").unlink()
    assert read(root) == (0, ["vllm.things.act is missing"])


def test_another_table_is_another_question(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read(root)
    monkeypatch.setattr(fit, "members", lambda: [Member("things", "act", "b")])
    assert read(root)[1] == ["vllm.things.act takes (a); expected (b)"]


def test_what_is_kept_may_be_damaged_or_forbidden(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read(root)
    (kept,) = (tmp_path / "cache").rglob("*.json")
    for text in ("", "{}", "[1]", '{"nowhere": [1, 2]}'):
        kept.write_text(text)
        assert read(root) == (1, [])
    monkeypatch.setenv("VLLM_CACHE_ROOT", os.path.join(str(kept), "below"))
    assert read(root) == (1, []) and read(root) == (1, [])
