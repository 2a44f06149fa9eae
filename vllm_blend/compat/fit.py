"""Whether a vLLM has what this package touches, as the table says (``members.py``)."""

from __future__ import annotations

import re
from collections.abc import Iterable

from vllm_blend.compat.members import VERSIONS, Member, members
from vllm_blend.compat.source import Source


def misfits(source: Source, version: str, table: Iterable[Member] | None = None) -> list[str]:
    """What of a vLLM is otherwise than this package needs it, a sentence each; empty: it fits.

    Args:
        source: its files.
        version: one that the table does not know is held against the newest that is older.
        table: what is needed; None: all of ``members.py``.
    """
    known = known_version(version)
    found = (_misfit(source, member, known) for member in (members() if table is None else table))
    return [sentence for sentence in found if sentence]


def needed() -> list[Member]:
    """What this package needs."""
    return members()


def known_version(version: str) -> str:
    """The table's version for this one."""
    older = [one for one in VERSIONS if _numbers(one) <= _numbers(version)]
    return older[-1] if older else VERSIONS[0]


def is_known(version: str) -> bool:
    """Whether the table has this version."""
    return version.startswith(tuple(f"{one}." for one in VERSIONS))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _misfit(source: Source, member: Member, known: str) -> str:
    """What is wrong with one member; empty: nothing."""
    if _numbers(member.since) > _numbers(known):
        return ""
    takes = member.takes
    for since, newer in member.newer.items():
        if _numbers(since) <= _numbers(known):
            takes = newer
            if newer is None:  # gone, and not needed
                return ""
    place = source.find(member.module, member.name)
    if place is None:
        return f"{member} is missing"
    if takes is not None and place.signature != takes:
        there = "is no function" if place.signature is None else f"takes ({place.signature})"
        return f"{member} {there}; expected ({takes})"
    return ""
