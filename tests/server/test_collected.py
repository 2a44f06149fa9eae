"""Chunks are computed without a layer of them staying where it was computed."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from asking import REPORT, drain, outputs, prompt_of, report
from engines import Engine, make_engine

from vllm_blend.model.blending import Blending
from vllm_blend.server.worker.collected import Distances, HostRows

MAX_CHUNK = 64


@pytest.fixture(scope="module")
def server(tiny: Any) -> Iterator[Engine]:
    settings = {"ram_gb": 0.05, "stand_in": "", "max_chunk_tokens": MAX_CHUNK}
    with make_engine(tiny("llama"), additional_config={"vllm_blend": settings}) as engine:
        drain(engine)
        yield engine


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of how many layers the memory of K or V is held when the next one comes."""
    counts: list[int] = []
    memory: list[tuple[int, Any]] = []

    def watched(stock: Any) -> Any:
        def write(rows: Any, layer: int, first: int, k: torch.Tensor, v: torch.Tensor) -> None:
            memory[:] = [(at, ref) for at, ref in memory if ref() is not None]
            counts.append(len({at for at, _ in memory if at != layer}))
            memory.extend((layer, weakref.ref(tensor.untyped_storage())) for tensor in (k, v))
            stock(rows, layer, first, k, v)

        return write

    for owner in (HostRows, Distances):
        monkeypatch.setattr(owner, "write", watched(owner.write))
    return counts


def test_of_a_chunk_a_layer_is_held_at_a_time(server: Engine, held: list[int]) -> None:
    prompt, spans = prompt_of(server, [1, 2], size=60)
    outputs(server, [prompt], [{"spans": spans}])
    drain(server)
    assert len(held) >= 2 * len(server.model.blending.attns)
    assert max(held) <= 1  # the layer before it, until its successor is launched
    (found,) = outputs(server, [prompt], [{"spans": spans} | REPORT])
    assert report(found)["reused_tokens"] == 120


def test_a_long_chunk_is_cut_into_pieces(server: Engine) -> None:
    prompt, spans = prompt_of(server, [3], size=150)
    outputs(server, [prompt], [{"spans": spans}])
    drain(server)
    (found,) = outputs(server, [prompt], [{"spans": spans} | REPORT])
    assert (report(found)["chunks"], report(found)["reused_tokens"]) == (3, 150)


def test_chunks_lie_in_one_block_that_is_reserved_at_the_start(server: Engine) -> None:
    prompt, spans = prompt_of(server, [4, 5], size=60)
    outputs(server, [prompt], [{"spans": spans}])
    drain(server)
    chunks = server.model.blending.chunks
    block = chunks.memory._arena._bytes
    assert block.nbytes >= 0.05e9 * 9 / 8 - 4096 and len(chunks) >= 2
    first, end = block.ctypes.data, block.ctypes.data + block.nbytes
    for kv in chunks._chunks.values():
        assert all(first <= part.data_ptr() < end for layer in kv.layers for part in layer)


def test_vllm_sees_what_blending_takes_when_it_measures_memory(
    server: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ring of three layers, and one that is collected or widened; of a step's most rows."""
    stock, seen = Blending.staging, []

    def staging(blending: Blending) -> torch.Tensor | None:
        seen.append(stock(blending))
        return seen[-1]

    monkeypatch.setattr(Blending, "staging", staging)
    runner = server.llm.llm_engine.model_executor.driver_worker.model_runner
    runner._dummy_run(16)
    rows, heads, size, num_bytes = 4096, 2, 32, 4
    assert [tensor.nbytes for tensor in seen] == [10 * rows * heads * size * num_bytes]
    seen.clear()
    server.generate([server.ids(20, 1)])
    assert seen and all(tensor is None for tensor in seen)
