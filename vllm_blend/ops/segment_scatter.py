"""Stored K, rotated, and V of many chunks, read where they lie, into the paged cache: one launch.

The launch's arguments do not depend on the step: where the chunks' KV lies (GPU memory, or pinned host
memory, which the GPU reads over PCIe), how much of it there is and where it goes is read from tensors
on the device. So a CUDA graph that holds the launch is replayed with other contents. (A blended step
has it read GPU memory alone: copy engines bring the rest, ``model/kv_loader.py``.)
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton

from vllm_blend.ops.fp8 import FP8, TRITON_TYPES, check_scales, scale_stride
from vllm_blend.ops.library import (
    FLOATS,
    check,
    check_inner_stride,
    check_rotary_dim,
    register,
    use_cuda,
    use_triton,
)
from vllm_blend.ops.segment_scatter_kernel import segment_scatter_kernel
from vllm_blend.ops.shift_scatter import shift_scatter_oracle

UNIT_TOKENS = 8
"""Tokens of a unit of work: 32 KiB of K and V to have in flight with 8 heads of 128 in 16 bits."""

ALIGNMENT = 16
"""Bytes that a segment's addresses are multiples of: the widest load."""


class SegmentTables:
    """The segments of a step on the device, at addresses that stay: what launches read.

    Layers share the tables but for the addresses. ``fill`` is one copy to the device, ordered with
    the work of the current stream as any copy is.

    Attributes:
        addresses: of the first K and first V element, ``[num_layers, num_segments_max, 2]`` int64.
        segments: ``(count, first_position, first_row, first_unit)``, ``[num_segments_max, 4]`` int32.
        totals: ``(num_segments, num_units)`` of each layer, ``[num_layers, 2]`` int32: the first ones.
    """

    def __init__(
        self,
        num_segments_max: int,
        num_rows_max: int,
        num_layers: int = 1,
        device: torch.device | str = "cuda",
    ) -> None:
        self.num_segments_max, self.num_rows_max = num_segments_max, num_rows_max
        self.num_layers = num_layers
        # int32 words: totals (padded to 16 bytes), segments, addresses
        self._sizes = [
            -(-2 * num_layers // 4) * 4,
            4 * num_segments_max,
            4 * num_layers * num_segments_max,
        ]
        words = torch.zeros(sum(self._sizes), dtype=torch.int32, device=device)
        totals, segments, addresses = words.split(self._sizes)
        self._words = words
        self.totals = totals[: 2 * num_layers].view(num_layers, 2)
        self.segments = segments.view(num_segments_max, 4)
        self.addresses = addresses.view(torch.int64).view(num_layers, num_segments_max, 2)

    def fill(
        self,
        segments: Sequence[tuple[int, int, int]] | npt.NDArray[np.int32],
        addresses: npt.ArrayLike,
        counts: Sequence[int] | None = None,
    ) -> None:
        """Replaces the segments.

        What lies at the addresses must stay until the launches that read it are done.

        Args:
            segments: ``(count, first_position, first_row)`` of each: its i-th token has the prompt
                position ``first_position + i``, and its slot is ``slot_mapping[first_row + i]``.
            addresses: of each layer's and segment's first K and first V element, in bytes,
                ``[num_layers, num_segments, 2]``.
            counts: how many of the segments each layer has, the first ones; None: all.

        Raises:
            ValueError: too many segments, a negative number, rows beyond ``num_rows_max``, an address
                that is not a multiple of 16, or another shape of ``addresses``.
        """
        table = np.asarray(segments, dtype=np.int64).reshape(-1, 3)
        num = len(table)
        where = np.asarray(addresses, dtype=np.int64)
        if num == 0 and where.size == 0:
            where = where.reshape(self.num_layers, 0, 2)
        if num > self.num_segments_max:
            raise ValueError(f"{num} segments; the tables hold {self.num_segments_max}")
        if where.shape != (self.num_layers, num, 2):
            raise ValueError(
                f"addresses has shape {list(where.shape)}; expected [{self.num_layers}, {num}, 2]"
            )
        count, first_position, first_row = table.T
        for name, column in (
            ("count", count),
            ("first_position", first_position),
            ("first_row", first_row),
        ):
            if (column < 0).any():
                raise ValueError(f"segments has a negative {name}: {column.min()}")
        if (first_row + count > self.num_rows_max).any():
            last = (first_row + count).max()
            raise ValueError(f"segments reach row {last}; slot_mapping has {self.num_rows_max} rows")
        if (where % ALIGNMENT).any():
            raise ValueError(f"addresses has one that is not a multiple of {ALIGNMENT} bytes")

        units = -(-count // UNIT_TOKENS)
        first_unit = np.append(0, units.cumsum())
        of_layers = np.full(self.num_layers, num) if counts is None else np.asarray(counts)
        if of_layers.shape != (self.num_layers,) or (of_layers < 0).any() or (of_layers > num).any():
            raise ValueError(
                f"counts is {of_layers.tolist()}; expected {self.num_layers} numbers from 0 to {num}"
            )
        # pinned memory of torch's own is not used again before the copy from it is done
        staging = torch.empty(self._words.shape[0], dtype=torch.int32, pin_memory=self._words.is_cuda)
        parts = staging.numpy()
        totals, rows, pairs = np.split(parts, np.cumsum(self._sizes[:2]))
        by_layer = totals[: 2 * self.num_layers].reshape(-1, 2)
        by_layer[:, 0], by_layer[:, 1] = of_layers, first_unit[of_layers]
        rows = rows.reshape(-1, 4)[:num]
        rows[:, :3], rows[:, 3] = table, first_unit[:-1]
        pairs.view(np.int64).reshape(self.num_layers, -1, 2)[:, :num] = where
        self._words.copy_(staging, non_blocking=True)


def segment_scatter(
    addresses: torch.Tensor,
    segments: torch.Tensor,
    totals: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    is_neox_style: bool = True,
    num_programs: int = 16,
    stored_dtype: torch.dtype | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Writes the segments' K, rotated to its place, and V to the paged cache.

    A segment is contiguous rows ``[count, num_kv_heads, head_size]`` of K, and the same of V, of the
    caches' type unless those are in e4m3. The first three arguments are of ``SegmentTables``, which
    checks what is in them.

    Args:
        addresses: byte addresses of the first K and first V element, ``[num_segments_max, 2]`` int64:
            one layer of ``SegmentTables.addresses``.
        segments: ``(count, first_position, first_row, first_unit)``, ``[num_segments_max, 4]`` int32.
        totals: ``(num_segments, num_units)``, ``[2]`` int32.
        slot_mapping: slot, ``block * block_size + offset``, of each row, ``[num_rows_max]`` int64;
            -1: not written.
        cos_sin_cache: the rotary module's, ``[max_position, rotary_dim]``: cosines, then sines.
        key_cache, value_cache: ``[num_blocks, block_size, num_kv_heads, head_size]``, any strides but
            a contiguous last dimension.
        is_neox_style: pairs are ``(d, d + rotary_dim / 2)``; else (GPT-J) ``(2 d, 2 d + 1)``.
        num_programs: the launch's size. 8 to 16 fill PCIe, and leave the other multiprocessors to
            other kernels; KV in GPU memory takes all of them.
        stored_dtype: of the segments; None: the caches'.
        k_scale, v_scale: of caches in e4m3, ``[1]`` or ``[num_kv_heads]`` float32.

    Raises:
        ValueError: names the argument that does not fit.
    """
    types = FLOATS if k_scale is None else (FP8,)
    check("key_cache", key_cache, ("num_blocks", "block_size", "num_kv_heads", "head_size"), types)
    cache = key_cache
    stored_dtype = stored_dtype or cache.dtype
    if stored_dtype not in (FLOATS if cache.dtype == FP8 else (cache.dtype,)):
        raise ValueError(f"stored_dtype is {stored_dtype}; the caches are {cache.dtype}")
    check_scales(cache.shape[2], cache, k_scale=k_scale, v_scale=v_scale)
    check("value_cache", value_cache, tuple(cache.shape), (cache.dtype,), cache)
    check("addresses", addresses, ("num_segments_max", 2), (torch.int64,), cache)
    check("segments", segments, (addresses.shape[0], 4), (torch.int32,), cache)
    check("totals", totals, (2,), (torch.int32,), cache)
    check("slot_mapping", slot_mapping, ("num_rows_max",), (torch.int64,), cache)
    check("cos_sin_cache", cos_sin_cache, ("max_position", "rotary_dim"), FLOATS, cache)
    check_rotary_dim(cos_sin_cache, cache.shape[3])
    for name, tensor in (
        ("cos_sin_cache", cos_sin_cache),
        ("key_cache", key_cache),
        ("value_cache", value_cache),
    ):
        check_inner_stride(name, tensor)
    for name, tensor in (
        ("addresses", addresses),
        ("segments", segments),
        ("totals", totals),
        ("slot_mapping", slot_mapping),
    ):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {list(tensor.stride())}; it must be contiguous")
    if cache.shape[3] * stored_dtype.itemsize % ALIGNMENT:
        raise ValueError(f"head_size is {cache.shape[3]}; rows must be multiples of {ALIGNMENT} bytes")
    if num_programs < 1:
        raise ValueError(f"num_programs is {num_programs}; expected at least 1")
    torch.ops.vllm_blend.segment_scatter(
        addresses,
        segments,
        totals,
        slot_mapping,
        cos_sin_cache,
        key_cache,
        value_cache,
        is_neox_style,
        num_programs,
        stored_dtype,
        k_scale,
        v_scale,
    )


def segment_scatter_oracle(
    stored: Sequence[tuple[torch.Tensor, torch.Tensor]],
    segments: Sequence[tuple[int, int, int]],
    slot_mapping: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    is_neox_style: bool = True,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """The same in plain PyTorch, from tensors; caches may be fp32 to see the exact result.

    Args:
        stored: K and V of each segment, ``[count, num_kv_heads, head_size]``, on any device.
        segments: ``(count, first_position, first_row)`` of each.
    """
    device = slot_mapping.device
    for (k, v), (count, first_position, first_row) in zip(stored, segments, strict=True):
        positions = torch.arange(first_position, first_position + count, device=device)
        slots = slot_mapping[first_row : first_row + count]
        k, v = k.to(device), v.to(device)
        caches = (key_cache, value_cache)
        shift_scatter_oracle(
            k, v, positions, slots, cos_sin_cache, *caches, is_neox_style, k_scale, v_scale
        )


def launch(
    addresses: torch.Tensor,
    segments: torch.Tensor,
    totals: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    is_neox_style: bool,
    num_programs: int,
    stored_dtype: torch.dtype | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """``segment_scatter`` without checks, for callers that made the tensors themselves."""
    num_segments_max = segments.shape[0]
    if num_segments_max == 0:
        return
    if use_cuda(key_cache) and k_scale is None:
        torch.ops.vllm_blend_C.segment_scatter.default(
            addresses,
            segments,
            totals,
            slot_mapping,
            cos_sin_cache,
            key_cache,
            value_cache,
            is_neox_style,
            num_programs,
            UNIT_TOKENS,
        )
        return
    _, block_size, num_heads, head_size = key_cache.shape
    rotary_dim = cos_sin_cache.shape[1]
    dtype = stored_dtype or key_cache.dtype
    if not use_triton(key_cache):
        num_segments = int(totals[0])
        table = segments[:num_segments, :3].tolist()
        stored = [
            (_at(k, (count, num_heads, head_size), dtype), _at(v, (count, num_heads, head_size), dtype))
            for (k, v), (count, _, _) in zip(addresses.tolist(), table, strict=False)
        ]
        caches = (key_cache, value_cache)
        segment_scatter_oracle(
            stored, table, slot_mapping, cos_sin_cache, *caches, is_neox_style, k_scale, v_scale
        )
        return
    # half of the bytes in flight are K's: 16 KiB of them at most, 64 bytes of K and V for a thread
    row_bytes = UNIT_TOKENS * triton.next_power_of_2(head_size) * dtype.itemsize
    heads = max(1, min(triton.next_power_of_2(num_heads), 16384 // row_bytes))
    segment_scatter_kernel[(num_programs,)](
        addresses,
        segments,
        totals,
        slot_mapping,
        cos_sin_cache,
        key_cache if k_scale is None else k_scale,
        value_cache if v_scale is None else v_scale,
        key_cache,
        value_cache,
        cos_sin_cache.stride(0),
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        BLOCK_SIZE=block_size,
        NUM_HEADS=num_heads,
        HEAD_SIZE=head_size,
        ROTARY_DIM=rotary_dim,
        IS_NEOX=is_neox_style,
        UNIT_TOKENS=UNIT_TOKENS,
        HEADS=heads,
        BLOCK_HALF=triton.next_power_of_2(rotary_dim // 2),
        BLOCK_PASS=triton.next_power_of_2(head_size - rotary_dim) if head_size > rotary_dim else 0,
        BLOCK_D=triton.next_power_of_2(head_size),
        LOG_SEGMENTS=(num_segments_max - 1).bit_length(),
        STORED=TRITON_TYPES[dtype],
        QUANTIZED=k_scale is not None,
        SCALE_STRIDE=scale_stride(k_scale),
        num_warps=16,
    )


def _at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor over host memory that somebody else keeps."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes == 0:
        return torch.empty(shape, dtype=dtype)
    memory = (ctypes.c_byte * num_bytes).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


register(
    "segment_scatter(Tensor addresses, Tensor segments, Tensor totals, Tensor slot_mapping, "
    "Tensor cos_sin_cache, Tensor(a!) key_cache, Tensor(b!) value_cache, bool is_neox_style, "
    "int num_programs, ScalarType? stored_dtype=None, Tensor? k_scale=None, Tensor? v_scale=None) "
    "-> ()",
    launch,
)
