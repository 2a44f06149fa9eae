"""OpenAI's API without a server: what a client sends, and an answer that tells of blending."""

from __future__ import annotations

import json
from typing import Any

import httpx

REPORT = {"reused_tokens": 40, "recomputed_tokens": 4}
TOLD = {"kv_transfer_params": {"blend": REPORT}}


class Stub:
    """Answers each request with ``"Ada."``; keeps what was sent.

    Args:
        blends: tell of blending in each answer.
    """

    def __init__(self, blends: bool = True) -> None:
        self.sent: list[dict[str, Any]] = []
        self._told = TOLD if blends else {}
        transport = httpx.MockTransport(self._answer)
        self.client = httpx.Client(transport=transport)
        self.async_client = httpx.AsyncClient(transport=transport)

    def texts(self, role: str = "user") -> list[str]:
        """Texts of the messages of a role that were sent."""
        messages = [message for body in self.sent for message in body["messages"]]
        return [message["content"] for message in messages if message["role"] == role]

    def field(self) -> dict[str, Any]:
        """The last request's ``blend`` field."""
        found: dict[str, Any] = json.loads(self.sent[-1]["vllm_xargs"]["blend"])
        return found

    def _answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.sent.append(body)
        common = {"id": "1", "created": 1, "model": "m"}
        if not body.get("stream"):
            message = {"role": "assistant", "content": "Ada."}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            usage = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}
            answer = common | {"object": "chat.completion", "choices": [choice], "usage": usage}
            return httpx.Response(200, json=answer | self._told)
        chunk = common | {"object": "chat.completion.chunk"}
        events = [
            chunk | {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "Ada"}}]},
            chunk
            | {"choices": [{"index": 0, "delta": {"content": "."}, "finish_reason": "stop"}]}
            | self._told,
        ]
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        return httpx.Response(200, text=text, headers={"Content-Type": "text/event-stream"})
