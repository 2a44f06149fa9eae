"""Attention from queries at explicit positions over the paged cache.

After a check layer the queries are scattered rows of a prompt, and a query must see the keys at
positions up to its own. Kernels that align a mask to the last query cannot express that.
"""

from __future__ import annotations

from typing import Any

import torch

from vllm_blend.ops.fp8 import FP8, cache_types, check_scales, widen_oracle
from vllm_blend.ops.library import FLOATS, INTS, check, check_inner_stride, register, use_triton
from vllm_blend.ops.sparse_attention_kernel import launch
from vllm_blend.ops.sparse_attention_tiles import choose_tiles, rest_tiles


def sparse_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_table: torch.Tensor,
    *,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``softmax(scale * q k^T) v`` over the keys of the query's request at positions <= its own.

    With a soft cap the logits are ``softcap * tanh(scale * q k^T / softcap)``. With sinks a head's
    softmax has one logit more, its sink, which takes its share and has no value.

    Args:
        query: ``[num_rows, num_heads, head_size]``, rows sorted by request, then position.
        key_cache, value_cache: ``[num_blocks, block_size, num_kv_heads, head_size]``, any strides but
            a contiguous last dimension. Every key up to a request's last query is there.
        positions: position of each query in its request, ``[num_rows]``.
        query_start_loc: first row of each request, then ``num_rows``, ``[num_reqs + 1]`` int32.
        block_table: blocks of each request, ``[num_reqs, max_num_blocks]`` int32.
        sliding_window: a query sees this many keys, its own included; 0: all.
        softcap: bound of the logits; 0: none.
        sinks: logits, neither scaled nor capped, ``[num_heads]``, any float type.
        q_scale, k_scale, v_scale: of a query and caches in e4m3, ``[1]`` or ``[num_kv_heads]`` float32.
        out: written if given, ``[num_rows, num_heads, head_size]``; it must be, where the query is in
            e4m3.

    Returns:
        ``[num_rows, num_heads, head_size]``.

    Raises:
        ValueError: names the argument that does not fit.
    """
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    scales = (q_scale, k_scale, v_scale)
    _check(
        query,
        key_cache,
        value_cache,
        positions,
        query_start_loc,
        block_table,
        out,
        softcap,
        sinks,
        *scales,
    )
    check_window(sliding_window)
    torch.ops.vllm_blend.sparse_attention(
        query,
        key_cache,
        value_cache,
        positions,
        query_start_loc,
        block_table,
        out,
        scale,
        sliding_window,
        softcap,
        sinks,
        *scales,
    )
    return out


def sparse_attention_rest(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
    prefix_lse: torch.Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Completes ``out``: adds the keys that ``virtual_requests`` left out, and the sinks.

    Another kernel has attended from each tile of rows with a causal mask, as if they stood one behind
    the other from the first one's position on, with the same soft cap and without sinks. Rows that have
    all their keys stay as they are, bit by bit, unless there are sinks. Arguments not listed are those
    of ``sparse_attention``.

    Args:
        out: what that kernel returned, ``[num_rows, num_heads, head_size]``; overwritten.
        prefix_lse: log of the sum of its exponentials (natural), ``[num_heads, num_rows]`` float32.

    Raises:
        ValueError: names the argument that does not fit.
    """
    scales = (q_scale, k_scale, v_scale)
    _check(
        query,
        key_cache,
        value_cache,
        positions,
        query_start_loc,
        block_table,
        out,
        softcap,
        sinks,
        *scales,
    )
    lse_shape = (query.shape[1], query.shape[0])
    check("prefix_lse", prefix_lse, lse_shape, (torch.float32,), query)
    check_inner_stride("prefix_lse", prefix_lse)
    torch.ops.vllm_blend.sparse_attention_rest(
        query,
        key_cache,
        value_cache,
        positions,
        query_start_loc,
        block_table,
        out,
        prefix_lse,
        scale,
        softcap,
        sinks,
        *scales,
    )


