"""Touches of vLLM's private parts that only engines on CUDA need: what, why, and when it can go.

``GPUModelRunner.gather_batch_req_state`` (the V2 runner)   wrapped: a prefill window of one token may
    run as a decode, whose CUDA graph never calls the model, so its K and V could not be collected.
    Goes when a model state can ask for a step without graphs.
``CustomOp._forward_method``   swapped while a step blends: with inductor, ops default to code that is
    meant to be compiled, which run eagerly is ten launches where a fused kernel is one.
    Goes when CustomOp can be asked for its CUDA form per call.
``torch.ops._vllm_fa3_C.fwd``   called as such: vLLM's ``flash_attn_varlen_func`` has no ``seqused_q``,
    without which requests must stand in the order of their rows.
    Goes when it has.
``vllm.utils.torch_utils.weak_ref_tensor``   called: what one CUDA graph leaves to the next is read by
    the host between them, and must not be kept alive, or no graph could use its memory.
    Goes when torch has it.
``AttentionBackendEnum._member_map_``   gets XFORMERS as a second name of its member CUSTOM. A member of
    its own would register too, but a spawned engine unpickles its configuration before plugins load,
    and knows only vLLM's own members. CUSTOM is one, and goes to other processes by its value.
    Goes when plugins are loaded before the configuration is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_blend.ops.sparse_attention_tiles import VirtualRequests
logger = logging.getLogger("vllm.vllm_blend")  # below vLLM's logger, so its handlers apply

XFORMERS = "vllm_blend.attention.xformers.XFormersBackend"


def register_xformers() -> None:
    """Makes ``--attention-backend XFORMERS`` (or CUSTOM) this package's backend; imports none of it."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != XFORMERS:
        logger.warning(
            "vllm_blend: the attention backend CUSTOM is %s, of another plugin. XFORMERS is not "
            "available beside it.",
            custom.get_path(),
        )
        return
    register_backend(custom, XFORMERS)
    AttentionBackendEnum._member_map_["XFORMERS"] = custom


def graph_reasons(vllm_config: VllmConfig) -> dict[str, bool]:
    """Reasons against blending: settings under which a prefill never calls the model's code."""
    from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
    from vllm.config.compilation import CompilationMode, CUDAGraphMode

    compilation = vllm_config.compilation_config
    mode = compilation.cudagraph_mode
    return {
        "cudagraph_mode FULL (FULL_AND_PIECEWISE and PIECEWISE are)": mode is not None
        and mode.mixed_mode() == CUDAGraphMode.FULL,
        "breakable CUDA graphs": is_breakable_cudagraph_enabled(),
        "compilation mode STOCK_TORCH_COMPILE": compilation.mode == CompilationMode.STOCK_TORCH_COMPILE,
    }


def keep_plans_off_decode_graphs(stock: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``gather_batch_req_state``: a step whose prefills have plans is no decode step."""
    state, uniform_token_count = stock(runner, *args, **kwargs)
    plans = getattr(runner.model_state, "plans", {})
    if state is not None and state.has_prefill and plans:
        prefills = (
            req_id for req_id, is_it in zip(state.req_ids, state.is_prefilling_np, strict=True) if is_it
        )
        if any(req_id in plans for req_id in prefills):
            return state._replace(decode_graph_eligible=False), None
    return state, uniform_token_count


def fusable_ops(layers: torch.nn.Module) -> list[Any]:
    """The custom ops of ``layers`` that have a CUDA kernel but would not use it."""
    from vllm.model_executor.custom_op import CustomOp

    return [
        op
        for op in layers.modules()
        if isinstance(op, CustomOp)
        and type(op).forward_cuda is not CustomOp.forward_cuda
        and op._forward_method != op.forward_cuda
    ]


def flash_attention_3(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    out: torch.Tensor,
    tiles: VirtualRequests,
    max_seq_len: int,
    scale: float,
    softcap: float = 0.0,
    scales: tuple[torch.Tensor | None, ...] = (None, None, None),
) -> torch.Tensor:
    """FlashAttention 3 of each tile, with a causal mask, into ``out``; without sinks.

    Args:
        query: ``[num_rows, num_heads, head_size]``.
        key_cache, value_cache: ``[num_blocks, block_size, num_kv_heads, head_size]``.
        max_seq_len: a bound on the tiles' keys.
        softcap: bound of the logits; 0: none.
        scales: of query, K and V in e4m3, each of all heads or one a KV head.

    Returns:
        Log of the sum of exponentials, ``[num_heads, num_rows]`` float32.
    """
    none = (None, None, None)
    of_tiles = (tiles.query_lens.shape[0], key_cache.shape[2])
    _, lse, _, _ = torch.ops._vllm_fa3_C.fwd(
        query,
        key_cache,
        value_cache,
        *none,  # new K, new V, a query for V
        out,
        tiles.starts,
        None,  # starts of keys
        None,  # starts of new keys
        tiles.query_lens,
        tiles.seq_lens,
        tiles.block_q,
        max_seq_len,
        tiles.block_table,
        None,  # index of each request in the cache
        None,  # left padding
        *none,  # cosines, sines and starts of a rotation
        *(None if one is None else one.expand(of_tiles) for one in scales),
        scale,
        True,  # causal
        -1,  # keys to the left
        -1,  # keys to the right
        softcap,
        True,  # rotation interleaved
        None,  # scheduler metadata
        1,  # splits
        None,  # pack the heads of a group: its choice
        0,  # multiprocessors left free
        None,  # sinks: sparse_attention_rest's
        1,  # context parallelism: size,
        0,  # rank,
        None,  # keys in all ranks
    )
    return cast(torch.Tensor, lse)


@contextmanager
def fused_ops(ops: list[Any] | None) -> Iterator[None]:
    """While it lasts, ``ops`` and vLLM's norms run as fused CUDA kernels; None: nothing changes."""
    if ops is None:
        yield
        return
    from vllm import ir

    with ExitStack() as stack:
        for norm in (ir.ops.rms_norm, ir.ops.fused_add_rms_norm):
            stack.enter_context(norm.set_priority(["vllm_c", "native"]))
        stock = [op.__dict__["_forward_method"] for op in ops]
        for op in ops:
            op.__dict__["_forward_method"] = op.forward_cuda
        try:
            yield
        finally:
            for op, method in zip(ops, stock, strict=True):
                op.__dict__["_forward_method"] = method


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, which may be used for something else once ``tensor`` is gone."""
    from vllm.utils.torch_utils import weak_ref_tensor

    return cast(torch.Tensor, weak_ref_tensor(tensor))
