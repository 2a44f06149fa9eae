"""What is released beside the code says the same as the code."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

import vllm_blend
from vllm_blend.server.config import ServerSettings

ROOT = Path(__file__).parents[2]
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
IMAGES = sorted((ROOT / "deploy").glob("Dockerfile.*"))
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))


def test_one_version() -> None:
    (in_setup,) = re.findall(r'version="([^"]+)"', (ROOT / "setup.py").read_text())
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    released = [heading.split()[0] for heading in headings if heading != "Unreleased"]
    assert in_setup == citation["version"] == released[0] == vllm_blend.__version__


def test_the_paper_is_cited() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    (paper,) = citation["references"]
    assert paper["url"].removeprefix("https://") in (ROOT / "README.md").read_text()
    assert citation["license"] == "Apache-2.0" and len(paper["authors"]) == 9


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / name).read_text())
    for link in links:
        assert link.startswith("https://") or (ROOT / link).exists(), link


def test_commands_for_contributors_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    named = re.findall(r"make ([a-z-]+)", (ROOT / "CONTRIBUTING.md").read_text())
    assert named and set(named) - {"g"} <= set(targets)


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_forms_are_whole(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    if path.stem == "config":
        assert form == {"blank_issues_enabled": True}
        return
    assert form["name"] and form["description"]
    fields = [field["id"] for field in form["body"]]
    assert len(fields) == len(set(fields)) > 0
    assert all(field["attributes"]["label"] for field in form["body"])


def instructions(path: Path) -> list[tuple[str, str]]:
    """Of a container file: each instruction and what stands behind it, comments left out."""
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.M).replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip()]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_images_copy_what_is_there_and_start_a_blending_server(path: Path) -> None:
    lines = instructions(path)
    ignored = (ROOT / ".dockerignore").read_text().split()
    kept = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    copied = [rest.split() for word, rest in lines if word == "COPY" and "--from" not in rest]
    sources = [source for words in copied for source in words[:-1]]
    assert {"vllm_blend", "csrc", "setup.py"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(fnmatch(source, pattern) or source.startswith(f"{pattern}/") for pattern in kept)
    (entrypoint,) = [json.loads(rest) for word, rest in lines if word == "ENTRYPOINT"]
    values: Any = json.loads(entrypoint[entrypoint.index("--additional-config") + 1])
    ServerSettings.from_mapping(values["vllm_blend"])


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_images_pass_hadolint(path: Path) -> None:
    if shutil.which("hadolint") is None:
        pytest.skip("no hadolint on PATH")
    assert subprocess.run(["hadolint", str(path)]).returncode == 0
