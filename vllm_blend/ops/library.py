"""What the ops share: registration with torch, the choice of kernels, and checks at the door."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

logger = logging.getLogger("vllm.vllm_blend.ops")

_library = torch.library.Library("vllm_blend", "FRAGMENT")

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""Triton's interpreter runs kernels on CPU tensors; it is chosen when Triton is first imported."""

Shape = Sequence[int | str]


def register(schema: str, run: Callable[..., None]) -> None:
    """Makes ``run`` the custom op ``torch.ops.vllm_blend.<name>``; it writes to its arguments only.

    Args:
        schema: torch's, with the written arguments marked; the op returns nothing.
        run: the op on real tensors, of any device.
    """
    name = schema.split("(", 1)[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")

    def fake(*args: object, **kwargs: object) -> None:
        return None

    torch.library.register_fake(f"vllm_blend::{name}", fake, lib=_library)


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether the Triton kernel runs for ``tensor``'s device."""
    return tensor.is_cuda or INTERPRETED


def use_cuda(tensor: torch.Tensor) -> bool:
    """Whether the CUDA C++ kernel, under ``torch.ops.vllm_blend_C``, runs for ``tensor``'s device."""
    return _chosen == "cuda" and tensor.is_cuda


def implementations() -> tuple[str, ...]:
    """Those of an op with a CUDA C++ kernel, on a GPU: "cuda" where it is built, and "triton"."""
    return ("cuda", "triton") if _loaded else ("triton",)


@contextlib.contextmanager
def implementation(name: str) -> Iterator[None]:
    """Chooses one of ``implementations()``, for tests and benchmarks.

    Raises:
        ValueError: there is none of that name.
    """
    global _chosen
    if name not in implementations():
        raise ValueError(f"there is no {name!r} here; expected one of {implementations()}")
    before, _chosen = _chosen, name
    try:
        yield
    finally:
        _chosen = before


def _load() -> bool:
    """Loads the CUDA C++ ops (csrc/, built by setup.py) where they are and fit this torch."""
    library = Path(__file__).parents[1] / "_C.abi3.so"
    if not library.exists():
        logger.debug("no CUDA C++ ops: %s was not built", library)
        return False
    try:
        torch.ops.load_library(library)
    except OSError as error:
        logger.debug("no CUDA C++ ops: %s (%s)", error, error.__cause__)
        return False
    return True


def _choose() -> str:
    """The kernels that GPU tensors get; ``VLLM_BLEND_OPS=triton`` is for debugging."""
    wish = os.environ.get("VLLM_BLEND_OPS", "")
    if wish not in ("", "triton"):
        raise ValueError(f"VLLM_BLEND_OPS is {wish!r}; expected triton")
    return wish or implementations()[0]


_loaded = _load()
_chosen = _choose()


def check(
    name: str,
    tensor: torch.Tensor,
    shape: Shape,
    dtypes: Sequence[torch.dtype],
    like: torch.Tensor | None = None,
) -> None:
    """Raises ValueError, naming the argument, unless it fits.

    Args:
        name: the argument's.
        shape: expected sizes; a name where any size will do.
        dtypes: allowed types.
        like: a tensor on the expected device; None where any will do.
    """
    found = tuple(tensor.shape)
    sizes = zip(shape, found, strict=False)
    if len(found) != len(shape) or any(isinstance(e, int) and e != f for e, f in sizes):
        wanted = ", ".join(str(size) for size in shape)
        raise ValueError(f"{name} has shape {list(found)}; expected [{wanted}]")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name} is {tensor.dtype}; expected {wanted}")
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}; expected {like.device}")


def check_inner_stride(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError unless the last dimension is contiguous."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} has strides {list(tensor.stride())}; its last dimension must be contiguous"
        )


def check_rotary_dim(cos_sin_cache: torch.Tensor, head_size: int) -> None:
    """Raises ValueError unless the rotated dimensions are pairs and fit in a head."""
    rotary_dim = cos_sin_cache.shape[1]
    if rotary_dim % 2 or rotary_dim > head_size:
        raise ValueError(
            f"cos_sin_cache is for rotary_dim {rotary_dim}; expected an even number up to {head_size}"
        )


FLOATS = (torch.float16, torch.bfloat16, torch.float32)
INTS = (torch.int32, torch.int64)
