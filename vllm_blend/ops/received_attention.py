"""What each key of a request receives of some queries' attention, over the paged cache."""

from __future__ import annotations

import torch

from vllm_blend.ops.fp8 import FP8, cache_types, check_scales, widen_oracle
from vllm_blend.ops.library import FLOATS, INTS, check, check_inner_stride, register, use_triton
from vllm_blend.ops.received_attention_kernel import MAX_QUERIES, launch
from vllm_blend.ops.sparse_attention import check_logits, check_window, weights_oracle


def received_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    last_keys: torch.Tensor,
    scores: torch.Tensor,
    *,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
) -> None:
    """Adds to ``scores`` the queries' attention to each key, summed over queries and heads.

    ``scores[j] += sum over queries i with last_keys[i] >= j and heads h of p[i, h, j]``, where
    ``p[i, h]`` is ``softmax(scale * q k^T)`` over the keys 0 to ``last_keys[i]``, with a window over
    the last of these; soft caps and sinks are as in ``sparse_attention``, and what a sink takes is
    nobody's. The launches depend on shapes alone, so a CUDA graph that holds them is replayed with
    other contents; the order of the sums is fixed, so the result is the same each time.

    Args:
        query: rotated, ``[num_queries, num_heads, head_size]``, at most ``MAX_QUERIES``; any strides
            but a contiguous last dimension.
        key_cache: rotated, ``[num_blocks, block_size, num_kv_heads, head_size]``, any strides but a
            contiguous last dimension.
        block_table: blocks of the request, ``[max_num_blocks]`` int32.
        last_keys: the last key that each query sees, ``[num_queries]``, below ``max_num_keys``; -1: the
            row counts for nothing, and may hold anything.
        sliding_window: a query sees this many keys; 0: all. The blocks to the left of all windows may
            be any that exist.
        softcap: bound of the logits; 0: none.
        sinks: logits, neither scaled nor capped, ``[num_heads]``, any float type.
        q_scale, k_scale: of a query and a cache in e4m3, ``[1]`` or ``[num_kv_heads]`` float32.
        scores: ``[max_num_keys]`` float32, contiguous; keys that no query sees are left as they are.

    Raises:
        ValueError: names the argument that does not fit.
    """
    query_types = FLOATS if q_scale is None else (FP8,)
    check("query", query, ("num_queries", "num_heads", "head_size"), query_types, query)
    num_queries, num_heads, head_size = query.shape
    if num_queries > MAX_QUERIES:
        raise ValueError(f"query has {num_queries} rows; allowed: up to {MAX_QUERIES}")
    cache_shape = ("num_blocks", "block_size", "num_kv_heads", head_size)
    check("key_cache", key_cache, cache_shape, cache_types(query.dtype, k_scale), query)
    check_scales(key_cache.shape[2], query, q_scale=q_scale, k_scale=k_scale)
    if num_heads % key_cache.shape[2]:
        raise ValueError(
            f"query has {num_heads} heads, which {key_cache.shape[2]} KV heads do not divide"
        )
    check_window(sliding_window)
    check_logits(query, softcap, sinks)
    check("block_table", block_table, ("max_num_blocks",), (torch.int32,), query)
    check("last_keys", last_keys, (num_queries,), INTS, query)
    check("scores", scores, ("max_num_keys",), (torch.float32,), query)
    for name, tensor in (
        ("query", query),
        ("key_cache", key_cache),
        ("block_table", block_table),
        ("last_keys", last_keys),
        ("scores", scores),
    ):
        check_inner_stride(name, tensor)
    torch.ops.vllm_blend.received_attention(
        query,
        key_cache,
        block_table,
        last_keys,
        scores,
        scale,
        sliding_window,
        softcap,
        sinks,
        q_scale,
        k_scale,
    )


def received_attention_oracle(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    last_keys: torch.Tensor,
    scores: torch.Tensor,
    *,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
) -> None:
    """The same in plain PyTorch, computed in the type of ``scores``; waits for the device."""
    real = last_keys >= 0
    query, last_keys = query[real], last_keys[real]
    if not query.shape[0]:
        return
    block_size, num_kv_heads = key_cache.shape[1:3]
    num_keys = int(last_keys.max()) + 1
    blocks = block_table[: -(-num_keys // block_size)].long()
    k = widen_oracle(key_cache[blocks].flatten(0, 1)[:num_keys], k_scale, scores.dtype)
    q = widen_oracle(query, q_scale, scores.dtype).unflatten(1, (num_kv_heads, -1))
    keys = torch.arange(num_keys, device=query.device)
    seen = keys <= last_keys[:, None]
    if sliding_window:
        seen &= keys > last_keys[:, None] - sliding_window
    weights = weights_oracle(q, k, seen, scale, softcap, sinks)
    scores[:num_keys] += weights.sum(dim=(0, 1, 2))


def run(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    last_keys: torch.Tensor,
    scores: torch.Tensor,
    scale: float,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
) -> None:
    """``received_attention`` without checks, for callers that made the tensors themselves."""
    if query.shape[0] == 0 or scores.shape[0] == 0:
        return
    attend = launch if use_triton(query) else received_attention_oracle
    attend(
        query,
        key_cache,
        block_table,
        last_keys,
        scores,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
        q_scale=q_scale,
        k_scale=k_scale,
    )


register(
    "received_attention(Tensor query, Tensor key_cache, Tensor block_table, Tensor last_keys, "
    "Tensor(a!) scores, float scale, int sliding_window=0, float softcap=0.0, "
    "Tensor? sinks=None, Tensor? q_scale=None, Tensor? k_scale=None) -> ()",
    run,
)
