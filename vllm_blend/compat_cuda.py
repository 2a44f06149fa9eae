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
``ModelCudaGraphManager.capture`` (the V2 runner)   wrapped, and ``_capture_descs`` added to meanwhile,
    so that there are graphs for as many rows as blended prompts have.
    Goes when vLLM captures sizes that its own batches do not use.
``CUDAGraphWrapper._all_instances``   read, for the sizes that vLLM has captured: a step that blends
    replays the graphs for its rows.
    Goes when vLLM tells which sizes it has captured.
``AttentionBackendEnum._member_map_``   gets XFORMERS as a second name of its member CUSTOM. A member of
    its own would register too, but a spawned engine unpickles its configuration before plugins load,
    and knows only vLLM's own members. CUSTOM is one, and goes to other processes by its value.
    Goes when plugins are loaded before the configuration is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import BatchDescriptor, ForwardContext

    from vllm_blend.ops.sparse_attention_kernel import VirtualRequests
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
) -> torch.Tensor:
    """FlashAttention 3 of each tile over the keys that all its rows see, into ``out``; without sinks.

    Args:
        query: ``[num_rows, num_heads, head_size]``.
        key_cache, value_cache: ``[num_blocks, block_size, num_kv_heads, head_size]``.
        max_seq_len: a bound on the tiles' keys.
        softcap: bound of the logits; 0: none.

    Returns:
        Log of the sum of exponentials, ``[num_heads, num_rows]`` float32.
    """
    none = (None, None, None)
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
        *none,  # scales of fp8
        scale,
        False,  # causal
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


def graph_for(context: ForwardContext, num_rows: int, num_tokens: int) -> BatchDescriptor | None:
    """vLLM's name for the smallest of its captured sizes that ``num_rows`` rows fit, or None.

    Args:
        context: vLLM's of the step.
        num_tokens: of the step's input tensors, which hold what is padded.
    """
    descriptor = context.batch_descriptor
    if descriptor is None:
        return None
    sizes = [size for size in captured_sizes() if num_rows <= size <= num_tokens]
    return replace(descriptor, num_tokens=min(sizes), num_reqs=None, uniform=False) if sizes else None


def captured_sizes() -> frozenset[int]:
    """Numbers of tokens that every piece of the model was captured for, at the engine's start."""
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm.config.compilation import CUDAGraphMode

    wrappers = list(CUDAGraphWrapper._all_instances)
    key = frozenset(map(id, wrappers))
    if key in _captured:
        return _captured[key]
    pieces = [
        {
            descriptor.num_tokens
            for descriptor, entry in wrapper.concrete_cudagraph_entries.items()
            if entry.cudagraph is not None
        }
        for wrapper in wrappers
        if wrapper.runtime_mode == CUDAGraphMode.PIECEWISE
    ]
    _captured.clear()
    _captured[key] = frozenset(set.intersection(*pieces)) if pieces else frozenset()
    return _captured[key]


_captured: dict[frozenset[int], frozenset[int]] = {}
"""The captured sizes, by the ids of what holds the graphs: an engine may follow another."""


ROW_SIZES = (*range(64, 1024, 64), *range(1024, 2048, 128), *range(2048, 3073, 256))
"""Numbers of rows that graphs are captured for beside vLLM's own sizes: those of blended prompts of up
to some 30,000 tokens at 8%. Steps of more rows keep the GPU busy without a graph."""


def capture_for_rows(stock: Any, manager: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the V2 runner's capture of graphs: pieces of more sizes, which only steps that blend use.

    vLLM's own steps go on as they would: what they replay is decided by a table that these are not in.
    """
    from vllm.config.compilation import CUDAGraphMode

    blending = getattr(model, "blending", None)
    descs = manager._capture_descs.get(CUDAGraphMode.PIECEWISE)
    if blending is None or blending.unsupported is not None or not descs or manager.use_breakable_cg:
        return stock(manager, model, *args, **kwargs)
    there = {desc.num_tokens for desc in descs}
    most = manager.vllm_config.scheduler_config.max_num_batched_tokens
    sizes = [size for size in ROW_SIZES if size not in there and size <= most]
    more = [replace(descs[0], num_tokens=size) for size in sizes]
    try:
        # large ones first: the later ones fit in their memory
        manager._capture_descs[CUDAGraphMode.PIECEWISE] = sorted(
            [*descs, *more], key=lambda desc: -desc.num_tokens
        )
        return stock(manager, model, *args, **kwargs)
    finally:
        manager._capture_descs[CUDAGraphMode.PIECEWISE] = descs
        _captured.clear()
