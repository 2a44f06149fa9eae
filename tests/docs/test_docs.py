"""README and docs: every block runs or is checked, every link leads somewhere, every file is current.

Python blocks of a page run in order, in one namespace, on one engine that all pages share. A comment
before a block says what is special about it: ``<!-- needs: redis -->`` (a real one where there is one),
``<!-- needs: server -->`` (a real one), ``<!-- needs: ANYTHING ELSE -->`` (its imports, attributes and
keyword arguments are resolved instead), ``<!-- holds: EXPRESSION -->`` (true once the block has run),
``<!-- settings: server -->`` (or request, or store: what the JSON must be accepted by).
"""

from __future__ import annotations

import ast
import gc
import importlib
import importlib.util
import inspect
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from servers import redis_binary
from settings_checks import check_json

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    *sorted(DOCS.glob("*.md")),
    *sorted(DOCS.glob("tutorials/*.md")),
    *sorted(DOCS.glob("rfc/*.md")),
    DOCS / "results/README.md",
]
LANGUAGES = {"python", "console", "json", "diff", ""}
SERVER = "http://127.0.0.1:8000"
OTHER_PROGRAMS = {"docker", "curl", "torchrun", "."}


@dataclass(frozen=True)
class Block:
    """A fenced block; ``line`` is that of its fence."""

    page: Path
    line: int
    language: str
    text: str
    needs: str = ""
    settings: str = ""
    holds: str = ""

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    found, start = [], None
    for at, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = at
            continue
        before = "\n".join(takewhile(lambda text: text.startswith("<!--"), lines[start - 1 :: -1]))
        kinds = ("needs", "settings", "holds")
        told = {key: re.search(rf"<!-- {key}: (.*?) -->", before) for key in kinds}
        notes = {key: match[1] if match else "" for key, match in told.items()}
        text = "\n".join(lines[start + 1 : at]) + "\n"
        found.append(Block(page, start + 1, lines[start].removeprefix("```"), text, **notes))
        start = None
    assert start is None, f"{page.name}: the block at line {start} has no end"
    return found


ALL = [block for page in PAGES for block in blocks(page)]


def of(language: str) -> list[Any]:
    return [pytest.param(block, id=block.place) for block in ALL if block.language == language]


def test_every_block_is_of_a_language_that_is_checked() -> None:
    assert {block.language for block in ALL} <= LANGUAGES


# --- Python ---------------------------------------------------------------------------------------


class OneLLM:
    """Stands in for ``vllm.LLM``: the first call makes the engine, others get the same one."""

    def __init__(self) -> None:
        self.made: Any = None
        self.asked: Any = None

    def __call__(self, model: str, **options: Any) -> Any:
        if self.made is None:
            from vllm import LLM

            self.asked = model, options
            self.made = LLM(model, enforce_eager=True, **options)
        assert (model, options) == self.asked, "all pages make the same engine, so that they share one"
        return self.made


@pytest.fixture(scope="module")
def one_llm() -> Iterator[OneLLM]:
    shared = OneLLM()
    yield shared
    shared.made = None
    gc.collect()


