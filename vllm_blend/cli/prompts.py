"""Prompts of users, a line of JSON each, as bodies of requests to a server.

    {"chunks": ["...", "..."], "question": "..."}        a chat whose parts are chunks
    {"messages": [...]}                                  a chat as clients send it
    {"prompt": "...", "separator": "<|8c1f|>"}           a text with separators
    {"token_ids": [...], "spans": [[12, 140]]}           token ids

Each may also have ``tenant``, ``blend`` (a request's blend field), ``at`` (seconds since the first) and
``answers`` (those that count as right).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = ("chunks", "messages", "prompt", "token_ids")
SEPARATOR = "<|vllm-blend-7c0e|>"
"""Of chunks that are put into a text, for models without a chat template."""


@dataclass(frozen=True)
class Row:
    """One prompt of a file.

    Attributes:
        values: as they were read.
        at: when it comes, in seconds; None: not told.
    """

    values: Mapping[str, Any]
    at: float | None

    @property
    def chunks(self) -> list[str]:
        """Its chunks' texts; none where only the server can tell."""
        if "chunks" in self.values:
            return list(self.values["chunks"])
        if "separator" in self.values:
            return [
                text for text in self.values["prompt"].split(self.values["separator"])[1:-1] if text
            ]
        return []

    @property
    def question(self) -> str:
        """What stands after the last chunk."""
        if "chunks" in self.values:
            return str(self.values["question"])
        return str(self.values["prompt"]).rpartition(self.values["separator"])[2]

    def request(self, model: str, chat: bool, field: Any = None) -> tuple[str, dict[str, Any]]:
        """Path and body of a request that answers it with one token.

        Args:
            chat: the model has a chat template.
            field: of blending, instead of the row's own; ``"off"``: full prefill.
        """
        values, blend = self.values, dict(self.values.get("blend") or {})
        body: dict[str, Any] = {"model": model, "max_tokens": 1, "temperature": 0}
        if values.get("tenant"):
            body["cache_salt"] = str(values["tenant"])
        path = "/v1/completions"
        if "chunks" in values and chat:
            parts = [{"type": "text", "text": text} for text in (*self.chunks, self.question)]
            path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": parts}]
        elif "chunks" in values:
            body["prompt"] = SEPARATOR.join(["", *self.chunks, self.question])
            blend["separator"] = SEPARATOR
        elif "messages" in values:
            path, body["messages"] = "/v1/chat/completions", values["messages"]
        elif "prompt" in values:
            body["prompt"] = values["prompt"]
            if "separator" in values:
                blend["separator"] = values["separator"]
        else:
            body["prompt"] = values["token_ids"]
            if "spans" in values:
                blend["spans"] = values["spans"]
        if field == "off":
            if "separator" in blend:  # which is no part of the prompt
                body["prompt"] = body["prompt"].replace(blend["separator"], "")
            body["vllm_xargs"] = {"blend": "off"}
        else:
            body["vllm_xargs"] = {"blend": json.dumps(blend | dict(field or {}))}
        return path, body


def read_rows(path: Path, limit: int | None = None) -> list[Row]:
    """The prompts of a ``.jsonl`` or ``.jsonl.gz`` file.

    Raises:
        ValueError: names the line that is no prompt, or the file that cannot be read.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise ValueError(f"{path} has no lines")
    return [_row(f"line {number} of {path.name}", line) for number, line in lines[:limit]]


def _row(where: str, line: str) -> Row:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is no JSON: {error}") from None
    if not isinstance(values, dict) or sum(kind in values for kind in KINDS) != 1:
        raise ValueError(f"{where}: expected an object with one of {', '.join(KINDS)}")
    if "chunks" in values:
        chunks = values["chunks"]
        if not isinstance(chunks, list) or not all(isinstance(text, str) and text for text in chunks):
            raise ValueError(f"{where}: chunks is no list of texts")
        if not isinstance(values.get("question"), str) or not values["question"]:
            raise ValueError(f"{where} has chunks and no question")
    at = values.get("at")
    if at is not None and (isinstance(at, bool) or not isinstance(at, int | float) or at < 0):
        raise ValueError(f"{where}: at is {at!r}; expected seconds, from 0")
    return Row(values, None if at is None else float(at))
