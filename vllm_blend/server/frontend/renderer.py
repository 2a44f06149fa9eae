"""vLLM's renderer of text prompts, with chunks marked on the way to token ids.

Registered in vLLM's ``RENDERER_REGISTRY``. In a server that was not started to blend it changes
nothing, nor does it change a text in which neither its request nor the operator marks chunks.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from cachetools import LRUCache
from vllm.renderers.hf import HfRenderer

from vllm_blend.server.config import ServerSettings
from vllm_blend.server.frontend.admission import check_early, parse
from vllm_blend.server.frontend.asked import asked
from vllm_blend.server.frontend.chunk_markers import (
    Marks,
    Piece,
    cut,
    mark_messages,
    split,
    tokenize,
    without_marks,
)
from vllm_blend.server.request import SPANS_KEY, WHY_NOT_KEY, WITH_MEDIA, BlendRequest

CACHED_BYTES = 128 << 20
"""Of pieces that are remembered: their texts, token ids, and what it takes to find them."""
ENTRY_BYTES = 560
"""Of a piece, beside its text and token ids."""

PIECES_KEY = "blend_pieces"
"""The key of a prompt that holds what its text was cut into, a ``Cut``."""

Ids = tuple[str, npt.NDArray[np.int32]]
"""A text and its token ids."""


class Cut(NamedTuple):
    """A text's pieces, and whose it is."""

    pieces: list[Piece]
    tenant: str


