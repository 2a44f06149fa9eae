"""``sparse_attention`` against its oracle, which is checked against torch's own attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged import paged_cache, relative_error

from vllm_blend.ops.library import FLOATS, use_triton
from vllm_blend.ops.sparse_attention import (
    sparse_attention,
    sparse_attention_oracle,
    sparse_attention_rest,
)
from vllm_blend.ops.sparse_attention_tiles import virtual_requests

BLOCK_SIZE = 16


def case(
    device: torch.device,
    rows: list[list[int]],
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    heads_first: bool = False,
) -> dict[str, Any]:
    """Arguments of the op: a request for each list of positions, over scattered blocks."""
    num_blocks = [max(at, default=0) // BLOCK_SIZE + 1 for at in rows]
    ids = torch.randperm(sum(num_blocks) + 3, device=device).to(torch.int32)
    block_table = torch.zeros(len(rows), max(num_blocks), dtype=torch.int32, device=device)
    for request, count in enumerate(num_blocks):
        start = sum(num_blocks[:request])
        block_table[request, :count] = ids[start : start + count]
    key_cache, value_cache = paged_cache(
        sum(num_blocks) + 3, BLOCK_SIZE, num_kv_heads, head_size, dtype, device, heads_first
    )
    counts = torch.tensor([0] + [len(at) for at in rows])
    num_rows = int(counts.sum())
    # the kernel gets queries as slices of qkv, as a model's layer does
    qkv = torch.randn(num_rows, (num_heads + 2) * head_size, device=device).to(dtype)
    return dict(
        query=qkv[:, : num_heads * head_size].view(num_rows, num_heads, head_size),
        key_cache=key_cache,
        value_cache=value_cache,
        positions=torch.tensor(sum(rows, []), dtype=torch.int64, device=device),
        query_start_loc=counts.cumsum(0).to(torch.int32).to(device),
        block_table=block_table,
        scale=head_size**-0.5,
    )


def scattered(count: int, length: int) -> list[int]:
    return sorted(torch.randperm(length)[:count].tolist())


def with_options(
    args: dict[str, Any], softcap: float = 0.0, has_sinks: bool = False, window: int = 0
) -> dict[str, Any]:
    """Logits that a soft cap bends, sinks that take a good part, and a window where there is one."""
    query = args["query"]
    sinks = (2 * torch.randn(query.shape[1], device=query.device) + 3).to(query.dtype)
    args = args | dict(scale=2 * args["scale"], softcap=softcap, sinks=sinks if has_sinks else None)
    return args | dict(sliding_window=window) if window else args


OPTIONS: list[dict[str, Any]] = [
    dict(softcap=2.0),
    dict(has_sinks=True),
    dict(softcap=2.0, has_sinks=True),
    dict(softcap=2.0, window=37),
    dict(has_sinks=True, window=37),
    dict(softcap=2.0, has_sinks=True, window=37),
]


def assert_close(result: torch.Tensor, args: dict[str, Any], window: int = 0) -> None:
    args = dict(sliding_window=window) | args
    exact = sparse_attention_oracle(**args)
    same_type = sparse_attention_oracle(**args, dtype=args["query"].dtype)
    allowed = max(2 * relative_error(same_type, exact), 2e-6)
    assert relative_error(result, exact) <= allowed


@pytest.mark.parametrize("count", [1, 19, 99, 989])
@pytest.mark.parametrize("window", [0, 37])
@pytest.mark.parametrize("heads", [(4, 2, 32), (9, 3, 64), (8, 1, 80), (32, 8, 128)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_equals_the_oracle(
    device: torch.device,
    full_size: bool,
    count: int,
    window: int,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
) -> None:
    if not full_size and (count > 99 or heads[0] > 9 or dtype == torch.bfloat16):
        # the interpreter multiplies bf16 bit patterns as integers, and takes minutes for the rest
        dtype, count, heads = torch.float16, min(count, 40), (6, 2, 16)
    length = 2 * count + 7
    rows = [scattered(count, length), [0], [], list(range(30, 30 + count // 2 + 1))]
    args = case(device, rows, dtype, *heads, heads_first=count % 2 == 0)
    poisoned = torch.full_like(args["query"], float("nan"))
    result = sparse_attention(**args, sliding_window=window, out=poisoned)
    assert result is poisoned
    assert_close(result, args, window)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("heads", [(2, 2, 40), (6, 2, 64), (7, 1, 96), (8, 1, 128), (3, 1, 256)])
def test_options_equal_the_oracle(
    device: torch.device, full_size: bool, heads: tuple[int, int, int], options: dict[str, Any]
) -> None:
    sizes = [(1, torch.float16), (19, torch.float32), (59, torch.float16)]
    if full_size:
        sizes = [(count, dtype) for count in (1, 19, 99, 989) for dtype in FLOATS]
    for count, dtype in sizes:
        rows = [scattered(count, 2 * count + 7), [0], [], list(range(30, 30 + count // 2 + 1))]
        args = with_options(case(device, rows, dtype, *heads, heads_first=count % 2 == 0), **options)
        poisoned = torch.full_like(args["query"], float("nan"))
        assert_close(sparse_attention(**args, out=poisoned), args)


def test_many_rows_with_all_options(device: torch.device) -> None:
    args = case(device, [scattered(989, 1400), [1399]], torch.float16, 4, 1, 32)
    args = with_options(args, softcap=2.0, has_sinks=True, window=100)
    assert_close(sparse_attention(**args), args)


@pytest.mark.parametrize("softcap", [0.5, 30.0, 50.0])
def test_capped_logits_of_any_size_are_finite(device: torch.device, softcap: float) -> None:
    """From far below the cap, where the identity is right, to far above it, where the sign is."""
    for size in (1e-3, 1.0, 30.0, 1e4):
        args = case(device, [scattered(19, 80)], torch.float32, 4, 2, 64)
        args |= dict(query=args["query"] * size, softcap=softcap)
        exact = sparse_attention_oracle(**args, dtype=torch.float64)
        # a logit is off by the rounding of its tanh, and by that of the product within it, in whatever
        # order its sum is taken
        orders = [torch.randperm(64, device=device) for _ in range(6)]
        of_oracle = max(
            relative_error(sparse_attention_oracle(**turned(args, o)), exact) for o in orders
        )
        allowed = max(of_oracle, 2e-6) + softcap * torch.finfo(torch.float32).eps
        assert relative_error(sparse_attention(**args), exact) <= allowed


def turned(args: dict[str, Any], order: torch.Tensor) -> dict[str, Any]:
    """The same attention, with a head's numbers in another order."""
    return args | {name: args[name][..., order] for name in ("query", "key_cache")}


