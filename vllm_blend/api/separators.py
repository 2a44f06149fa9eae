"""Retrieved documents as chunks, in a text that a framework puts together.

A framework's prompt is one text by the time it is sent: templates join documents, and some flatten the
parts of a message. So documents are marked by a separator, which the server takes out again. It is
digits alone: no template escapes, trims or splits them. And it is drawn, so no document can hold it.
"""

from __future__ import annotations

import json
import secrets
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

NO_REPORT = (
    "the server did not say what it reused. If it is not a blending one (--additional-config "
    "'{\"vllm_blend\": {}}'), its model has read the separators between the documents"
)


def draw_separator() -> str:
    """20 digits."""
    return f"{secrets.randbits(64):020d}"


def join(texts: Iterable[str], separator: str, end: str = "\n\n") -> str:
    """One text in which each of ``texts`` is a chunk, whatever stands before and after it.

    Args:
        texts: empty ones are left out.
        end: of each chunk; part of it, so that the last one is the same chunk elsewhere.
    """
    chunks = [text + end for text in texts if text]
    return separator.join(["", *chunks, ""])


def mark(text: str, separator: str) -> str:
    """A text that is a chunk, for others to put somewhere."""
    return f"{separator}{text}{separator}" if text else text


def request_body(
    body: Mapping[str, Any] | None, separator: str, blend: Mapping[str, Any]
) -> dict[str, Any]:
    """A request's ``extra_body`` that asks for blending.

    Args:
        body: what else is in it.
        separator: of its documents.
        blend: other keys of the ``blend`` field (docs/serve.md); a report is asked for if it has no
            ``report``.
    """
    body = dict(body or {})
    field = {"report": True} | dict(blend) | {"separator": separator}
    xargs = dict(body.get("vllm_xargs") or {}) | {"blend": json.dumps(field)}
    return body | {"vllm_xargs": xargs}


def report_of(response: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a response, or the last chunk of a stream, says of blending."""
    return (response.get("kv_transfer_params") or {}).get("blend")


def warn_without_report(blend: Mapping[str, Any]) -> None:
    """Warns that a request has no report, if it asked for one."""
    if blend.get("report", True):
        warnings.warn(NO_REPORT, stacklevel=2)