class BlendRenderer(HfRenderer):
    """``HfRenderer``, whose prompts carry the spans of marked chunks under ``SPANS_KEY``.

    Chunks come back in other prompts, so a marked prompt's pieces are tokenized once and remembered,
    for each tenant by itself: how long it takes tells nobody what others sent.
    """

    def __init__(self, config: Any, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        self.blend_settings = ServerSettings.of(config)
        self._ids: LRUCache[tuple[str, str], Ids] = LRUCache(CACHED_BYTES, _num_bytes)
        self._ids_lock = threading.Lock()  # vLLM tokenizes in threads

    # --- chat messages --------------------------------------------------------------------------

    def render_messages(self, messages: Any, params: Any) -> Any:
        wishes = self._wishes()
        if wishes is None or self._renders_ids(params):
            return super().render_messages(messages, params)
        marks = Marks.draw()
        marked = mark_messages(messages, wishes.parts, wishes.separator, marks)
        return _cut(super().render_messages(marked, params), marks)

    async def render_messages_async(self, messages: Any, params: Any) -> Any:
        wishes = self._wishes()
        if wishes is None or self._renders_ids(params):
            return await super().render_messages_async(messages, params)
        marks = Marks.draw()
        marked = mark_messages(messages, wishes.parts, wishes.separator, marks)
        return _cut(await super().render_messages_async(marked, params), marks)

    def _renders_ids(self, params: Any) -> bool:
        """Whether a chat's rendering is token ids, in which no mark can be found again."""
        ids = params.chat_template_kwargs.get("tokenize", True)  # vLLM's default
        return bool(ids) or self.model_config.enable_prompt_embeds

    def _wishes(self) -> BlendRequest | None:
        """How the request at hand marks chunks in its texts; None: it does not."""
        if self.blend_settings is None:
            return None
        wishes = parse(self.blend_settings, asked().field)
        return wishes if wishes.parts or wishes.separator else None

    # --- texts ----------------------------------------------------------------------------------

    def render_prompts(self, prompts: Sequence[Any]) -> list[Any]:
        return self._split(super().render_prompts(prompts))

    async def render_prompts_async(self, prompts: Sequence[Any]) -> list[Any]:
        return self._split(await super().render_prompts_async(prompts))

    def _split(self, prompts: list[Any]) -> list[Any]:
        """Prompts with their texts, where they are texts, cut at separators."""
        wishes = self._wishes()
        if wishes is None or not wishes.separator:
            return prompts
        return [
            _with_pieces(prompt, split(prompt["prompt"], wishes.separator))
            if isinstance(prompt.get("prompt"), str) and "prompt_token_ids" not in prompt
            else prompt
            for prompt in prompts
        ]

    # --- token ids ------------------------------------------------------------------------------

    def _tokenize_prompt(self, prompt: Any, params: Any) -> Any:
        found: Cut | None = prompt.get(PIECES_KEY)
        if found is None:
            return super()._tokenize_prompt(prompt, params)
        prompt = {key: value for key, value in prompt.items() if key != PIECES_KEY}
        assert self.blend_settings is not None
        why_not = ""
        if params.truncate_prompt_tokens is not None:
            why_not = "a prompt with truncate_prompt_tokens has no marked chunks"
        elif params.return_token_offsets or params.do_lower_case:
            why_not = "a prompt with return_token_offsets or in lower case has no marked chunks"
        elif prompt.get("multi_modal_data"):
            why_not = WITH_MEDIA
        if why_not:
            return super()._tokenize_prompt(prompt | {WHY_NOT_KEY: why_not}, params)
        tenant = prompt.get("cache_salt") or found.tenant

        def encode(texts: list[str]) -> list[list[int]]:
            if not params.add_special_tokens:
                return self._ids_of(tenant, texts, params)
            first = super(BlendRenderer, self)._tokenize_prompt({"prompt": texts[0]}, params)
            rest = self._ids_of(tenant, texts[1:], replace(params, add_special_tokens=False))
            return [first["prompt_token_ids"], *rest]

        least = self.blend_settings.min_chunk_tokens
        token_ids, spans = tokenize(found.pieces, encode, least)
        if len(spans) < sum(is_chunk for _, is_chunk in found.pieces):
            why_not = f"marked chunks are shorter than min_chunk_tokens, {least}"
        return self._build_tokens_prompt(token_ids, prompt | {SPANS_KEY: spans, WHY_NOT_KEY: why_not})

    def _ids_of(self, tenant: str, texts: list[str], params: Any) -> list[list[int]]:
        """Token ids of pieces, without special tokens; nothing else in ``params`` changes them.

        Those that are not remembered are tokenized together: a fast tokenizer does that in threads.
        """
        with self._ids_lock:
            known = {text: self._ids.get((tenant, text)) for text in texts}
        pieces = {text: piece for text, piece in known.items() if piece is not None}
        new = [text for text in known if text not in pieces]
        if new:
            encoded = self.get_tokenizer()(new, **params.get_encode_kwargs())["input_ids"]
            for text, ids in zip(new, encoded, strict=True):
                pieces[text] = piece = text, np.array(ids, dtype=np.int32)
                with self._ids_lock, suppress(ValueError):  # it is larger than all that is remembered
                    self._ids[tenant, text] = piece
        return [pieces[text][1].tolist() for text in texts]

    def forget_tenant(self, tenant: str) -> None:
        """Forgets a tenant's pieces."""
        with self._ids_lock:
            for key in [key for key in self._ids if key[0] == tenant]:
                del self._ids[key]

    # --- the engine's input ---------------------------------------------------------------------

    def _process_tokens(self, prompt: Any, **kwargs: Any) -> Any:
        return self._checked(prompt, super()._process_tokens(prompt, **kwargs))

    async def _process_tokens_async(self, prompt: Any, **kwargs: Any) -> Any:
        return self._checked(prompt, await super()._process_tokens_async(prompt, **kwargs))

    def _checked(self, prompt: Any, engine_input: Any) -> Any:
        """The engine's input, with the spans of the prompt that it was made of."""
        check_early(self.config, asked().field, len(engine_input["prompt_token_ids"]))
        for key in (SPANS_KEY, WHY_NOT_KEY):
            if value := prompt.get(key):
                engine_input[key] = value
        return engine_input


def _cut(rendered: Any, marks: Marks) -> tuple[Any, Any]:
    """A rendered chat without its marks; the prompt has the pieces that they cut it into."""
    conversation, prompt = rendered
    pieces = cut(prompt["prompt"], marks)
    return without_marks(conversation, marks), _with_pieces(prompt, pieces)


def _with_pieces(prompt: Any, pieces: list[Piece]) -> Any:
    text = "".join(piece for piece, _ in pieces)
    if not any(is_chunk for _, is_chunk in pieces):
        return prompt | {"prompt": text}
    return prompt | {"prompt": text, PIECES_KEY: Cut(pieces, asked().tenant)}


def _num_bytes(piece: Ids) -> int:
    text, ids = piece
    return sys.getsizeof(text) + ids.nbytes + ENTRY_BYTES
