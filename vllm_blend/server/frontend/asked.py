"""What a request asks for, told to the renderer of its text.

vLLM's renderer gets messages and texts, and no word of the request that they belong to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from vllm_blend.core.plans import EXTRA_ARG


@dataclass(frozen=True)
class Asked:
    """Of one request.

    Attributes:
        field: its ``blend`` field, or None.
        tenant: its ``cache_salt``.
    """

    field: Any = None
    tenant: str = ""


_NOBODY = Asked()
_asked: ContextVar[Asked] = ContextVar("vllm_blend_asked", default=_NOBODY)


@contextmanager
def asked_by(request: Any) -> Iterator[None]:
    """While it lasts, and in tasks that are begun meanwhile, ``asked`` is what this request asks for.

    Args:
        request: one of vLLM's protocol classes; not all of them declare what is read.
    """
    xargs = getattr(request, "vllm_xargs", None)
    field = xargs.get(EXTRA_ARG) if isinstance(xargs, Mapping) else None
    token = _asked.set(Asked(field, str(getattr(request, "cache_salt", None) or "")))
    try:
        yield
    finally:
        _asked.reset(token)


def asked() -> Asked:
    """Of the request whose text is being rendered; of nobody outside a server."""
    return _asked.get()
