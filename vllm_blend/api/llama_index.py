"""LlamaIndex: an LLM whose retrieved nodes are chunks.

llm = BlendLLM(api_base="http://127.0.0.1:8000/v1", model="MODEL", api_key="-")
engine = RetrieverQueryEngine.from_args(retriever, llm, node_postprocessors=[llm.chunks()])
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    from llama_index.core.bridge.pydantic import Field
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, QueryBundle, TextNode
    from llama_index.llms.openai_like import OpenAILike
except ImportError as error:
    raise ImportError(f"{error}; pip install 'vllm-blend[llama-index]'") from error

from vllm_blend.api.separators import (
    draw_separator,
    mark,
    report_of,
    request_body,
    warn_without_report,
)


class BlendLLM(OpenAILike):
    """``OpenAILike`` against a blending vLLM server.

    A response's ``additional_kwargs["blend"]`` tells what was reused.

    Args:
        blend: keys of the request's ``blend`` field (docs/serve.md), e.g. ``{"recomp_ratio": 0.1}``.
        separator: around nodes. Drawn; see ``langchain.ChatBlend``.
        on_report: called with each report, since query engines hand on no responses.

    Everything else is ``OpenAILike``'s, but that ``is_chat_model`` is True if it is left out. Set
    ``context_window`` to the model's: in 3,900 tokens, the default, LlamaIndex asks piece by piece.
    """

    is_chat_model: bool = True
    additional_kwargs: dict[str, Any] = Field(default_factory=dict)
    blend: dict[str, Any] = Field(default_factory=dict)
    separator: str = Field(default_factory=draw_separator)
    on_report: Callable[[dict[str, Any]], Any] | None = Field(default=None, exclude=True)

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        given: dict[str, Any] = self.additional_kwargs
        body = request_body(given.get("extra_body"), self.separator, self.blend)
        self.additional_kwargs = given | {"extra_body": body}

    @classmethod
    def class_name(cls) -> str:
        return "BlendLLM"

    def chunks(self) -> BaseNodePostprocessor:
        """The last of a query engine's postprocessors: makes each node a chunk."""
        return ChunkMarker(separator=self.separator)

    def _get_response_token_counts(self, raw_response: Any) -> dict[str, Any]:
        counts: dict[str, Any] = super()._get_response_token_counts(raw_response)
        report = report_of(getattr(raw_response, "model_extra", None) or {})
        if report is not None:
            if self.on_report is not None:
                self.on_report(report)
            return counts | {"blend": report}
        if any(choice.finish_reason for choice in getattr(raw_response, "choices", ())):
            warn_without_report(self.blend)
        return counts


class ChunkMarker(BaseNodePostprocessor):
    """Puts nodes' texts, as the model reads them, between separators."""

    separator: str

    @classmethod
    def class_name(cls) -> str:
        return "ChunkMarker"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        return [
            NodeWithScore(node=MarkedNode.of(found.node, self.separator), score=found.score)
            for found in nodes
        ]


class MarkedNode(TextNode):
    """A node whose text for the model is a chunk; its ``text``, as an answer's source, is as it was."""

    separator: str

    @classmethod
    def of(cls, node: BaseNode, separator: str) -> MarkedNode:
        fields = {name: getattr(node, name) for name in TextNode.model_fields if hasattr(node, name)}
        return cls(**fields | {"text": node.get_content(), "separator": separator})

    @classmethod
    def class_name(cls) -> str:
        return "MarkedNode"

    def get_content(self, metadata_mode: MetadataMode = MetadataMode.NONE) -> str:
        text: str = super().get_content(metadata_mode)
        return mark(text, self.separator) if metadata_mode == MetadataMode.LLM else text
