"""Devices for the kernels: the GPU (marker ``gpu``), or a CPU in Triton's interpreter.

The interpreter is chosen by an environment variable when Triton is first imported, so those tests
run in a process of their own, which ``test_interpreter.py`` starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from vllm_blend.ops import library

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves to the interpreter's process what only it can run."""
    left_out = [item for item in items if item.path.parent.name == "ops" and _elsewhere(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def _elsewhere(item: pytest.Item) -> bool:
    if item.path.name == "test_interpreter.py":
        return INTERPRETED
    on_gpu = item.get_closest_marker("gpu") is not None
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if parameters.get("device") == "cpu":
        if parameters.get("implementation") == "cuda":
            return True
        # the interpreter takes seconds for so many: one type is enough
        if parameters.get("num_tokens", 0) > 500 and parameters.get("dtype") != torch.float16:
            return True
    return "device" in getattr(item, "fixturenames", ()) and on_gpu == INTERPRETED


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    torch.manual_seed(0)
    return torch.device(request.param)


@pytest.fixture(params=["triton", pytest.param("cuda", marks=pytest.mark.gpu)])
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """The kernels of an op that has two; on a CPU "triton" is the interpreter, or the oracle."""
    if request.param not in library.implementations():
        pytest.skip("the CUDA C++ ops are not built: python setup.py build_ext --inplace")
    with library.implementation(request.param):
        yield request.param


@pytest.fixture
def full_size(device: torch.device) -> bool:
    """Whether sizes may be those of real work; the interpreter is slow."""
    return device.type == "cuda"
