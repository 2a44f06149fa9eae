"""Records looked at from outside: listed, verified and removed without the model that wrote them.

A record says its key's digest, token ids and shape. Its header and all checksums can be verified
by these. Not its token ids: they are part of what the digest is made of, beside the weights and the
tenant, which a record does not tell. (The store compares them with those that are asked for.)
"""

from __future__ import annotations

import json
import os
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from vllm_blend.core.kv import KVShape
from vllm_blend.store.disk import FILE_MODE, FOLDER_MODE, LARGEST_HEAD, SUFFIX, sweep
from vllm_blend.store.file_source import FileSource
from vllm_blend.store.keys import DIGEST_BYTES, DIGEST_VERSION, ChunkKey, ModelKey
from vllm_blend.store.record import (
    DTYPES,
    FORMAT,
    FP8_NAME,
    VERSIONS,
    Preamble,
    Reason,
    Rejected,
    checksum,
    token_ids_in,
)
from vllm_blend.store.tier import Source

UNKNOWN = "unknown: read from a record"
"""In the place of the weights, of a key that a record tells."""


@dataclass(frozen=True)
class Entry:
    """A record in its place.

    Attributes:
        digest: its name.
        used_at: when it was last used, seconds since 1970; 0: not known.
    """

    digest: bytes
    num_bytes: int
    used_at: float


class Shelf(Protocol):
    """Where records lie. Methods raise TierError, and OSError of a folder."""

    name: str

    def entries(self) -> list[Entry]:
        """All records, least recently used first."""

    def open(self, entry: Entry) -> Source | None:
        """None: it is gone."""

    def remove(self, entry: Entry) -> None: ...

    def mend(self, dry: bool) -> list[str]:
        """Mends what is beside the records; says what, in words. ``dry``: only says it."""

    def close(self) -> None: ...


@dataclass(frozen=True, eq=False)
class NamedKey(ChunkKey):
    """A chunk's key as its record tells it: by its digest, not by what that is made of."""

    name: bytes = field(default=b"", kw_only=True)

    @cached_property
    def digest(self) -> bytes:
        return self.name


def read_key(source: Source, digest: bytes, checksum_key: bytes = b"") -> NamedKey:
    """The key that a record tells.

    Args:
        digest: that its place stands for.
        checksum_key: the store's.

    Raises:
        Rejected: if it is no record, or another chunk's.
    """
    length = int.from_bytes(_read(source, 0, 8), "little")
    if not 0 < length < LARGEST_HEAD:
        raise Rejected(Reason.FOREIGN, "no header of a record")
    text = _read(source, 8, length)
    try:
        header: dict[str, Any] = json.loads(text)
        metadata, ids_end = header["__metadata__"], header["token_ids"]["data_offsets"][1]
        if metadata["format"] != FORMAT:
            raise Rejected(Reason.FOREIGN, f"format {metadata['format']!r}")
        if metadata["version"] not in VERSIONS.values():
            raise Rejected(Reason.VERSION, f"version {metadata['version']!r}")
        if metadata["key"] != digest.hex():
            raise Rejected(Reason.FOREIGN, f"key {metadata['key']!r}")
        layer = header["layers.0.k"]
        fp8 = layer["dtype"] == FP8_NAME
        names = {name: dtype for dtype, name in DTYPES.items()}
        dtype = names["F32" if fp8 else layer["dtype"]]  # what fp8 was made of is not told
        num_layers = sum(name.startswith("layers.") and name.endswith(".k") for name in header)
        _, num_kv_heads, head_size = layer["shape"]
        shape = KVShape(num_layers, num_kv_heads, head_size, dtype)
        ids = token_ids_in(length.to_bytes(8, "little") + text + _read(source, 8 + length, ids_end))
        model = ModelKey(
            UNKNOWN, "", shape, storage="fp8" if fp8 else "auto", checksum_key=checksum_key
        )
        return NamedKey(model, ids or (), name=digest)
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise Rejected(Reason.CORRUPT, f"the header cannot be read: {error}") from None


