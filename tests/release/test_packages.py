"""The sdist and the wheel that is built from it, installed into an environment of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "csrc", "vllm_blend")
PAGE = {f"server/frontend/page.{end}" for end in ("html", "css", "js")}
QUESTIONS = {f"cli/demo_inputs/{number}.json" for number in range(1, 11)}
DATA = {f"vllm_blend/{name}" for name in {"py.typed", "core/stand_in.txt"} | PAGE | QUESTIONS}

SMOKE = """
import json, pathlib, sys
from importlib.metadata import distribution, entry_points
import vllm_blend, vllm_blend.core.stand_in as stand_in
from vllm_blend.attention import cpu_kernel
from vllm_blend.server.config import ServerSettings
from vllm_blend.server.frontend.page import page_html

own = distribution("vllm_blend")
names = [r.partition(";")[0].strip() for r in own.requires if "extra ==" not in r]
for name in names:
    distribution(name)
(plugin,) = [p for p in entry_points(group="vllm.general_plugins") if p.name == "vllm_blend"]
plugin.load()()
assert stand_in.text()
print(json.dumps({
    "file": vllm_blend.__file__, "version": own.version, "needs": sorted(names),
    "page": page_html(ServerSettings(page=True))[:15],
    "kernels": sorted(p.name for p in pathlib.Path(vllm_blend.__file__).parent.glob("_cpu_*.so")),
}))
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel built from it."""
    source = tmp_path_factory.mktemp("source")
    made = shutil.ignore_patterns("*.so", "__pycache__")
    for name in FILES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=made)
        else:
            shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(source / "dist")]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return source / "dist"


def names_in(folder: Path, kind: str) -> set[str]:
    """Files of the sdist, below its one folder, or of the wheel."""
    (path,) = folder.glob(kind)
    if kind.endswith("whl"):
        return set(zipfile.ZipFile(path).namelist())
    with tarfile.open(path) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def test_the_wheel_has_the_package_and_its_data_alone(built: Path) -> None:
    names = names_in(built, "*.whl")
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "vllm_blend").rglob("*.py")}
    assert sources <= names
    assert names >= DATA
    rest = {name for name in names - sources if ".dist-info/" not in name}
    compiled = {name for name in rest if name.endswith(".abi3.so")}
    assert rest - compiled == DATA
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_sdist_has_what_the_kernels_are_built_of(built: Path) -> None:
    names = names_in(built, "*.tar.gz")
    kernels = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*") if path.is_file()}
    assert kernels <= names and {"setup.py", "pyproject.toml", "LICENSE"} <= names
    assert not any(name.startswith(("tests", "docs", "benchmarks")) for name in names)


def test_the_wheel_runs_where_nothing_of_this_folder_is(built: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env/bin/python"
    (wheel,) = built.glob("*.whl")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps"]
    subprocess.run([*install, "--quiet", "--no-index", str(wheel)], check=True)
    # torch, vLLM and the rest: of this environment, without its own copy of the package
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    (site / "rest.pth").write_text(sysconfig.get_path("purelib"))
    command = [str(python), "-c", SMOKE]
    clean = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["file"].startswith(str(site)) and told["page"] == "<!doctype html>"
    assert {"blake3", "numpy", "tqdm"} <= set(told["needs"])
    assert f"-{told['version']}-" in wheel.name
    assert bool(told["kernels"]) == wheel.name.endswith("linux_x86_64.whl")


NEWEST = ("python3.14", "python3.13", "python3.12")
"""Of those that vLLM takes, the first one that is installed here beside the one that runs."""
INSTALLED = """
import sys
from importlib.metadata import distribution, entry_points

(plugin,) = [p for p in entry_points(group="vllm.general_plugins") if p.name == "vllm_blend"]
plugin.load()  # as vLLM does in each process; nothing heavy is imported
scripts = [p.name for p in entry_points(group="console_scripts") if p.dist.name == "vllm-blend"]
print(distribution("vllm_blend").version, scripts, "torch" in sys.modules)
"""


def newest_python() -> str:
    """On the path, or of pyenv."""
    for name in NEWEST:
        version = name.removeprefix("python")
        own = Path.home().glob(f".pyenv/versions/{version}.*/bin/{name}")
        for path in filter(None, (shutil.which(name), *map(str, own))):
            ran = subprocess.run([path, "-c", "import sys; print(sys.executable)"], capture_output=True)
            if ran.returncode == 0:
                return ran.stdout.decode().strip()
    pytest.skip(f"none of {', '.join(NEWEST)} is installed")


def test_the_newest_python_takes_the_wheel(built: Path, tmp_path: Path) -> None:
    python = newest_python()
    (wheel,) = built.glob("*.whl")
    subprocess.run([python, "-m", "venv", str(tmp_path / "env")], check=True)
    own = str(tmp_path / "env/bin/python")
    install = [own, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True)  # its tags, and the Pythons that it names
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    command = [own, "-W", "error", "-m", "compileall", "-q", "-f", str(site / "vllm_blend")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    clean = {"PATH": "/usr/bin:/bin"}
    told = subprocess.run(
        [own, "-c", INSTALLED], cwd=tmp_path, env=clean, capture_output=True, text=True
    )
    assert told.returncode == 0, told.stderr[-3000:]
    assert told.stdout.split(maxsplit=1)[1] == "['vllm-blend'] False\n"
