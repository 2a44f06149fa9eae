"""A page to try blending on: one HTML document, which asks the API as any client does."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_blend.core.settings import POLICIES
from vllm_blend.server.config import ServerSettings

if TYPE_CHECKING:
    from fastapi import FastAPI

PATH = "/blend"
FILES = {"STYLE": "page.css", "SCRIPT": "page.js"}
"""What is put into ``page.html``, so that one request brings it all."""
POLICY = (
    "default-src 'none'; connect-src 'self'; img-src data:; style-src 'nonce-{nonce}'; "
    "script-src 'nonce-{nonce}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""What the page may load: nothing but itself, and the server's API."""


def add_page(app: FastAPI, settings: ServerSettings) -> None:
    """Adds the route."""
    from fastapi.responses import HTMLResponse

    html = page_html(settings)

    async def page() -> HTMLResponse:
        nonce = secrets.token_urlsafe(16)
        headers = {
            "Content-Security-Policy": POLICY.format(nonce=nonce),
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        return HTMLResponse(html.replace("NONCE", nonce), headers=headers)

    app.add_api_route(PATH, page, methods=["GET"], include_in_schema=False)


def page_html(settings: ServerSettings) -> str:
    """The page, but for ``NONCE``."""
    folder = Path(__file__).parent
    html = (folder / "page.html").read_text(encoding="utf-8")
    for place, name in FILES.items():
        html = html.replace(place, (folder / name).read_text(encoding="utf-8"))
    # nothing in a script ends it but "</"
    return html.replace("VALUES", json.dumps(page_values(settings)).replace("<", "\\u003c"))


def page_values(settings: ServerSettings) -> dict[str, Any]:
    """What the page knows of the server: what a client may set, and what holds without."""
    return {
        "fields": sorted(settings.client_fields),
        "ratios": settings.client_ratios,
        "ratio": settings.blend.recomp_ratio,
        "policy": settings.blend.policy,
        "policies": {settings.blend.policy: "this server's"} | POLICIES,
    }
