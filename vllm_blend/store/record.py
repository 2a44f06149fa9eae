"""The record of a chunk: a safetensors file in which every byte is known or checked.

    8 bytes      length of the header, little-endian
    header       JSON, padded with spaces until layer 0 starts at a multiple of 4,096
    token_ids    I32 [num_tokens]
    checksums    U8 [num_layers, 16], blake3 of key digest, layer number and the layer's bytes
    layers       for each layer K (before RoPE), then V: [num_tokens, num_kv_heads, head_size];
                 of KV in fp8 the scales of both stand before them: F32 [num_tokens, num_kv_heads, 1]

The header is a function of the key alone, so a reader knows every offset before it reads, and compares
instead of parsing. A bit flipped anywhere is seen: in the header and the token ids by comparison, in
checksums and layers by the checksum. The same bytes lie in files, in Redis and in S3.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from math import prod

import torch
from blake3 import blake3

from vllm_blend.core import KVShape, StoredKV
from vllm_blend.layers import BlockLayers, LayerKV
from vllm_blend.store.fp8 import Fp8Layers, narrow, scale_bytes
from vllm_blend.store.keys import FORMAT_VERSION, ChunkKey

assert sys.byteorder == "little", "records are little-endian, and are not converted"

FORMAT = "vllm_blend chunk KV"
PAGE = 4096
CHECKSUM_BYTES = 16
DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
FP8_NAME = "F8_E4M3"


class Reason(StrEnum):
    """Why a lookup is a miss, or a tier's data were not used."""

    ABSENT = "absent"  # no tier has it
    TRUNCATED = "truncated"  # shorter or longer than its header says
    CORRUPT = "corrupt"  # a byte is not what was written
    FOREIGN = "foreign"  # not a record, or another chunk's
    VERSION = "version"  # written by an older or newer format
    GONE = "gone"  # listed, but removed meanwhile
    UNAVAILABLE = "unavailable"  # the tier failed or did not answer
    CLOSED = "closed"  # the store was closed during the load


class Rejected(Exception):
    """A record that must not be used; ``reason`` says why."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason


@dataclass(frozen=True)
class Layout:
    """Sizes, offsets and expected bytes of one key's record.

    Attributes:
        head: length and header, as they must be.
        preamble_bytes: everything before layer 0; a multiple of 4,096.
        layer_bytes: K and V of one layer.
    """

    key: ChunkKey
    head: bytes
    preamble_bytes: int
    layer_bytes: int

    @classmethod
    def of(cls, key: ChunkKey) -> Layout:
        """Raises ValueError if the KV's dtype cannot be stored."""
        shape = key.model.shape
        before, after, preamble, layer = _template(shape, key.num_tokens, key.model.storage)
        return cls(key, before + key.digest.hex().encode() + after, preamble, layer)

    @property
    def num_layers(self) -> int:
        return self.key.model.shape.num_layers

    @property
    def num_bytes(self) -> int:
        return self.preamble_bytes + self.payload_bytes

    @property
    def payload_bytes(self) -> int:
        """All layers."""
        return self.num_layers * self.layer_bytes

    def offset(self, layer: int) -> int:
        """Where a layer starts in the record."""
        return self.preamble_bytes + layer * self.layer_bytes

    def preamble(self, checksums: Sequence[bytes]) -> bytes:
        """What stands before the layers."""
        return self.head + self.key.id_bytes + b"".join(checksums)

    def checksums(self, preamble: bytes | bytearray) -> list[bytes]:
        """The layers' checksums, once header and token ids are what they must be.

        Raises:
            Rejected: if they are not.
        """
        data = bytes(preamble)
        if data[: len(self.head)] != self.head:
            raise _explain(data, self)
        if len(data) != self.preamble_bytes:
            raise Rejected(
                Reason.TRUNCATED, f"{len(data)} of {self.preamble_bytes} bytes before layer 0"
            )
        ids_end = len(self.head) + len(self.key.id_bytes)
        if data[len(self.head) : ids_end] != self.key.id_bytes:
            raise Rejected(Reason.FOREIGN, "other token ids")
        table = data[ids_end:]
        return [table[at : at + CHECKSUM_BYTES] for at in range(0, len(table), CHECKSUM_BYTES)]


def checksum(key: ChunkKey, layer: int, *parts: memoryview) -> bytes:
    """Of one layer's bytes. Key and layer go in, so that no other chunk's or layer's bytes pass."""
    hasher = blake3(key.digest + layer.to_bytes(4, "little"))
    for part in parts:
        hasher.update(part)
    return hasher.digest(CHECKSUM_BYTES)


