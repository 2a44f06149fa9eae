"""Rates of the GPU ops against ceilings measured in the same run.

    python benchmarks/bench_ops.py                       # 4k to 32k keys at 16%, Mistral-7B's heads
    python benchmarks/bench_ops.py --keys 8192 --ratio 0.3

Ceilings: a device-to-device copy, a cuBLAS bf16 product, and vLLM's FlashAttention 3 over the same
paged cache: with its bottom-right causal mask on the same rows (wrong for them, and more keys), and as
a full prefill. Ops with two implementations, Triton and CUDA C++ where it is built, are timed in both.
segment_scatter reads KV from GPU memory, and from pinned host memory, where a copy to the device is
the ceiling. Each time is the median of repeats with the L2 cache flushed between them; attention's
rate counts the keys that the masks let through, received_attention's the bytes of its keys, once.
Inputs are random. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton

from vllm_blend.compat.cuda import flash_attention_3
from vllm_blend.ops import library
from vllm_blend.ops.deviation import deviation
from vllm_blend.ops.received_attention import received_attention
from vllm_blend.ops.received_attention_tiles import MAX_QUERIES
from vllm_blend.ops.segment_scatter import SegmentTables, segment_scatter
from vllm_blend.ops.shift_scatter import shift_scatter
from vllm_blend.ops.sparse_attention import sparse_attention, sparse_attention_rest
from vllm_blend.ops.sparse_attention_tiles import virtual_requests

BLOCK_SIZE = 16  # vLLM's default on CUDA


def milliseconds(calls: Sequence[Callable[[], Any]]) -> float:
    """Time of one call on the device: the median over replays of a graph of all of them, twice.

    A graph leaves out the host's share, which a model's other kernels hide.
    """
    for call in calls:
        call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in [*calls, *calls]:
            call()
    times = []
    for _ in range(25):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / (2 * len(calls)))
    return statistics.median(times[5:])


def hardware() -> str:
    name, memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
    return (
        f"{name} {memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}, torch {torch.__version__}, "
        f"triton {triton.__version__}, Python {platform.python_version()}"
    )


def copy_bandwidth() -> float:
    """GB/s, bytes read and written."""
    source = torch.randint(256, (1 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / milliseconds([lambda: target.copy_(source)]) / 1e6


def product_rate() -> float:
    """TFLOP/s of cuBLAS, bf16."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / milliseconds([lambda: a @ b]) / 1e9


