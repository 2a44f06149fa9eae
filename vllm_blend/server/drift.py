"""The requests by which a server measures its model's drift at start-up (``vllm_blend/drift.py``)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from vllm_blend.core import CollectPlan, DriftPart
from vllm_blend.drift import MIN_TOKENS, part_spans, text
from vllm_blend.prompt import TokenIds, text_ids

logger = logging.getLogger("vllm.vllm_blend.server")


class DriftRequests:
    """A text as a whole, then its parts; what comes of them stays in the model's process.

    Args:
        token_ids: of the text; nothing is measured where they are too few.
        context: token ids that chunks are computed behind.
        make_request: an engine request of ``(request_id, token_ids, plan)``.

    Attributes:
        done: whether nothing is left to do.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        context: Sequence[int],
        make_request: Callable[[str, list[int], CollectPlan], Any],
    ) -> None:
        self.done = len(token_ids) < MIN_TOKENS
        if token_ids and self.done:
            logger.warning(
                "vllm_blend: max_model_len leaves room for %d tokens to measure drift on; it takes %d. "
                "No KV is corrected for it.",
                len(token_ids),
                MIN_TOKENS,
            )
        parts = [(start, token_ids[start:end]) for start, end in part_spans(len(token_ids))]
        self._context, self._make_request = list(context), make_request
        self._todo: list[list[tuple[int | None, Sequence[int]]]] = [[(None, token_ids)], [*parts]]
        self._num_parts = len(parts)
        self._running: set[str] = set()

    def start(self) -> list[Any]:
        """The next engine requests, if none runs."""
        if self.done or self._running:
            return []
        requests = []
        for start, token_ids in self._todo.pop(0):
            length = len(self._context) + len(token_ids)
            part = DriftPart(start, self._num_parts)
            plan = CollectPlan(len(self._context), num_prompt_tokens=length, drift=part)
            request_id = f"vllm_blend-drift-{start}"
            self._running.add(request_id)
            requests.append(self._make_request(request_id, [*self._context, *token_ids], plan))
        return requests

    def is_mine(self, request_id: str) -> bool:
        return request_id in self._running

    def finish(self, request_id: str, completed: bool) -> None:
        """One of the requests has ended, or was aborted: then there is no drift to correct by."""
        self._running.remove(request_id)
        if not completed:
            self._todo.clear()
            logger.warning(
                "vllm_blend: the measurement of drift was aborted. No KV is corrected for it."
            )
        self.done = not self._todo and not self._running


def text_of(vllm_config: Any, num_tokens: int) -> TokenIds:
    """At most ``num_tokens`` of the text that drift is measured on.

    Raises:
        ValueError: if there is no tokenizer.
    """
    if vllm_config.model_config.skip_tokenizer_init:
        raise ValueError("drift of vllm_blend needs a tokenizer; the engine has none")
    from vllm.tokenizers.registry import cached_tokenizer_from_config

    return text_ids(cached_tokenizer_from_config(vllm_config.model_config), text(), "text")[:num_tokens]
