"""RAG with LlamaIndex, without blending and with it. Needs a blending server and BM25:

vllm-blend serve MODEL
pip install 'vllm-blend[llama-index]' rank-bm25
python example/clients/llama_index_rag.py --url http://127.0.0.1:8000/v1
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from library import INSTRUCTION, Asked, Library, compare, options
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.llms.openai_like import OpenAILike

from vllm_blend.api.llama_index import BlendLLM


class BM25(BaseRetriever):
    def __init__(self) -> None:
        super().__init__()
        self.library = Library()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        found = self.library.search(query_bundle.query_str)
        return [NodeWithScore(node=TextNode(text=text)) for text in found]


def ask(llm: OpenAILike, postprocessors: list[Any]) -> Callable[[str], Asked]:
    """The query engine as LlamaIndex's users make it."""
    engine = RetrieverQueryEngine.from_args(
        BM25(), llm, streaming=True, node_postprocessors=postprocessors
    )

    def stream(question: str) -> Asked:
        reports.clear()
        for text in engine.query(question).response_gen:
            yield text, None
        yield "", reports[-1] if reports else None

    return stream


reports: list[dict[str, Any]] = []


def main() -> None:
    chosen = options("RAG with LlamaIndex")
    server = dict(api_base=chosen.url, model=chosen.model, api_key=chosen.api_key, is_chat_model=True)
    common = server | dict(temperature=0, max_tokens=24, context_window=4096, system_prompt=INSTRUCTION)
    llm = BlendLLM(**common, on_report=reports.append)
    compare(before=ask(OpenAILike(**common), []), after=ask(llm, [llm.chunks()]))


if __name__ == "__main__":
    main()
