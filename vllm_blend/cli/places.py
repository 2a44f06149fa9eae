"""Where a store keeps records, as ``vllm-blend store`` is told it: opened, and read through."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vllm_blend.cli.output import console, found_wrong, print_json, print_table, say, size, wrong_call
from vllm_blend.cli.settings import settings_or_wrong_call
from vllm_blend.store.audit import DiskShelf, Entry, Shelf, look
from vllm_blend.store.record import Rejected
from vllm_blend.store.secrets import check_key, read_secret
from vllm_blend.store.tier import TierError


@dataclass(frozen=True)
class Opened:
    """A place, and the key that its checksums are made with."""

    shelf: Shelf
    checksum_key: bytes


@dataclass(frozen=True)
class Looked:
    """A place's records, and those that the store would not use, with the reason."""

    number: int
    damaged: list[tuple[Entry, str]]

    @classmethod
    def at(cls, at: Opened, whole: bool) -> Looked:
        """Reads them: all of each, or all but the layers."""
        from rich.progress import track

        entries, damaged = at.shelf.entries(), []
        for entry in track(entries, "reading", console=console(stderr=True), transient=True):
            try:
                look(at.shelf, entry, at.checksum_key, whole)
            except Rejected as error:
                damaged.append((entry, str(error)))
        return cls(len(entries), damaged)

    @property
    def all_damaged(self) -> bool:
        """Whether several are, and no other is there: which a wrong key looks like."""
        return len(self.damaged) == self.number > 1

    def tell(self, beside: list[str], as_json: bool, said: str) -> None:
        """Prints what was found, and what was done about it."""
        named = [(entry.digest.hex(), entry.num_bytes, why) for entry, why in self.damaged]
        if as_json:
            listed = [{"key": key, "bytes": amount, "why": why} for key, amount, why in named]
            print_json({"records": self.number, said.replace(" ", "_"): listed, "beside": beside})
            return
        if named:
            print_table(
                ("key", "size", "why"), [[key, size(amount), why] for key, amount, why in named], (1,)
            )
        for line in beside:
            say(f"beside the records: {line}")
        end = f"{len(named)} {said}" if named else "all of them whole"
        say(f"{self.number} records, {end}")


@contextmanager
def opened(place: str | None, settings: str | None, tier: str | None) -> Iterator[Opened]:
    """The place that a command names; raises what a wrong call is, and ends with 1 if it fails."""
    store = settings_or_wrong_call(settings).get("store") or {}
    try:
        key = read_secret("checksum_key", store["checksum_key"]) if "checksum_key" in store else ""
        shelf = _shelf(place, store, tier)
        check_key(key.encode())
    except (ValueError, OSError, ImportError) as error:
        raise wrong_call(str(error), "PLACE") from None
    try:
        yield Opened(shelf, key.encode())
    except (TierError, OSError) as error:
        console(stderr=True).print(f"{shelf.name}: {error}", markup=False)
        raise found_wrong() from None
    finally:
        shelf.close()


def _shelf(place: str | None, store: dict[str, Any], tier: str | None) -> Shelf:
    """Raises ValueError, OSError or ImportError where there is no such place."""
    if place is None:
        tiers = [name for name in ("disk", "redis", "s3") if store.get(name)]
        name = tier or (tiers[0] if tiers else "")
        if name not in tiers:
            raise ValueError("name a folder or an address, or --settings with a store that has tiers")
        values = {key: value for key, value in store[name].items() if key != "budget_gb"}
        if "password" in values:
            values["password"] = read_secret("password of redis", values["password"])
    elif place.startswith(("redis://", "rediss://")):
        name, values = "redis", {"url": place}
    elif place.startswith("s3://"):
        bucket, _, prefix = place.removeprefix("s3://").partition("/")
        name, values = "s3", {"bucket": bucket} | ({"prefix": prefix} if prefix else {})
    else:
        return DiskShelf(place)
    if name == "disk":
        return DiskShelf(values["folder"])
    from vllm_blend.store.audit_remote import RedisShelf, S3Shelf

    if name == "redis":
        from vllm_blend.store.redis_tier import RedisTier

        return RedisShelf(RedisTier(budget_bytes=0, **values))
    from vllm_blend.store.s3_tier import S3Tier

    return S3Shelf(S3Tier(budget_bytes=0, **values))
