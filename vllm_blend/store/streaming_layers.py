"""KV that is still on its way: shapes are known at once, contents layer by layer."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

from vllm_blend.core.kv import ChunkLost as ChunkLost
from vllm_blend.core.kv import StoredKV
from vllm_blend.core.layers import LayerKV, LazyLayers

FIRST_LAYERS = 2
"""The first layers come out of buffers, and say little of how fast the others will come: until they are
there, what is believed of the tier counts."""


def _unknown() -> float:
    return math.inf


class StreamingLayers(LazyLayers):
    """A chunk's layers while they are loaded, in order, by another thread.

    Args:
        tensors: where the layers will be.
        name: of the chunk, for messages.
        timeout_s: how long to wait for a layer before it counts as lost.
        believed_left: seconds until all layers are there, as far as their tier is known.
    """

    def __init__(
        self,
        tensors: Sequence[LayerKV],
        name: str,
        timeout_s: float,
        believed_left: Callable[[], float] = _unknown,
    ) -> None:
        self.tensors = tensors
        self._name = name
        self._timeout_s = timeout_s
        self._believed_left = believed_left
        self._arrived = 0
        self._began_at = time.monotonic()
        self._patience_s = math.inf
        self._lost: str | None = None
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self.tensors)

    def layer(self, index: int) -> LayerKV:
        """One of them, once it is there; raises ChunkLost if it cannot be loaded, or not in time."""
        self.wait(index + 1)
        return self.tensors[index]

    @property
    def described(self) -> Sequence[LayerKV]:
        """For shapes, types and devices; what it holds may come later."""
        return StoredKV(self.tensors).described

    @property
    def arrived(self) -> int:
        """Layers that are there."""
        return self._arrived

    @property
    def is_lost(self) -> bool:
        """Whether a layer will never be there, or not in time."""
        return self._arrived < len(self) and self._lost is not None

    @property
    def reason(self) -> str | None:
        """Why no further layer will come; None: as far as is known, they will."""
        return self._lost

    @property
    def seconds_left(self) -> float:
        """Until all layers are there, as fast as they came so far; infinite before it is known how fast
        they come. One more has been read, or nearly, and is not verified yet."""
        left, arrived = len(self) - self._arrived, self._arrived
        if not left or arrived < FIRST_LAYERS:
            return self._believed_left() if left else 0.0
        return max(left - 1, 0.5) / (arrived + 1) * (time.monotonic() - self._began_at)

    def hurry(self, seconds: float) -> None:
        """From now on all waits together take no longer than this; then it is lost."""
        self._patience_s = seconds

    def tokens(self, start: int, end: int) -> StreamingTokens:
        """Those of tokens ``[start, end)``; not copied, and not waited for."""
        return StreamingTokens(self, start, end)

    def wait(self, count: int | None = None) -> None:
        """Waits until the first ``count`` layers are there; None: all.

        Raises:
            ChunkLost: if they cannot be loaded, or not in time.
        """
        count = len(self) if count is None else count
        if count <= self._arrived:
            return
        began, timeout_s = time.monotonic(), max(min(self._timeout_s, self._patience_s), 0.0)
        with self._changed:
            self._changed.wait_for(lambda: count <= self._arrived or self._lost is not None, timeout_s)
            self._patience_s -= time.monotonic() - began
            if count <= self._arrived:
                return
            reason = self._lost or f"layer {self._arrived} did not arrive within {timeout_s:g} s"
            if self._patience_s <= 0:
                self._lost = reason
        raise ChunkLost(f"the KV of chunk {self._name} cannot be loaded: {reason}")

    def arrive(self) -> None:
        """Called by the loading thread, once a layer."""
        with self._changed:
            self._arrived += 1
            self._changed.notify_all()

    def lose(self, reason: str) -> None:
        """Called by the loading thread: no further layer will come."""
        with self._changed:
            self._lost = reason
            self._changed.notify_all()


class StreamingTokens(LazyLayers):
    """Some consecutive tokens of a chunk's layers while they are loaded."""

    def __init__(self, whole: StreamingLayers, start: int, end: int) -> None:
        self.tensors = StoredKV(whole.tensors).tokens(start, end).layers
        self.wait, self._whole = whole.wait, whole

    def __len__(self) -> int:
        return len(self.tensors)

    def layer(self, index: int) -> LayerKV:
        self.wait(index + 1)
        return self.tensors[index]

    @property
    def described(self) -> Sequence[LayerKV]:
        return StoredKV(self.tensors).described

    @property
    def arrived(self) -> int:
        return self._whole.arrived


class StreamingKV(StoredKV):
    """Stored KV whose ``layers[i]`` waits for layer ``i``; its scores are there from the start."""

    layers: StreamingLayers

    def wait(self) -> StoredKV:
        """Waits for every layer; the KV as any other's then. Raises ChunkLost."""
        self.layers.wait()
        return StoredKV(self.layers.tensors, self.scores)
