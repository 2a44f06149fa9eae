"""LangChain's prompts, as a blending server gets and cuts them."""

from __future__ import annotations

import asyncio
import warnings
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from openai_stub import REPORT, Stub

from vllm_blend.api.langchain import ChatBlend
from vllm_blend.server.frontend.chunk_markers import split

TEXTS = [
    'Ada said: {"bakery": <b>1921</b>} & left.',
    "The ferry  stops\n\nin winter.\n",
    "Ünïcode – 日本.",
]
DOCUMENTS = [Document(text, metadata={"page": at}) for at, text in enumerate(TEXTS)]


def chat(stub: Stub, **more: Any) -> ChatBlend:
    server = dict(base_url="http://server/v1", model="m", api_key="-")
    clients = dict(http_client=stub.client, http_async_client=stub.async_client)
    return ChatBlend(**server, **clients, **more)


def chunks(text: str, separator: str) -> list[str]:
    assert text.count(separator) >= 2
    return [piece for piece, is_chunk in split(text, separator) if is_chunk]


@pytest.mark.parametrize("template", ["f-string", "jinja2", "mustache"])
def test_documents_in_a_chain_are_chunks_to_the_character(template: Any) -> None:
    stub = Stub()
    llm = chat(stub)
    names = {"f-string": "{%s}", "jinja2": "{{ %s }}", "mustache": "{{{%s}}}"}[template]
    human = f"  {names % 'context'}  Question: {names % 'question'}"
    prompt = ChatPromptTemplate.from_messages(
        [("system", "Answer."), ("human", human)], template_format=template
    )
    retriever = RunnableLambda(lambda _: DOCUMENTS)
    chain = {"context": retriever | llm.join, "question": RunnablePassthrough()} | prompt | llm
    answer = chain.invoke("Who?")
    (text,) = stub.texts()
    assert chunks(text, llm.separator) == [f"{text}\n\n" for text in TEXTS]
    read = "".join(f"{text}\n\n" for text in TEXTS)
    assert text.replace(llm.separator, "") == f"  {read}  Question: Who?"
    assert stub.field() == {"separator": llm.separator, "report": True}
    assert answer.text == "Ada." and answer.response_metadata["blend"] == REPORT


def test_marked_documents_are_chunks_whoever_joins_them() -> None:
    stub = Stub()
    llm = chat(stub)
    marked = llm.mark(DOCUMENTS)
    llm.invoke("\n---\n".join(document.page_content for document in marked))
    assert chunks(stub.texts()[0], llm.separator) == [
        TEXTS[0],
        "\n---\n",
        TEXTS[1],
        "\n---\n",
        TEXTS[2],
    ]
    assert [document.metadata for document in marked] == [{"page": at} for at in range(3)]
    assert [document.page_content for document in DOCUMENTS] == TEXTS  # the retriever's own


def test_streams_tell_what_was_reused() -> None:
    stub = Stub()
    llm = chat(stub)
    whole = None
    for chunk in llm.stream("Who?"):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None and whole.text == "Ada."
    assert whole.response_metadata["blend"] == REPORT
    answer = asyncio.run(llm.ainvoke([HumanMessage("Who?")]))
    assert answer.response_metadata["blend"] == REPORT


def test_a_server_that_does_not_blend_is_told_of() -> None:
    llm = chat(Stub(blends=False))
    with pytest.warns(UserWarning, match="read the separators"):
        llm.invoke("Who?")
    with pytest.warns(UserWarning, match="read the separators"):
        list(llm.stream("Who?"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chat(Stub(blends=False), blend={"report": False}).invoke("Who?")


def test_settings_and_other_fields_of_the_body_are_sent() -> None:
    stub = Stub()
    llm = chat(stub, blend={"recomp_ratio": 0.3}, extra_body={"top_k": 3}, separator="0123456789")
    llm.bind(stop=["x"]).invoke("Who?")
    assert stub.field() == {"separator": "0123456789", "report": True, "recomp_ratio": 0.3}
    assert stub.sent[0]["top_k"] == 3 and stub.sent[0]["stop"] == ["x"]
