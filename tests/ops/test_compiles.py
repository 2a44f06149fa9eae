"""Kernels compile for a GPU that is not there: Triton makes machine code for it all the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from vllm_blend.ops import library
from vllm_blend.ops.fp8 import FP8

pytestmark = pytest.mark.slow

HOPPER, HALF = 90, torch.bfloat16
POINTERS = {
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.uint8: "*u8",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Compiler:
    """Stands in for a kernel: launched, it is compiled for the arguments that it gets."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self.compiled: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        return self.launch

    def launch(self, *args: Any, num_warps: int = 4, num_stages: int = 2, **constants: Any) -> Any:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource, compile

        names = self._kernel.arg_names
        values = dict(zip(names, args, strict=False))
        signature = {name: of(value) for name, value in values.items()}
        signature |= dict.fromkeys(constants, "constexpr")
        at = {(names.index(name),): value for name, value in constants.items()}
        source = ASTSource(self._kernel, {n: signature[n] for n in names}, at, {})
        options = dict(num_warps=num_warps, num_stages=num_stages)
        self.compiled.append(compile(source, GPUTarget("cuda", HOPPER, 32), options))


def of(value: Any) -> str:
    """An argument's type, in Triton's words."""
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


@pytest.fixture
def compilers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Compiler]]:
    """All kernels, by name."""
    if library.INTERPRETED:
        pytest.skip("Triton is the interpreter here")
    from vllm_blend.ops import (
        received_attention_kernel,
        received_attention_tiles,
        segment_scatter,
        shift_scatter,
        sparse_attention_kernel,
        widen,
    )

    found = {}
    for module, name in (
        (sparse_attention_kernel, "_sparse_attention_kernel"),
        (received_attention_kernel, "_lse_kernel"),
        (received_attention_kernel, "_received_kernel"),
        (received_attention_kernel, "_sum_kernel"),
        (segment_scatter, "segment_scatter_kernel"),
        (shift_scatter, "_shift_scatter_kernel"),
        (widen, "_widen_kernel"),
    ):
        found[name] = Compiler(getattr(module, name))
        monkeypatch.setattr(module, name, found[name])
    for module in (segment_scatter, shift_scatter):
        monkeypatch.setattr(module, "use_triton", lambda tensor: True)
    monkeypatch.setattr(received_attention_tiles, "num_multiprocessors", lambda device: 132)
    yield found


@pytest.mark.parametrize("is_fp8", [False, True], ids=["bf16", "fp8"])
def test_every_kernel_is_machine_code_for_hopper(compilers: dict[str, Compiler], is_fp8: bool) -> None:
    from vllm_blend.ops import received_attention_kernel as received
    from vllm_blend.ops import segment_scatter, shift_scatter, widen
    from vllm_blend.ops import sparse_attention_kernel as sparse
    from vllm_blend.ops import sparse_attention_tiles as tiling

    rows, heads, kv_heads, size = 40, 8, 2, 128
    cache = torch.empty(9, 16, kv_heads, size, dtype=FP8 if is_fp8 else HALF)
    query = torch.empty(rows, heads, size, dtype=FP8 if is_fp8 else HALF)
    out, one = torch.empty(rows, heads, size, dtype=HALF), torch.ones(1)
    stored: dict[str, Any] = dict(k_scale=one, v_scale=one) if is_fp8 else {}
    scales = stored | dict(q_scale=one) if is_fp8 else {}
    at, starts = torch.empty(rows, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    table, lse = torch.zeros(1, 9, dtype=torch.int32), torch.zeros(heads, rows)
    place = (query, cache, cache, at, starts, table, out, 0.1)
    for window, softcap, sinks in ((0, 0.0, None), (37, 2.0, torch.zeros(heads))):
        tiles = tiling.choose_tiles(query, kv_heads)
        sparse.launch(*place, window, tiles, softcap=softcap, sinks=sinks, **scales)
    sparse.launch(*place, 0, tiling.rest_tiles(), lse, **scales)
    scales.pop("v_scale", None)
    of_layers = {name: scale[None] for name, scale in scales.items()}
    received.launch(
        query[None, :19], [cache], table[0], at[:19], torch.zeros(144), scale=0.1, **of_layers
    )
    slots, angles = torch.zeros(rows, dtype=torch.int64), torch.empty(99, size, dtype=HALF)
    k = torch.empty(rows, kv_heads, size, dtype=HALF)
    tables = segment_scatter.SegmentTables(4, rows, device="cpu")
    addresses = (tables.addresses[0], tables.segments, tables.totals[0], slots)
    for neox in (True, False):
        shift_scatter.launch(k, k, at, slots, angles, cache, cache, neox, **stored)
        segment_scatter.launch(*addresses, angles, cache, cache, neox, 132, HALF, **stored)
    widen.launch(torch.empty(k.shape, dtype=FP8), torch.empty(rows, kv_heads, 1), k)
    counts = {name: len(compiler.compiled) for name, compiler in compilers.items()}
    assert counts.pop("_sparse_attention_kernel") == 3
    assert counts.pop("_shift_scatter_kernel") == counts.pop("segment_scatter_kernel") == 2
    assert set(counts.values()) == {1}
    for name, compiler in compilers.items():
        for binary in compiler.compiled:
            assert binary.asm["cubin"]
            assert ("e4m3x2" in binary.asm["ptx"]) == (
                is_fp8 and name not in ("_sum_kernel", "_widen_kernel")
            )
