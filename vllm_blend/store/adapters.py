"""Which LoRA adapter computed a chunk's KV: by the adapter's content, not by its name.

A tenant's chunks lie on shelves, one for the base model and one for each adapter: what one adapter
computed is not looked for, and not found, in requests of another. A shelf's name takes the place of the
tenant's wherever chunks are kept, so that indexes, queues and the store's keys need not know of
adapters.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from vllm_blend.store.fingerprint import local_folder

FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""Of an adapter in PEFT's format, as vLLM reads them; ``new_embeddings`` are none of them."""

DIGITS = 32
"""Of an adapter's digest, hexadecimal."""

MARK = "\0lora "
"""Begins the names of adapters' shelves."""

BASE = "-" * DIGITS
"""In the place of a digest: the base model."""


def adapter_digest(path: str) -> str:
    """Digest of an adapter's files.

    Args:
        path: as in vLLM's ``LoRARequest``: a folder, or a name whose files are on this machine.

    Returns:
        32 hexadecimal digits.

    Raises:
        FileNotFoundError: if it has no weights here.
    """
    files = _files(path)
    if len(files) < 2:
        raise FileNotFoundError(f"{path} holds no LoRA adapter: {' and '.join(FILES[:2])}")
    hasher = blake3()
    for file in files:
        hasher.update(f"{file.name}:{file.stat().st_size};".encode())
        hasher.update_mmap(file)
    return hasher.hexdigest(DIGITS // 2)


def _files(path: str) -> list[Path]:
    try:
        folder = local_folder(path, None)
    except (OSError, ValueError):  # no such folder, and no such name
        return []
    return [folder / name for name in FILES if (folder / name).is_file()]


def _stamp(path: str) -> tuple[tuple[int, int], ...]:
    """Of an adapter's files: changes with them, and takes no time."""
    states = [file.stat() for file in _files(path)]
    return tuple((state.st_size, state.st_mtime_ns) for state in states)


def shelf(tenant: str, adapter: str = "") -> str:
    """Where the chunks of a tenant lie that an adapter computed, given by its digest; empty: the base
    model. Different for each tenant and adapter, whatever tenants are called."""
    if not adapter and not tenant.startswith(MARK):
        return tenant
    return f"{MARK}{adapter or BASE} {tenant}"


def adapter_of(name: str) -> str:
    """The digest of the adapter whose shelf this is; empty: the base model."""
    digest = name[len(MARK) :][:DIGITS] if name.startswith(MARK) else BASE
    return "" if digest == BASE else digest


def tenant_of(name: str) -> str:
    """The tenant whose shelf this is."""
    return name[len(MARK) + DIGITS + 1 :] if name.startswith(MARK) else name


@dataclass(frozen=True)
class Known:
    """An adapter that a request has had.

    Attributes:
        digest, stamp: of its files, as they were when vLLM was to load them.
        request: vLLM's ``LoRARequest``.
    """

    digest: str
    stamp: tuple[tuple[int, int], ...]
    request: Any


class Adapters:
    """The adapters of an engine's requests.

    vLLM loads an adapter once, and knows it by its number. So its files are read once a number, and
    again where a request asks for them to be loaded anew: files that were changed since are not what
    vLLM computes with.
    """

    def __init__(self) -> None:
        self._known: dict[int, Known] = {}

    def digest(self, lora_request: Any) -> str:
        """Of a request's adapter; empty: it has none.

        Args:
            lora_request: vLLM's ``LoRARequest``, or None.

        Raises:
            FileNotFoundError: if the adapter's files are not on this machine.
        """
        if lora_request is None:
            return ""
        number, path = lora_request.lora_int_id, lora_request.lora_path
        known = self._known.get(number)
        if known is None or (lora_request.load_inplace and known.stamp != _stamp(path)):
            stamp = _stamp(path)  # before the files are read: they may change meanwhile
            known = self._known[number] = Known(adapter_digest(path), stamp, lora_request)
        return known.digest

    @property
    def digests(self) -> list[str]:
        """Of all that requests have had."""
        return [known.digest for known in self._known.values()]

    def why_unknown(self, lora_request: Any) -> str:
        """Why an adapter cannot be told from others; empty: it can."""
        try:
            self.digest(lora_request)
        except OSError as error:
            return str(error)
        return ""

    def request(self, name: str) -> Any:
        """A ``LoRARequest`` for the adapter of a shelf; None: it is the base model's.

        Raises:
            FileNotFoundError: if the adapter is not known, or its files were changed.
        """
        digest = adapter_of(name)
        if not digest:
            return None
        for known in self._known.values():
            if known.digest == digest and known.stamp == _stamp(known.request.lora_path):
                return known.request
        raise FileNotFoundError(f"the files of the adapter {digest} are gone, or were changed")
