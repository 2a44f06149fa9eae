"""A server's settings, by themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vllm_blend.cli.checks.finding import Finding, ok, wrong
from vllm_blend.cli.settings import read_settings
from vllm_blend.server.config import ServerSettings

PAGE = "docs/settings.md lists all keys."


def check_settings(
    given: str | None, served: Mapping[str, Any] | None
) -> tuple[list[Finding], dict[str, Any] | None]:
    """What is wrong with the settings; and their values, where they can be gone on with.

    Args:
        given: a file or a text; None: none.
        served: those of the arguments of ``vllm serve``, which are taken where nothing is given.
    """
    try:
        values = dict(served) if given is None and served is not None else read_settings(given)
    except ValueError as error:
        return [wrong("settings", str(error), f"Mend the file. {PAGE}")], None
    try:
        settings = ServerSettings.from_mapping(values)
    except (ValueError, TypeError) as error:
        return [wrong("settings", str(error), f"Mend this key. {PAGE}")], values
    kept = "a store" if settings.store is not None else f"ram_gb {settings.ram_gb:g}"
    how = f"policy {settings.blend.policy}, ratio {settings.blend.last_ratio:g}, {kept}"
    return [ok("settings", f"{how}{'' if values else ' (the defaults)'}")], values


def check_store(values: Mapping[str, Any] | None) -> Iterator[Finding]:
    """The store of a server's settings; nothing where they have none."""
    store = (values or {}).get("store")
    if isinstance(store, Mapping):
        from vllm_blend.cli.checks.tiers import check_tiers

        yield from check_tiers(store)
