"""Traces of prompts over the input's documents, and what is simulated of them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serving import sample
from typer.testing import CliRunner

from vllm_blend.cli.app import app

ARGUMENTS = ("--", "--dtype", "float32", "--max-model-len", "4096")


def documents() -> list[str]:
    return [text for number in range(1, 9) for text in sample(number)[0]]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def made_trace(path: Path, number: int = 40) -> Path:
    """Questions over four documents each, some documents more often than others; two tenants, and
    text with separators, and a chat of another form."""
    choose, texts = random.Random(5), documents()
    weights = [1 / (rank + 1) for rank in range(len(texts))]
    rows: list[dict[str, Any]] = []
    for index in range(number):
        chosen = list(dict.fromkeys(choose.choices(texts, weights, k=4)))
        row: dict[str, Any] = {"chunks": chosen, "question": f"What is told in text {index}?"}
        if index % 8 == 3:
            row = {"prompt": "<|cut|>".join(["Read this.", *chosen, "Why?"]), "separator": "<|cut|>"}
        elif index % 8 == 6:
            parts = [{"type": "text", "text": text} for text in (*chosen, "And then?")]
            row = {"messages": [{"role": "user", "content": parts}]}
        rows.append(row | ({"tenant": "b"} if index % 5 == 4 else {}))
    return write(path, rows)


def simulate(trace: Path, model: Path, *options: Any, arguments: Sequence[str] = ARGUMENTS) -> Any:
    """What the command tells, over a small KV cache."""
    call = ["simulate", str(trace), str(model), "--json", "--cache-gb", "0.05", *map(str, options)]
    result = CliRunner().invoke(app, [*call, *arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)
