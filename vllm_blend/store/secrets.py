"""Secrets of a store: settings name where they are, since settings are logged."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MIN_KEY_BYTES = 16


def read_secret(name: str, place: Any) -> str:
    """The secret that a setting names.

    Args:
        name: of the setting.
        place: ``{"env": NAME}``, an environment variable, or ``{"file": PATH}``, a file's text without
            white space around it.

    Raises:
        ValueError: if it is neither, or there is no secret; says nothing of the value.
    """
    if not isinstance(place, Mapping) or len(place) != 1 or not {"env", "file"} & place.keys():
        raise ValueError(f'{name} must be {{"env": NAME}} or {{"file": PATH}}; settings are logged')
    if "env" in place:
        secret = os.environ.get(str(place["env"]), "")
    else:
        try:
            secret = Path(place["file"]).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{name} cannot be read from {place['file']}: {error}") from None
    if not secret:
        kind, where = next(iter(place.items()))
        raise ValueError(f"{name} is empty, or not set: {kind} {where}")
    return secret


def check_key(key: bytes) -> bytes:
    """Raises ValueError if a key is short; none at all is a key, too."""
    if key and len(key) < MIN_KEY_BYTES:
        raise ValueError(f"checksum_key has {len(key)} bytes; allowed: {MIN_KEY_BYTES} or more")
    return key


def check_address(name: str, url: str | None) -> None:
    """Raises ValueError if an address has a user or a password in it; says nothing of them."""
    if url is not None and ("@" in url or "password=" in url):
        raise ValueError(f"{name} has a user or a password in it; set them by keys of their own")
