"""What the scheduler and the model's process tell each other, on vLLM's own messages.

``News`` ride on the model runner's output, as an attribute.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_blend.core import ChunkKey

NEWS = "blend_news"
"""The attribute of vLLM's ``ModelRunnerOutput``."""


@dataclass(frozen=True)
class Lost:
    """A chunk of a request's plan whose KV is not in the model's process.

    Attributes:
        computed: the request's tokens that were in the paged cache already.
        reason: one word, for the metrics.
    """

    request_id: str
    key: ChunkKey
    computed: int
    reason: str


@dataclass
class News:
    """From the model's process to the scheduler.

    Attributes:
        lost: chunks that requests of this step should have reused.
        seconds: of the stages of blending, by request id and stage.
    """

    lost: list[Lost] = field(default_factory=list)
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, output: Any) -> News:
        """Those that came with a model runner's output."""
        found: News = getattr(output, NEWS, None) or cls()
        return found
