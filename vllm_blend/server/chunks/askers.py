"""Which requests asked for the chunks that are to come, so that nothing is done for those who left."""

from __future__ import annotations

from vllm_blend.core.plans import ChunkKey

ANSWERED = ""
"""Stands for requests that were answered: what they missed is computed for the next one."""


class Askers:
    """Requests by the chunks that they asked for."""

    def __init__(self) -> None:
        self._of_chunk: dict[ChunkKey, set[str]] = {}
        self._asked: dict[str, set[ChunkKey]] = {}

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._of_chunk

    def __len__(self) -> int:
        """Chunks that are asked for."""
        return len(self._of_chunk)

    def ask(self, key: ChunkKey, request_id: str) -> None:
        """A request wants a chunk."""
        self._of_chunk.setdefault(key, set()).add(request_id)
        if request_id != ANSWERED:
            self._asked.setdefault(request_id, set()).add(key)

    def answered(self, request_id: str) -> None:
        """A request has its answer: the next one may want the same chunks."""
        for key in self._asked.pop(request_id, ()):
            self._of_chunk[key].remove(request_id)
            self._of_chunk[key].add(ANSWERED)

    def left(self, request_id: str) -> list[ChunkKey]:
        """A request was aborted before its answer began; the chunks that nobody else asked for."""
        unwanted = []
        for key in self._asked.pop(request_id, ()):
            self._of_chunk[key].remove(request_id)
            if not self._of_chunk[key]:
                del self._of_chunk[key]
                unwanted.append(key)
        return unwanted

    def forget(self, key: ChunkKey) -> None:
        """A chunk has come, or will not come."""
        for request_id in self._of_chunk.pop(key, ()):
            if request_id != ANSWERED:
                self._asked[request_id].remove(key)
                if not self._asked[request_id]:
                    del self._asked[request_id]
