"""Documents marked in a text, as the server then cuts it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from vllm_blend.api.separators import draw_separator, join, mark, request_body
from vllm_blend.server.frontend.chunk_markers import split

SEPARATOR = draw_separator()


def test_each_document_is_a_chunk_and_the_last_one_is_the_same_chunk_elsewhere() -> None:
    first = split(f"Read: {join(['one', 'two'], SEPARATOR)}Who?", SEPARATOR)
    assert first == [("Read: ", False), ("one\n\n", True), ("two\n\n", True), ("Who?", False)]
    second = split(join(["two", "", "one"], SEPARATOR), SEPARATOR)
    assert second == [("two\n\n", True), ("one\n\n", True)]


def test_no_documents_are_no_chunks() -> None:
    assert join([], SEPARATOR) == join([""], SEPARATOR)
    cut = split(f"Read: {join([], SEPARATOR)}Who?", SEPARATOR)
    assert cut == [("Read: ", False), ("Who?", False)]
    assert mark("", SEPARATOR) == ""


def test_separators_are_drawn_and_are_digits() -> None:
    drawn = {draw_separator() for _ in range(100)}
    assert len(drawn) == 100
    assert all(len(one) == 20 and one.isdigit() for one in drawn)


def test_a_body_keeps_what_is_in_it() -> None:
    given = {"top_k": 3, "vllm_xargs": {"mine": 1}}
    body = request_body(given, SEPARATOR, {"recomp_ratio": 0.2, "report": False})
    assert given == {"top_k": 3, "vllm_xargs": {"mine": 1}}
    assert body["top_k"] == 3 and body["vllm_xargs"]["mine"] == 1
    field = json.loads(body["vllm_xargs"]["blend"])
    assert field == {"separator": SEPARATOR, "recomp_ratio": 0.2, "report": False}


@pytest.mark.parametrize(
    ("module", "missing", "extra"),
    [
        ("langchain", "langchain_openai", "vllm-blend[langchain]"),
        ("llama_index", "llama_index.llms", "vllm-blend[llama-index]"),
    ],
)
def test_a_missing_framework_is_named_with_what_to_install(
    module: str, missing: str, extra: str
) -> None:
    code = f"""
import sys
sys.modules[{missing!r}] = None
try:
    import vllm_blend.api.{module}
except ImportError as error:
    assert {missing!r} in str(error) and {extra!r} in str(error), error
else:
    raise AssertionError
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("module", ["langchain", "llama_index"])
def test_a_client_needs_neither_torch_nor_vllm(module: str) -> None:
    code = f"""
import sys
for name in ("torch", "vllm"):
    sys.modules[name] = None
import vllm_blend.api.{module}
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
