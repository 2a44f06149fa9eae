"""``sparse_attention`` against its oracle, which is checked against torch's own attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from paged import paged_cache, relative_error

from vllm_blend.ops.sparse_attention import (
    sparse_attention,
    sparse_attention_oracle,
    sparse_attention_rest,
)
from vllm_blend.ops.sparse_attention_kernel import virtual_requests

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


def assert_close(result: torch.Tensor, args: dict[str, Any], window: int = 0) -> None:
    exact = sparse_attention_oracle(**args, sliding_window=window)
    same_type = sparse_attention_oracle(**args, sliding_window=window, dtype=args["query"].dtype)
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


@pytest.mark.parametrize("group", [1, 3, 4, 6, 7])
def test_rest_completes_attention_over_virtual_requests(
    device: torch.device, full_size: bool, group: int
) -> None:
    length = 3000 if full_size else 90
    rows = [scattered(length // 3, length), [0], [], [length - 1], list(range(length // 4))]
    dtype = torch.float16 if full_size else torch.float32
    args = case(device, rows, dtype, 2 * group, 2, 32)
    scale = args.pop("scale")
    tiles = virtual_requests(
        args["positions"],
        args["query_start_loc"],
        args["block_table"],
        group=group,
    )
    # dense attention of each virtual request: the part of FlashAttention
    out = torch.full_like(args["query"], float("nan"))
    lse = out.new_full((2 * group, out.shape[0]), float("nan"), dtype=torch.float32)
    covered = torch.zeros(out.shape[0], dtype=torch.int64)
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
        assert num_keys == int(args["positions"][start]) + 1
        blocks = tiles.block_table[tile, : -(-num_keys // BLOCK_SIZE)].long()
        k, v = (
            args[name][blocks].flatten(0, 1)[:num_keys].float().repeat_interleave(group, dim=1)
            for name in ("key_cache", "value_cache")
        )
        scores = torch.einsum("qhd,khd->hqk", args["query"][start:end].float(), k) * scale
        lse[:, start:end] = scores.logsumexp(dim=-1)
        out[start:end] = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v).to(dtype)
    assert (covered == 1).all()
    sparse_attention_rest(**args, out=out, prefix_lse=lse, scale=scale)
    assert_close(out, args | {"scale": scale})


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
    ],
)
def test_the_door_names_the_argument(
    device: torch.device, name: str, change: Any, message: str
) -> None:
    args = case(device, [[0, 5, 17]], torch.float32, 4, 2, 32)
    with pytest.raises(ValueError, match=message):
        sparse_attention(**(args | {name: change(args[name])}))
    with pytest.raises(ValueError, match="sliding_window is -1"):
        sparse_attention(**args, sliding_window=-1)
