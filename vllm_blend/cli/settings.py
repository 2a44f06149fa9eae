"""A server's settings as users have them: a file or a text, JSON or YAML, with or without its frame."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_blend.cli.output import wrong_call
from vllm_blend.server.config import CONFIG_KEY

FRAMES = ("additional-config", "additional_config", CONFIG_KEY)
"""Keys that settings may stand under, the outer ones first."""


def read_settings(given: str | None) -> dict[str, Any]:
    """The settings' values, as ``ServerSettings.from_mapping`` takes them; None: none are set.

    Raises:
        ValueError: if the text is no JSON object, or the file cannot be read.
    """
    if given is None:
        return {}
    if given.lstrip().startswith("{"):
        return unframed(_json(given, "the settings"))
    path = Path(given)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{given} cannot be read: {error}") from None
    if path.suffix in (".yaml", ".yml"):
        import yaml

        try:
            return unframed(yaml.safe_load(text))
        except yaml.YAMLError as error:
            raise ValueError(f"{given} is no YAML: {error}") from None
    return unframed(_json(text, given))


def unframed(values: Any) -> dict[str, Any]:
    """What stands under ``vllm_blend``; all, if there is no such key.

    Raises:
        ValueError: if that is no object.
    """
    for frame in FRAMES:
        if isinstance(values, Mapping) and frame in values:
            values = values[frame]
    if not isinstance(values, Mapping):
        raise ValueError(f"the settings are {type(values).__name__}; expected an object, e.g. {{}}")
    return dict(values)


def settings_or_wrong_call(given: str | None) -> dict[str, Any]:
    """The same for a command that cannot go on without them."""
    try:
        return read_settings(given)
    except ValueError as error:
        raise wrong_call(str(error), "--settings") from None


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} is no JSON: {error}") from None
