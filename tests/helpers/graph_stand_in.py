"""CUDA graphs without a GPU: what is computed while one is captured is computed again at each replay,
from and into the same memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_blend.attention import paged, xformers
from vllm_blend.model import graph_capture, graphs

WAITS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal"}
"""Ops that make the host wait for the device, which a capture cannot hold."""


class Recorder(TorchDispatchMode):
    """Keeps what is called, to be called again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], None]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.name().partition("::")[2].partition(".")[0]
        assert name not in WAITS, f"{name} in a graph"
        found = func(*args, **kwargs)
        given = {t.untyped_storage().data_ptr() for t in tensors([*args, *kwargs.values()])}
        made = [t for t in tensors([found]) if t.untyped_storage().data_ptr() not in given]
        if made or any(arg.alias_info and arg.alias_info.is_write for arg in func._schema.arguments):

            def again() -> None:
                others = tensors([func(*args, **kwargs)])
                if made:
                    for place, other in zip(made, others, strict=True):
                        place.copy_(other)

            self.calls.append(again)
        return found


def tensors(values: Any) -> list[torch.Tensor]:
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors(value)
    return found


class Graph:
    """``torch.cuda.CUDAGraph``."""

    capturing: Recorder | None = None
    replayed = 0

    def __init__(self) -> None:
        self._recorder = Recorder()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "") -> None:
        assert Graph.capturing is None
        Graph.capturing = self._recorder
        self._recorder.__enter__()

    def capture_end(self) -> None:
        assert Graph.capturing is self._recorder
        self._recorder.__exit__(None, None, None)
        Graph.capturing = None

    def replay(self) -> None:
        Graph.replayed += 1
        for call in self._recorder.calls:
            call()


def whole(stock: Callable[..., None]) -> Callable[..., None]:
    """Makes ``stock`` one call of a graph: a kernel's stand-in may look at what tensors hold."""

    def call(*args: Any, **kwargs: Any) -> None:
        recorder = Graph.capturing
        if recorder is None:
            stock(*args, **kwargs)
            return
        recorder.__exit__(None, None, None)
        stock(*args, **kwargs)
        recorder.__enter__()
        recorder.calls.append(lambda: stock(*args, **kwargs))

    return call


@contextmanager
def stood_in() -> Iterator[type[Graph]]:
    """While it lasts, graphs are these, for engines on XFORMERS."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "CUDAGraph", Graph)
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        patch.setattr(torch.cuda, "Stream", lambda: None)
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        patch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
        patch.setattr(graphs, "capturing_on", lambda stream: nullcontext())
        patch.setattr(graph_capture, "unowned", lambda tensor: tensor)
        patch.setattr(xformers.sparse, "run", whole(xformers.sparse.run))
        patch.setattr(
            xformers.ops, "reshape_and_cache_flash", whole(xformers.ops.reshape_and_cache_flash)
        )
        patch.setattr(paged.segment_scatter, "launch", whole(paged.segment_scatter.launch))
        yield Graph
