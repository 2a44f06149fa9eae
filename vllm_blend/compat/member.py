"""A member of vLLM that this package touches, and how it is in the versions that are known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

VERSIONS = ("0.32", "0.33")
"""The table's vLLMs, the oldest first."""

GONE = None
"""As a value of ``newer``: the member is not there any more, and not needed."""


@dataclass(frozen=True)
class Member:
    """A member of vLLM.

    Attributes:
        module: below ``vllm``.
        name: ``function``, ``Class`` or ``Class.member``.
        takes: its parameters, ``=`` behind those with a default; None: they do not matter.
        newer: by version, its parameters from that version on.
        since: the version that first has it.
    """

    module: str
    name: str
    takes: str | None = None
    newer: Mapping[str, str | None] = field(default_factory=dict, hash=False)
    since: str = VERSIONS[0]

    def __str__(self) -> str:
        return f"vllm.{self.module}.{self.name}"


def each(module: str, owner: str, *names: str) -> tuple[Member, ...]:
    """Members of a class whose parameters do not matter."""
    return tuple(Member(module, f"{owner}.{name}") for name in names)
