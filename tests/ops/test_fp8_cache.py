"""Paged caches in e4m3: rounded to the bit as vLLM rounds, and read as the oracles read them."""

from __future__ import annotations

from typing import Any

import pytest
import test_received_attention
import test_segment_scatter
import test_shift_scatter
import test_sparse_attention
import torch
from paged import relative_error

from vllm_blend.ops.fp8 import FP8, quantize_oracle, widen_oracle
from vllm_blend.ops.library import use_triton
from vllm_blend.ops.received_attention import received_attention, received_attention_oracle
from vllm_blend.ops.segment_scatter import segment_scatter, segment_scatter_oracle
from vllm_blend.ops.shift_scatter import shift_scatter, shift_scatter_oracle
from vllm_blend.ops.sparse_attention import (
    sparse_attention,
    sparse_attention_oracle,
    sparse_attention_rest,
)

SHAPES = [(2, 64, 64), (3, 64, 32), (1, 80, 40), (5, 96, 96)]
MOVED = [torch.float16, torch.float32]
"""Types whose rounding Triton's interpreter gets right."""


def scales_of(count: int, device: torch.device, *names: str) -> dict[str, torch.Tensor]:
    """One for all heads or one for each, none of them a power of two."""
    return {name: (torch.rand(count, device=device) + 0.3) / 7 for name in names}


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def quantized_caches(args: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Caches of any bytes, in the layout of those in ``args``."""
    caches = {}
    for name in ("key_cache", "value_cache"):
        cache = args[name]
        both = torch.randint(0, 120, (cache.numel() * 2,), dtype=torch.uint8, device=cache.device)
        spread = both[: 2 * cache.numel()].view(*cache.shape[:3], -1)
        caches[name] = spread[..., : cache.shape[3]].view(FP8)
    return caches


@pytest.mark.parametrize("scale", [1.0, 0.07])
def test_the_oracle_is_the_nearest_number_of_e4m3(scale: float) -> None:
    """Of all that there are, ties to the even one; what is larger becomes the largest."""
    numbers = torch.arange(127, dtype=torch.uint8).view(FP8).double()
    x = torch.cat([torch.randn(4000) * 40, torch.randn(4000) / 60, torch.tensor([1e9, -1e9, 0.0])])
    found = quantize_oracle(x.view(1, 1, -1), torch.tensor([scale])).flatten()
    exact = (x.float() / scale).double()
    distance = (exact.abs()[:, None] - numbers).abs()
    assert torch.equal((found.double() - exact).abs(), distance.amin(1))
    ties = (numbers[1:] + numbers[:-1]).float() / 2
    rounded = quantize_oracle(ties.view(1, 1, -1), torch.ones(1)).flatten().view(torch.uint8)
    assert not (rounded % 2).any()


@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("num_tokens", [1, 19, 99])
def test_shift_scatter_rounds_as_vllm_does(
    device: torch.device,
    full_size: bool,
    num_tokens: int,
    shape: tuple[int, int, int],
    per_head: bool,
    is_neox_style: bool,
) -> None:
    for dtype in (*MOVED, torch.bfloat16) if full_size else MOVED:
        args = test_shift_scatter.case(device, num_tokens, dtype, *shape, num_tokens % 2 == 0)
        args["k"][0, 0, :3] = args["k"].new_tensor([1e4, -1e4, -0.0])  # too large, and a signed zero
        args["v"][-1, 0, :3] = args["v"].new_tensor([1e4, -1e4, -0.0])
        args |= quantized_caches(args)
        args |= scales_of(shape[0] if per_head else 1, device, "k_scale", "v_scale")
        expected = args | {name: args[name].clone() for name in ("key_cache", "value_cache")}
        shift_scatter_oracle(**expected, is_neox_style=is_neox_style)
        shift_scatter(**args, is_neox_style=is_neox_style)
        assert same_bits(args["value_cache"], expected["value_cache"])
        check_keys(args["key_cache"], expected["key_cache"], args["cos_sin_cache"].shape[1])


def check_keys(found: torch.Tensor, expected: torch.Tensor, rotary_dim: int) -> None:
    """A rotation that is fused differs in its last bit, which moves few values by one step of e4m3."""
    assert same_bits(found[..., rotary_dim:].contiguous(), expected[..., rotary_dim:].contiguous())
    steps = (found.view(torch.uint8).int() - expected.view(torch.uint8).int()).abs()
    assert int(steps.max()) <= 1
    assert float(steps.float().mean()) < 0.01


@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("num_tokens", [1, 19, 99])
def test_segment_scatter_rounds_as_vllm_does(
    device: torch.device,
    full_size: bool,
    num_tokens: int,
    shape: tuple[int, int, int],
    per_head: bool,
    is_neox_style: bool,
) -> None:
    for dtype in (*MOVED, torch.bfloat16) if full_size else MOVED:
        counts = test_segment_scatter.COUNTS[num_tokens]
        case = test_segment_scatter.Case(device, counts, dtype, shape, heads_first=num_tokens == 19)
        case.place |= quantized_caches(case.place)
        scales = scales_of(shape[0] if per_head else 1, device, "k_scale", "v_scale")
        expected = case.before()
        segment_scatter_oracle(
            case.stored, case.segments, **expected, is_neox_style=is_neox_style, **scales
        )
        case.run(is_neox_style=is_neox_style, stored_dtype=dtype, num_programs=3, **scales)
        assert same_bits(case.place["value_cache"], expected["value_cache"])
        check_keys(case.place["key_cache"], expected["key_cache"], shape[2])


def quantized(args: dict[str, Any], per_head: bool, query: bool) -> dict[str, Any]:
    """The same arguments with caches, and perhaps queries, in e4m3."""
    names = [name for name in ("key_cache", "value_cache") if name in args]
    num_kv_heads, device = args["key_cache"].shape[2], args["query"].device
    count = num_kv_heads if per_head else 1
    scales = scales_of(count, device, *(f"{name[0]}_scale" for name in names))
    args = args | scales
    for name in names:
        scale = scales[f"{name[0]}_scale"]
        args[name] = quantize_oracle(args[name].nan_to_num(0.0), scale)
    if query:
        args["q_scale"] = scales_of(count, device, "q")["q"]
        group = args["query"].shape[1] // num_kv_heads
        of_heads = args["q_scale"].repeat_interleave(group if per_head else 1)
        args["query"] = quantize_oracle(args["query"].nan_to_num(0.0), of_heads)
    return args


def quantized_layers(args: dict[str, Any], per_head: bool, query: bool) -> dict[str, Any]:
    """The same for those of ``received_attention``: each layer has scales of its own."""
    layers = [
        quantized(dict(key_cache=cache, query=rows), per_head, query)
        for cache, rows in zip(args["key_caches"], args["query"], strict=True)
    ]
    scales = [name for name in ("q_scale", "k_scale") if name in layers[0]]
    queries = torch.stack([layer["query"].view(torch.uint8) for layer in layers])
    found = dict(key_caches=[layer["key_cache"] for layer in layers])
    found |= {name: torch.stack([layer[name] for layer in layers]) for name in scales}
    return args | found | dict(query=queries.view(layers[0]["query"].dtype))


ATTENTION = [{}, *test_sparse_attention.OPTIONS]


@pytest.mark.parametrize("options", ATTENTION, ids=str)
@pytest.mark.parametrize(("per_head", "query"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("heads", [(6, 2, 64), (8, 1, 80), (4, 4, 40)])
def test_sparse_attention_equals_the_oracle(
    device: torch.device,
    full_size: bool,
    heads: tuple[int, int, int],
    per_head: bool,
    query: bool,
    options: dict[str, Any],
) -> None:
    cases = [(1, torch.float16), (19, torch.float32 if not query else torch.float16)]
    if full_size:
        cases = [
            (count, dtype) for count in (1, 19, 99, 989) for dtype in (torch.float16, torch.bfloat16)
        ]
    for count, dtype in cases:
        rows = [test_sparse_attention.scattered(count, 2 * count + 7), [0], [], list(range(30, 41))]
        args = test_sparse_attention.case(device, rows, dtype, *heads, heads_first=count == 19)
        args = quantized(test_sparse_attention.with_options(args, **options), per_head, query)
        out = torch.full(args["query"].shape, float("nan"), dtype=dtype, device=device)
        result = sparse_attention(**args, out=out)
        exact = sparse_attention_oracle(**args, dtype=torch.float64)
        assert relative_error(result, exact) < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("options", ATTENTION[:4], ids=str)
@pytest.mark.parametrize("per_head", [False, True])
def test_the_rest_completes_attention_over_some_keys(
    device: torch.device, per_head: bool, options: dict[str, Any]
) -> None:
    rows, heads = (
        [test_sparse_attention.scattered(40, 120), [0], [119], list(range(30, 41))],
        (6, 2, 64),
    )
    args = test_sparse_attention.case(device, rows, torch.float16, *heads)
    args = quantized(test_sparse_attention.with_options(args, **options), per_head, query=True)
    out, lse = attention_of_tiles(args, torch.float16)
    before = out.clone()
    sparse_attention_rest(**args, out=out, prefix_lse=lse)
    if args.get("sinks") is None and use_triton(out):  # rows that lack no key stay as they were
        assert torch.equal(out[len(rows[0]) :], before[len(rows[0]) :])
        assert not torch.equal(out, before)
    exact = sparse_attention_oracle(**args, dtype=torch.float64)
    assert relative_error(out, exact) < 4 * torch.finfo(torch.float16).eps


def attention_of_tiles(args: dict[str, Any], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each virtual request, causal: the part of FlashAttention 3."""
    num_rows, num_heads, _ = args["query"].shape
    num_kv_heads, device = args["key_cache"].shape[2], args["query"].device
    group = num_heads // num_kv_heads
    place = (args["positions"], args["query_start_loc"], args["block_table"])
    tiles = test_sparse_attention.virtual_requests(*place, group=group)
    out = torch.zeros(args["query"].shape, dtype=dtype, device=device)
    lse = torch.zeros(num_heads, num_rows, device=device)
    k_all = widen_oracle(args["key_cache"], args["k_scale"], torch.float32)
    v_all = widen_oracle(args["value_cache"], args["v_scale"], torch.float32)
    q_all = widen_oracle(args["query"], args.get("q_scale"), torch.float32)
    for tile, (start, count) in enumerate(
        zip(tiles.starts.tolist(), tiles.query_lens.tolist(), strict=False)
    ):
        if not count:
            continue
        num_keys = int(tiles.seq_lens[tile])
        blocks = tiles.block_table[tile, : -(-num_keys // test_sparse_attention.BLOCK_SIZE)].long()
        k, v = (
            cache[blocks].flatten(0, 1)[:num_keys].repeat_interleave(group, dim=1)
            for cache in (k_all, v_all)
        )
        scores = torch.einsum("qhd,khd->hqk", q_all[start : start + count], k) * args["scale"]
        if args.get("softcap"):
            scores = args["softcap"] * (scores / args["softcap"]).tanh()
        seen = torch.ones(count, num_keys, dtype=torch.bool, device=device).tril(num_keys - count)
        scores = scores.masked_fill(~seen, float("-inf"))
        lse[:, start : start + count] = scores.logsumexp(dim=-1)
        out[start : start + count] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(dtype)
    return out, lse


@pytest.mark.parametrize("options", [{}, *test_received_attention.OPTIONS], ids=str)
@pytest.mark.parametrize(("per_head", "query"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("heads", [(6, 2, 64), (8, 1, 80)])
def test_received_attention_equals_the_oracle(
    device: torch.device,
    heads: tuple[int, int, int],
    per_head: bool,
    query: bool,
    options: dict[str, Any],
) -> None:
    for num_queries, num_keys in ((1, 1), (5, 19), (19, 99)):
        last_keys = test_received_attention.last_keys_of(num_queries, num_keys)
        args = test_received_attention.case(device, last_keys, torch.float16, *heads, 32, num_layers=2)
        args = quantized_layers(test_received_attention.with_options(args, **options), per_head, query)
        scores = torch.zeros(num_keys, device=device)
        expected = torch.zeros(num_keys, dtype=torch.float64, device=device)
        received_attention(**args, scores=scores)
        received_attention_oracle(**args, scores=expected)
        assert relative_error(scores, expected) < (1e-5 if device.type == "cuda" else 2e-6)


@pytest.mark.parametrize("per_head", [False, True])
def test_scales_are_what_values_are_multiplied_by(device: torch.device, per_head: bool) -> None:
    """A cache in e4m3 is read as its values in float32 are."""
    rows = [test_sparse_attention.scattered(19, 60), [5]]
    args = test_sparse_attention.case(device, rows, torch.float32, 4, 2, 64)
    small = quantized(args, per_head, query=False)
    wide = args | {
        name: widen_oracle(small[name], small[f"{name[0]}_scale"], torch.float32)
        for name in ("key_cache", "value_cache")
    }
    assert relative_error(sparse_attention(**small), sparse_attention(**wide)) < 2e-6
    assert relative_error(sparse_attention(**wide), sparse_attention(**args)) > 1e-2  # it was rounded


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(k_scale=None), "key_cache is torch.float8_e4m3fn; expected torch.float16"),
        (dict(v_scale=None), "a cache in e4m3 has both, another neither"),
        (dict(k_scale=torch.ones(3)), "k_scale has 3 values; expected 1, or 2: one a KV head"),
        (dict(v_scale=torch.ones(2).double()), "v_scale is torch.float64; expected torch.float32"),
        (dict(v_scale=torch.ones(2, 2)), "v_scale has strides"),
        (dict(q_scale=torch.ones(1)), "query is torch.float16; expected torch.float8_e4m3fn"),
    ],
)
def test_the_door_names_the_argument(
    device: torch.device, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    args = test_sparse_attention.case(device, [[0, 5, 17]], torch.float16, 4, 2, 32)
    args = quantized(args, per_head=True, query=False)
    # the first of several columns, which ``to`` would make contiguous
    there = {name: None if value is None else value.to(device) for name, value in changes.items()}
    args |= {
        name: value[:, 0] if value is not None and value.dim() > 1 else value
        for name, value in there.items()
    }
    with pytest.raises(ValueError, match=message):
        sparse_attention(**args)


def test_the_type_of_segments_is_checked(device: torch.device) -> None:
    case = test_segment_scatter.Case(device, [19], torch.float16)
    tables = case.tables
    place = (tables.addresses[0], tables.segments, tables.totals[0])
    with pytest.raises(
        ValueError, match=r"stored_dtype is torch.float32; the caches are torch.float16"
    ):
        segment_scatter(*place, **case.place, stored_dtype=torch.float32)
    case.place |= quantized_caches(case.place)
    scales = scales_of(1, device, "k_scale", "v_scale")
    with pytest.raises(ValueError, match="stored_dtype is torch.float8_e4m3fn"):
        segment_scatter(*place, **case.place, **scales)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_vllm_writes_is_what_is_written(dtype: torch.dtype) -> None:
    """At position 0, where K is not rotated, to the bit."""
    from vllm import _custom_ops as ops

    torch.manual_seed(0)
    device = torch.device("cuda")
    args = test_shift_scatter.case(device, 989, dtype, 4, 128, 128)
    args["positions"].zero_()
    args["cos_sin_cache"][0, :64], args["cos_sin_cache"][0, 64:] = 1, 0
    for name in ("k", "v"):
        args[name] *= 30
        args[name][0, 0, :3] = args[name].new_tensor([1e4, -1e4, -0.0])
    args |= quantized_caches(args) | scales_of(1, device, "k_scale", "v_scale")
    expected = {name: args[name].clone() for name in ("key_cache", "value_cache")}
    ops.reshape_and_cache_flash(
        args["k"],
        args["v"],
        expected["key_cache"].view(torch.uint8),
        expected["value_cache"].view(torch.uint8),
        args["slot_mapping"],
        "fp8",
        args["k_scale"],
        args["v_scale"],
    )
    shift_scatter(**args)
    for name, cache in expected.items():
        assert same_bits(args[name], cache)


@pytest.mark.gpu
@pytest.mark.parametrize("options", ATTENTION[:4], ids=str)
@pytest.mark.parametrize(("group", "head_size"), [(3, 64), (4, 128), (7, 96), (8, 256)])
def test_rest_completes_flash_attention_3(group: int, head_size: int, options: dict[str, Any]) -> None:
    """Which rounds its weights to e4m3, too: the result is within that of the oracle."""
    pytest.importorskip("vllm.vllm_flash_attn._vllm_fa3_C", exc_type=ImportError)
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("FlashAttention 3 is for compute capability 9.x")
    from vllm_blend.compat.cuda import flash_attention_3

    device, length = torch.device("cuda"), 3000
    torch.manual_seed(0)
    rows = [test_sparse_attention.scattered(1000, length), [0], [length - 1], list(range(700))]
    args = test_sparse_attention.case(
        device, rows, torch.bfloat16, 2 * group, 2, head_size, heads_first=True
    )
    args = quantized(test_sparse_attention.with_options(args, **options), False, query=True)
    tiles = test_sparse_attention.virtual_requests(
        args["positions"], args["query_start_loc"], args["block_table"], group=group
    )
    out = torch.full(args["query"].shape, float("nan"), dtype=torch.bfloat16, device=device)
    scales = (args["q_scale"], args["k_scale"], args["v_scale"])
    caches = (args["key_cache"], args["value_cache"])
    lse = flash_attention_3(
        args["query"], *caches, out, tiles, length, args["scale"], args["softcap"], scales
    )
    sparse_attention_rest(**args, out=out, prefix_lse=lse)
    assert relative_error(out, sparse_attention_oracle(**args)) < 0.05
