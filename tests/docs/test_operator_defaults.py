"""The table of what an operator opens to clients tells the defaults that the code has."""

from __future__ import annotations

import re
from pathlib import Path

from vllm_blend.server.config import CLIENT_FIELDS, ServerSettings

SERVE = Path(__file__).parents[2] / "docs" / "serve.md"
SAID = {"off": False, "on": True, "none": None}


def rows() -> dict[str, str]:
    """Defaults as they are told, by setting."""
    section = SERVE.read_text().split("## What may clients do?")[1].split("\n\n")[1]
    found = {}
    for line in section.splitlines()[2:]:
        names, default, _ = (cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:4])
        keys = re.findall(r"`(\w+)`", names.split(", or ")[0].split(" in ")[0])
        values = default.split(", ") if len(keys) > 1 and ", " in default else [default] * len(keys)
        found |= dict(zip(keys, values, strict=True))
    return found


def test_told_defaults_are_the_code_s() -> None:
    told, settings = rows(), ServerSettings()
    assert told.pop("checksum_key") == "none"  # of a store
    assert len(told) > 12
    for name, default in told.items():
        value = getattr(settings, name)
        if name == "client_fields":
            assert re.findall(r"`(\w+)`", default) == list(value)
        elif name == "client_ratios":
            assert default == f"`[{value[0]:g}, {value[1]:g}]`"
        elif name == "separator":
            assert (default, value) == ("off", "")
        elif default in SAID:
            assert value is SAID[default], name
        else:
            assert float(default) == value, name


def test_what_is_not_open_by_default_is_told() -> None:
    section = SERVE.read_text().split("## What may clients do?")[1]
    closed = set(CLIENT_FIELDS) - set(ServerSettings().client_fields)
    assert closed and all(f"`{name}`" in section.split("`client_ratios`")[0] for name in closed)