def paged_cache(
    num_keys: int, num_kv_heads: int, head_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K, V and a shuffled block table of one request."""
    num_blocks = -(-num_keys // BLOCK_SIZE)
    size = (num_blocks, BLOCK_SIZE, num_kv_heads, 2 * head_size)
    k, v = torch.randn(size, device="cuda", dtype=torch.bfloat16).split(head_size, dim=-1)
    return k, v, torch.randperm(num_blocks, device="cuda").to(torch.int32)[None]


def attention(
    num_keys: int, ratio: float, num_heads: int, num_kv_heads: int, head_size: int
) -> list[dict[str, Any]]:
    """Times of attention from a share of the rows of one prompt."""
    k, v, block_table = paged_cache(num_keys, num_kv_heads, head_size)
    num_rows = int(ratio * num_keys)
    positions = torch.randperm(num_keys, device="cuda")[:num_rows].sort().values
    starts = torch.tensor([0, num_rows], dtype=torch.int32, device="cuda")
    query = torch.randn(num_rows, num_heads, head_size, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(query)
    scale = head_size**-0.5
    flop_per_key = 4 * num_heads * head_size
    flop = flop_per_key * float((positions + 1).sum())
    place = (k, v, positions, starts, block_table)
    times: dict[str, tuple[float, Callable[[], Any]]] = {
        "sparse_attention (Triton)": (
            flop,
            lambda: sparse_attention(query, *place, scale=scale, out=out),
        )
    }

    flash = flash_attention()
    if flash is not None:
        keys = torch.tensor([num_keys], dtype=torch.int32, device="cuda")
        common = dict(k=k, v=v, max_seqlen_k=num_keys, softmax_scale=scale, fa_version=3)
        tiles = virtual_requests(positions, starts, block_table, group=num_heads // num_kv_heads)

        def with_flash() -> None:
            lse = flash_attention_3(query, k, v, out, tiles, num_keys, scale)
            sparse_attention_rest(query, *place, out, lse, scale=scale)

        times["sparse_attention (FA3 prefix + rest)"] = (flop, with_flash)
        bottom_right = flop_per_key * num_rows * (num_keys - (num_rows - 1) / 2)
        times["FA3, bottom-right mask"] = (
            bottom_right,
            lambda: flash(
                q=query,
                out=out,
                cu_seqlens_q=starts,
                max_seqlen_q=num_rows,
                seqused_k=keys,
                causal=True,
                block_table=block_table,
                **common,
            ),
        )
        all_rows = torch.randn(num_keys, num_heads, head_size, device="cuda", dtype=query.dtype)
        all_starts = torch.tensor([0, num_keys], dtype=torch.int32, device="cuda")
        times["FA3, full prefill"] = (
            flop_per_key * num_keys * (num_keys + 1) / 2,
            lambda: flash(
                q=all_rows,
                cu_seqlens_q=all_starts,
                max_seqlen_q=num_keys,
                seqused_k=keys,
                causal=True,
                block_table=block_table,
                **common,
            ),
        )
    rows = []
    for name, (work, call) in times.items():
        ms = milliseconds([call])
        rows.append(
            dict(op=name, keys=num_keys, rows=num_rows, ms=ms, rate=work / ms / 1e9, unit="TFLOP/s")
        )
    return rows


def flash_attention() -> Any:
    """vLLM's FlashAttention 3, or None."""
    try:
        from vllm.vllm_flash_attn import flash_attn_interface
    except ImportError:
        return None
    return flash_attn_interface.flash_attn_varlen_func if flash_attn_interface.FA3_AVAILABLE else None


def received(num_keys: int, num_heads: int, num_kv_heads: int, head_size: int) -> list[dict[str, Any]]:
    """Time of what the keys receive of a prompt's last rows' attention; bytes are the keys', once."""
    key_bytes = 2 * num_keys * num_kv_heads * head_size
    last_keys = torch.arange(num_keys - MAX_QUERIES, num_keys, device="cuda")
    scores = torch.zeros(num_keys, device="cuda")
    calls = []
    for _ in range(max(2, (256 << 20) // key_bytes)):
        k, _, block_table = paged_cache(num_keys, num_kv_heads, head_size)
        query = torch.randn(1, MAX_QUERIES, num_heads, head_size, device="cuda", dtype=torch.bfloat16)
        place: tuple[Any, ...] = (query, [k], block_table[0], last_keys, scores)
        calls.append(partial(received_attention, *place, scale=head_size**-0.5))
    ms = milliseconds(calls)
    rate = key_bytes / ms / 1e6
    name = "received_attention (Triton)"
    return [dict(op=name, keys=num_keys, rows=MAX_QUERIES, ms=ms, rate=rate, unit="GB/s")]


def host_bandwidth() -> float:
    """GB/s of a copy from pinned host memory to the device."""
    source = torch.randint(256, (1 << 28,), dtype=torch.uint8).pin_memory()
    target = torch.empty_like(source, device="cuda")
    return source.nbytes / milliseconds([lambda: target.copy_(source, non_blocking=True)]) / 1e6


def movement(num_tokens: int, share: float, num_kv_heads: int, head_size: int) -> list[dict[str, Any]]:
    """Times of the ops that move data; bytes are those that must be read and written.

    From host memory the bytes are those that cross PCIe: read.
    """
    slots = torch.randperm(num_tokens // BLOCK_SIZE, device="cuda")[:, None] * BLOCK_SIZE
    slots = (slots + torch.arange(BLOCK_SIZE, device="cuda")).flatten()
    slots[torch.rand(len(slots), device="cuda") < share] = -1
    positions = torch.arange(num_tokens, device="cuda")
    angles = torch.randn(num_tokens, head_size, device="cuda", dtype=torch.bfloat16)
    size = (2, num_tokens, num_kv_heads, head_size)
    num_sets = max(2, (256 << 20) // (2 * math.prod(size)))
    shift, compare = [], []
    segments: dict[tuple[str, int], list[Callable[[], Any]]] = {}
    for _ in range(num_sets):
        key_cache, value_cache, _ = paged_cache(num_tokens, num_kv_heads, head_size)
        kv = torch.randn(size, device="cuda", dtype=torch.bfloat16)
        k, v = kv
        caches = (key_cache, value_cache)
        shift.append(partial(shift_scatter, k, v, positions, slots, angles, *caches))
        compare.append(partial(deviation, k, v))
        for memory, stored in (("GPU", kv), ("host", kv.cpu().pin_memory())):
            tables = chunk_tables(stored)
            where = (tables.addresses[0], tables.segments, tables.totals[0])
            for num_programs in (8, 16, 132) if memory == "GPU" else (4, 8, 16):
                # `stored` has to stay, too
                call = partial(_scatter, stored, *where, slots, angles, *caches, num_programs)
                segments.setdefault((memory, num_programs), []).append(call)
    num_moved = int((slots >= 0).sum())
    row_bytes = kv[0, 0].nbytes
    moved = num_moved * (4 * row_bytes + angles[0].nbytes)
    jobs: list[tuple[str, int, list[Any]]] = [
        ("shift_scatter", moved, shift),
        ("deviation", kv.nbytes, compare),
    ]
    for (memory, num_programs), calls in segments.items():
        name = f"segment_scatter, {memory}, {num_programs} programs"
        jobs.append((name, moved if memory == "GPU" else num_moved * 2 * row_bytes, calls))
    rows = []
    for name, work, calls in jobs:
        for kind in library.implementations():
            with library.implementation(kind):
                ms = milliseconds(calls)
            title = f"{name} ({'CUDA' if kind == 'cuda' else 'Triton'})"
            row = dict(op=title, keys=num_tokens, rows=None, ms=ms, rate=work / ms / 1e6, unit="GB/s")
            rows.append(row)
    return rows


def chunk_tables(kv: torch.Tensor, num_chunks: int = 16) -> SegmentTables:
    """K and V of a prompt as so many chunks of the same length."""
    num_tokens = kv.shape[1]
    count = num_tokens // num_chunks
    starts = [i * count for i in range(num_chunks)]
    tables = SegmentTables(num_chunks, num_tokens)
    tables.fill(
        [(count, start, start) for start in starts],
        [[(kv[0, start].data_ptr(), kv[1, start].data_ptr()) for start in starts]],
    )
    return tables


def _scatter(stored: torch.Tensor, *args: Any) -> None:
    *tensors, num_programs = args
    segment_scatter(*tensors, num_programs=num_programs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keys", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--ratio", type=float, default=0.16, help="share of the rows that attend")
    parser.add_argument("--num-heads", type=int, default=32)
    parser.add_argument("--num-kv-heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=128)
    opt = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    torch.manual_seed(0)

    bandwidth, product, host = copy_bandwidth(), product_rate(), host_bandwidth()
    print(hardware())
    print(
        f"copy {bandwidth:.0f} GB/s, from pinned host memory {host:.1f} GB/s, "
        f"cuBLAS bf16 {product:.0f} TFLOP/s\n"
    )
    print(f"{'op':44} {'keys':>6} {'rows':>6} {'ms':>8} {'rate':>8} {'':8} of ceiling")
    rows = []
    for num_keys in opt.keys:
        found = attention(num_keys, opt.ratio, opt.num_heads, opt.num_kv_heads, opt.head_size)
        flash = {row["op"]: row["rate"] for row in found}
        ceiling = flash.get("FA3, bottom-right mask", product)
        moves = received(num_keys, opt.num_heads, opt.num_kv_heads, opt.head_size)
        moves += movement(num_keys, opt.ratio, opt.num_kv_heads, opt.head_size)
        for row in found + moves:
            moved = host if ", host," in row["op"] else bandwidth
            row["of_ceiling"] = row["rate"] / (ceiling if row in found else moved)
            print(
                f"{row['op']:44} {row['keys']:6} {row['rows'] or '':>6} {row['ms']:8.4f} "
                f"{row['rate']:8.1f} {row['unit']:8} {row['of_ceiling']:.2f}"
            )
        rows += found + moves
    settings = vars(opt)
    print(
        json.dumps(
            dict(
                hardware=hardware(),
                copy_gb_s=bandwidth,
                host_gb_s=host,
                cublas_tflop_s=product,
                **settings,
                ops=rows,
            )
        )
    )


if __name__ == "__main__":
    main()