@dataclass(frozen=True, eq=False)
class Record:
    """A chunk ready to be written; ``kv`` keeps the memory of ``parts`` alive."""

    key: ChunkKey
    kv: StoredKV
    parts: tuple[memoryview, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @classmethod
    def of(cls, key: ChunkKey, kv: StoredKV) -> Record:
        """The record of ``kv``, in host memory; nothing is copied where ``kv`` lies there already.

        Raises:
            ValueError: if ``kv`` is not what the key's model stores.
        """
        layout = Layout.of(key)
        kv.check(key.model.shape, key.num_tokens, name="kv")
        checksums: list[bytes] = []
        parts: list[memoryview] = []
        for index in range(layout.num_layers):
            layer = [raw(tensor) for tensor in _kept(key, kv, index)]
            checksums.append(checksum(key, index, *layer))
            parts += layer
        return cls(key, kv, (memoryview(layout.preamble(checksums)), *parts))


def raw(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes, in host memory."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _kept(key: ChunkKey, kv: StoredKV, index: int) -> Sequence[torch.Tensor]:
    """A layer's tensors in the order and the types that a record has them in."""
    if isinstance(kv.layers, Fp8Layers):
        return kv.layers.parts(index)
    return narrow(*kv.layers[index]) if key.model.storage == "fp8" else kv.layers[index]


def layers_in(
    memory: torch.Tensor, shape: KVShape, num_tokens: int, storage: str = "auto"
) -> Sequence[LayerKV]:
    """K and V of each layer over ``memory``, uint8 ``[payload_bytes]``: views, or widened from fp8."""
    if storage == "fp8":
        return Fp8Layers(memory, shape, num_tokens)
    return BlockLayers(memory.view(shape.dtype).view(shape.num_layers, 2, *shape.of(num_tokens)))


def token_ids_in(data: bytes) -> tuple[int, ...] | None:
    """The token ids in the beginning of a record; None where it is not one, or is cut short.

    They are not verified: whoever uses them makes a key of them, and compares it with the record's.
    """
    length = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + length])
        if header["__metadata__"]["version"] != str(FORMAT_VERSION):
            return None
        start, end = header["token_ids"]["data_offsets"]
        ids = data[8 + length + start : 8 + length + end]
        return struct.unpack(f"<{(end - start) // 4}i", ids)
    except (ValueError, KeyError, TypeError, struct.error, RecursionError):
        return None


@lru_cache(maxsize=4096)
def _template(shape: KVShape, num_tokens: int, storage: str) -> tuple[bytes, bytes, int, int]:
    """Header before and after the digest, and the sizes of preamble and layer."""
    if shape.dtype not in DTYPES:
        raise ValueError(f"cannot store KV of {shape.dtype}; allowed: {', '.join(map(str, DTYPES))}")
    size = list(shape.of(num_tokens))
    layer: list[tuple[str, str, list[int], int]] = []
    if storage == "fp8":
        layer += [(f"{kind}_scale", "F32", [*size[:2], 1], scale_bytes(size)) for kind in "kv"]
        layer += [(kind, FP8_NAME, size, prod(size)) for kind in "kv"]
    else:
        num_bytes = prod(size) * shape.dtype.itemsize
        layer += [(kind, DTYPES[shape.dtype], size, num_bytes) for kind in "kv"]
    mark = "#" * 32
    metadata = {"format": FORMAT, "version": str(FORMAT_VERSION), "key": mark}
    tensors: dict[str, tuple[str, list[int], int]] = {
        "token_ids": ("I32", [num_tokens], 4 * num_tokens),
        "checksums": ("U8", [shape.num_layers, CHECKSUM_BYTES], shape.num_layers * CHECKSUM_BYTES),
    }
    for index in range(shape.num_layers):
        for kind, dtype, dims, num_bytes in layer:
            tensors[f"layers.{index}.{kind}"] = dtype, dims, num_bytes
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name, (dtype, dims, num_bytes) in tensors.items():
        header[name] = {"dtype": dtype, "shape": dims, "data_offsets": [end, end + num_bytes]}
        end += num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    small = 4 * num_tokens + shape.num_layers * CHECKSUM_BYTES
    preamble = -(-(8 + len(text) + small) // PAGE) * PAGE
    text = text.ljust(preamble - small - 8)
    before, after = text.split(mark.encode())
    return len(text).to_bytes(8, "little") + before, after, preamble, sum(part[-1] for part in layer)


def _explain(data: bytes, layout: Layout) -> Rejected:
    """Why a header is not the expected one."""
    if layout.head.startswith(data):
        return Rejected(Reason.TRUNCATED, f"{len(data)} bytes of the header")
    length = int.from_bytes(data[:8], "little")
    try:
        metadata = json.loads(data[8 : 8 + length])["__metadata__"]
        name, version, key = metadata["format"], metadata["version"], metadata["key"]
    except (ValueError, KeyError, TypeError):
        ours = FORMAT.encode() in data
        return Rejected(Reason.CORRUPT if ours else Reason.FOREIGN, "no header of a record")
    if name != FORMAT:
        return Rejected(Reason.FOREIGN, f"format {name!r}")
    if version != str(FORMAT_VERSION):
        return Rejected(Reason.VERSION, f"version {version!r}, expected {FORMAT_VERSION}")
    if key != layout.key.digest.hex():
        return Rejected(Reason.FOREIGN, f"key {key!r}")
    return Rejected(Reason.CORRUPT, "the header differs")
