"""LangChain: a chat model whose retrieved documents are chunks.

llm = ChatBlend(base_url="http://127.0.0.1:8000/v1", model="MODEL", api_key="-")
context = {"context": retriever | llm.join, "question": RunnablePassthrough()}
chain = context | prompt | llm
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

try:
    from langchain_core.documents import Document
    from langchain_core.outputs import ChatGenerationChunk, ChatResult
    from langchain_openai import ChatOpenAI
    from pydantic import Field
except ImportError as error:
    raise ImportError(f"{error}; pip install 'vllm-blend[langchain]'") from error

from vllm_blend.api.separators import (
    draw_separator,
    join,
    mark,
    report_of,
    request_body,
    warn_without_report,
)


class ChatBlend(ChatOpenAI):
    """``ChatOpenAI`` against a blending vLLM server.

    A message's ``response_metadata["blend"]`` tells what was reused.

    Args:
        blend: keys of the request's ``blend`` field (docs/serve.md), e.g. ``{"recomp_ratio": 0.1}``.
        separator: around documents. Drawn; give your own only where texts must not differ from run to
            run, as in a cache of answers, and no document can hold it.

    Everything else is ``ChatOpenAI``'s.
    """

    extra_body: Mapping[str, Any] | None = None
    blend: dict[str, Any] = Field(default_factory=dict)
    separator: str = Field(default_factory=draw_separator)

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        self.extra_body = request_body(self.extra_body, self.separator, self.blend)

    def join(self, documents: Sequence[Document]) -> str:
        """The documents as one text for a prompt, each a chunk."""
        return join((document.page_content for document in documents), self.separator)

    def mark(self, documents: Sequence[Document]) -> list[Document]:
        """The documents, each marked as a chunk, for chains that join documents themselves."""
        return [
            document.model_copy(update={"page_content": mark(document.page_content, self.separator)})
            for document in documents
        ]

    def _create_chat_result(
        self, response: Any, generation_info: dict[str, Any] | None = None
    ) -> ChatResult:
        result = super()._create_chat_result(response, generation_info)
        report = report_of(response if isinstance(response, dict) else response.model_extra or {})
        if report is None:
            warn_without_report(self.blend)
        else:
            for generation in result.generations:
                generation.message.response_metadata["blend"] = report
        return result

    def _convert_chunk_to_generation_chunk(
        self, chunk: dict[str, Any], *args: Any, **kwargs: Any
    ) -> ChatGenerationChunk | None:
        made = super()._convert_chunk_to_generation_chunk(chunk, *args, **kwargs)
        choices = chunk.get("choices") or ()
        if made is None or not any(choice.get("finish_reason") for choice in choices):
            return made
        report = report_of(chunk)
        if report is None:
            warn_without_report(self.blend)
        else:
            made.message.response_metadata["blend"] = report
        return made
