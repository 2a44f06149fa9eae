"""Which kernels run: CUDA C++ where it is built, Triton, or the oracle; never an import error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vllm_blend.ops import library


def test_a_library_that_does_not_load_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "ops").mkdir()
    monkeypatch.setattr(library, "__file__", str(tmp_path / "ops" / "library.py"))
    monkeypatch.setattr(library.logger, "propagate", True)
    monkeypatch.setattr(library.logger.parent, "propagate", True)
    for content, reason in ((None, "was not built"), (b"no library", "Could not load this library")):
        if content:
            (tmp_path / "_C.abi3.so").write_bytes(content)
        caplog.clear()
        with caplog.at_level("DEBUG", logger=library.logger.name):
            assert not library._load()
        assert [record.levelname for record in caplog.records] == ["DEBUG"]
        assert reason in caplog.text


def test_the_choice_is_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_loaded", True)
    monkeypatch.delenv("VLLM_BLEND_OPS", raising=False)
    assert library._choose() == "cuda"
    monkeypatch.setenv("VLLM_BLEND_OPS", "triton")
    assert library._choose() == "triton"
    monkeypatch.setenv("VLLM_BLEND_OPS", "cutlass")
    with pytest.raises(ValueError, match="VLLM_BLEND_OPS is 'cutlass'; expected triton"):
        library._choose()


def test_a_choice_lasts_as_long_as_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_loaded", True)
    monkeypatch.setattr(library, "_chosen", "triton")
    with library.implementation("cuda"):
        assert library._chosen == "cuda"
        assert not library.use_cuda(torch.empty(0))  # a CPU's
    assert library._chosen == "triton"
    with pytest.raises(ValueError, match="there is no 'hip' here"), library.implementation("hip"):
        pass