def verify(source: Source, digest: bytes, checksum_key: bytes = b"", whole: bool = True) -> Preamble:
    """Reads a record as the store would.

    Args:
        digest, checksum_key: as for ``read_key``.
        whole: the layers too; else what stands before them.

    Raises:
        Rejected: says what is wrong with it.
        TierError: if it cannot be read.
    """
    key = read_key(source, digest, checksum_key)
    preamble = Preamble.read(key, source.num_bytes, source.read)
    layout = preamble.layout
    memory = memoryview(bytearray(layout.layer_bytes))
    for index in range(layout.num_layers if whole else 0):
        if source.read(layout.offset(index), memory) != layout.layer_bytes:
            raise Rejected(Reason.TRUNCATED, f"layer {index}")
        if checksum(key, index, memory) != preamble.checksums[index]:
            raise Rejected(Reason.CORRUPT, f"layer {index}")
    return preamble


def look(shelf: Shelf, entry: Entry, checksum_key: bytes = b"", whole: bool = True) -> Preamble | None:
    """``verify`` of a record in its place; None: it is gone."""
    source = shelf.open(entry)
    if source is None:
        return None
    with closing(source):
        return verify(source, entry.digest, checksum_key, whole)


class DiskShelf:
    """A disk tier's folder.

    Raises:
        FileNotFoundError: if there is none; says what there should be.
    """

    def __init__(self, folder: str | Path) -> None:
        self.name = "disk"
        self._outer = Path(folder)
        self._folder = self._outer / f"v{DIGEST_VERSION}"
        if not self._folder.is_dir():
            raise FileNotFoundError(
                f"{folder} is no folder of a store: it has no {self._folder.name} in it"
            )

    def entries(self) -> list[Entry]:
        found = []
        for path in self._folder.glob(f"??/*{SUFFIX}"):
            try:
                digest, stat = bytes.fromhex(path.stem), path.stat()
            except (ValueError, OSError):
                continue
            if len(digest) == DIGEST_BYTES and path.parent.name == path.stem[:2]:
                found.append(Entry(digest, stat.st_size, stat.st_mtime))
        return sorted(found, key=lambda entry: entry.used_at)

    def open(self, entry: Entry) -> Source | None:
        try:
            return FileSource(os.open(self._path(entry), os.O_RDONLY | os.O_CLOEXEC))
        except FileNotFoundError:
            return None

    def remove(self, entry: Entry) -> None:
        self._path(entry).unlink(missing_ok=True)

    def mend(self, dry: bool) -> list[str]:
        done = []
        for path in sorted(self._folder.glob("??/.*.tmp")):
            if sweep(path, dry):
                done.append(f"what a killed writer left: {path.relative_to(self._outer)}")
        folders = [self._outer, self._folder, *self._folder.glob("??")]
        modes = [(path, FOLDER_MODE) for path in folders]
        modes += [(path, FILE_MODE) for path in self._folder.glob(f"??/*{SUFFIX}")]
        open_to_others = [(path, mode) for path, mode in modes if path.stat().st_mode & 0o077]
        for path, mode in open_to_others:
            if not dry:
                path.chmod(mode)
        if open_to_others:
            done.append(f"{len(open_to_others)} files or folders that others could read")
        return done

    def close(self) -> None:
        """Nothing is held open."""

    def _path(self, entry: Entry) -> Path:
        name = entry.digest.hex()
        return self._folder / name[:2] / (name + SUFFIX)


def _read(source: Source, offset: int, num_bytes: int) -> bytes:
    memory = bytearray(num_bytes)
    if source.read(offset, memoryview(memory)) != num_bytes:
        raise Rejected(Reason.TRUNCATED, f"{source.num_bytes} bytes")
    return bytes(memory)
