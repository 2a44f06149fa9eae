"""Which LoRA adapter computed a chunk's KV: by the adapter's content, not by its name.

A tenant's chunks lie on shelves, one for the base model and one for each adapter: what one adapter
computed is not looked for, and not found, in requests of another. A shelf's name takes the place of the
tenant's wherever chunks are kept, so that indexes, queues and the store's keys need not know of
adapters.
"""

from __future__ import annotations

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
    folder = local_folder(path, None)
    found = [folder / name for name in FILES if (folder / name).is_file()]
    if len(found) < 2:
        raise FileNotFoundError(f"{folder} holds no LoRA adapter: {' and '.join(FILES[:2])}")
    hasher = blake3()
    for file in found:
        hasher.update(f"{file.name}:{file.stat().st_size};".encode())
        hasher.update_mmap(file)
    return hasher.hexdigest(DIGITS // 2)


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


class Adapters:
    """The adapters of an engine's requests.

    vLLM loads an adapter once, and knows it by its number. So its files are read once a number, and
    again where a request asks for them to be loaded anew: files that were changed since are not what
    vLLM computes with.
    """

    def __init__(self) -> None:
        self._digests: dict[int, str] = {}
        self._requests: dict[str, Any] = {}

    def digest(self, lora_request: Any) -> str:
        """Of a request's adapter; empty: it has none.

        Args:
            lora_request: vLLM's ``LoRARequest``, or None.

        Raises:
            FileNotFoundError: if the adapter's files are not on this machine.
        """
        if lora_request is None:
            return ""
        number = lora_request.lora_int_id
        if number not in self._digests or lora_request.load_inplace:
            self._digests[number] = adapter_digest(lora_request.lora_path)
        digest = self._digests[number]
        self._requests[digest] = lora_request
        return digest

    def why_unknown(self, lora_request: Any) -> str:
        """Why an adapter cannot be told from others; empty: it can."""
        try:
            self.digest(lora_request)
        except FileNotFoundError as error:
            return str(error)
        return ""

    def request(self, name: str) -> Any:
        """A ``LoRARequest`` for the adapter of a shelf; None: it is the base model's.

        Raises:
            FileNotFoundError: if the adapter is not known, or its files are others now.
        """
        digest = adapter_of(name)
        if not digest:
            return None
        known = self._requests.get(digest)
        if known is None or adapter_digest(known.lora_path) != digest:
            raise FileNotFoundError(f"the files of the adapter {digest} are gone, or were changed")
        return known
