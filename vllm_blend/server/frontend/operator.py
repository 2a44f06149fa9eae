"""What an operator asks over HTTP: which chunks are kept; to delete, check or compute them; on and off.

    GET  /blend/stats          what is kept, by tenant
    GET  /blend/chunks         the chunks in memory: tenant, offset, limit
    POST /blend/delete         {"texts": [...], "tenant": ""}, or {"tenant": ...}: all of a tenant's
    POST /blend/warm           {"texts": [...], "tenant": ""}: computed in the background
    POST /blend/verify         is what is listed there?
    POST /blend/on, /blend/off

Each needs the operator's key as a bearer token. Without one in the settings there are no such routes.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Body, Depends, Query, Request
from fastapi.responses import JSONResponse

from vllm_blend.server.config import ServerSettings
from vllm_blend.server.request import pieces
from vllm_blend.store.secrets import read_secret

if TYPE_CHECKING:
    from fastapi import FastAPI

MIN_KEY = 16
"""Characters of a key."""
MAX_TEXTS = 1024
"""Of one request."""
MAX_LISTED = 1000


class Refused(Exception):
    """A request that is not carried out. (vLLM logs a traceback for each of FastAPI's own.)"""

    def __init__(self, status: int, detail: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers = status, detail, headers


async def _answer(request: Request, refused: Any) -> JSONResponse:
    return JSONResponse({"detail": refused.detail}, refused.status, refused.headers)


def operator_key(place: Mapping[str, Any]) -> str:
    """The key that a setting names.

    Raises:
        ValueError: if there is none, or a short one; says nothing of it.
    """
    key = read_secret("operator_key", place)
    if len(key) < MIN_KEY:
        raise ValueError(f"operator_key has {len(key)} characters; allowed: {MIN_KEY} or more")
    return key


def add_operator_routes(app: FastAPI, settings: ServerSettings) -> None:
    """Adds the routes, which ask the engine client at ``app.state.blend_engine``."""
    assert settings.operator_key is not None
    app.add_exception_handler(Refused, _answer)
    expected = sha256(operator_key(settings.operator_key).encode()).digest()

    async def allowed(request: Request) -> None:
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not key:
            challenge = {"WWW-Authenticate": "Bearer"}
            raise Refused(401, "the operator's key is needed, as a bearer token", challenge)
        if not hmac.compare_digest(sha256(key.strip().encode()).digest(), expected):
            raise Refused(403, "this is not the operator's key")

    async def ask(operation: str, **values: Any) -> Any:
        core = app.state.blend_engine.engine_core
        try:
            engines = await core.call_utility_all_async("blend_operation", operation, values)
        except Exception as error:  # the engine's log has its traceback
            raise Refused(500, str(error)) from error
        return {"engines": engines}

    def cut(texts: list[str]) -> list[list[int]]:
        """Token ids of chunks, long ones in pieces, as the renderer makes them."""
        tokenizer = app.state.blend_engine.renderer.get_tokenizer()
        found = []
        for text in texts:
            ids = tokenizer.encode(text, add_special_tokens=False)
            if ids:
                ends = pieces(0, len(ids), settings.max_chunk_tokens)
                found += [ids[start:end] for start, end in ends]
        return found

    async def stats() -> Any:
        return await ask("stats")

    async def chunks(
        tenant: str | None = None,
        offset: Annotated[int, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 100,
    ) -> Any:
        found = await ask("list", tenant=tenant, offset=offset, limit=limit)
        tokenizer = app.state.blend_engine.renderer.get_tokenizer()
        for engine in found["engines"]:
            for chunk in engine["chunks"]:
                chunk["beginning"] = tokenizer.decode(chunk["beginning"])
        return found

    async def delete(body: Annotated[Any, Body()]) -> Any:
        tenant, texts = checked(body)
        if texts is not None:
            return await ask("delete", tenant=tenant or "", pieces=cut(texts))
        if tenant is None:
            raise Refused(400, "neither texts nor tenant; one of them says what to delete")
        app.state.blend_engine.renderer.forget_tenant(tenant)
        return await ask("delete_tenant", tenant=tenant)

    async def warm(body: Annotated[Any, Body()]) -> Any:
        tenant, texts = checked(body)
        if texts is None:
            raise Refused(400, "texts is missing; expected a list of texts")
        return await ask("warm", tenant=tenant or "", pieces=cut(texts))

    async def verify() -> Any:
        return await ask("verify")

    async def on() -> Any:
        return await ask("switch", on=True)

    async def off() -> Any:
        return await ask("switch", on=False)

    options: dict[str, Any] = {"dependencies": [Depends(allowed)], "include_in_schema": False}
    app.add_api_route("/blend/stats", stats, methods=["GET"], **options)
    app.add_api_route("/blend/chunks", chunks, methods=["GET"], **options)
    for do in (delete, warm, verify, on, off):
        app.add_api_route(f"/blend/{do.__name__}", do, methods=["POST"], **options)


def checked(body: Any) -> tuple[str | None, list[str] | None]:
    """Tenant and texts of a request's body.

    Raises:
        Refused: 400, which names what is wrong.
    """
    if not isinstance(body, dict):
        raise Refused(400, f"the body is {type(body).__name__}; expected an object")
    if unknown := sorted(body.keys() - {"tenant", "texts"}):
        raise Refused(400, f"unknown key {unknown[0][:80]!r}; allowed: tenant, texts")
    tenant, texts = body.get("tenant"), body.get("texts")
    if not isinstance(tenant, str | None):
        raise Refused(400, f"tenant is {type(tenant).__name__}; expected a text")
    if texts is None:
        return tenant, None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise Refused(400, "texts must be a list of texts")
    if not all(_is_unicode(text) for text in [tenant or "", *texts]):
        raise Refused(400, "texts has a lone surrogate, which no text can hold")
    if not 0 < len(texts) <= MAX_TEXTS:
        raise Refused(400, f"texts has {len(texts)} entries; allowed: 1 to {MAX_TEXTS}")
    return tenant, texts


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)
