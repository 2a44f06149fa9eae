"""The CPU's kernel for rows at any positions: what attention over the paged cache must give, at odd
sizes, and what vLLM's own kernel gives in an engine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import make_engine, plan_for, relative_error, run
from families import FAMILIES, family_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.platforms import current_platform

from vllm_blend.attention import cpu_kernel
from vllm_blend.attention.cpu import CPUBlendImpl
from vllm_blend.attention.cpu_kernel import BUILDS, attend, make_tiles
from vllm_blend.ops.sparse_attention import sparse_attention_oracle

CAPABLE = torch.backends.cpu.get_cpu_capability()
pytestmark = pytest.mark.skipif(
    not current_platform.is_cpu()
    or CAPABLE not in BUILDS
    or (cpu_kernel._library() is None and shutil.which("c++") is None),
    reason="needs vLLM's CPU ops, AVX2, and a compiler to have been there",
)


@pytest.fixture(params=BUILDS)
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each build that this CPU can run."""
    if request.param == "AVX512" != CAPABLE:
        pytest.skip("this CPU has no AVX-512")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: request.param)
    cpu_kernel._library.cache_clear()
    yield request.param
    cpu_kernel._library.cache_clear()


def test_it_was_built_here(build: str) -> None:
    """``make`` installs a compiler's work where there is a compiler, as on any machine that tests."""
    library = cpu_kernel._library()
    assert library is not None
    assert library.lanes() == {"AVX512": 16, "AVX2": 8}[build]


class Case:
    """Requests with random K and V in a paged cache, the rest of which is NaN."""

    def __init__(
        self, lens: list[int], kept: list[list[int]], heads: tuple[int, int], size: int, block: int
    ) -> None:
        generator = torch.Generator().manual_seed(sum(lens) + size)
        num_heads, num_kv_heads = heads
        most = -(-max(lens) // block)
        order = torch.randperm(len(lens) * most + 1, generator=generator)[: len(lens) * most]
        self.block_table = order.view(len(lens), most).to(torch.int32)
        shape = (len(lens) * most + 1, block, num_kv_heads, size)
        self.k, self.v = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        for table, count in zip(self.block_table.long(), lens, strict=True):
            at = torch.arange(count)
            place = table[at // block], at % block
            self.k[place], self.v[place] = torch.randn(
                2, count, num_kv_heads, size, generator=generator
            )
        packed = [self.k.permute(0, 2, 3, 1).flatten(2), self.v.transpose(1, 2).flatten(2)]
        self.kv_cache = torch.cat(packed, 2).view(shape[0], num_kv_heads, block, 2 * size)
        self.last_keys = torch.tensor([row for rows in kept for row in rows])
        self.starts = torch.tensor([0, *map(len, kept)]).cumsum(0).to(torch.int32)
        count = len(self.last_keys)
        wide = torch.randn(count, num_heads + 3, size, generator=generator) * 2
        self.query = wide[:, 1 : 1 + num_heads]  # as a part of a QKV product
        self.group = num_heads // num_kv_heads

    def check(self, window: int = 0, softcap: float = 0.0, sinks: torch.Tensor | None = None) -> None:
        tiles = make_tiles(self.last_keys, self.starts, self.block_table, self.group)
        out = torch.full_like(self.query, torch.nan)
        attend(self.query, self.kv_cache, tiles, out, 0.3, window, softcap, sinks)
        expected = sparse_attention_oracle(
            self.query,
            self.k.nan_to_num(),
            self.v.nan_to_num(),
            self.last_keys,
            self.starts,
            self.block_table,
            scale=0.3,
            sliding_window=window,
            softcap=softcap,
            sinks=sinks,
            dtype=torch.float64,
        )
        assert relative_error(out, expected.float()) < 5e-6


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_rows_at_any_positions(data: st.DataObject) -> None:
    lens = data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=4))
    kept = [
        sorted(data.draw(st.sets(st.integers(0, count - 1), max_size=min(count, 60)))) for count in lens
    ]
    if not any(kept):
        kept[0] = [lens[0] - 1]
    num_kv_heads = data.draw(st.integers(1, 3))
    num_heads = num_kv_heads * data.draw(st.sampled_from([1, 2, 3, 7, 50]))
    size, block = (
        data.draw(st.sampled_from([16, 48, 64, 80])),
        data.draw(st.sampled_from([16, 32, 128])),
    )
    window = data.draw(st.sampled_from([0, 1, 5, 64, 200]))
    softcap = data.draw(st.sampled_from([0.0, 1.5]))
    sinks = torch.linspace(-3, 8, num_heads) if data.draw(st.booleans()) else None
    Case(lens, kept, (num_heads, num_kv_heads), size, block).check(window, softcap, sinks)


