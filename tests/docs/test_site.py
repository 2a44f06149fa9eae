"""The docs as a site: built without a warning, whole, and without anything from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr[-3000:]
    return folder


def test_every_page_is_there_and_can_be_reached(site: Path) -> None:
    pages = {str(path.relative_to(ROOT / "docs").with_suffix("")) for path in ROOT.glob("docs/**/*.md")}
    pages = {re.sub("README$", "index", page) for page in pages} | {"index", "CHANGELOG", "reference"}
    index = (site / "index.html").read_text()
    for page in pages:
        assert (site / f"{page}.html").exists(), page
        assert re.search(rf'href="{re.escape(page)}\.html"', index) or page == "index", page


def test_links_lead_somewhere(site: Path) -> None:
    for path in site.rglob("*.html"):
        html = path.read_text()
        for link in re.findall(r'(?:href|src)="([^"#?]+)[^"]*"', html):
            if not re.match(r"[a-z]+:|/|\.$", link):
                assert (path.parent / link).exists(), f"{path.name}: {link}"


def test_nothing_comes_from_elsewhere(site: Path) -> None:
    for path in site.rglob("*.html"):
        tags = re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", path.read_text())
        loaded = [tag for tag in tags if re.search(r'(?:src|href)="(?:https?:)?//', tag)]
        assert [tag for tag in loaded if 'rel="canonical"' not in tag] == [], path.name


def test_the_reference_is_made_of_docstrings(site: Path) -> None:
    text = (site / "reference.html").read_text()
    for name in ("vllm_blend.Blender", "vllm_blend.api.langchain.ChatBlend"):
        assert f'id="{name}"' in text
