"""RAG with OpenAI's client, without blending and with it: the message's text parts are the chunks.

vllm-blend serve MODEL
pip install openai rank-bm25
python example/clients/openai_rag.py --url http://127.0.0.1:8000/v1
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from library import INSTRUCTION, Asked, Library, compare, options
from openai import OpenAI


def messages(question: str, library: Library) -> Any:
    """The last part is the question; each other one is a chunk."""
    texts = [f"{text}\n\n" for text in library.search(question)] + [f"Question: {question}"]
    parts = [{"type": "text", "text": text} for text in texts]
    return [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": parts}]


def ask(client: OpenAI, model: str, blend: str) -> Callable[[str], Asked]:
    library = Library()

    def stream(question: str) -> Asked:
        answer = client.chat.completions.create(
            model=model,
            messages=messages(question, library),
            stream=True,
            temperature=0,
            max_tokens=24,
            extra_body={"vllm_xargs": {"blend": blend}},
        )
        for chunk in answer:
            told = (chunk.model_extra or {}).get("kv_transfer_params") or {}
            yield chunk.choices[0].delta.content or "", told.get("blend")

    return stream


def main() -> None:
    chosen = options("RAG with OpenAI's client")
    client = OpenAI(base_url=chosen.url, api_key=chosen.api_key)
    report = json.dumps({"report": True})
    compare(before=ask(client, chosen.model, "off"), after=ask(client, chosen.model, report))


if __name__ == "__main__":
    main()
