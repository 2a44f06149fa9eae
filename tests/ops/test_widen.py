"""``widen`` against its oracle, to the bit."""

from __future__ import annotations

import pytest
import torch

from vllm_blend.core.layers import widen as widen_oracle
from vllm_blend.ops import library
from vllm_blend.ops.fp8 import FP8
from vllm_blend.ops.widen import widen

SIZES = [(1, 1, 8), (3, 2, 80), (37, 5, 64), (129, 1, 128), (1, 3, 13)]


def arguments(
    size: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values = torch.randint(0, 256, size, dtype=torch.uint8, device=device)
    scales = torch.rand(*size[:2], 1, device=device) * 10.0 ** torch.randint(-6, 3, (1,)).item()
    return values.view(FP8), scales, torch.full(size, -7.0, dtype=dtype, device=device)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """To the bit, but for what is no number."""
    numbers = ~expected.isnan()
    bits = torch.int32 if found.dtype == torch.float32 else torch.int16
    return torch.equal(found.isnan(), expected.isnan()) and torch.equal(
        found[numbers].view(bits), expected[numbers].view(bits)
    )


def check_against_the_oracle(
    size: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    values, scales, target = arguments(size, dtype, device)
    expected = widen_oracle(values, scales, torch.empty_like(target))
    widen(values, scales, target)
    assert same(target, expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_equals_the_oracle(
    device: torch.device, size: tuple[int, int, int], dtype: torch.dtype
) -> None:
    if library.INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter rounds to bfloat16 otherwise than a GPU")
    check_against_the_oracle(size, dtype, device)


def test_every_byte(device: torch.device) -> None:
    """As torch reads it, the smallest and minus zero too."""
    values = torch.arange(256, dtype=torch.uint8, device=device).view(2, 2, 64).view(FP8)
    target = torch.empty(2, 2, 64, device=device)
    widen(values, torch.ones(2, 2, 1, device=device), target)
    assert same(target, values.float())


def test_what_lies_behind_is_left_alone(device: torch.device) -> None:
    values, scales, _ = arguments((5, 3, 80), torch.float16, device)
    memory = torch.full((8, 3, 80), -7.0, dtype=torch.float16, device=device)
    widen(values, scales, memory[:5])
    assert (memory[5:] == -7).all()


def test_no_tokens(device: torch.device) -> None:
    widen(*arguments((0, 2, 64), torch.float16, device))


def test_the_door_names_the_argument(device: torch.device) -> None:
    values, scales, target = arguments((4, 2, 64), torch.float16, device)
    with pytest.raises(ValueError, match="values is torch.uint8; expected torch.float8_e4m3fn"):
        widen(values.view(torch.uint8), scales, target)
    with pytest.raises(ValueError, match=r"scales has shape \[4, 2\]; expected \[4, 2, 1\]"):
        widen(values, scales[..., 0], target)
    with pytest.raises(ValueError, match=r"target has shape \[3, 2, 64\]"):
        widen(values, scales, target[:3])
    with pytest.raises(ValueError, match="target has strides .* must be contiguous"):
        widen(values, scales, target.new_empty(2, 4, 64).transpose(0, 1))
