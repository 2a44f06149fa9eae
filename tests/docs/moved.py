"""New names of modules, for a tree that still has the old ones. To be deleted with the old layout."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import vllm_blend

NEW_LAYOUT = (Path(vllm_blend.__file__).parent / "core").is_dir()
OLD = {
    "api": "",
    "api.load_control": "paced",
    "core.kv": "core",
    "core.plans": "core",
    "core.settings": "settings",
    "model": "models",
    "model.select": "select",
    "model.select.early": "select.early",
    "model.select.policies": "select.policies",
    "server.request": "server.wire",
    "store.load_time": "store.estimate",
}


def install() -> None:
    """Lets this process import modules by their new names."""
    if not NEW_LAYOUT:
        for new, old in OLD.items():
            module = importlib.import_module(f"vllm_blend.{old}".rstrip("."))
            sys.modules.setdefault(f"vllm_blend.{new}", module)
