"""What a chunk's KV is known by: a digest of everything that changes its numbers.

Two keys with the same digest stand for the same KV; whatever differs (other weights, another dtype,
another rank, another tenant) makes another digest, so it is simply not found.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property

import numpy as np
from blake3 import blake3

from vllm_blend.core.kv import KVShape
from vllm_blend.store.secrets import check_key

DIGEST_VERSION = 1
"""Of digests, and of the places where records lie; a new one makes every older record a miss. (Records
have versions of their own, ``record.py``.)"""

STORAGES = ("auto", "fp8")
"""How a store may keep K and V."""

KEY_CONTEXT = "vllm_blend 2026 names and checksums of chunk records"
"""What a checksum key is used for; another use of the same secret has another context."""

DIGEST_BYTES = 16
"""128 bits: among a billion chunks the chance of one collision is below 1e-20."""


@dataclass(frozen=True)
class ModelKey:
    """The model, and the share of it, that computed a chunk's KV.

    Attributes:
        weights: fingerprint of the weights and the model's configuration (``fingerprint.py``).
        rope: the RoPE settings, as canonical JSON.
        shape: layers, KV heads (of this rank), head size and the type K and V are computed in.
        kv_dtype: the type K and V are computed in, and vLLM's name for its cache's.
        quantization: vLLM's name for how the weights are quantized, or "".
        tp_size: tensor-parallel ranks.
        tp_rank: which of them, from 0.
        first_layer: of the pipeline stage; its other layers follow.
        storage: ``"auto"``: K and V are kept as they are computed; ``"fp8"``: in eight bits.
        checksum_key: secret; names and checksums of records depend on it, so that what someone wrote
            without it is not used. Empty: there is none.

    Raises:
        ValueError: names what is out of range.
    """

    weights: str
    rope: str
    shape: KVShape
    kv_dtype: str = "auto"
    quantization: str = ""
    tp_size: int = 1
    tp_rank: int = 0
    first_layer: int = 0
    storage: str = "auto"
    checksum_key: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        if not self.weights:
            raise ValueError("weights is empty; expected a fingerprint of the model's weights")
        if not 0 <= self.tp_rank < self.tp_size:
            raise ValueError(
                f"tp_rank is {self.tp_rank}; allowed: 0 to tp_size - 1 = {self.tp_size - 1}"
            )
        check_storage(self.storage)
        check_key(self.checksum_key)

    def hasher(self, data: bytes) -> blake3:
        """blake3 of ``data`` and what it is updated with; keyed, if there is a checksum key."""
        return blake3(data, key=self._hash_key) if self.checksum_key else blake3(data)

    @cached_property
    def _hash_key(self) -> bytes:
        """32 bytes."""
        return blake3(self.checksum_key, derive_key_context=KEY_CONTEXT).digest()

    @cached_property
    def digest(self) -> bytes:
        """16 bytes."""
        values = asdict(self) | {"format": DIGEST_VERSION}
        del values["checksum_key"]
        if self.storage == "auto":
            del values["storage"]  # so that these keys are those from before there was a choice
        if not self.first_layer:
            del values["first_layer"]  # likewise
        text = json.dumps(values, sort_keys=True, default=str)
        return self.hasher(text.encode()).digest(DIGEST_BYTES)

    def chunk(self, token_ids: Sequence[int], context: Sequence[int] = (), salt: str = "") -> ChunkKey:
        """The key of a chunk: its token ids, those it was computed after, and a tenant's salt."""
        return ChunkKey(self, tuple(token_ids), tuple(context), salt)


@dataclass(frozen=True, eq=False)
class ChunkKey:
    """One chunk of one model.

    Attributes:
        token_ids: the tokens that the KV stands for; compared with the stored ones at every lookup.
        context: the tokens before them when the KV was computed (BOS, system prefix).
        salt: keeps tenants apart: a chunk is found with the salt it was stored with, no other.

    Raises:
        ValueError: if there are no token ids, or one does not fit in 32 bits.
    """

    model: ModelKey
    token_ids: tuple[int, ...]
    context: tuple[int, ...] = ()
    salt: str = ""

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError("token_ids is empty; a chunk has at least one token")

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @cached_property
    def digest(self) -> bytes:
        """16 bytes."""
        salt = self.salt.encode(errors="surrogatepass")  # a client may send any text
        sizes = np.array([len(salt), len(self.context), self.num_tokens], dtype="<i8")
        hasher = blake3(self.model.digest)
        for part in (sizes.tobytes(), salt, ids_bytes(self.context), self.id_bytes):
            hasher.update(part)
        return hasher.digest(DIGEST_BYTES)

    @cached_property
    def id_bytes(self) -> bytes:
        """The token ids as little-endian int32."""
        return ids_bytes(self.token_ids)

    def __str__(self) -> str:
        return f"{self.digest.hex()[:12]} ({self.num_tokens} tokens)"


def check_storage(storage: str) -> None:
    """Raises ValueError unless it is one of ``STORAGES``."""
    if storage not in STORAGES:
        raise ValueError(f"storage is {storage!r}; allowed: {', '.join(STORAGES)}")


def ids_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32.

    Raises:
        ValueError: if one is negative or does not fit.
    """
    ids = np.asarray(token_ids, dtype=np.int64)
    if ids.size and not (ids.min() >= 0 and ids.max() < 2**31):
        raise ValueError("token_ids has an id outside of 0 to 2**31 - 1")
    return ids.astype("<i4").tobytes()
