"""Adapters are told apart by their content, and their chunks by name."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_blend.store.adapters import MARK, Adapters, adapter_digest, adapter_of, shelf, tenant_of


def write(folder: Path, weights: bytes = b"weights", config: str = '{"lora_alpha": 8}') -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(config)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


def asked(folder: Path, number: int = 1, load_inplace: bool = False) -> Any:
    return SimpleNamespace(lora_int_id=number, lora_path=str(folder), load_inplace=load_inplace)


def test_the_content_makes_the_digest(tmp_path: Path) -> None:
    here, there = write(tmp_path / "a"), write(tmp_path / "b")
    digest = adapter_digest(str(here))
    assert digest == adapter_digest(str(there)) and len(digest) == 32
    assert adapter_digest(str(write(there, weights=b"weightt"))) != digest
    assert adapter_digest(str(write(there, config='{"lora_alpha": 9}'))) != digest


def test_a_folder_without_an_adapter_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "gone", Path("someone/no-such-adapter")):
        with pytest.raises(FileNotFoundError, match="holds no LoRA adapter"):
            adapter_digest(str(path))
        assert "holds no LoRA adapter" in Adapters().why_unknown(asked(path))


def test_shelves_differ_whatever_tenants_are_called(tmp_path: Path) -> None:
    one, two = (adapter_digest(str(write(tmp_path / name, name.encode()))) for name in "ab")
    tenants = ["", "tenant", f"{MARK}{one} tenant", shelf("", one), shelf("tenant"), MARK]
    names = {(t, a): shelf(t, a) for t in dict.fromkeys(tenants) for a in ("", one, two)}
    assert len(set(names.values())) == len(names)
    assert shelf("tenant") == "tenant"  # as it always was
    for (tenant, adapter), name in names.items():
        assert (tenant_of(name), adapter_of(name)) == (tenant, adapter)


def test_vllm_computes_with_what_it_loaded(tmp_path: Path) -> None:
    adapters, folder = Adapters(), write(tmp_path / "a")
    assert adapters.digest(None) == ""
    first = adapters.digest(asked(folder))
    write(folder, b"others")
    assert adapters.digest(asked(folder)) == first
    again = adapters.digest(asked(folder, load_inplace=True))
    assert again != first and adapters.digest(asked(folder)) == again
    assert adapters.digest(asked(folder, number=2)) == again


def test_a_chunk_is_not_computed_with_another_adapter(tmp_path: Path) -> None:
    adapters, folder = Adapters(), write(tmp_path / "a")
    request = asked(folder)
    name = shelf("tenant", adapters.digest(request))
    assert adapters.request(name) is request
    assert adapters.request(shelf("tenant")) is None
    write(folder, b"others")
    with pytest.raises(FileNotFoundError, match="gone, or were changed"):
        adapters.request(name)
    with pytest.raises(FileNotFoundError, match="gone, or were changed"):
        Adapters().request(name)
    shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError, match="gone, or were changed"):
        adapters.request(name)
