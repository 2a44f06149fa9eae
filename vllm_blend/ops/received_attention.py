"""What each key of a request receives of some queries' attention, over the paged caches of layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vllm_blend.ops.fp8 import FP8, cache_types, check_scales, widen_oracle
from vllm_blend.ops.library import FLOATS, INTS, check, check_inner_stride, register, use_triton
from vllm_blend.ops.received_attention_kernel import launch
from vllm_blend.ops.received_attention_tiles import MAX_QUERIES
from vllm_blend.ops.sparse_attention import check_logits, check_window, weights_oracle


def received_attention(
    query: torch.Tensor,
    key_caches: Sequence[torch.Tensor],
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
    """Adds to ``scores`` the queries' attention to each key, summed over layers, queries and heads.

    ``scores[j] += sum over layers l, queries i with last_keys[i] >= j and heads h of p[l, i, h, j]``,
    where ``p[l, i, h]`` is ``softmax(scale * q k^T)`` over the keys 0 to ``last_keys[i]``, with a
    window over the last of these; soft caps and sinks are as in ``sparse_attention``, and what a sink
    takes is nobody's. It takes three launches, however many layers there are. They depend on shapes and
    on where the caches are, so a CUDA graph that holds them is replayed with other contents; the order
    of the sums is fixed, so the result is the same each time.

    Args:
        query: rotated, ``[num_layers, num_queries, num_heads, head_size]``, of a layer at most
            ``MAX_QUERIES``; any strides but a contiguous last dimension.
        key_caches: rotated, of each layer ``[num_blocks, block_size, num_kv_heads, head_size]``, any
            strides but a contiguous last dimension; the same in all layers.
        block_table: blocks of the request, ``[max_num_blocks]`` int32.
        last_keys: the last key that each query sees, ``[num_queries]``, below ``max_num_keys``; -1: the
            row counts for nothing, and may hold anything.
        sliding_window: a query sees this many keys; 0: all. The blocks to the left of all windows may
            be any that exist.
        softcap: bound of the logits; 0: none.
        sinks: logits, neither scaled nor capped, ``[num_layers, num_heads]``, any float type.
        q_scale, k_scale: of queries and caches in e4m3, ``[num_layers, 1]`` or ``[num_layers,
            num_kv_heads]`` float32.
        scores: ``[max_num_keys]`` float32, contiguous; keys that no query sees are left as they are.

    Raises:
        ValueError: names the argument that does not fit.
    """
    query_types = FLOATS if q_scale is None else (FP8,)
    names = ("num_layers", "num_queries", "num_heads", "head_size")
    check("query", query, names, query_types, query)
    num_layers, num_queries, num_heads, head_size = query.shape
    if num_queries > MAX_QUERIES:
        raise ValueError(f"query has {num_queries} rows; allowed: up to {MAX_QUERIES}")
    if len(key_caches) != num_layers:
        raise ValueError(f"key_caches has {len(key_caches)} of them; query has {num_layers} layers")
    check_window(sliding_window)
    check("block_table", block_table, ("max_num_blocks",), (torch.int32,), query)
    check("last_keys", last_keys, (num_queries,), INTS, query)
    check("scores", scores, ("max_num_keys",), (torch.float32,), query)
    for name, tensor in (
        ("query", query),
        ("block_table", block_table),
        ("last_keys", last_keys),
        ("scores", scores),
    ):
        check_inner_stride(name, tensor)
    cache_shape = ("num_blocks", "block_size", "num_kv_heads", head_size)
    for layer, key_cache in enumerate(key_caches):
        check("key_caches", key_cache, cache_shape, cache_types(query.dtype, k_scale), query)
        if num_heads % key_cache.shape[2]:
            raise ValueError(
                f"query has {num_heads} heads, which {key_cache.shape[2]} KV heads do not divide"
            )
        check_inner_stride("key_caches", key_cache)
        found, first = ([*one.shape[1:], *one.stride()] for one in (key_cache, key_caches[0]))
        if found != first:
            raise ValueError(
                f"key_caches[{layer}] has block sizes and strides {found}; the first has {first}"
            )
    of_layers = {"q_scale": q_scale, "k_scale": k_scale, "sinks": sinks}
    for name, values in of_layers.items():
        if values is not None and (values.dim() != 2 or len(values) != num_layers):
            raise ValueError(
                f"{name} has shape {list(values.shape)}; expected a row for each of {num_layers} layers"
            )
        if values is not None and not values.is_contiguous():
            raise ValueError(f"{name} has strides {list(values.stride())}; it must be contiguous")
    for layer, key_cache in enumerate(key_caches):
        one = {name: None if all_ is None else all_[layer] for name, all_ in of_layers.items()}
        check_logits(query[layer], softcap, one.pop("sinks"))
        check_scales(key_cache.shape[2], query, **one)
    torch.ops.vllm_blend.received_attention(
        query,
        list(key_caches),
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
    key_caches: Sequence[torch.Tensor],
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
    query, last_keys = query[:, real], last_keys[real]
    if not last_keys.shape[0]:
        return
    num_keys = int(last_keys.max()) + 1
    keys = torch.arange(num_keys, device=query.device)
    seen = keys <= last_keys[:, None]
    if sliding_window:
        seen &= keys > last_keys[:, None] - sliding_window
    for layer, key_cache in enumerate(key_caches):
        q_scales, k_scales, of_layer = (
            None if values is None else values[layer] for values in (q_scale, k_scale, sinks)
        )
        block_size, num_kv_heads = key_cache.shape[1:3]
        blocks = block_table[: -(-num_keys // block_size)].long()
        k = widen_oracle(key_cache[blocks].flatten(0, 1)[:num_keys], k_scales, scores.dtype)
        q = widen_oracle(query[layer], q_scales, scores.dtype).unflatten(1, (num_kv_heads, -1))
        weights = weights_oracle(q, k, seen, scale, softcap, of_layer)
        scores[:num_keys] += weights.sum(dim=(0, 1, 2))


def run(
    query: torch.Tensor,
    key_caches: Sequence[torch.Tensor],
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
    if query.shape[0] == 0 or query.shape[1] == 0 or scores.shape[0] == 0:
        return
    attend = launch if use_triton(query) else received_attention_oracle
    attend(
        query,
        key_caches,
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
    "received_attention(Tensor query, Tensor[] key_caches, Tensor block_table, Tensor last_keys, "
    "Tensor(a!) scores, float scale, int sliding_window=0, float softcap=0.0, "
    "Tensor? sinks=None, Tensor? q_scale=None, Tensor? k_scale=None) -> ()",
    run,
)
