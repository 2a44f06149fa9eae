"""What is released beside the code says the same as the code."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from markdown.extensions.toc import slugify
from settings_checks import check_json

import vllm_blend

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
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
    for link in (link for link in links if not link.startswith("https://")):
        path, _, section = link.partition("#")
        page = ROOT / (path or name)
        assert page.exists(), link
        assert page.suffix != ".md" or not section or section in _sections(page), link


def _sections(page: Path) -> set[str]:
    """What a link may name after ``#``: the headings of a page as GitHub and MkDocs spell them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {slugify(heading, "-") for heading in headings}


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
    check_json("server", json.loads(entrypoint[entrypoint.index("--additional-config") + 1]))


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.name)
def test_images_pass_hadolint(path: Path) -> None:
    if shutil.which("hadolint") is None:
        pytest.skip("no hadolint on PATH")
    assert subprocess.run(["hadolint", str(path)]).returncode == 0


def commands() -> list[list[str]]:
    """Arguments of the servers that compose and Kubernetes start."""
    compose = yaml.safe_load((ROOT / "deploy/compose.yml").read_text())
    found = [compose["services"][name]["command"] for name in ("cpu", "gpu")]
    for part in yaml.safe_load_all((ROOT / "deploy/kubernetes.yml").read_text()):
        if part["kind"] == "Deployment":
            (container,) = part["spec"]["template"]["spec"]["containers"]
            found += [container["args"]] if container["name"] == "server" else []
    return found


@pytest.mark.parametrize("at", range(3))
def test_what_is_deployed_is_accepted(at: int) -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    words = commands()[at]
    known = make_arg_parser(FlexibleArgumentParser())._option_string_actions
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= set(known)
    check_json("server", json.loads(words[words.index("--additional-config") + 1]))


def test_compose_mounts_what_is_there() -> None:
    services = yaml.safe_load((ROOT / "deploy/compose.yml").read_text())["services"]
    mounts = [volume for service in services.values() for volume in service.get("volumes", ())]
    local = [mount.partition(":")[0] for mount in mounts if mount.startswith(".")]
    assert len(local) == 3
    for path in local:
        assert (ROOT / "deploy" / path).exists(), path
    for name in ("cpu", "gpu"):
        assert (ROOT / services[name]["build"]["dockerfile"]).exists()
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def test_prometheus_takes_its_configuration() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("no promtool on PATH")
    path = ROOT / "deploy/monitoring/prometheus.yml"
    assert subprocess.run(["promtool", "check", "config", str(path)]).returncode == 0
    targets = yaml.safe_load(path.read_text())["scrape_configs"][0]["static_configs"][0]["targets"]
    compose = yaml.safe_load((ROOT / "deploy/compose.yml").read_text())
    assert targets == [f"{compose['x-server']['networks']['default']['aliases'][0]}:8000"]
