"""How far full prefill is from itself where last bits differ: what rounding alone makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from engines import Engine


@contextmanager
def other_last_bits(engine: Engine, seed: int) -> Iterator[None]:
    """Meanwhile each K and V is up to a unit in its last place off when it goes to the cache."""
    generators: dict[torch.device, torch.Generator] = {}

    def off(x: torch.Tensor) -> torch.Tensor:
        if x.device not in generators:
            generators[x.device] = torch.Generator(x.device).manual_seed(seed)
        by = 2 * torch.rand(x.shape, device=x.device, generator=generators[x.device]) - 1
        return (x.float() * (1 + torch.finfo(x.dtype).eps / 2 * by)).to(x.dtype)

    def writes(stock: Callable[..., None]) -> Callable[..., None]:
        def write(layer: Any, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> None:
            stock(layer, off(key), off(value), *rest)

        return write

    with pytest.MonkeyPatch.context() as patch:
        for attn in engine.model.blending.attns:
            patch.setattr(attn.impl, "do_kv_cache_update", writes(attn.impl.do_kv_cache_update))
        yield


def attends_as_stock(engine: Engine) -> bool:
    """Whether rows that follow one another get the bits of full prefill: FlashAttention 3 attends."""
    return getattr(engine.model.blending.attns[0].impl, "vllm_flash_attn_version", None) == 3


def mean(distances: Sequence[float]) -> float:
    """Their root mean square."""
    return float((sum(one**2 for one in distances) / len(distances)) ** 0.5)
