"""Streamed answers tell what was reused, as other answers do: in their last chunk."""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from vllm_blend.server.request import REPORT_KEY

FINISHED = '"finish_reason":"'
"""In an event that ends a choice; text of the answer has its quotes escaped."""
START, END = "data: ", "\n\n"
"""Of a server-sent event."""


async def with_reports(
    stock: Any, serving: Any, *args: Any, **kwargs: Any
) -> AsyncGenerator[str, None]:
    """vLLM's events, those that end a choice with its request's ``kv_transfer_params``.

    Args:
        stock: the stream's generator, of Chat Completions or Completions.
    """
    told: dict[int, Any] = {}  # by prompt of the request
    call = inspect.signature(stock).bind(serving, *args, **kwargs)
    call.arguments["result_generator"] = _note(call.arguments["result_generator"], told)
    choices = getattr(call.arguments["request"], "n", None) or 1
    async for event in stock(*call.args, **call.kwargs):
        yield _tell(event, told, choices) if told and FINISHED in event else event


async def _note(results: AsyncIterator[Any], told: dict[int, Any]) -> AsyncIterator[Any]:
    """The results, of which ``told`` keeps what blending says."""
    async for result in results:
        prompt, output = result if isinstance(result, tuple) else (0, result)
        params = getattr(output, "kv_transfer_params", None) or {}
        if report := params.get(REPORT_KEY):
            told[prompt] = {REPORT_KEY: report}
        yield result


def _tell(event: str, told: dict[int, Any], choices: int) -> str:
    """An event with the report of the prompt that its choice answers."""
    chunk = json.loads(event.removeprefix(START))
    prompt = chunk["choices"][0]["index"] // choices
    if prompt not in told:
        return event
    told_of = json.dumps(chunk | {"kv_transfer_params": told[prompt]}, ensure_ascii=False)
    return f"{START}{told_of}{END}"