def _check(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
    softcap: float,
    sinks: torch.Tensor | None,
    q_scale: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """The door of both functions above."""
    query_types = FLOATS if q_scale is None else (FP8,)
    check("query", query, ("num_rows", "num_heads", "head_size"), query_types, query)
    num_rows, num_heads, head_size = query.shape
    cache_shape = ("num_blocks", "block_size", "num_kv_heads", head_size)
    types = cache_types(query.dtype, k_scale)
    check("key_cache", key_cache, cache_shape, types, query)
    check("value_cache", value_cache, tuple(key_cache.shape), types, query)
    check_scales(key_cache.shape[2], query, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    check("positions", positions, (num_rows,), INTS, query)
    check("query_start_loc", query_start_loc, ("num_reqs + 1",), (torch.int32,), query)
    num_reqs = query_start_loc.shape[0] - 1
    check("block_table", block_table, (num_reqs, "max_num_blocks"), (torch.int32,), query)
    if num_heads % key_cache.shape[2]:
        raise ValueError(
            f"query has {num_heads} heads, which {key_cache.shape[2]} KV heads do not divide"
        )
    check_logits(query, softcap, sinks)
    out_types = (query.dtype,) if q_scale is None else FLOATS
    check("out", out, (num_rows, num_heads, head_size), out_types, query)
    for name, tensor in (
        ("query", query),
        ("key_cache", key_cache),
        ("value_cache", value_cache),
        ("block_table", block_table),
        ("out", out),
    ):
        check_inner_stride(name, tensor)


def check_window(sliding_window: int) -> None:
    """Raises ValueError unless it is none or a number of keys."""
    if sliding_window < 0:
        raise ValueError(f"sliding_window is {sliding_window}; allowed: 0 (none) or more")


def check_logits(query: torch.Tensor, softcap: float, sinks: torch.Tensor | None) -> None:
    """Raises ValueError unless they fit ``query``, ``[num_rows, num_heads, head_size]``."""
    if not 0 <= softcap < float("inf"):
        raise ValueError(f"softcap is {softcap}; allowed: 0 (none) or more")
    if sinks is not None:
        check("sinks", sinks, (query.shape[1],), FLOATS, query)
        check_inner_stride("sinks", sinks)


def sparse_attention_oracle(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_table: torch.Tensor,
    *,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The same in plain PyTorch, computed in ``dtype``; waits for the device."""
    out = torch.zeros(query.shape, dtype=dtype, device=query.device)
    block_size, num_kv_heads = key_cache.shape[1:3]
    starts = query_start_loc.tolist()
    for request, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        if start == end:
            continue
        at = positions[start:end].long()
        num_keys = int(at.max()) + 1
        blocks = block_table[request, : -(-num_keys // block_size)].long()
        k = widen_oracle(key_cache[blocks].flatten(0, 1)[:num_keys], k_scale, dtype)
        v = widen_oracle(value_cache[blocks].flatten(0, 1)[:num_keys], v_scale, dtype)
        q = widen_oracle(query[start:end], q_scale, dtype).unflatten(1, (num_kv_heads, -1))
        keys = torch.arange(num_keys, device=query.device)
        seen = keys <= at[:, None]
        if sliding_window:
            seen &= keys > at[:, None] - sliding_window
        weights = weights_oracle(q, k, seen, scale, softcap, sinks)
        out[start:end] = torch.einsum("hgqk,khd->qhgd", weights, v).flatten(1, 2)
    return out


def weights_oracle(
    q: torch.Tensor,
    k: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """What each query gives to each key, in the type of ``q`` and ``k``.

    Args:
        q: ``[num_rows, num_kv_heads, group, head_size]``.
        k: ``[num_keys, num_kv_heads, head_size]``.
        seen: whether a row sees a key, ``[num_rows, num_keys]``.

    Returns:
        ``[num_kv_heads, group, num_rows, num_keys]``; rows sum to 1, or with sinks to less.
    """
    scores = torch.einsum("qhgd,khd->hgqk", q, k) * scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(*scores.shape[:2], 1, 1)
        scores = torch.cat([scores, sink.expand(-1, -1, scores.shape[2], -1)], dim=-1)
    return scores.softmax(dim=-1)[..., : k.shape[0]]


def run(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    sliding_window: int,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """``sparse_attention`` without checks, for callers that made the tensors themselves."""
    if query.shape[0] == 0:
        return
    scales = dict(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    options: dict[str, Any] = dict(softcap=softcap, sinks=sinks) | scales
    if not use_triton(query):
        exact = sparse_attention_oracle(
            query,
            key_cache,
            value_cache,
            positions,
            query_start_loc,
            block_table,
            scale=scale,
            sliding_window=sliding_window,
            **options,
        )
        out.copy_(exact)
        return
    tiles = choose_tiles(query, key_cache.shape[2])
    launch(
        query,
        key_cache,
        value_cache,
        positions,
        query_start_loc,
        block_table,
        out,
        scale,
        sliding_window,
        tiles,
        **options,
    )


register(
    "sparse_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor positions, "
    "Tensor query_start_loc, Tensor block_table, Tensor(a!) out, float scale, "
    "int sliding_window, float softcap=0.0, Tensor? sinks=None, "
    "Tensor? q_scale=None, Tensor? k_scale=None, Tensor? v_scale=None) -> ()",
    run,
)


def _run_rest(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
    prefix_lse: torch.Tensor,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    if query.shape[0] == 0:
        return
    scales = dict(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    options: dict[str, Any] = dict(softcap=softcap, sinks=sinks) | scales
    if not use_triton(query):
        exact = sparse_attention_oracle(
            query,
            key_cache,
            value_cache,
            positions,
            query_start_loc,
            block_table,
            scale=scale,
            **options,
        )
        out.copy_(exact)
        return
    launch(
        query,
        key_cache,
        value_cache,
        positions,
        query_start_loc,
        block_table,
        out,
        scale,
        0,
        rest_tiles(),
        prefix_lse,
        **options,
    )


register(
    "sparse_attention_rest(Tensor query, Tensor key_cache, Tensor value_cache, Tensor positions, "
    "Tensor query_start_loc, Tensor block_table, Tensor(a!) out, Tensor prefix_lse, float scale, "
    "float softcap=0.0, Tensor? sinks=None, "
    "Tensor? q_scale=None, Tensor? k_scale=None, Tensor? v_scale=None) -> ()",
    _run_rest,
)
