"""Two runs of a GPU's memory that are copied at once; on a CPU with a stand-in for CUDA's runtime."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_blend.server.worker import strided_copy
from vllm_blend.server.worker.strided_copy import StridedCopies


class Error(Enum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1


class Runtime:
    """Copies in the host's memory, row by row."""

    cudaError_t = Error
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyDeviceToHost="to the host")

    def __init__(self) -> None:
        self.calls = 0

    def cudaMemcpy2DAsync(
        self, to: int, to_pitch: int, source: int, pitch: int, width: int, height: int, *rest: Any
    ) -> tuple[Error]:
        assert rest == ("to the host", 77)
        self.calls += 1
        if width > min(pitch, to_pitch):
            return (Error.cudaErrorInvalidValue,)
        for row in range(height):
            ctypes.memmove(to + row * to_pitch, source + row * pitch, width)
        return (Error.cudaSuccess,)


@pytest.fixture(params=["cpu", "without", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A device, a stream, and the stand-in."""
    if request.param == "cuda":
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            yield torch.device("cuda"), stream, None
        return
    runtime = Runtime() if request.param == "cpu" else None
    monkeypatch.setattr(strided_copy, "_runtime", lambda: runtime)
    yield torch.device("cpu"), SimpleNamespace(cuda_stream=77), runtime


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("count", [1, 5, 17])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_part_goes_to_its_place(place: Any, first: int, count: int, dtype: torch.dtype) -> None:
    device, stream, runtime = place
    source = torch.randn(2, 40, 3, 10, device=device).to(dtype)
    target = torch.full((4, 2, 20, 3, 10), -1.0, dtype=dtype, pin_memory=device.type == "cuda")
    expected = target.clone()
    expected[1, :, first : first + count] = source[:, 7 : 7 + count].cpu()
    copies = StridedCopies([(target[:, :, first : first + count], 7)])
    copies.launch(1, source, stream)
    if device.type == "cuda":
        stream.synchronize()
    assert torch.equal(target, expected)
    assert runtime is None or runtime.calls == 1


def test_parts_of_a_layer_go_each_to_its_own_place(place: Any) -> None:
    device, stream, runtime = place
    source = torch.arange(2 * 30 * 4, device=device).view(2, 30, 2, 2).to(torch.float16)
    pinned = device.type == "cuda"
    targets = [torch.zeros(3, 2, count, 2, 2).half() for count in (6, 9)]
    targets = [target.pin_memory() if pinned else target for target in targets]
    copies = StridedCopies([(targets[0], 20), (targets[1][:, :, 2:7], 1)])
    for layer in range(3):
        copies.launch(layer, source + 500 * layer, stream)
        if pinned:
            stream.synchronize()
    for layer in range(3):
        now = (source + 500 * layer).cpu()
        assert torch.equal(targets[0][layer], now[:, 20:26])
        assert torch.equal(targets[1][layer, :, 2:7], now[:, 1:6])
    assert not targets[1][:, :, :2].any() and not targets[1][:, :, 7:].any()
    assert runtime is None or runtime.calls == 6


def test_an_error_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strided_copy, "_runtime", Runtime)
    both = torch.zeros(2, 5, 3)
    copies = StridedCopies([(both[:1].expand(1, 2, 5, 3), 0)])  # K and V in one place
    with pytest.raises(RuntimeError, match="cudaMemcpy2DAsync: cudaErrorInvalidValue"):
        copies.launch(0, both, SimpleNamespace(cuda_stream=77))  # type: ignore[arg-type]


@pytest.mark.parametrize("found", [(Error.cudaSuccess, 0), (Error.cudaErrorInvalidValue, 0), None])
def test_a_runtime_without_a_device_is_none(
    monkeypatch: pytest.MonkeyPatch, found: tuple[Error, int] | None
) -> None:
    def get_device() -> tuple[Error, int]:
        if found is None:
            raise RuntimeError("no driver")
        return found

    runtime = SimpleNamespace(cudaGetDevice=get_device, cudaError_t=Error)
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(runtime=runtime))
    expected = runtime if found == (Error.cudaSuccess, 0) else None
    assert strided_copy._runtime.__wrapped__() is expected
