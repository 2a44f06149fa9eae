"""A chunk with its KV, and a prompt of chunks."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_blend.core.kv import StoredKV
from vllm_blend.core.plans import ChunkSpan
from vllm_blend.core.prompt import TokenIds


@dataclass(frozen=True, eq=False)
class Chunk:
    """A chunk's token ids, separator included, and their KV, computed after ``context`` alone.

    Without KV it is computed with the prompt, like the question. ``adapter``: digest of the LoRA
    adapter that computed it; empty: the base model.
    """

    token_ids: TokenIds
    kv: StoredKV | None = field(repr=False)
    context: TokenIds = field(default=(), repr=False)
    adapter: str = ""


@dataclass(frozen=True)
class BlendPrompt:
    """Token ids of a prompt, where its chunks stand in it, and the digest of their LoRA adapter."""

    token_ids: list[int]
    spans: tuple[ChunkSpan, ...]
    adapter: str = ""

    @property
    def num_reused(self) -> int:
        """Tokens that stored KV stands for."""
        return sum(span.end - span.start for span in self.spans)