@pytest.mark.parametrize(
    ("window", "softcap", "sinks"), [(0, 0.0, False), (70, 0.0, True), (0, 30.0, False)]
)
def test_each_build(build: str, window: int, softcap: float, sinks: bool) -> None:
    kept = [list(range(0, 900, 7)), [3], [], list(range(100, 250))]
    case = Case([900, 4, 1, 250], kept, (6, 2), 64, 128)
    case.check(window, softcap, torch.linspace(-1, 6, 6) if sinks else None)


def test_a_row_does_not_depend_on_the_rows_beside_it(build: str) -> None:
    rows = list(range(5, 400, 9))
    case = Case([400], [rows], (3, 1), 32, 32)
    out = [torch.empty_like(case.query), torch.empty_like(case.query)]
    tiles = make_tiles(case.last_keys, case.starts, case.block_table, 3)
    attend(case.query, case.kv_cache, tiles, out[0], 0.3)
    for at in range(len(rows)):
        alone = make_tiles(case.last_keys[at : at + 1], torch.tensor([0, 1]), case.block_table, 3)
        row = slice(at, at + 1)
        attend(case.query[row], case.kv_cache, alone, out[1][row], 0.3)
    assert torch.equal(*out)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(dtype=torch.bfloat16), "computes in float32"),
        (dict(head_size=72), "multiples"),
        (dict(isa="neon"), "another layout"),
        (dict(alibi=True), "ALiBi"),
    ],
)
def test_what_it_does_not_know_is_left_to_vllm(change: dict[str, Any], reason: str) -> None:
    head_size = change.get("head_size", 64)
    dtype = change.get("dtype", torch.float32)
    cache = torch.zeros(2, 3, 32, 2 * head_size, dtype=dtype)
    layer = SimpleNamespace(kv_cache=cache, dtype=dtype)

    def update(layer: Any, key: Any, value: Any, cache: torch.Tensor, slots: Any) -> None:
        if "isa" not in change:
            k = key.permute(1, 2, 0).flatten(1)
            cache[0] = torch.cat([k, value.transpose(0, 1).flatten(1)], 1).view_as(cache[0])

    impl = SimpleNamespace(alibi_slopes=change.get("alibi"), do_kv_cache_update=update)
    why_not = cpu_kernel.why_not(impl, layer)
    assert why_not is not None and reason in why_not


def test_without_a_build_vllms_kernel_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    cpu_kernel._library.cache_clear()
    assert cpu_kernel.why_not(None, None) == "it was not built for this CPU"
    cpu_kernel._library.cache_clear()


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])  # plain; soft caps, windows; sinks
def test_an_engine_answers_as_on_vllms_kernel(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_engine(family_folder(family), **FAMILIES[family].engine) as engine:
        chunks = [engine.ids(count, seed) for seed, count in enumerate((33, 90, 7, 51))]
        prompt, plan = plan_for(engine, chunks, engine.ids(2, 9), engine.ids(12, 50), policy="static")
        beside = engine.ids(40, 60)
        used: list[torch.Tensor] = []
        stock = cpu_kernel.attend
        with monkeypatch.context() as patch:
            patch.setattr(cpu_kernel, "attend", lambda q, *a: used.append(q) or stock(q, *a))
            with engine.watched() as logits:
                tokens = run(engine, [prompt, beside], [plan, None])
        assert len(used) == len(engine.model.blending.attns)
        monkeypatch.setattr(CPUBlendImpl, "has_kernel", lambda impl, layer: False)
        with engine.watched() as expected:
            assert run(engine, [prompt, beside], [plan, None]) == tokens
        assert len(used) == len(engine.model.blending.attns)
        assert relative_error(torch.cat(logits), torch.cat(expected)) < 1e-5
