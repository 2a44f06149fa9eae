"""What the tensor-parallel ranks must agree on; with one rank each function returns what it gets.

A rank has some heads of every layer, of stored KV too. All ranks run the same steps, so they must
choose the same rows, and reuse the same chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed import get_tp_group, tensor_model_parallel_all_reduce
from vllm.distributed.parallel_state import GraphCaptureContext, model_parallel_is_initialized


def num_ranks() -> int:
    return int(get_tp_group().world_size) if model_parallel_is_initialized() else 1


def rank() -> int:
    """This process's, from 0."""
    return int(get_tp_group().rank_in_group) if model_parallel_is_initialized() else 0


def all_reduce_sum(part: torch.Tensor) -> torch.Tensor:
    """The sum over the ranks of what each has computed from its heads; may overwrite ``part``."""
    if num_ranks() == 1:
        return part
    if part.is_cpu:  # a GPU's group has no way for it
        dist.all_reduce(part, group=get_tp_group().cpu_group)
        return part
    return tensor_model_parallel_all_reduce(part)


def broadcast_rank0(rows: torch.Tensor) -> torch.Tensor:
    """The first rank's ``rows``, as many on every rank: where scores are equal, ranks may choose
    differently."""
    if num_ranks() == 1:
        return rows
    chosen: torch.Tensor = get_tp_group().broadcast(rows, src=0)
    return chosen


def capturing_on(stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
    """Makes ``stream`` current, for CUDA graphs. At the end ranks tell each other where the all-reduces
    in them read, so all must capture the same."""
    if num_ranks() == 1:
        return torch.cuda.stream(stream)
    context: AbstractContextManager[Any] = get_tp_group().graph_capture(GraphCaptureContext(stream))
    return context


def all_reduce_min(values: Sequence[int]) -> list[int]:
    """For each value the least of any rank; waits for the other ranks, which must have as many."""
    if num_ranks() == 1 or not values:
        return list(values)
    found = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(found, op=dist.ReduceOp.MIN, group=get_tp_group().cpu_group)
    return [int(value) for value in found]
