"""HKVD selection against plain Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_blend.core.settings import num_kept
from vllm_blend.model.select import deviation, top_rows


@pytest.mark.parametrize("num_tokens", [1, 19, 99, 989])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_deviation_is_the_squared_distance_in_fp32(num_tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(num_tokens)
    fresh, stored = torch.randn(2, num_tokens, 3, 33).to(dtype)
    expected = [
        float((a.double() - b.double()).pow(2).sum()) for a, b in zip(fresh, stored, strict=True)
    ]
    assert torch.allclose(deviation(fresh, stored).double(), torch.tensor(expected).double(), rtol=1e-5)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=80, unique=True), st.floats(0, 1))
def test_top_rows_are_the_highest_in_ascending_order(scores: list[int], ratio: float) -> None:
    count = num_kept(ratio, len(scores))
    best = sorted(sorted(range(len(scores)), key=lambda i: -scores[i])[:count])
    assert top_rows(torch.tensor(scores).float(), count).tolist() == best


def test_all_rows_at_one_and_none_at_zero() -> None:
    assert [num_kept(ratio, 7) for ratio in (0.0, 0.14, 0.15, 1.0)] == [0, 0, 1, 7]
