"""What all ranks of a model must agree on, its pipeline stages included; with one rank each function
returns what it gets.

A stage has consecutive layers, and of stored KV those layers' part. It gets hidden states from the
stage before it (``IntermediateTensors``), and goes on to the next step while a later stage is at this
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed import get_pp_group, get_tp_group
from vllm.distributed.parallel_state import model_parallel_is_initialized
from vllm.sequence import IntermediateTensors

from vllm_blend.core import tensor_parallel


def num_stages() -> int:
    return int(get_pp_group().world_size) if model_parallel_is_initialized() else 1


def stage() -> int:
    """This process's, from 0."""
    return int(get_pp_group().rank_in_group) if model_parallel_is_initialized() else 0


def is_last_stage() -> bool:
    return stage() == num_stages() - 1


def num_ranks() -> int:
    """Tensor-parallel ranks of all stages."""
    return num_stages() * tensor_parallel.num_ranks()


def all_reduce_min(values: Sequence[int]) -> list[int]:
    """For each value the least of any rank of any stage; waits for them, and all must have as many."""
    least = tensor_parallel.all_reduce_min(values)
    if num_stages() == 1 or not least:
        return least
    found = torch.tensor(least, dtype=torch.int64)
    dist.all_reduce(found, op=dist.ReduceOp.MIN, group=get_pp_group().cpu_group)
    return [int(value) for value in found]


def sum_of_stages(part: torch.Tensor) -> torch.Tensor:
    """The sum over the stages of what each has of its layers, on the host; may overwrite ``part``."""
    if num_stages() > 1:
        dist.all_reduce(part, group=get_pp_group().cpu_group)
    return part


def receive_into(tensors: IntermediateTensors) -> None:
    """Hidden states from the stage before this one, in the place of those that have come."""
    found: dict[str, Any] = get_pp_group().recv_tensor_dict(all_gather_group=get_tp_group())
    for name, rows in found.items():
        tensors.tensors[name][: len(rows)].copy_(rows)


def send(tensors: IntermediateTensors) -> None:
    """Hidden states to the next stage."""
    get_pp_group().send_tensor_dict(tensors.tensors, all_gather_group=get_tp_group())
