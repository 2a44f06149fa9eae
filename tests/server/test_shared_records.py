"""What lies in a store's tiers, as it is told to tenants; tiers that are scripted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_blend.server.worker import shared_records
from vllm_blend.server.worker.shared_records import SharedRecords


def one(number: int, size: int = 10) -> tuple[bytes, tuple[int, ...]]:
    return bytes([number]), tuple(range(number, number + size))


class Tiers:
    """A disk with records 1 to 3, the third used last, and two lanes with news."""

    def __init__(self) -> None:
        self.news: list[list[Any]] = [[], []]
        self.lanes = [SimpleNamespace(appeared=lambda at=at: self._take(at)) for at in range(2)]

    def token_ids(self) -> Any:
        return iter([one(3), one(2), one(1)])

    def _take(self, at: int) -> list[Any]:
        taken, self.news[at] = self.news[at], []
        return taken


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_records, "ASK_S", 0.0)


def records(tiers: Tiers, max_tokens: int = 1000) -> SharedRecords:
    found = SharedRecords(tiers, max_tokens)  # type: ignore[arg-type]
    found.update()
    return found


def test_each_tenant_is_told_once() -> None:
    tiers = Tiers()
    found = records(tiers)
    assert found.tell("a", True) == [one(3), one(2), one(1)]
    tiers.news = [[one(5), one(4)], [one(4), one(6)]]  # in both
    found.update()
    assert found.tell("a", False) == [one(6), one(5), one(4)]
    assert found.tell("a", False) == []
    assert found.tell("b", True) == [one(number) for number in (6, 5, 4, 3, 2, 1)]
    assert len(found.tell("a", True)) == 6


def test_the_first_ones_are_forgotten() -> None:
    tiers = Tiers()
    found = records(tiers, max_tokens=25)
    assert found.tell("a", True) == [one(3), one(2)]
    tiers.news[0] = [one(4)]
    found.update()
    assert found.tell("b", True) == [one(4), one(3)]
    tiers.news[0] = [one(7), one(6), one(5)]
    found.update()
    assert found.tell("a", False) == [one(7), one(6)]


def test_what_is_deleted_is_told_when_it_is_written_again() -> None:
    tiers = Tiers()
    found = records(tiers)
    found.tell("a", True)
    found.remove(one(2)[0])
    assert [ids for _, ids in found.tell("b", True)] == [one(3)[1], (), one(1)[1]]
    tiers.news[1] = [one(2)]
    found.update()
    assert found.tell("a", False) == [one(2)]


def test_what_is_deleted_takes_no_room() -> None:
    tiers = Tiers()
    found = records(tiers, max_tokens=40)
    for _ in range(5):
        found.remove(one(2)[0])
        tiers.news[0] = [one(2)]
        found.update()
    assert [ids for _, ids in found.tell("a", True) if ids] == [one(2)[1], one(3)[1], one(1)[1]]
