"""Weights that are replaced in a server, over its endpoint for development, and put back."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file
from serving import chat, connect, disk, reported, reset_prefix_cache, serving, text_of, xargs

pytestmark = pytest.mark.slow

TEXTS = [
    "The ferry stops in winter, since the lake is frozen then. " * 4,
    "A bakery stands there. " * 9,
]


def test_a_server_s_new_weights_reuse_nothing_of_the_old(smollm2: Path, tmp_path: Path) -> None:
    others = tmp_path / "others"
    shutil.copytree(smollm2, others)
    for file in others.glob("*.safetensors"):
        changed = {name: (tensor * 1.05).contiguous() for name, tensor in load_file(file).items()}
        save_file(changed, file, metadata={"format": "pt"})

    with serving(smollm2, tmp_path, disk(tmp_path), stand_in="") as url:
        client = connect(url)

        def ask(field: Any) -> Any:
            reset_prefix_cache(url)
            return chat(client, TEXTS, "Does the ferry go today?", **xargs(field))

        def reuse() -> Any:
            """Asks until the chunks are known; the last answer."""
            for _ in range(100):
                found = ask({"report": True, "recomp_ratio": 1.0})
                told = reported(found)
                if told["reused_tokens"] and not told["missed_chunks"]:
                    return found
            raise AssertionError(told)

        def load(folder: Path) -> None:
            call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            answer = httpx.post(f"{url}/collective_rpc", json=call, timeout=120)
            assert answer.status_code == 200, answer.text

        reuse()
        load(others)
        first = ask({"report": True})
        assert reported(first)["reused_tokens"] == 0 and reported(first)["missed_chunks"] == 2
        assert text_of(reuse()) == text_of(ask("off")) == text_of(first)
        computed = reported(reuse())["computed_chunks"]
        load(smollm2)
        back = ask({"report": True})
        assert reported(back)["loaded_chunks"] == 2, "the disk has those of these weights"
        assert reported(back)["computed_chunks"] == computed
