"""A running server, as its clients see it: plain HTTP, and what an answer says of blending."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from vllm_blend.cli.options import KEY_ENV
from vllm_blend.server.request import REPORT_KEY


class ServerError(Exception):
    """A server does not answer, or refuses a request.

    Attributes:
        status: of the answer; 0: there was none.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Server:
    """A server by its address, with or without ``http://`` and ``/v1``.

    Args:
        timeout_s: of one answer.
    """

    def __init__(self, url: str, timeout_s: float = 120.0) -> None:
        key = os.environ.get(KEY_ENV)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        whole = url if "://" in url else f"http://{url}"
        self.url = whole.rstrip("/").removesuffix("/v1")
        self._client = httpx.Client(base_url=self.url, timeout=timeout_s, headers=headers)

    def get(self, path: str, key: str | None = None) -> httpx.Response:
        """Raises ServerError.

        Args:
            key: another one than the API's.
        """
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return self._ask("GET", path, headers=headers)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The answer's JSON; raises ServerError."""
        return self._ask("POST", path, json=body).json()

    def model(self) -> str:
        """The name of the first model; raises ServerError."""
        names: list[str] = [model["id"] for model in self.get("/v1/models").json()["data"]]
        return names[0]

    def close(self) -> None:
        self._client.close()

    def _ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            answer = self._client.request(method, path, **options)
        except httpx.HTTPError as error:
            raise ServerError(f"{self.url} does not answer: {error}") from None
        if answer.status_code != 200:
            raise ServerError(_message(answer), answer.status_code)
        return answer


def with_parts(
    texts: Sequence[str], question: str, blend: Mapping[str, Any], **more: Any
) -> dict[str, Any]:
    """The body of a chat whose parts are chunks, but for the last."""
    parts = [{"type": "text", "text": text} for text in (*texts, question)]
    message = {"role": "user", "content": parts}
    return {"messages": [message], "vllm_xargs": {"blend": json.dumps(blend)}, **more}


def report_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    """What an answer says of blending; empty: nothing."""
    found: dict[str, Any] = (answer.get("kv_transfer_params") or {}).get(REPORT_KEY) or {}
    return found


def _message(answer: httpx.Response) -> str:
    try:
        said = answer.json()
        error = said["error"] if "error" in said else said["detail"]  # vLLM's; the operator's routes'
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return f"HTTP {answer.status_code} of {answer.request.url.path}"
