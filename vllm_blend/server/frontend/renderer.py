"""vLLM's renderer of text prompts, with chunks marked on the way to token ids.

Registered in vLLM's ``RENDERER_REGISTRY``. In a server that was not started to blend it changes
nothing.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from cachetools import LRUCache, cachedmethod
from vllm.renderers.hf import HfRenderer

from vllm_blend.server.config import ServerSettings
from vllm_blend.server.frontend.chunk_markers import START, cut, mark_parts, remove_marks, tokenize
from vllm_blend.server.request import SPANS_KEY

CACHED_BYTES = 128 << 20
"""Of pieces that are remembered: their texts, token ids, and what it takes to find them."""
ENTRY_BYTES = 500
"""Of a piece, beside its text and token ids."""

Piece = tuple[str, npt.NDArray[np.int32]]
"""A text and its token ids."""


class BlendRenderer(HfRenderer):
    """``HfRenderer``, whose prompts carry the spans of marked chunks under ``SPANS_KEY``.

    Chunks come back in other prompts, so a marked prompt's pieces are tokenized once and remembered.
    """

    def __init__(self, config: Any, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        self.blend_settings = ServerSettings.of(config)
        self._ids: LRUCache[str, Piece] = LRUCache(CACHED_BYTES, _num_bytes)
        self._ids_lock = threading.Lock()  # vLLM tokenizes in threads

    def render_messages(self, messages: Any, params: Any) -> Any:
        return super().render_messages(self._marked(messages), params)

    async def render_messages_async(self, messages: Any, params: Any) -> Any:
        return await super().render_messages_async(self._marked(messages), params)

    def _marked(self, messages: Any) -> Any:
        settings = self.blend_settings
        return mark_parts(messages) if settings is not None and settings.parts else messages

    def _tokenize_prompt(self, prompt: Any, params: Any) -> Any:
        settings = self.blend_settings
        text = prompt["prompt"]
        if settings is None or not (START in text or settings.separator and settings.separator in text):
            return super()._tokenize_prompt(prompt, params)
        pieces = cut(text, settings.separator)
        plain = prompt | {"prompt": remove_marks(text.replace(settings.separator, ""))}
        if params.truncate_prompt_tokens is not None or params.return_token_offsets:
            return super()._tokenize_prompt(plain, params)  # spans would not stay where they are

        def encode(piece: str, first: bool) -> list[int]:
            if first and params.add_special_tokens:
                return self._encode(piece, params)
            _, ids = self._piece(piece, replace(params, add_special_tokens=False))
            return ids.tolist()

        token_ids, spans = tokenize(pieces, encode, settings.min_chunk_tokens)
        return self._build_tokens_prompt(token_ids, plain | {SPANS_KEY: spans})

    @cachedmethod(
        lambda self: self._ids, key=lambda _, piece, params: piece, lock=lambda self: self._ids_lock
    )
    def _piece(self, piece: str, params: Any) -> Piece:
        """A piece's ids without special tokens; nothing else in ``params`` changes them."""
        return piece, np.array(self._encode(piece, params), dtype=np.int32)

    def _encode(self, piece: str, params: Any) -> list[int]:
        ids: list[int] = super()._tokenize_prompt({"prompt": piece}, params)["prompt_token_ids"]
        return ids

    def _process_tokens(self, prompt: Any, **kwargs: Any) -> Any:
        return _keep_spans(prompt, super()._process_tokens(prompt, **kwargs))

    async def _process_tokens_async(self, prompt: Any, **kwargs: Any) -> Any:
        return _keep_spans(prompt, await super()._process_tokens_async(prompt, **kwargs))


def _num_bytes(piece: Piece) -> int:
    text, ids = piece
    return sys.getsizeof(text) + ids.nbytes + ENTRY_BYTES


def _keep_spans(prompt: Any, engine_input: Any) -> Any:
    if spans := prompt.get(SPANS_KEY):
        engine_input[SPANS_KEY] = spans
    return engine_input
