"""RAG with LangChain, without blending and with it. Needs a blending server and BM25:

vllm-blend serve MODEL
pip install 'vllm-blend[langchain]' rank-bm25
python example/clients/langchain_rag.py --url http://127.0.0.1:8000/v1
"""

from __future__ import annotations

from collections.abc import Callable

from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_openai import ChatOpenAI
from library import INSTRUCTION, Asked, Library, compare, options

from vllm_blend.api.langchain import ChatBlend

PROMPT = ChatPromptTemplate.from_messages(
    [("system", INSTRUCTION), ("human", "{context}\n\nQuestion: {question}")]
)


def retriever() -> Runnable[str, list[Document]]:
    library = Library()
    return RunnableLambda(lambda asked: [Document(text) for text in library.search(asked)])


def plain_join(documents: list[Document]) -> str:
    return "\n\n".join(document.page_content for document in documents)


def ask(llm: ChatOpenAI, join: Callable[[list[Document]], str]) -> Callable[[str], Asked]:
    """The chain as LangChain's users write it."""
    context = {"context": retriever() | join, "question": RunnablePassthrough()}
    chain = context | PROMPT | llm

    def stream(question: str) -> Asked:
        for chunk in chain.stream(question):
            yield chunk.text, chunk.response_metadata.get("blend")

    return stream


def main() -> None:
    chosen = options("RAG with LangChain")
    server = dict(base_url=chosen.url, model=chosen.model, api_key=chosen.api_key)
    common = server | dict(temperature=0, max_tokens=24)
    llm = ChatBlend(**common)
    compare(before=ask(ChatOpenAI(**common), plain_join), after=ask(llm, llm.join))


if __name__ == "__main__":
    main()
