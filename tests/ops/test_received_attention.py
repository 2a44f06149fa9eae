"""``received_attention`` against its oracle, which is checked against a softmax written out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from paged import paged_cache, relative_error

from vllm_blend.attention import paged as paged_attention
from vllm_blend.ops.library import FLOATS
from vllm_blend.ops.received_attention import received_attention, received_attention_oracle

SPARE = 9  # keys in `scores` that no query sees


def case(
    device: torch.device,
    last_keys: list[int],
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    block_size: int = 16,
    heads_first: bool = False,
    num_layers: int = 1,
) -> dict[str, Any]:
    """Arguments of the op but ``scores``; rows that pad and blocks of others hold NaN."""
    num_blocks = max(last_keys) // block_size + 1
    block_table = torch.randperm(num_blocks + 2, device=device)[:num_blocks].to(torch.int32)
    others = torch.ones(num_blocks + 2, dtype=torch.bool, device=device)
    others[block_table.long()] = False
    key_caches = []
    for _ in range(num_layers):
        key_cache, _ = paged_cache(
            num_blocks + 2, block_size, num_kv_heads, head_size, dtype, device, heads_first
        )
        key_cache[others] = float("nan")
        key_caches.append(key_cache)
    # slices of what several requests ask, and of qkv
    size = (num_layers, len(last_keys) + 2, (num_heads + 2) * head_size)
    last = torch.tensor(last_keys, dtype=torch.int32 if heads_first else torch.int64, device=device)
    qkv = torch.randn(size, device=device).to(dtype)[:, 1:-1]
    qkv[:, last < 0] = float("nan")
    query = qkv[..., : num_heads * head_size].unflatten(-1, (num_heads, head_size))
    # twice the usual scale: some keys receive much more than others
    return dict(
        query=query,
        key_caches=key_caches,
        block_table=block_table,
        last_keys=last,
        scale=2 * head_size**-0.5,
    )


def with_options(
    args: dict[str, Any], softcap: float = 0.0, has_sinks: bool = False, window: int = 0
) -> dict[str, Any]:
    """Sinks that take a good part, a soft cap that bends logits; blocks left of windows hold NaN."""
    query = args["query"]
    size = query.shape[0], query.shape[2]
    sinks = (2 * torch.randn(size, device=query.device) + 3).to(query.dtype)
    args = args | dict(softcap=softcap, sinks=sinks if has_sinks else None, sliding_window=window)
    if window:
        first = int(args["last_keys"][args["last_keys"] >= 0].min()) - window + 1
        freed = max(0, first) // args["key_caches"][0].shape[1]
        for key_cache in args["key_caches"]:
            key_cache[args["block_table"][:freed].long()] = float("nan")
    return args


OPTIONS: list[dict[str, Any]] = [
    dict(softcap=2.0),
    dict(has_sinks=True),
    dict(window=37),
    dict(softcap=2.0, has_sinks=True),
    dict(softcap=2.0, window=37),
    dict(softcap=2.0, has_sinks=True, window=37),
]


def check_against_the_oracle(args: dict[str, Any], calls: int = 1) -> None:
    """Calls add up, and keys beyond are left alone; the oracle computes in fp64."""
    num_keys = int(args["last_keys"].max()) + 1
    scores = torch.zeros(num_keys + SPARE, device=args["query"].device)
    scores[num_keys:] = torch.arange(SPARE)
    expected = scores.double()
    for _ in range(calls):
        received_attention(**args, scores=scores)
        received_attention_oracle(**args, scores=expected)
    # 16-bit products are exact in fp32; tensor cores cut off bits of their sums
    on_tensor_cores = args["query"].is_cuda and args["query"].element_size() == 2
    allowed = 1e-5 if on_tensor_cores else 2e-6
    assert relative_error(scores[:num_keys], expected[:num_keys]) <= allowed
    assert torch.equal(scores[num_keys:].double(), expected[num_keys:])


def last_keys_of(num_queries: int, num_keys: int) -> list[int]:
    """Some of the prompt's last tokens; one row pads, where there are more."""
    last_keys = [num_keys - 1 - num_keys * i // 99 for i in range(num_queries)]
    if num_queries > 1:
        last_keys[1] = -1
    return last_keys


@pytest.mark.parametrize("num_queries", [1, 5, 32])
@pytest.mark.parametrize("num_keys", [1, 17, 100, 1000])
@pytest.mark.parametrize(
    "heads", [(2, 2, 32), (6, 2, 64), (8, 1, 80), (7, 1, 96), (12, 3, 128), (4, 1, 256)]
)
def test_equals_the_oracle(
    device: torch.device,
    full_size: bool,
    num_queries: int,
    num_keys: int,
    heads: tuple[int, int, int],
) -> None:
    dtypes = FLOATS
    if not full_size:
        # the interpreter is slow, and multiplies bf16 bit patterns as integers
        dtypes = (torch.float32,) if num_queries == 5 else (torch.float16,)
        num_keys = num_keys if heads == (7, 1, 96) else min(num_keys, 200)
    last_keys = last_keys_of(num_queries, num_keys)
    block_size, heads_first = (16, True) if num_queries == 5 else (128, False)
    for dtype in dtypes:
        check_against_the_oracle(case(device, last_keys, dtype, *heads, block_size, heads_first))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("heads", [(2, 2, 40), (6, 2, 64), (7, 1, 96), (8, 1, 128), (3, 1, 256)])
def test_options_equal_the_oracle(
    device: torch.device, full_size: bool, heads: tuple[int, int, int], options: dict[str, Any]
) -> None:
    sizes = [(1, 1, torch.float16), (5, 19, torch.float32), (19, 99, torch.float16)]
    sizes += [(5, 989, torch.float16)] if heads[2] == 64 else []
    if full_size:
        lengths = [(1, 1), (5, 19), (19, 99), (32, 989), (32, 9989)]
        sizes = [(*length, dtype) for length in lengths for dtype in FLOATS]
    for num_queries, num_keys, dtype in sizes:
        last_keys = last_keys_of(num_queries, num_keys)
        block_size, heads_first = (16, True) if num_queries == 5 else (32, False)
        args = case(device, last_keys, dtype, *heads, block_size, heads_first)
        check_against_the_oracle(with_options(args, **options))


@pytest.mark.parametrize("options", [{}, OPTIONS[-1]], ids=str)
@pytest.mark.parametrize("num_layers", [2, 5])
def test_layers_add_up(device: torch.device, num_layers: int, options: dict[str, Any]) -> None:
    """In one call as in a call for each; each layer's queries, keys and sinks are its own."""
    for heads in ((6, 2, 64), (7, 1, 96)):
        for num_queries, num_keys in ((1, 1), (5, 19), (19, 99)):
            last_keys = last_keys_of(num_queries, num_keys)
            args = case(device, last_keys, torch.float16, *heads, 32, num_layers=num_layers)
            args = with_options(args, **options)
            check_against_the_oracle(args)
            together, apart = torch.zeros(2, num_keys, device=device)
            received_attention(**args, scores=together)
            for layer in range(num_layers):
                of_layer = {"query": args["query"][layer : layer + 1]}
                of_layer |= {"key_caches": args["key_caches"][layer : layer + 1]}
                if args.get("sinks") is not None:
                    of_layer["sinks"] = args["sinks"][layer : layer + 1]
                received_attention(**(args | of_layer), scores=apart)
            torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_what_layers_were_asked_is_received_at_once(device: torch.device, dtype: torch.dtype) -> None:
    """By layers of two kinds, of two requests of a step; as the oracle gives it layer by layer."""
    num_layers, num_queries, heads, size = 4, 3, 4, 32
    made = case(device, [90, 40, -1], dtype, heads, 2, size, num_layers=num_layers)
    made = with_options(made, has_sinks=True)
    made["key_caches"] = [cache.nan_to_num(0.0) for cache in made["key_caches"]]
    tables = torch.stack(
        [made["block_table"], made["block_table"].flip(0), made["block_table"].roll(1)]
    )
    windows = [None, 37, None, 37]
    queries = torch.randn(num_layers, 9, heads, size, device=device).to(dtype)
    rows = torch.tensor([8, 1, 3, 0, 2, 7], device=device)
    asked = []
    for layer, window in enumerate(windows):
        impl: Any = paged_attention.PagedFuse()
        impl.__dict__.update(kv_cache_dtype="auto", scale=0.3, sinks=made["sinks"][layer])
        impl.caches = lambda kv_cache: (kv_cache, None)
        module = SimpleNamespace(kv_cache=made["key_caches"][layer], sliding_window=window)
        asked.append(impl.asked(module, queries[layer], rows, tables))
    received = paged_attention.Received(asked)
    for request, last_keys in ((2, [90, 40, -1]), (1, [17, 60, 61])):
        last = torch.tensor(last_keys, device=device)
        of_request = slice(0, num_queries) if request == 2 else slice(num_queries, 2 * num_queries)
        scores, expected = torch.zeros(2, 91, device=device)
        received.add_to(scores, of_request, request, last)
        for layer, window in enumerate(windows):
            received_attention_oracle(
                queries[layer, rows[of_request]][None],
                [made["key_caches"][layer]],
                tables[request],
                last,
                expected,
                scale=0.3,
                sliding_window=window or 0,
                sinks=made["sinks"][layer][None],
            )
        assert expected.any()
        assert relative_error(scores, expected) <= (1e-5 if device.type == "cuda" else 2e-6)


def test_layers_of_other_strides_are_refused(device: torch.device) -> None:
    args = case(device, [0, 5, 17], torch.float32, 4, 2, 32, num_layers=2)
    args["key_caches"][1] = args["key_caches"][1].contiguous()
    with pytest.raises(ValueError, match=r"key_caches\[1\] has block sizes and strides"):
        received_attention(**args, scores=torch.zeros(20, device=device))


def test_keys_left_of_all_windows_are_left_as_they_are(device: torch.device) -> None:
    args = with_options(case(device, [500, -1, 480], torch.float32, 4, 2, 32), window=100)
    scores = torch.arange(600, dtype=torch.float32, device=device)
    before = scores.clone()
    received_attention(**args, scores=scores)
    assert (scores != before).nonzero().flatten().tolist() == list(range(381, 501))


@pytest.mark.parametrize("window", [0, 37])
def test_sinks_of_nothing_change_no_bit(device: torch.device, window: int) -> None:
    args = with_options(case(device, [40, 3, -1, 99], torch.float16, 4, 2, 32), window=window)
    scores = torch.zeros(2, 100, device=device)
    received_attention(**args, scores=scores[0])
    sinks = torch.full((1, 4), float("-inf"), device=device)
    received_attention(**(args | dict(sinks=sinks)), scores=scores[1])
    assert torch.equal(*scores)


def test_sinks_far_above_all_logits_take_everything(device: torch.device) -> None:
    args = case(device, [40, 3, -1, 99], torch.float16, 4, 2, 32)
    scores = torch.zeros(100, device=device)
    received_attention(**args, scores=scores, sinks=torch.full((1, 4), 1e4, device=device))
    assert not scores.any()


def test_calls_add_up(device: torch.device) -> None:
    check_against_the_oracle(case(device, [40, 3, -1, 99], torch.float16, 4, 2, 32), calls=2)


@pytest.mark.parametrize("options", [{}, *OPTIONS], ids=str)
def test_the_oracle_is_a_softmax_of_each_head_and_query(
    device: torch.device, options: dict[str, Any]
) -> None:
    args = with_options(case(device, [20, -1, 3, 36], torch.float32, 6, 2, 32), **options)
    args |= dict(sliding_window=9 if options.get("window") else 0)
    keys = args["key_caches"][0][args["block_table"].long()].flatten(0, 1).double()
    expected = torch.zeros(40, dtype=torch.float64, device=device)
    for row, last in enumerate(args["last_keys"].tolist()):
        seen = slice(max(0, last - 8) if options.get("window") else 0, last + 1)
        for head in range(6):
            logits = keys[seen, head // 3] @ args["query"][0, row, head].double() * args["scale"]
            if options.get("softcap"):
                logits = 2.0 * (logits / 2.0).tanh()
            weights = logits.exp()
            total = weights.sum()
            if options.get("has_sinks"):
                total += args["sinks"][0, head].double().exp()
            expected[seen] += weights / total
    scores = torch.zeros_like(expected)
    received_attention_oracle(**args, scores=scores)
    torch.testing.assert_close(scores, expected, rtol=1e-12, atol=1e-12)


def test_no_queries(device: torch.device) -> None:
    args = case(device, [20, 3], torch.float32, 4, 2, 32)
    args["last_keys"].fill_(-1)
    scores = torch.arange(SPARE, dtype=torch.float32, device=device)
    for count in (2, 0):
        some = {"query": args["query"][:, :count], "last_keys": args["last_keys"][:count]}
        received_attention(**(args | some), scores=scores)
        received_attention_oracle(**(args | some), scores=scores)
    assert scores.tolist() == list(range(SPARE))


@pytest.mark.gpu
def test_a_graph_is_replayed_with_other_queries_and_compiles_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from triton import knobs

    torch.manual_seed(0)
    device, heads = torch.device("cuda"), (5, 1, 48)  # heads of no other test
    args = case(device, [3000] * 32, torch.float16, *heads, num_layers=2)
    scores = torch.zeros(3001, device=device)
    received_attention(**args, scores=scores)
    compiled: list[Any] = []
    monkeypatch.setattr(
        knobs.runtime, "jit_post_compile_hook", lambda **more: compiled.append(more["fn"])
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        received_attention(**args, scores=scores)
    for last_keys in ([40] * 32, last_keys_of(32, 2900), [-1] * 31 + [0]):
        args["last_keys"].copy_(torch.tensor(last_keys))
        args["query"].normal_()
        expected = torch.zeros_like(scores)
        received_attention_oracle(**args, scores=expected)
        results = []
        for _ in range(2):
            scores.zero_()
            graph.replay()
            results.append(scores.clone())
        assert torch.equal(*results)
        assert relative_error(results[0], expected) <= 1e-5
        # the last rows alone, and tensors that begin anywhere
        some = {"query": args["query"][:, -3:], "last_keys": args["last_keys"][-3:]}
        some["block_table"] = torch.cat([args["block_table"][:1], args["block_table"]])[1:]
        check_against_the_oracle(args | some)
    assert not compiled


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("query", lambda t: t[0], "query has shape"),
        ("query", lambda t: t.repeat(1, 11, 1, 1), "query has 33 rows; allowed: up to 32"),
        ("query", lambda t: t.repeat(2, 1, 1, 1), "key_caches has 1 of them; query has 2 layers"),
        ("query", lambda t: t[:, :, :3], "query has 3 heads, which 2 KV heads do not divide"),
        ("query", lambda t: t.repeat(1, 1, 1, 2)[..., ::2], "query has strides"),
        ("key_caches", lambda t: [t[0][..., :16]], "key_caches has shape"),
        ("key_caches", lambda t: [t[0].half()], "key_caches is torch.float16; expected torch.float32"),
        ("block_table", lambda t: t[None], "block_table has shape"),
        ("block_table", lambda t: t.repeat(2)[::2], "block_table has strides"),
        ("last_keys", lambda t: t[:1], "last_keys has shape"),
        ("last_keys", lambda t: t.float(), "last_keys is torch.float32"),
        ("sinks", lambda t: t[:, :3].clone(), r"sinks has shape \[3\]; expected \[4\]"),
        ("sinks", lambda t: t[0], r"sinks has shape \[4\]; expected a row for each of 1 layers"),
        ("sinks", lambda t: t.int(), "sinks is torch.int32"),
        ("sinks", lambda t: t.repeat(1, 2)[:, ::2], "sinks has strides"),
        ("softcap", lambda _: -1.0, "softcap is -1.0; allowed: 0"),
        ("sliding_window", lambda _: -1, "sliding_window is -1; allowed: 0"),
        ("scores", lambda t: t.double(), "scores is torch.float64; expected torch.float32"),
        ("scores", lambda t: t[::2], "scores has strides"),
    ],
)
def test_the_door_names_the_argument(
    device: torch.device, name: str, change: Any, message: str
) -> None:
    args = with_options(case(device, [0, 5, 17], torch.float32, 4, 2, 32), 2.0, True, 9)
    args["scores"] = torch.zeros(20, device=device)
    with pytest.raises(ValueError, match=message):
        received_attention(**(args | {name: change(args[name])}))
