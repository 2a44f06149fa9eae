"""mkdocs' hook (../mkdocs.yml): pages that are made of files outside docs/.

Those of ``PAGES`` become pages; any other file that a page links to becomes a page with its text;
reference.md is made of docstrings.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "deploy/README.md": "containers.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
}
LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")
FENCES = {".py": "python", ".sh": "bash", ".yml": "yaml", ".json": "json"}
PUBLIC = (
    "vllm_blend.Blender",
    "vllm_blend.BlendSettings",
    "vllm_blend.embedded_model",
    "vllm_blend.store.ChunkStore",
    "vllm_blend.store.open_store",
    "vllm_blend.server.config.ServerSettings",
    "vllm_blend.api.langchain.ChatBlend",
    "vllm_blend.api.llama_index.BlendLLM",
    "vllm_blend.api.routing.Router",
)


def on_files(files: Files, config: Any) -> Files:
    """Adds what is made, and the sources that any page links to."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text("utf-8")))
    reference = "# API\n\n" + "\n\n".join(f"::: {name}" for name in PUBLIC) + "\n"
    files.append(File.generated(config, "reference.md", content=reference))
    for page in files.documentation_pages():
        for target in sorted(outside(page)):
            if files.get_file_from_path(source_page(target)) is None:
                made = File.generated(config, source_page(target), content=shown(target))
                made.inclusion = made.inclusion.NOT_IN_NAV
                files.append(made)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A page with its links to where things are in the site."""
    place = origin(page.file)

    def moved(match: re.Match[str]) -> str:
        link, anchor = match[1], match[2] or ""
        target = resolve(place, link)
        if target is None:
            return match[0]
        to = in_site(target)
        up = "../" * page.file.src_uri.count("/")
        return f"]({up}{to}{anchor})"

    return LINK.sub(moved, markdown)


def origin(file: File) -> Path:
    """The file of the repository that a page is made of."""
    for name, made in PAGES.items():
        if file.src_uri == made:
            return ROOT / name
    return ROOT / "docs" / file.src_uri


def resolve(place: Path, link: str) -> Path | None:
    """The file of the repository that a link in ``place`` leads to; None: it leads elsewhere."""
    if re.match(r"[a-z]+:", link):
        return None
    target = (place.parent / link).resolve()
    return target if target.exists() and target.is_relative_to(ROOT) else None


def in_site(target: Path) -> str:
    """Where a file of the repository is found in the site."""
    name = str(target.relative_to(ROOT))
    if name in PAGES:
        return PAGES[name]
    if target.is_relative_to(ROOT / "docs") and target.is_file() and target.suffix != ".py":
        return str(target.relative_to(ROOT / "docs"))
    return source_page(target)


def source_page(target: Path) -> str:
    return f"source/{target.relative_to(ROOT)}.md"


def outside(page: File) -> set[Path]:
    """What a page links to that becomes a page with its text."""
    links = LINK.findall(page.content_string)
    targets = {resolve(origin(page), link) for link, _ in links}
    return {t for t in targets if t is not None and in_site(t) == source_page(t)}


def shown(target: Path) -> str:
    """A page with a file's text, or with those of a folder's files."""
    paths = sorted(target.glob("*.py")) if target.is_dir() else [target]
    parts = [f"# {target.relative_to(ROOT)}"]
    for path in paths:
        if target.is_dir():
            parts.append(f"## {path.name}")
        fence = FENCES.get(path.suffix, "text")
        parts.append(f"````{fence}\n{path.read_text('utf-8').rstrip()}\n````")
    return "\n\n".join(parts) + "\n"
