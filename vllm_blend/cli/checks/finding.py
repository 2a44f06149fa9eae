"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How a finding is meant."""

    OK = "ok"
    NOTE = "note"  # it works, and could work better
    WRONG = "wrong"  # blending does not work, or not as it was asked for


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's.

    Attributes:
        check: what was looked at, e.g. ``"plugin"``.
        what: what was found.
        do: what to do about it; empty where nothing is to be done.
    """

    check: str
    level: Level
    what: str
    do: str = ""


def ok(check: str, what: str) -> Finding:
    return Finding(check, Level.OK, what)


def note(check: str, what: str, do: str = "") -> Finding:
    return Finding(check, Level.NOTE, what, do)


def wrong(check: str, what: str, do: str) -> Finding:
    return Finding(check, Level.WRONG, what, do)