def test_sinks_of_nothing_change_no_bit(device: torch.device) -> None:
    args = case(device, [scattered(19, 80), [5]], torch.float16, 4, 2, 64)
    sinks = torch.full((4,), float("-inf"), device=device)
    for window in (0, 37):
        before = sparse_attention(**args, sliding_window=window)
        assert torch.equal(sparse_attention(**args, sliding_window=window, sinks=sinks), before)


def test_sinks_far_above_all_logits_take_everything(device: torch.device) -> None:
    args = case(device, [scattered(19, 80), [5]], torch.float16, 4, 2, 64)
    sinks = torch.tensor([1e4, 0.0, 1e4, 0.0], device=device)
    result = sparse_attention(**args, sinks=sinks)
    assert not result[:, ::2].any()
    assert result[:, 1::2].any(-1).all()


def test_later_keys_do_not_matter(device: torch.device) -> None:
    """Noise in every key after a query's position leaves its output bit-equal."""
    args = case(device, [[3, 20, 21, 40, 63]], torch.float32, 4, 2, 32)
    before = sparse_attention(**args)
    blocks = args["block_table"][0].long()
    for row, position in enumerate([3, 20, 21, 40]):
        changed = {name: args[name].clone() for name in ("key_cache", "value_cache")}
        for n in range(position + 1, 64):
            for cache in changed.values():
                cache[blocks[n // BLOCK_SIZE], n % BLOCK_SIZE] = 1e4
        after = sparse_attention(**(args | changed))
        assert torch.equal(after[: row + 1], before[: row + 1])
        assert not torch.equal(after[row + 1 :], before[row + 1 :])


def test_the_oracle_is_torchs_causal_attention_where_all_rows_are_there(
    device: torch.device,
) -> None:
    args = case(device, [list(range(50))], torch.float32, 4, 2, 32)
    blocks = args["block_table"][0].long()
    k, v = (
        args[name][blocks].flatten(0, 1)[:50].transpose(0, 1) for name in ("key_cache", "value_cache")
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        args["query"].transpose(0, 1)[None], k[None], v[None], is_causal=True, enable_gqa=True
    )
    assert relative_error(sparse_attention_oracle(**args), expected[0].transpose(0, 1)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_oracle_is_the_formula_with_options(device: torch.device, dtype: torch.dtype) -> None:
    """A softmax written out of one row and head after the other."""
    positions = [3, 20, 21, 40, 63]
    args = with_options(case(device, [positions], torch.float32, 4, 2, 32), 2.0, True, window=9)
    blocks = args["block_table"][0].long()
    keys, values = (args[name][blocks].flatten(0, 1).double() for name in ("key_cache", "value_cache"))
    expected = torch.zeros(len(positions), 4, 32, dtype=torch.float64, device=device)
    for row, position in enumerate(positions):
        seen = slice(max(0, position - 8), position + 1)
        for head in range(4):
            logits = args["scale"] * keys[seen, head // 2] @ args["query"][row, head].double()
            weights = (2.0 * (logits / 2.0).tanh()).exp()
            total = weights.sum() + args["sinks"][head].double().exp()
            expected[row, head] = weights @ values[seen, head // 2] / total
    allowed = 1e-12 if dtype == torch.float64 else 1e-6
    assert relative_error(sparse_attention_oracle(**args, dtype=dtype), expected) < allowed


@pytest.mark.parametrize("options", [{}, *OPTIONS[:3]], ids=str)
@pytest.mark.parametrize(
    ("group", "head_size"), [(1, 40), (3, 64), (4, 32), (6, 96), (7, 128), (8, 256)]
)
def test_rest_completes_attention_over_virtual_requests(
    device: torch.device, full_size: bool, group: int, head_size: int, options: dict[str, Any]
) -> None:
    length = 3000 if full_size else 90
    rows = [scattered(length // 3, length), [0], [], [length - 1], list(range(length // 4))]
    dtype = torch.float16 if full_size else torch.float32
    args = with_options(case(device, rows, dtype, 2 * group, 2, head_size), **options)
    scale, softcap = args["scale"], args["softcap"]
    tiles = virtual_requests(
        args["positions"],
        args["query_start_loc"],
        args["block_table"],
        group=group,
    )
    # causal attention of each virtual request: the part of FlashAttention
    out = torch.full_like(args["query"], float("nan"))
    lse = out.new_full((2 * group, out.shape[0]), float("nan"), dtype=torch.float32)
    covered, known = torch.zeros(2, out.shape[0], dtype=torch.int64)
    for tile, (start, rows_here) in enumerate(
        zip(tiles.starts.tolist(), tiles.query_lens.tolist(), strict=False)
    ):
        assert 0 <= rows_here <= tiles.block_q
        num_keys = int(tiles.seq_lens[tile])
        if not rows_here:
            assert not num_keys
            continue
        end = start + rows_here
        covered[start:end] += 1
        assert num_keys == int(args["positions"][start]) + rows_here
        known[start:end] = torch.arange(num_keys - rows_here, num_keys)
        blocks = tiles.block_table[tile, : -(-num_keys // BLOCK_SIZE)].long()
        k, v = (
            args[name][blocks].flatten(0, 1)[:num_keys].float().repeat_interleave(group, dim=1)
            for name in ("key_cache", "value_cache")
        )
        scores = torch.einsum("qhd,khd->hqk", args["query"][start:end].float(), k) * scale
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        seen = torch.ones(rows_here, num_keys, dtype=torch.bool, device=device)
        scores = scores.masked_fill(~seen.tril(num_keys - rows_here), float("-inf"))
        lse[:, start:end] = scores.logsumexp(dim=-1)
        out[start:end] = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v).to(dtype)
    assert (covered == 1).all()
    positions = args["positions"].cpu()
    assert (known <= positions).all()
    before = out.clone()
    sparse_attention_rest(**args, out=out, prefix_lse=lse)
    assert_close(out, args)
    if args.get("sinks") is None and use_triton(out):
        whole = (known == positions).to(device)
        assert torch.equal(out[whole], before[whole])
        assert int(whole.sum()) >= length // 4 + 2  # the last three requests
        assert not torch.equal(out, before)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, *OPTIONS[:3]], ids=str)
@pytest.mark.parametrize(("group", "head_size"), [(1, 40), (3, 64), (7, 96), (4, 128), (8, 256)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rest_completes_flash_attention_3(
    dtype: torch.dtype, group: int, head_size: int, options: dict[str, Any]
) -> None:
    """Its soft cap is ours, and the log of its sum of exponentials is of capped logits."""
    pytest.importorskip("vllm.vllm_flash_attn._vllm_fa3_C", exc_type=ImportError)
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("FlashAttention 3 is for compute capability 9.x")
    from vllm_blend.compat.cuda import flash_attention_3

    device, length = torch.device("cuda"), 3000
    torch.manual_seed(0)
    rows = [scattered(length // 3, length), [0], [length - 1], list(range(length // 4))]
    args = with_options(case(device, rows, dtype, 2 * group, 2, head_size, True), **options)
    place = (args["positions"], args["query_start_loc"], args["block_table"])
    tiles = virtual_requests(*place, group=group)
    out = torch.full(args["query"].shape, float("nan"), dtype=dtype, device=device)
    caches = args["key_cache"], args["value_cache"]
    query = args["query"].contiguous()
    lse = flash_attention_3(query, *caches, out, tiles, length, args["scale"], args["softcap"])
    sparse_attention_rest(**args, out=out, prefix_lse=lse)
    assert_close(out, args)


@pytest.mark.gpu
@pytest.mark.parametrize(("group", "head_size"), [(1, 64), (3, 64), (7, 96), (4, 128), (8, 256)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_that_follow_one_another_get_the_bits_of_flash_attention_3(
    dtype: torch.dtype, group: int, head_size: int
) -> None:
    pytest.importorskip("vllm.vllm_flash_attn._vllm_fa3_C", exc_type=ImportError)
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("FlashAttention 3 is for compute capability 9.x")
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    from vllm_blend.compat.cuda import flash_attention_3

    device = torch.device("cuda")
    torch.manual_seed(0)
    rows = [list(range(first, first + count)) for first, count in ((0, 300), (1000, 77), (2999, 1))]
    args = case(device, rows, dtype, 2 * group, 2, head_size, True)
    place = (args["positions"], args["query_start_loc"], args["block_table"])
    tiles = virtual_requests(*place, group=group)
    query, caches = args["query"].contiguous(), (args["key_cache"], args["value_cache"])
    stock, out = torch.zeros_like(query), torch.zeros_like(query)
    flash_attn_varlen_func(
        query,
        *caches,
        out=stock,
        cu_seqlens_q=args["query_start_loc"],
        max_seqlen_q=max(len(at) for at in rows),
        seqused_k=torch.tensor([at[-1] + 1 for at in rows], dtype=torch.int32, device=device),
        max_seqlen_k=3000,
        softmax_scale=args["scale"],
        causal=True,
        block_table=args["block_table"],
        fa_version=3,
        num_splits=1,
    )
    lse = flash_attention_3(query, *caches, out, tiles, 3000, args["scale"])
    sparse_attention_rest(**args, out=out, prefix_lse=lse)
    assert torch.equal(out, stock)


@pytest.mark.gpu
def test_steps_of_other_sizes_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes half a second, which a server's requests would wait."""
    from triton import knobs

    compiled: list[Any] = []
    device, heads = torch.device("cuda"), (5, 1, 48)  # heads of no other test
    for rows in ([[*range(200)]], [[199]], [[3, 199]] * 16, [[*range(31)], [199], [], [7, 8]]):
        args = case(device, rows, torch.float16, *heads)
        sparse_attention(**args)
        lse = torch.zeros(heads[0], args["query"].shape[0], device=device)
        sparse_attention_rest(**args, out=torch.zeros_like(args["query"]), prefix_lse=lse)
        if not compiled:
            compiled.append("the first")
            monkeypatch.setattr(
                knobs.runtime, "jit_post_compile_hook", lambda **more: compiled.append(more["fn"])
            )
    assert compiled == ["the first"]


def test_no_rows(device: torch.device) -> None:
    args = case(device, [[]], torch.float32, 4, 2, 32)
    assert sparse_attention(**args).shape == (0, 4, 32)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("query", lambda t: t[0], "query has shape"),
        ("key_cache", lambda t: t[..., :16], "key_cache has shape"),
        ("value_cache", lambda t: t.half(), "value_cache is torch.float16; expected torch.float32"),
        ("positions", lambda t: t[:1], "positions has shape"),
        ("query_start_loc", lambda t: t.long(), "query_start_loc is torch.int64"),
        ("block_table", lambda t: t[None], "block_table has shape"),
        ("block_table", lambda t: t.repeat(1, 2)[:, ::2], "block_table has strides"),
        ("query", lambda t: t[:, :3], "query has 3 heads, which 2 KV heads do not divide"),
        ("sinks", lambda t: t[:3], r"sinks has shape \[3\]; expected \[4\]"),
        ("sinks", lambda t: t.int(), "sinks is torch.int32"),
        ("sinks", lambda t: t.repeat(2)[::2], "sinks has strides"),
        ("softcap", lambda _: -1.0, "softcap is -1.0; allowed: 0"),
        ("softcap", lambda _: float("nan"), "softcap is nan; allowed: 0"),
    ],
)
def test_the_door_names_the_argument(
    device: torch.device, name: str, change: Any, message: str
) -> None:
    args = with_options(case(device, [[0, 5, 17]], torch.float32, 4, 2, 32), 2.0, True)
    changed = args | {name: change(args[name])}
    with pytest.raises(ValueError, match=message):
        sparse_attention(**changed)
    out, lse = torch.zeros(3, 4, 32, device=device), torch.zeros(4, 3, device=device)
    with pytest.raises(ValueError, match=message):
        sparse_attention_rest(**changed, out=out, prefix_lse=lse)
    with pytest.raises(ValueError, match="sliding_window is -1"):
        sparse_attention(**args, sliding_window=-1)
