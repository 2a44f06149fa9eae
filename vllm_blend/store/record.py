"""The record of a chunk: a safetensors file in which every byte is known or checked.

    8 bytes      length of the header, little-endian
    header       JSON, padded with spaces until layer 0 starts at a multiple of 4,096
    token_ids    I32 [num_tokens]
    scores       F32 [num_tokens]; in version 2 alone
    checksums    U8 [num_layers, 16], blake3 of key digest, layer number and the layer's bytes; in
                 version 2 [num_layers + 1, 16]: the last is that of the scores, as of one more layer;
                 with a checksum key blake3's keyed hash, which nobody makes without it
    layers       for each layer K (before RoPE), then V: [num_tokens, num_kv_heads, head_size];
                 of KV in fp8 the scales of both stand before them: F32 [num_tokens, num_kv_heads, 1]

A chunk whose scores (``StoredKV.scores``) are not known is a record of version 1, one with scores is of
version 2. The header is a function of the key and the version alone, so a reader knows every offset as
soon as it knows which of the two it has, and compares instead of parsing. A bit flipped anywhere is
seen: in the header and the token ids by comparison, in checksums, scores and layers by the checksum.
The same bytes lie in files, in Redis and in S3.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from math import prod

import torch

from vllm_blend.core.kv import KVShape, StoredKV
from vllm_blend.core.layers import BlockLayers, LayerKV
from vllm_blend.store.fp8 import Fp8Layers, narrow, scale_bytes
from vllm_blend.store.keys import ChunkKey

assert sys.byteorder == "little", "records are little-endian, and are not converted"

FORMAT = "vllm_blend chunk KV"
VERSIONS = {False: "1", True: "2"}
"""Of records without scores, and with."""

PAGE = 4096
"""Layers start at multiples of it, in records and in memory, as direct I/O wants."""

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
    GONE = "gone"  # listed, but removed meanwhile, or replaced while it was read
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
        scored: whether it has scores.
        head: length and header, as they must be.
        preamble_bytes: everything before layer 0; a multiple of 4,096.
        layer_bytes: K and V of one layer.
    """

    key: ChunkKey
    scored: bool
    head: bytes
    preamble_bytes: int
    layer_bytes: int

    @classmethod
    def of(cls, key: ChunkKey, scored: bool = False) -> Layout:
        """Raises ValueError if the KV's dtype cannot be stored."""
        shape = key.model.shape
        before, after, preamble, layer = _template(shape, key.num_tokens, key.model.storage, scored)
        return cls(key, scored, before + key.digest.hex().encode() + after, preamble, layer)

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

    def preamble(self, checksums: Sequence[bytes], scores: torch.Tensor | None = None) -> bytes:
        """What stands before the layers."""
        parts = [self.head, self.key.id_bytes]
        if scores is not None:
            data = raw(scores)
            parts.append(bytes(data))
            checksums = [*checksums, checksum(self.key, self.num_layers, data)]
        return b"".join([*parts, *checksums])


@dataclass(frozen=True, eq=False)
class Preamble:
    """What a reader learns from what stands before the layers; verified.

    Attributes:
        checksums: the layers'.
        scores: float32 ``[num_tokens]``, or None.
    """

    layout: Layout
    checksums: list[bytes]
    scores: torch.Tensor | None

    @classmethod
    def read(cls, key: ChunkKey, num_bytes: int, read: Callable[[int, memoryview], int]) -> Preamble:
        """Reads a record of either version as far as layer 0.

        Args:
            num_bytes: of the whole record.
            read: fills memory from an offset on; returns how many bytes there were.

        Raises:
            Rejected: if it is not this key's record, or not as it was written.
        """
        layouts = [Layout.of(key, scored) for scored in VERSIONS]
        fitting = [layout for layout in layouts if layout.num_bytes == num_bytes]
        memory = bytearray((fitting or layouts)[0].preamble_bytes)  # both have one size if both fit
        data = bytes(memory[: read(0, memoryview(memory))])
        for layout in fitting:
            if data.startswith(layout.head):
                return cls._of(layout, data)
        raise _explain(data, num_bytes, layouts)

    @classmethod
    def _of(cls, layout: Layout, data: bytes) -> Preamble:
        """Of bytes whose header is right."""
        key = layout.key
        if len(data) != layout.preamble_bytes:
            raise Rejected(
                Reason.TRUNCATED, f"{len(data)} of {layout.preamble_bytes} bytes before layer 0"
            )
        size = len(key.id_bytes)  # the scores' too
        rest = data[len(layout.head) :]
        if rest[:size] != key.id_bytes:
            raise Rejected(Reason.FOREIGN, "other token ids")
        table = rest[2 * size :] if layout.scored else rest[size:]
        checksums = [table[at : at + CHECKSUM_BYTES] for at in range(0, len(table), CHECKSUM_BYTES)]
        if not layout.scored:
            return cls(layout, checksums, None)
        scores = bytearray(rest[size : 2 * size])
        if checksum(key, layout.num_layers, memoryview(scores)) != checksums.pop():
            raise Rejected(Reason.CORRUPT, "scores")
        return cls(layout, checksums, torch.frombuffer(scores, dtype=torch.float32))


