"""Several servers behind a gateway: each request to the one that most likely has its chunks' KV.

    router = Router(["http://a:8000", "http://b:8000"])
    url = router.choose(body)  # of a request in the OpenAI API, before it is passed on

The rule goes by what was sent: a server that was sent a chunk keeps its KV (docs/serve.md), until its
memory is full. It asks no server, and needs neither vLLM nor torch.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping
from threading import Lock
from typing import Any

from blake3 import blake3

MIN_CHARS = 16
"""Of a chunk: a server computes one of fewer tokens (``min_chunk_tokens``) afresh in every prompt."""

REMEMBERED = 4
"""Requests a server that count as lately sent: a share is told from chance, and a burst passes."""


class Router:
    """Which server a request goes to; for one gateway, whose threads may share it.

    The server that was sent most of a prompt's chunks, by their length, gets it; of several that were
    sent as much, the one with the fewest requests lately, so new chunks spread evenly. None gets more
    than ``slack`` times its share of the latest requests, and one: what everybody asks for comes to lie
    on several servers.

    Args:
        servers: their names, e.g. addresses.
        chunks: about how many a server holds at a time, in all its tiers; the least recently sent are
            taken for dropped. An entry takes some 300 bytes.
        slack: at least 1. Higher finds more, and lets one server have more to do than others.

    Raises:
        ValueError: names the argument that does not fit.
    """

    def __init__(self, servers: Iterable[str], chunks: int = 10_000, slack: float = 1.25) -> None:
        self._held: dict[str, OrderedDict[bytes, None]] = {name: OrderedDict() for name in servers}
        if not self._held:
            raise ValueError("servers is empty; expected at least one name")
        if chunks < 1:
            raise ValueError(f"chunks is {chunks}; allowed: 1 and more")
        if not slack >= 1:
            raise ValueError(f"slack is {slack}; allowed: 1 and more")
        self._chunks, self._slack = chunks, slack
        self._holders: dict[bytes, set[str]] = {}
        self._lately: deque[str] = deque(maxlen=REMEMBERED * len(self._held))
        self._lock = Lock()

    def choose(self, body: Mapping[str, Any], among: Collection[str] | None = None) -> str:
        """The server for a request, which is then taken for sent to it.

        Args:
            body: of the request, as ``chunks_of`` reads it.
            among: the servers that may get it, those that are up; None: all.

        Raises:
            ValueError: ``among`` is empty, or names a server that is none.
        """
        chunks = chunks_of(body)
        with self._lock:
            names = list(self._held) if among is None else list(among)
            if not names or not self._held.keys() >= set(names):
                raise ValueError(f"among is {names}; allowed: some of {', '.join(self._held)}")
            sent = Counter(self._lately)
            most = self._slack * sum(sent[name] for name in names) / len(names) + 1
            known: Counter[str] = Counter()
            for digest, length in chunks.items():
                for name in self._holders.get(digest, ()):
                    known[name] += length
            room = [name for name in names if sent[name] < most]
            chosen = max(room, key=lambda name: (known[name], -sent[name]))
            self._lately.append(chosen)
            for digest in chunks:
                self._send(digest, chosen)
            return chosen

    def forget(self, server: str) -> None:
        """A server has lost its chunks: it was started anew, and reads them from no tier.

        Raises:
            ValueError: there is no such server.
        """
        with self._lock:
            if server not in self._held:
                raise ValueError(f"server is {server!r}; allowed: {', '.join(self._held)}")
            while self._held[server]:
                self._drop_oldest(server)

    def _send(self, digest: bytes, name: str) -> None:
        held = self._held[name]
        held[digest] = None
        held.move_to_end(digest)
        self._holders.setdefault(digest, set()).add(name)
        if len(held) > self._chunks:
            self._drop_oldest(name)

    def _drop_oldest(self, name: str) -> None:
        digest, _ = self._held[name].popitem(last=False)
        self._holders[digest].discard(name)
        if not self._holders[digest]:
            del self._holders[digest]


def chunks_of(body: Mapping[str, Any]) -> dict[bytes, int]:
    """A request's texts that may be chunks, by a hash of 16 bytes: their lengths.

    These are the parts of its messages, or its prompt, cut as its ``blend`` field says: at the
    ``separator``, or, of token ids, by the ``spans``. The hash covers model and ``cache_salt`` too:
    servers share no chunk between adapters or tenants.

    Args:
        body: a chat's (``messages``), or a completion's (``prompt``: a text, or token ids). What is
            none of these has no chunks; the server that gets it refuses it.
    """
    field = _blend_field(body)
    messages, prompt = body.get("messages"), body.get("prompt")
    if isinstance(messages, list):
        parts = [part for message in messages for part in _parts_of(message)]
    elif isinstance(prompt, list):
        cut = [prompt[start:end] for start, end in _spans(field)] or [prompt]
        parts = [str(ids) for ids in cut if ids]
    else:
        parts = [prompt] if isinstance(prompt, str) else []
    separator = field.get("separator")
    if isinstance(separator, str) and separator:
        parts = [piece for part in parts for piece in part.split(separator)]
    owner = json.dumps([str(body.get(name) or "") for name in ("model", "cache_salt")])
    return {_digest(owner, part): len(part) for part in parts if len(part) >= MIN_CHARS}


def _parts_of(message: Any) -> list[str]:
    """A message's texts."""
    content = message.get("content") if isinstance(message, Mapping) else None
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = (part.get("text") for part in parts if isinstance(part, Mapping))
    return [text for text in texts if isinstance(text, str)]


def _blend_field(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the request asks of blending; empty: nothing that can be read."""
    xargs = body.get("vllm_xargs")
    field = xargs.get("blend") if isinstance(xargs, Mapping) else None
    if isinstance(field, str):
        try:
            field = json.loads(field)
        except (ValueError, RecursionError):
            return {}
    return field if isinstance(field, Mapping) else {}


def _spans(field: Mapping[str, Any]) -> list[list[int]]:
    spans = field.get("spans")
    pairs = spans if isinstance(spans, list) else []
    good = all(isinstance(p, list) and [type(end) for end in p] == [int, int] for p in pairs)
    return pairs if good else []


def _digest(owner: str, text: str) -> bytes:
    return blake3(f"{owner}{text}".encode("utf-8", "surrogatepass")).digest(16)
