"""Writes settings.md, the reference of all settings, from the dataclasses and docstrings they live in.

python docs/make_settings.py            # writes docs/settings.md
python docs/make_settings.py --check    # exits with 1 if it is not up to date
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from vllm_blend import BlendSettings
from vllm_blend.server.config import ServerSettings
from vllm_blend.store import ChunkStore, DiskTier, RedisTier, S3Tier
from vllm_blend.store.config import OPTIONS, TIERS

PATH = Path(__file__).with_name("settings.md")


def arguments(documented: Any) -> dict[str, str]:
    """The ``Args`` of a docstring, by name, each as one line of Markdown."""
    doc = inspect.getdoc(documented) or ""
    part = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", doc, re.M | re.S)
    found: dict[str, str] = {}
    for item in re.findall(
        r"^ {4}(\S[^\n]*(?:\n {5,}[^\n]*|\n(?=\n))*)", part[1] if part else "", re.M
    ):
        names, _, words = item.partition(": ")
        words = " ".join(words.split()).replace("``", "`").replace("|", "\\|")
        for name in names.split(", "):
            found[name] = words
    return found


def value(default: Any) -> str:
    if default is MISSING or default is inspect.Parameter.empty:
        return "must be given"
    if isinstance(default, tuple):
        default = list(default)
    shown = json.dumps(default, ensure_ascii=False).replace("|", "\\|")
    return f"`{shown}`"


def table(rows: list[tuple[str, str, str]]) -> list[str]:
    lines = [f"| `{name}` | {default} | {words} |" for name, default, words in rows]
    return ["| key | default | meaning |", "|---|---|---|", *lines, ""]


def of_dataclass(settings: Any, leave_out: frozenset[str] = frozenset()) -> list[str]:
    words = arguments(settings)
    rows = [(f.name, f.default, words[f.name]) for f in fields(settings) if f.name not in leave_out]
    return table([(name, value(default), text) for name, default, text in rows])


def of_call(made: Any, keys: dict[str, str]) -> list[str]:
    """Keys of plain values, by the argument of ``made`` that each one sets."""
    words, parameters = arguments(made), inspect.signature(made).parameters
    rows = []
    for key, name in keys.items():
        default = parameters[name].default
        if key.endswith("_gb") and isinstance(default, int):
            default = round(default / 1e9, 2)
        rows.append((key, value(default), words[name]))
    return table(rows)


def policies() -> list[str]:
    known: dict[str, str] = vars(sys.modules[BlendSettings.__module__])["POLICIES"]
    lines = [f"| `{name}` | {text} |" for name, text in known.items()]
    return ["| policy | the tokens that are recomputed |", "|---|---|", *lines, ""]


def page() -> str:
    store = {"host_gb": "host_bytes", "gpu_gb": "gpu_bytes", "write_behind_gb": "write_behind_bytes"}
    store |= {name: name for name in sorted(OPTIONS)}
    tiers = {"disk": DiskTier, "redis": RedisTier, "s3": S3Tier}
    if set(tiers) != set(TIERS):
        raise SystemExit(f"docs/make_settings.py knows {sorted(tiers)}, the store has {sorted(TIERS)}")
    lines = [
        "# Settings",
        "",
        "All settings, from the code. Made by `python docs/make_settings.py`; do not edit.",
        "A wrong value is refused with the key, the value and what is allowed.",
        "",
        "## BlendSettings",
        "",
        "Which tokens are recomputed: `Blender(llm, BlendSettings(...))`, a request's `blend` field,",
        "or beside the server's own keys as the default of all requests.",
        "",
        *of_dataclass(BlendSettings),
        *policies(),
        "## ServerSettings",
        "",
        "Keys of the server's object:",
        "`vllm serve MODEL --additional-config '{\"vllm_blend\": {...}}'`.",
        'Keys of `BlendSettings` stand beside them. With a store, `recomp_ratio` may be `"auto"`.',
        "",
        *of_dataclass(ServerSettings, frozenset({"blend", "paced"})),
        "## Store",
        "",
        "Values of `open_store({...})`, and of a server's `store`. A GB is 10^9 bytes.",
        "",
        *of_call(ChunkStore, store),
    ]
    for name, tier in tiers.items():
        _, place, more = TIERS[name]
        keys = {place: place, "budget_gb": "budget_bytes"} | {key: key for key in sorted(more)}
        lines += [f"`{name}`, an object:", "", *of_call(tier, keys)]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    text = page()
    if "--check" in sys.argv[1:]:
        if PATH.read_text(encoding="utf-8") != text:
            sys.exit("docs/settings.md is not up to date: run python docs/make_settings.py")
        return
    PATH.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
