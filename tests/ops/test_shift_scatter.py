"""``shift_scatter`` against its oracle; what is only moved is bit-exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged import paged_cache, relative_error

from vllm_blend.ops.shift_scatter import rotate_oracle, shift_scatter, shift_scatter_oracle

pytestmark = pytest.mark.usefixtures("implementation")

MAX_POSITION = 1200


def case(
    device: torch.device,
    num_tokens: int,
    dtype: torch.dtype,
    num_kv_heads: int = 2,
    head_size: int = 64,
    rotary_dim: int = 64,
    heads_first: bool = False,
    padding: bool = True,
) -> dict[str, Any]:
    """Arguments of the op, with runs of -1 slots and scattered blocks."""
    num_blocks, block_size = num_tokens // 16 + 4, 16
    slots = torch.randperm(num_blocks * block_size, device=device)[:num_tokens]
    if padding and num_tokens > 1:
        for start in range(0, num_tokens, 13):
            slots[start : start + 1 + start % 7] = -1
    angles = torch.rand(MAX_POSITION, rotary_dim // 2, device=device) * 6.3
    key_cache, value_cache = paged_cache(
        num_blocks, block_size, num_kv_heads, head_size, dtype, device, heads_first
    )
    stored = torch.randn(2, num_tokens, num_kv_heads, head_size, device=device).to(dtype)
    return dict(
        k=stored[0],
        v=stored[1],
        positions=torch.randint(0, MAX_POSITION, (num_tokens,), device=device),
        slot_mapping=slots,
        cos_sin_cache=torch.cat([angles.cos(), angles.sin()], dim=1).to(dtype),
        key_cache=key_cache,
        value_cache=value_cache,
    )


@pytest.mark.parametrize("num_tokens", [1, 19, 99, 989])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize(
    "shape", [(2, 64, 64), (3, 64, 32), (1, 80, 40), (8, 128, 128)], ids=lambda s: "x".join(map(str, s))
)
def test_equals_the_oracle(
    device: torch.device,
    num_tokens: int,
    dtype: torch.dtype,
    is_neox_style: bool,
    shape: tuple[int, int, int],
) -> None:
    num_kv_heads, head_size, rotary_dim = shape
    heads_first = num_tokens % 2 == 0
    args = case(device, num_tokens, dtype, num_kv_heads, head_size, rotary_dim, heads_first)
    check_against_the_oracle(args, is_neox_style)


def check_against_the_oracle(args: dict[str, Any], is_neox_style: bool = True) -> None:
    before = {name: tensor.clone() for name, tensor in args.items()}
    expected = {name: tensor.clone() for name, tensor in args.items()}
    expected["key_cache"] = expected["key_cache"].float()
    shift_scatter_oracle(**expected, is_neox_style=is_neox_style)
    shift_scatter(**args, is_neox_style=is_neox_style)

    for name in ("k", "v", "positions", "slot_mapping", "cos_sin_cache"):
        assert torch.equal(args[name], before[name]), f"{name} was written to"
    assert torch.equal(args["value_cache"], expected["value_cache"])
    rest = slice(args["cos_sin_cache"].shape[1], None)
    assert torch.equal(args["key_cache"][..., rest].float(), expected["key_cache"][..., rest])
    slots = args["slot_mapping"]
    slots = slots[slots >= 0]
    written = torch.zeros(args["key_cache"].shape[:2], dtype=torch.bool, device=slots.device)
    written.view(-1)[slots] = True
    assert torch.equal(args["key_cache"][~written], before["key_cache"][~written])
    if slots.numel():
        got, exact = args["key_cache"][written], expected["key_cache"][written]
        angles = (args["positions"], args["cos_sin_cache"], is_neox_style)
        same_type = rotate_oracle(args["k"], *angles, dtype=args["k"].dtype)
        allowed = 2 * relative_error(same_type, rotate_oracle(args["k"], *angles))
        assert relative_error(got, exact) <= max(allowed, 1e-6)


@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize("shape", [(2, 96, 96), (5, 80, 80), (1, 256, 64), (40, 128, 128)])
def test_other_shapes(device: torch.device, shape: tuple[int, int, int], is_neox_style: bool) -> None:
    check_against_the_oracle(case(device, 99, torch.bfloat16, *shape), is_neox_style)


@pytest.mark.parametrize("is_neox_style", [True, False])
def test_angles_and_integers_of_other_types(device: torch.device, is_neox_style: bool) -> None:
    args = case(device, 99, torch.bfloat16)
    args["cos_sin_cache"] = args["cos_sin_cache"].float()
    args["positions"], args["slot_mapping"] = args["positions"].int(), args["slot_mapping"].int()
    check_against_the_oracle(args, is_neox_style)


@pytest.mark.parametrize("name", ["k", "v", "cos_sin_cache", "key_cache", "value_cache"])
def test_alignment_does_not_matter(device: torch.device, name: str) -> None:
    args = case(device, 99, torch.float16)
    tensor = args[name]
    shifted = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype, device=device)[1:]
    args[name] = shifted.view(tensor.shape).copy_(tensor)
    check_against_the_oracle(args)


def test_strides_of_the_stored_kv_do_not_matter(device: torch.device) -> None:
    args = case(device, 99, torch.float16)
    same = {name: tensor.clone() for name, tensor in args.items()}
    wide = torch.zeros(99, 5, 3 * 64, dtype=torch.float16, device=device)
    wide[:, 1:3, 64:128] = args["k"]
    shift_scatter(**(args | {"k": wide[:, 1:3, 64:128]}))
    shift_scatter(**same)
    assert torch.equal(args["key_cache"], same["key_cache"])


def test_all_slots_padding_writes_nothing(device: torch.device) -> None:
    args = case(device, 19, torch.float32)
    args["slot_mapping"].fill_(-1)
    before = args["key_cache"].clone(), args["value_cache"].clone()
    shift_scatter(**args)
    assert torch.equal(args["key_cache"], before[0])
    assert torch.equal(args["value_cache"], before[1])


def test_position_zero_is_the_identity_and_angles_add_up(device: torch.device) -> None:
    """Rotating by 3 and by 4 is rotating by 7: the oracle's own identity."""
    k = torch.randn(5, 2, 32, device=device)
    angles = torch.arange(8, device=device)[:, None] * torch.rand(16, device=device)
    cache = torch.cat([angles.cos(), angles.sin()], dim=1)
    at = [torch.full((5,), p, device=device) for p in (0, 3, 4, 7)]
    for neox in (True, False):
        assert torch.equal(rotate_oracle(k, at[0], cache, neox), k)
        twice = rotate_oracle(rotate_oracle(k, at[1], cache, neox), at[2], cache, neox)
        torch.testing.assert_close(twice, rotate_oracle(k, at[3], cache, neox))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("v", lambda t: t[:2], "v has shape"),
        ("positions", lambda t: t.float(), "positions is torch.float32"),
        ("slot_mapping", lambda t: t[:2], "slot_mapping has shape"),
        ("cos_sin_cache", lambda t: t[:, :31], "rotary_dim 31; expected an even number up to 64"),
        ("key_cache", lambda t: t.half(), "key_cache is torch.float16; expected torch.float32"),
        ("value_cache", lambda t: t[:-1], "value_cache has shape"),
        ("k", lambda t: t.transpose(1, 2).contiguous().transpose(1, 2), "k has strides"),
    ],
)
def test_the_door_names_the_argument(
    device: torch.device, name: str, change: Any, message: str
) -> None:
    args = case(device, 19, torch.float32)
    with pytest.raises(ValueError, match=message):
        shift_scatter(**(args | {name: change(args[name])}))