def checksum(key: ChunkKey, layer: int, *parts: memoryview) -> bytes:
    """Of one layer's bytes. Key and layer go in, so that no other chunk's or layer's bytes pass.

    (The scores are layer ``num_layers``.)
    """
    hasher = key.model.hasher(key.digest + layer.to_bytes(4, "little"))
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

    @property
    def scored(self) -> bool:
        """Whether it has scores."""
        return self.kv.scores is not None

    @property
    def head(self) -> bytes:
        """What it begins with, and no other chunk's record, nor this one's of the other version."""
        return Layout.of(self.key, self.scored).head

    def adds_to(self, stored: bytes) -> bool:
        """Whether it says more than what a tier has at its place.

        Args:
            stored: the first ``len(head)`` bytes of that, or of what there is; empty: nothing.
        """
        return not stored or (self.scored and stored != self.head)

    @classmethod
    def of(cls, key: ChunkKey, kv: StoredKV) -> Record:
        """The record of ``kv``, in host memory; nothing is copied where ``kv`` lies there already.

        Raises:
            ValueError: if ``kv`` is not what the key's model stores.
        """
        check_kv(key, kv)
        layout = Layout.of(key, kv.scores is not None)
        checksums: list[bytes] = []
        parts: list[memoryview] = []
        for index in range(layout.num_layers):
            layer = [raw(tensor) for tensor in _kept(key, kv, index)]
            checksums.append(checksum(key, index, *layer))
            parts += layer
        return cls(key, kv, (memoryview(layout.preamble(checksums, kv.scores)), *parts))


def check_kv(key: ChunkKey, kv: StoredKV) -> None:
    """Raises ValueError if ``kv`` is not what the key's model stores."""
    kv.check(key.model.shape, key.num_tokens, name="kv")
    found = kv.scores
    if found is None or (
        found.dtype == torch.float32 and found.shape == (key.num_tokens,) and found.device.type == "cpu"
    ):
        return
    raise ValueError(
        f"scores of kv are {found.dtype} {list(found.shape)} on {found.device}; expected "
        f"torch.float32 [num_tokens] = [{key.num_tokens}] in host memory"
    )


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
        if header["__metadata__"]["version"] not in VERSIONS.values():
            return None
        start, end = header["token_ids"]["data_offsets"]
        ids = data[8 + length + start : 8 + length + end]
        return struct.unpack(f"<{(end - start) // 4}i", ids)
    except (ValueError, KeyError, TypeError, struct.error, RecursionError):
        return None


@lru_cache(maxsize=4096)
def _template(
    shape: KVShape, num_tokens: int, storage: str, scored: bool
) -> tuple[bytes, bytes, int, int]:
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
    metadata = {"format": FORMAT, "version": VERSIONS[scored], "key": mark}
    tensors: dict[str, tuple[str, list[int], int]] = {
        "token_ids": ("I32", [num_tokens], 4 * num_tokens)
    }
    if scored:
        tensors["scores"] = "F32", [num_tokens], 4 * num_tokens
    rows = shape.num_layers + scored
    tensors["checksums"] = "U8", [rows, CHECKSUM_BYTES], rows * CHECKSUM_BYTES
    small = sum(num_bytes for *_, num_bytes in tensors.values())
    for index in range(shape.num_layers):
        for kind, dtype, dims, num_bytes in layer:
            tensors[f"layers.{index}.{kind}"] = dtype, dims, num_bytes
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name, (dtype, dims, num_bytes) in tensors.items():
        header[name] = {"dtype": dtype, "shape": dims, "data_offsets": [end, end + num_bytes]}
        end += num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    preamble = -(-(8 + len(text) + small) // PAGE) * PAGE
    text = text.ljust(preamble - small - 8)
    before, after = text.split(mark.encode())
    return len(text).to_bytes(8, "little") + before, after, preamble, sum(part[-1] for part in layer)


def _explain(data: bytes, num_bytes: int, layouts: Sequence[Layout]) -> Rejected:
    """Why a record of ``num_bytes`` that begins with ``data`` has none of these layouts."""
    sizes = [layout.num_bytes for layout in layouts]
    heads = [layout.head for layout in layouts]
    cut = num_bytes not in sizes or any(head.startswith(data[: len(head)]) for head in heads)
    length = int.from_bytes(data[:8], "little")
    try:
        metadata = json.loads(data[8 : 8 + length])["__metadata__"]
        name, version, key = metadata["format"], metadata["version"], metadata["key"]
    except (ValueError, KeyError, TypeError, RecursionError):
        name = version = key = None
    known = " or ".join(VERSIONS.values())
    if name == FORMAT and version not in VERSIONS.values():
        return Rejected(Reason.VERSION, f"version {version!r}, expected {known}")
    if cut:
        expected = " or ".join(map(str, sizes))
        return Rejected(Reason.TRUNCATED, f"{num_bytes} bytes ({len(data)} read), expected {expected}")
    if name is None:
        ours = FORMAT.encode() in data
        return Rejected(Reason.CORRUPT if ours else Reason.FOREIGN, "no header of a record")
    if name != FORMAT:
        return Rejected(Reason.FOREIGN, f"format {name!r}")
    if key != layouts[0].key.digest.hex():
        return Rejected(Reason.FOREIGN, f"key {key!r}")
    return Rejected(Reason.CORRUPT, "the header differs")