@pytest.fixture(scope="module")
def server_url(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server as ``vllm-blend serve`` starts it, of the small model."""
    from vllm_blend.cli.server_process import server_process

    options = "--dtype float32 --enforce-eager --max-model-len 4096 --max-num-batched-tokens 4096"
    with server_process(str(smollm2), options.split(), {}) as server:
        yield server.url


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(b.page == page and b.language == "python" for b in ALL)],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_python(
    page: Path, one_llm: OneLLM, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    import vllm

    stock, names = vllm.LLM, {"__name__": "docs"}
    for block in (block for block in ALL if block.page == page and block.language == "python"):
        text = block.text
        if block.needs == "redis" and redis_binary() is not None:
            server = request.getfixturevalue("redis_server")
            text = text.replace("redis://127.0.0.1:6379/0", server.url)
        elif block.needs == "server":
            text = text.replace(SERVER, request.getfixturevalue("server_url"))
        elif block.needs:
            resolve(text)
            continue
        code = compile("\n" * block.line + text, str(page), "exec")
        with monkeypatch.context() as patch:
            patch.setattr(vllm, "LLM", one_llm if one_llm.made is not None else first(one_llm, stock))
            exec(code, names)
        if block.holds:
            assert eval(block.holds, names), f"{block.place}: {block.holds}"


def first(one_llm: OneLLM, stock: Any) -> Any:
    """The first page's ``LLM``, with vLLM's own back in its place while the engine is made."""
    import vllm

    def make(model: str, **options: Any) -> Any:
        stand_in, vllm.LLM = vllm.LLM, stock
        try:
            return one_llm(model, **options)
        finally:
            vllm.LLM = stand_in

    return make


def resolve(text: str) -> None:
    """Imports what a block imports; finds attributes and keyword arguments of what it names so."""
    tree, known = ast.parse(text), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                known[(name.asname or name.name).split(".")[0]] = importlib.import_module(name.name)
        elif isinstance(node, ast.ImportFrom):
            module = importlib.import_module(str(node.module))
            for name in node.names:
                known[name.asname or name.name] = getattr(module, name.name)

    def find(node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            return known.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = find(node.value)
            return getattr(owner, node.attr) if isinstance(owner, type | ModuleType) else None
        return None

    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            made = find(node.value.func)
            if isinstance(made, type) and isinstance(node.targets[0], ast.Name):
                known[node.targets[0].id] = made  # a class in an instance's place: it has its methods
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            find(node)
        if isinstance(node, ast.Call) and callable(called := find(node.func)):
            parameters = inspect.signature(called).parameters.values()
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                assert {k.arg for k in node.keywords if k.arg} <= {p.name for p in parameters}, called


# --- commands -------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", of("console"))
def test_console(block: Block, tmp_path: Path) -> None:
    for line in re.sub(r"\\\n\s*", "", block.text).splitlines():
        for command in line.split(" && "):
            words = shlex.split(command, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                del words[0]
            if words:
                check_command(words, tmp_path)


def check_command(words: list[str], folder: Path) -> None:
    program, rest = words[0], words[1:]
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert {word for word in rest if "=" not in word} <= set(targets)
    elif program == "pip":
        check_pip(rest)
    elif program == "python" and rest[:1] == ["-m"]:
        spec = importlib.util.find_spec(rest[1])
        assert spec is not None and spec.origin is not None, rest[1]
        check_flags(rest[2:], [spec.origin, *Path(spec.origin).parent.glob("*.py")])
    elif program == "python":
        script = ROOT / rest[0]
        assert script.is_file(), rest[0]
        shared = ["common.py"] + ["served.py"] * ("parser_of" in script.read_text())
        check_flags(rest[1:], [script, *(p for name in shared for p in script.parent.glob(name))])
    elif program == "vllm-blend":
        check_own(rest, folder)
    elif program == "vllm":
        assert rest[0] == "serve"
        check_server(rest[1:], folder)
    else:
        assert program in OTHER_PROGRAMS, program


def check_flags(words: list[str], sources: list[Any]) -> None:
    """Whether a script that parses its own arguments, or a module beside it, names these."""
    text = "".join(Path(source).read_text() for source in dict.fromkeys(map(str, sources)))
    for word in words:
        if word.startswith("--"):
            assert f'"{word}"' in text, word
        elif "/" in word and not word.isupper() and "://" not in word:
            assert (ROOT / word).exists(), word


def check_own(words: list[str], folder: Path) -> None:
    """Whether ``vllm-blend`` has this command, with these options."""
    import typer

    from vllm_blend.cli.app import app

    own, after = words, []
    if "--" in words:
        own, after = words[: words.index("--")], words[words.index("--") + 1 :]
    found: Any = typer.main.get_command(app)
    while own and own[0] in getattr(found, "commands", {}):
        found, own = found.commands[own[0]], own[1:]
    if words[0] == "eval" and len(words) > 1:
        check_flags(own, list((ROOT / "vllm_blend/cli/eval").glob("*.py")))
        return
    known = {name for parameter in found.params for name in parameter.opts} | {"--help", "-h"}
    known |= {"--install-completion", "--show-completion"}
    assert {word.partition("=")[0] for word in own if word.startswith("-")} <= known
    for at, word in enumerate(own):
        if word == "--settings" and own[at + 1].startswith("{"):
            check_json("server", {"vllm_blend": json.loads(own[at + 1])})
    check_server(after, folder)


def check_pip(words: list[str]) -> None:
    assert words[0] == "install"
    known = (ROOT / "setup.py").read_text() + (ROOT / "requirements.txt").read_text()
    files = [words[at + 1] for at, word in enumerate(words) if word == "-r"]
    for word in files:
        assert (ROOT / word).is_file(), word
    for word in words[1:]:
        if not word.startswith("-") and word not in (*files, "."):
            assert word in known, word


def check_server(words: list[str], folder: Path) -> None:
    """Whether vLLM knows the arguments, and the settings take the JSON."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    known = make_arg_parser(FlexibleArgumentParser())._option_string_actions
    for at, word in enumerate(words):
        if word.startswith("--"):
            assert word in known, word
        if word == "--additional-config":
            text = words[at + 1]
            if text.startswith("$("):
                if shutil.which("jq") is None:
                    continue
                (folder / "passages.txt").write_text("One passage.\n\nAnother.\n\n")
                text = subprocess.check_output(["bash", "-c", text[2:-1]], cwd=folder, text=True)
            check_json("server", json.loads(text))


# --- diffs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", sorted(DOCS.glob("rfc/*.md")), ids=lambda page: page.name)
def test_diffs_apply_to_the_installed_vllm(page: Path, tmp_path: Path) -> None:
    import vllm

    site = Path(vllm.__file__).parents[1]
    text = "".join(b.text for b in ALL if b.page == page and b.language == "diff")
    names = re.findall(r"^--- a/(\S+)$", text, re.M)
    assert names, "a draft shows the diff that it would take"
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(site / name, tmp_path / name)
    done = subprocess.run(
        ["git", "apply", "-"], input=text, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for name in names:
        ast.parse((tmp_path / name).read_text())


# --- JSON -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", of("json"))
def test_json(block: Block) -> None:
    check_json(block.settings, json.loads(block.text))


# --- links, paths, files that are made ------------------------------------------------------------


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of a page's headings."""
    titles = re.findall(r"^#+ (.*)", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path), target


def test_architecture_names_what_is_there() -> None:
    page = DOCS / "architecture.md"
    source = {p: p.read_text() for p in (ROOT / "vllm_blend").rglob("*.py")}
    ways = re.findall(r"(?:^\d\. .*\n(?:   .*\n)*)+", prose(page), re.M)
    assert len(ways) == 2
    for way in ways:
        steps = re.findall(r"^\d\. `([\w/]+\.py)`(?:, `([\w.]+)`)?", way, re.M)
        assert len(steps) == len(re.findall(r"^\d\.", way, re.M)) <= 8
        assert len({path for path, _ in steps}) == len(steps), "a file is entered twice"
        for path, function in re.findall(r"`([\w/]+\.py)`(?:,\s+`([\w.]+)`)?", way):
            own = source.get(ROOT / "vllm_blend" / path)
            assert own is not None, path
            for name in filter(None, function.split(".")):
                assert re.search(rf"^\s*(?:async )?(?:def|class) {name}\b", own, re.M), function


def test_the_tree_is_the_packages() -> None:
    (tree,) = [b.text for b in blocks(DOCS / "architecture.md") if b.text.startswith("vllm_blend/\n")]
    listed = set(re.findall(r"^  (\w+)/", tree, re.M))
    packages = {p.parent.name for p in (ROOT / "vllm_blend").glob("*/__init__.py")}
    assert listed == packages
    files = {path.name for path in ROOT.rglob("*.py")}
    assert set(re.findall(r"\b\w+\.py\b", tree)) <= files


def test_every_result_is_described() -> None:
    files = {path.name for path in (DOCS / "results").iterdir()} - {"README.md"}
    described = set(re.findall(r"[\w-]+\.(?:csv|json)\b", (DOCS / "results/README.md").read_text()))
    assert described - {"FILE.json"} == files


def load(script: str) -> Any:
    spec = importlib.util.spec_from_file_location(script, DOCS / f"{script}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_settings_are_up_to_date() -> None:
    assert (DOCS / "settings.md").read_text(encoding="utf-8") == load("make_settings").page(), (
        "run python docs/make_settings.py"
    )


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="argparse lays out by Python's version")
def test_the_help_of_commands_is_up_to_date() -> None:
    command = [sys.executable, str(DOCS / "make_cli_help.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_picture_is_up_to_date() -> None:
    drawn = load("draw_three_prefills").picture()
    assert (DOCS / "three_prefills.svg").read_text(encoding="utf-8") == drawn
