"""RAG over plain HTTP, without blending and with it, by server-sent events and nothing but Python.

vllm-blend serve MODEL
python example/clients/http_rag.py --url http://127.0.0.1:8000/v1
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from typing import Any

from library import INSTRUCTION, Asked, Library, compare, options


def body(question: str, library: Library, model: str, blend: str) -> dict[str, Any]:
    """The message's last part is the question; each other one is a chunk."""
    texts = [f"{text}\n\n" for text in library.search(question)] + [f"Question: {question}"]
    parts = [{"type": "text", "text": text} for text in texts]
    system = {"role": "system", "content": INSTRUCTION}
    return {
        "model": model,
        "messages": [system, {"role": "user", "content": parts}],
        "vllm_xargs": {"blend": blend},
        "stream": True,
        "temperature": 0,
        "max_tokens": 24,
    }


def ask(url: str, key: str, model: str, blend: str) -> Callable[[str], Asked]:
    library = Library()

    def stream(question: str) -> Asked:
        data = json.dumps(body(question, library, model, blend)).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        request = urllib.request.Request(f"{url}/chat/completions", data, headers)
        with urllib.request.urlopen(request) as answer:
            for line in answer:
                event = line.decode().strip().removeprefix("data: ")
                if event and event != "[DONE]":
                    chunk = json.loads(event)
                    told = chunk.get("kv_transfer_params") or {}
                    yield chunk["choices"][0]["delta"].get("content") or "", told.get("blend")

    return stream


def main() -> None:
    chosen = options("RAG over plain HTTP")
    server = chosen.url, chosen.api_key, chosen.model
    compare(before=ask(*server, "off"), after=ask(*server, json.dumps({"report": True})))


if __name__ == "__main__":
    main()
