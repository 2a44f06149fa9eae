"""LlamaIndex's prompts, as a blending server gets and cuts them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from openai_stub import REPORT, Stub

from vllm_blend.api.llama_index import BlendLLM
from vllm_blend.server.frontend.chunk_markers import split

TEXTS = [
    'Ada said: {"bakery": <b>1921</b>} & left. She came back.',
    "The ferry  stops\n\nin winter.",
    "Ünïcode – 日本.",
]


class Fixed(BaseRetriever):
    def __init__(self, nodes: list[TextNode]) -> None:
        super().__init__()
        self.nodes = nodes

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=node, score=0.5) for node in self.nodes]


def blend_llm(stub: Stub, **more: Any) -> BlendLLM:
    clients = dict(http_client=stub.client, async_http_client=stub.async_client)
    server = dict(api_base="http://server/v1", model="m", api_key="-", context_window=4096)
    return BlendLLM(**server, **clients, max_retries=0, **more)


def ask(llm: BlendLLM, nodes: list[TextNode], **more: Any) -> Any:
    engine = RetrieverQueryEngine.from_args(
        Fixed(nodes), llm, node_postprocessors=[llm.chunks()], **more
    )
    return engine.query("Who?")


def chunks(text: str, separator: str) -> list[str]:
    """Chunks of a text, without what stands between two."""
    pieces = [piece for piece, is_chunk in split(text, separator) if is_chunk]
    return [piece for piece in pieces if piece.strip() not in ("", "\\n")]


@pytest.mark.parametrize("mode", ["compact", "simple_summarize", "tree_summarize", "refine"])
def test_nodes_are_chunks_to_the_character(mode: str) -> None:
    stub = Stub()
    llm = blend_llm(stub)
    answer = ask(llm, [TextNode(text=text) for text in TEXTS], response_mode=ResponseMode(mode))
    found = [chunk for text in stub.texts() for chunk in chunks(text, llm.separator)]
    # simple_summarize puts a list into its template, so Python's notation of it is what is read
    assert found == ([repr(t)[1:-1] for t in TEXTS] if mode == "simple_summarize" else TEXTS)
    assert all("Who?" in text for text in stub.texts())
    assert str(answer) == "Ada."
    assert [node.text for node in answer.source_nodes] == TEXTS  # a reader sees no separators
    assert stub.field() == {"separator": llm.separator, "report": True}


def test_what_the_model_reads_of_a_node_is_the_chunk() -> None:
    stub = Stub()
    llm = blend_llm(stub)
    metadata = {"title": "Ferry", "secret": "x"}
    node = TextNode(text=TEXTS[1], id_="7", metadata=metadata, excluded_llm_metadata_keys=["secret"])
    answer = ask(llm, [node])
    assert chunks(stub.texts()[0], llm.separator) == [f"title: Ferry\n\n{TEXTS[1]}"]
    assert answer.source_nodes[0].node.metadata == metadata
    assert answer.source_nodes[0].node.node_id == "7"
    assert answer.source_nodes[0].score == 0.5


def test_reports_are_told_of_answers_and_of_streams() -> None:
    stub = Stub()
    told: list[Any] = []
    llm = blend_llm(stub, on_report=told.append)
    assert llm.complete("Who?").additional_kwargs["blend"] == REPORT
    assert told == [REPORT]
    pieces = list(ask(llm, [TextNode(text=TEXTS[0])], streaming=True).response_gen)
    assert "".join(pieces) == "Ada."
    assert told == [REPORT, REPORT]


def test_a_server_that_does_not_blend_is_told_of() -> None:
    with pytest.warns(UserWarning, match="read the separators"):
        blend_llm(Stub(blends=False)).complete("Who?")
    with pytest.warns(UserWarning, match="read the separators"):
        list(blend_llm(Stub(blends=False)).stream_complete("Who?"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        blend_llm(Stub(blends=False), blend={"report": False}).complete("Who?")


def test_settings_and_other_fields_of_the_body_are_sent() -> None:
    stub = Stub()
    more = {"extra_body": {"top_k": 3}, "seed": 7}
    llm = blend_llm(stub, blend={"policy": "static"}, additional_kwargs=more, separator="0123456789")
    llm.complete("Who?")
    assert stub.field() == {"separator": "0123456789", "report": True, "policy": "static"}
    assert stub.sent[0]["top_k"] == 3 and stub.sent[0]["seed"] == 7
    assert llm.additional_kwargs["seed"] == 7 and more == {"extra_body": {"top_k": 3}, "seed": 7}
