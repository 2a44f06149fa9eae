"""``deviation`` against its oracle."""

from __future__ import annotations

import pytest
import torch

from vllm_blend.ops.deviation import deviation, deviation_oracle

pytestmark = pytest.mark.usefixtures("implementation")


@pytest.mark.parametrize("num_tokens", [1, 19, 99, 989])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads", [(8, 128), (3, 64), (1, 80)])
def test_equals_the_oracle(
    device: torch.device, num_tokens: int, dtype: torch.dtype, heads: tuple[int, int]
) -> None:
    num_heads, head_size = heads
    qkv = torch.randn(num_tokens, 3 * num_heads * head_size, device=device).to(dtype)
    fresh = qkv[:, -num_heads * head_size :].view(-1, num_heads, head_size)
    stored = torch.randn(num_tokens, num_heads, head_size, device=device).to(dtype)
    result = deviation(fresh, stored)
    assert result.dtype == torch.float32
    # the same numbers, summed in another order
    torch.testing.assert_close(result, deviation_oracle(fresh, stored), rtol=1e-5, atol=0)


@pytest.mark.parametrize("start", [0, 1, 8])
def test_heads_apart_and_unaligned(device: torch.device, start: int) -> None:
    both = torch.randn(2, 99, 5, 200, device=device).half()
    fresh, stored = both[0, :, 1:4, start : start + 80], both[1, :, :3, 16:96]
    result = deviation(fresh, stored)
    torch.testing.assert_close(result, deviation_oracle(fresh, stored), rtol=1e-5, atol=0)


def test_no_tokens(device: torch.device) -> None:
    empty = torch.empty(0, 2, 32, device=device)
    assert deviation(empty, empty).shape == (0,)


def test_the_door_names_the_argument(device: torch.device) -> None:
    x = torch.randn(3, 2, 32, device=device)
    with pytest.raises(ValueError, match=r"stored has shape \[2, 2, 32\]; expected \[3, 2, 32\]"):
        deviation(x, x[:2])
    with pytest.raises(ValueError, match="stored is torch.float16; expected torch.float32"):
        deviation(x, x.half())
    with pytest.raises(ValueError, match="fresh has strides .* must be contiguous"):
        deviation(x.transpose(1, 2), x.transpose(1, 2))
