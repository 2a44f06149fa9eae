"""The CPU's kernel for rows at any positions (csrc/cpu/), where it was built and fits the layer.

vLLM's own CPU kernel aligns a request's rows to its last keys, so rows that stand alone are requests of
one row each, and read all their keys alone: up to twice the time a row. Here consecutive kept rows of a
request are a tile, whatever their positions. Fp32 alone, over the layout that vLLM gives its cache for
plain vectors (which is looked at, not assumed); everything else stays with vLLM's kernel.
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger("vllm.vllm_blend")

MAX_TILE = 48
"""Rows of a tile's matrix: query rows times the query heads of a KV head."""

MAX_ROWS = 16
"""Query rows of a tile: with more, the first ones meet too many keys that they do not see."""

BUILDS = {"AVX512": "avx512", "AVX2": "avx2"}
"""The library's builds, by torch's name for what the CPU can do."""


@dataclass(frozen=True, eq=False)
class Tiles:
    """A step's kept rows in tiles.

    Attributes:
        last_keys: last key that each row sees, ``[num_rows]`` int64.
        tiles: first row, number of rows and request of each, longest first, ``[num_tiles, 3]`` int32.
        block_table: ``[num_reqs, max_num_blocks]`` int32.
    """

    last_keys: torch.Tensor
    tiles: torch.Tensor
    block_table: torch.Tensor


def make_tiles(
    last_keys: torch.Tensor, query_start_loc: torch.Tensor, block_table: torch.Tensor, group: int
) -> Tiles:
    """Tiles of consecutive rows of one request.

    Args:
        last_keys: last key that each row sees, ``[num_rows]``.
        query_start_loc: first row of each request, then ``num_rows``, ``[num_reqs + 1]``.
        block_table: ``[num_reqs, max_num_blocks]``.
        group: query heads of a KV head.
    """
    most = max(1, min(MAX_ROWS, MAX_TILE // group))
    starts = query_start_loc.long()
    counts = (starts.diff() + most - 1) // most  # tiles of each request
    request = torch.repeat_interleave(torch.arange(len(counts)), counts)
    place = torch.arange(len(request)) - (counts.cumsum(0) - counts)[request]
    first = starts[request] + place * most
    rows = torch.minimum(starts[request + 1] - first, torch.tensor(most))
    last_keys = last_keys.long().contiguous()
    longest = last_keys[first + rows - 1].argsort(descending=True)
    tiles = torch.stack([first, rows, request], dim=1)[longest]
    return Tiles(last_keys, tiles.to(torch.int32).contiguous(), block_table.to(torch.int32))


class Attention(ctypes.Structure):
    """``struct Attention`` of csrc/cpu/sparse_attention.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "cache", "out", "block_table")),
        *((name, ctypes.c_void_p) for name in ("last_keys", "tiles", "sinks")),
        *((name, ctypes.c_int64) for name in ("query_row", "query_head", "out_row", "out_head")),
        *((name, ctypes.c_int64) for name in ("cache_block", "cache_head", "table_row")),
        *((name, ctypes.c_int32) for name in ("num_tiles", "num_kv_heads", "group", "head_size")),
        *((name, ctypes.c_int32) for name in ("block_size", "window")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    ]


def attend(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    tiles: Tiles,
    out: torch.Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attention of the rows, into ``out``; ``why_not`` must have had nothing against it.

    Args:
        query: ``[num_rows, num_heads, head_size]`` float32, heads contiguous.
        kv_cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]`` float32.
        out: as ``query``.
        window: keys that a row sees, its own included; 0: all.
        softcap: bound of the logits; 0: none.
        sinks: logits, neither scaled nor capped, ``[num_heads]`` float32.
    """
    library = _library()
    assert library is not None
    _, num_kv_heads, block_size, width = kv_cache.shape
    given = Attention(
        query=query.data_ptr(),
        cache=kv_cache.data_ptr(),
        out=out.data_ptr(),
        block_table=tiles.block_table.data_ptr(),
        last_keys=tiles.last_keys.data_ptr(),
        tiles=tiles.tiles.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        query_row=query.stride(0),
        query_head=query.stride(1),
        out_row=out.stride(0),
        out_head=out.stride(1),
        cache_block=kv_cache.stride(0),
        cache_head=kv_cache.stride(1),
        table_row=tiles.block_table.stride(0),
        num_tiles=len(tiles.tiles),
        num_kv_heads=num_kv_heads,
        group=query.shape[1] // num_kv_heads,
        head_size=width // 2,
        block_size=block_size,
        window=window,
        scale=scale,
        softcap=softcap,
    )
    library.attend(ctypes.byref(given))


def why_not(impl: Any, layer: Any) -> str | None:
    """Why the kernel cannot serve a layer, or None.

    Args:
        impl: the layer's CPU attention.
        layer: vLLM's ``Attention``, its cache bound.
    """
    library = _library()
    if library is None:
        return "it was not built for this CPU"
    kv_cache = layer.kv_cache
    lanes = library.lanes()
    _, _, block_size, width = kv_cache.shape
    if kv_cache.dtype != torch.float32 or layer.dtype != torch.float32:
        return f"it computes in float32, the layer in {layer.dtype} over {kv_cache.dtype}"
    if (width // 2) % lanes or block_size % lanes:
        return f"heads of {width // 2} and blocks of {block_size} are not both multiples of {lanes}"
    if impl.alibi_slopes is not None:
        return "it knows no ALiBi"
    if kv_cache.stride(3) != 1 or kv_cache.stride(2) != width or not _lies_as_read(impl, layer):
        return "the cache has another layout"
    return None


def _lies_as_read(impl: Any, layer: Any) -> bool:
    """Whether a head's block is K transposed, then V, by what vLLM's kernel makes of numbers."""
    _, _, block_size, width = layer.kv_cache.shape
    scratch = layer.kv_cache.new_zeros(1, layer.kv_cache.shape[1], block_size, width)
    numbers = torch.arange(block_size * width, dtype=scratch.dtype).view(2, block_size, 1, width // 2)
    k, v = numbers.expand(-1, -1, scratch.shape[1], -1).contiguous()
    impl.do_kv_cache_update(layer, k, v, scratch, torch.arange(block_size))
    expected = torch.cat([k[:, 0].t().flatten(), v[:, 0].flatten()])
    return bool((scratch.flatten(2) == expected.view(scratch[0, 0].shape).flatten()).all())


@cache
def _library() -> Any:
    """The build for this CPU; None where there is none."""
    return load_library(Path(__file__).parents[1])


def load_library(package: Path) -> Any:
    """The same of the package in this folder, read each time."""
    build = BUILDS.get(torch.backends.cpu.get_cpu_capability())
    path = package / f"_cpu_{build}.abi3.so"
    if build is None or not path.exists():
        logger.debug("no CPU kernel: %s was not built", path)
        return None
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        logger.debug("no CPU kernel: %s", error)
        return None
    library.attend.argtypes, library.attend.restype = [ctypes.POINTER(Attention)], None
    library.lanes.argtypes, library.lanes.restype = [], ctypes.c_int32
    return library
