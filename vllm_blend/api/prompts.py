"""A chunk with its KV, and a prompt of chunks."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_blend.core.kv import StoredKV
from vllm_blend.core.plans import ChunkSpan
from vllm_blend.core.prompt import TokenIds


@dataclass(frozen=True, eq=False)
class Chunk:
    """A chunk's token ids, separator included, and their KV, computed after ``context`` alone.

    Without KV it is computed with the prompt, like the question.
    """

    token_ids: TokenIds
    kv: StoredKV | None = field(repr=False)
    context: TokenIds = field(default=(), repr=False)


@dataclass(frozen=True)
class BlendPrompt:
    """Token ids of a prompt, and where its chunks stand in it."""

    token_ids: list[int]
    spans: tuple[ChunkSpan, ...]

    @property
    def num_reused(self) -> int:
        """Tokens that stored KV stands for."""
        return sum(span.end - span.start for span in self.spans)
