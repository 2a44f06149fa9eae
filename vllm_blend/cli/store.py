"""``vllm-blend store``: what lies in a store, and whether it is whole."""

from __future__ import annotations

import re
import time
from collections import Counter
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_blend.cli.options import Json, Settings
from vllm_blend.cli.output import (
    found_wrong,
    help_text,
    print_json,
    print_table,
    say,
    size,
    wrong_call,
)

if TYPE_CHECKING:  # these load torch, which takes seconds that help and completion should not
    from vllm_blend.cli.places import Opened
    from vllm_blend.store.audit import Entry

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")

HELP = help_text(
    """List, verify, repair and empty a store: a folder, Redis, or a bucket.

    A place is a folder, redis://HOST:PORT/DB or s3://BUCKET; or the store of a server's settings
    (--settings), which also name passwords and the checksum key. No model is needed.""",
    "vllm-blend store stat /var/cache/chunks",
    "vllm-blend store verify --settings blend.yaml --json",
    "vllm-blend store purge /var/cache/chunks --older-than 7d",
)

Place = Annotated[
    str | None, typer.Argument(help="Folder, redis:// or s3:// address; else that of --settings.")
]
TierName = Annotated[
    str | None, typer.Option("--tier", help="disk, redis or s3: which of the settings' tiers.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@app.command(
    "ls",
    help=help_text(
        "List records, the last used ones first.",
        "vllm-blend store ls /var/cache/chunks",
        "vllm-blend store ls /var/cache/chunks --limit 5 --tokenizer MODEL   # with their texts",
    ),
)
def ls(
    place: Place = None,
    limit: Annotated[int, typer.Option(min=1, help="Records that are listed.")] = 20,
    tokenizer: Annotated[
        str | None, typer.Option(help="A model's folder: shows how each text begins.")
    ] = None,
    settings: Settings = None,
    tier: TierName = None,
    as_json: Json = False,
) -> None:
    decode = _decoder(tokenizer)
    with _opened(place, settings, tier) as at:
        entries = at.shelf.entries()
        rows = [_row(at, entry, decode) for entry in reversed(entries[-limit:])]
    if as_json:
        print_json({"records": len(entries), "listed": rows})
        return
    heads = ("key", "tokens", "size", "last used", "kept as", "scores", *(["text"] if decode else []))
    table = [
        [row["key"][:12], str(row["tokens"]), size(row["bytes"]), _ago(row["used_at"]), row["kept_as"]]
        + [{True: "yes", False: "no"}.get(row["scored"], "?"), *([row["text"]] if decode else [])]
        for row in rows
    ]
    print_table(heads, table, numbers=(1, 2))
    say(f"\n{len(rows)} of {len(entries)} records, {size(sum(e.num_bytes for e in entries))} in all")


@app.command(
    "stat",
    help=help_text(
        "Count records, tokens and bytes, by model shape.",
        "vllm-blend store stat /var/cache/chunks",
        "vllm-blend store stat redis://127.0.0.1:6379/0 --json",
    ),
)
def stat(
    place: Place = None, settings: Settings = None, tier: TierName = None, as_json: Json = False
) -> None:
    with _opened(place, settings, tier) as at:
        entries = at.shelf.entries()
        rows = [_row(at, entry, None) for entry in entries]
    kinds = Counter(row["kept_as"] for row in rows)
    of_kind = [
        {
            "kept_as": kind,
            "records": count,
            "tokens": sum(row["tokens"] for row in rows if row["kept_as"] == kind),
            "bytes": sum(row["bytes"] for row in rows if row["kept_as"] == kind),
            "scored": sum(bool(row["scored"]) for row in rows if row["kept_as"] == kind),
        }
        for kind, count in kinds.most_common()
    ]
    used = [row["used_at"] for row in rows]
    if as_json:
        times = {"oldest_use": min(used, default=None), "latest_use": max(used, default=None)}
        print_json(
            {"records": len(rows), "bytes": sum(e.num_bytes for e in entries)}
            | times
            | {"kinds": of_kind}
        )
        return
    table = [
        [
            one["kept_as"],
            str(one["records"]),
            str(one["tokens"]),
            size(one["bytes"]),
            str(one["scored"]),
        ]
        for one in of_kind
    ]
    print_table(("kept as", "records", "tokens", "size", "with scores"), table, numbers=(1, 2, 3, 4))
    if used:
        say(f"\nlast used: {_ago(max(used))} at the latest, {_ago(min(used))} at the earliest")


@app.command(
    "verify",
    help=help_text(
        """Read every record, and compare each byte with its checksums; exit code 1 if one is damaged.

        A record of a store with a checksum key needs the key: --settings names it.""",
        "vllm-blend store verify /var/cache/chunks",
        "vllm-blend store verify --settings blend.yaml --quick",
    ),
)
def verify(
    place: Place = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Headers, token ids and scores alone, not the layers.")
    ] = False,
    settings: Settings = None,
    tier: TierName = None,
    as_json: Json = False,
) -> None:
    from vllm_blend.cli.places import Looked

    with _opened(place, settings, tier) as at:
        looked = Looked.at(at, whole=not quick)
        beside = at.shelf.mend(dry=True)
    looked.tell(beside, as_json, "damaged")
    if looked.damaged:
        raise found_wrong()


@app.command(
    "repair",
    help=help_text(
        """Remove damaged records and what killed writers left; put rights and counts in order.

        Servers may run meanwhile: a record that is gone is computed again.""",
        "vllm-blend store repair /var/cache/chunks --dry-run",
        "vllm-blend store repair --settings blend.yaml",
    ),
)
def repair(
    place: Place = None,
    dry_run: DryRun = False,
    settings: Settings = None,
    tier: TierName = None,
    as_json: Json = False,
) -> None:
    from vllm_blend.cli.places import Looked

    with _opened(place, settings, tier) as at:
        looked = Looked.at(at, whole=True)
        if at.checksum_key == b"" and looked.all_damaged and not dry_run:
            message = (
                "every record fails its checksum: if this store has a checksum key, give --settings"
            )
            raise wrong_call(f"{message}; to remove all, use purge --all", "PLACE")
        for entry, _ in looked.damaged if not dry_run else ():
            at.shelf.remove(entry)
        beside = at.shelf.mend(dry_run)
    looked.tell(beside, as_json, "to be removed" if dry_run else "removed")


@app.command(
    "purge",
    help=help_text(
        "Remove records: all, those that were not used for a time, or the oldest beyond a size.",
        "vllm-blend store purge /var/cache/chunks --older-than 7d",
        "vllm-blend store purge /var/cache/chunks --to-gb 50 --dry-run",
        "vllm-blend store purge /var/cache/chunks --all --yes",
    ),
)
def purge(
    place: Place = None,
    everything: Annotated[bool, typer.Option("--all", help="All records.")] = False,
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="Not used for so long: 30m, 12h, 7d.")
    ] = None,
    to_gb: Annotated[
        float | None, typer.Option(min=0, help="The least recently used, until so many GB are left.")
    ] = None,
    dry_run: DryRun = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    settings: Settings = None,
    tier: TierName = None,
    as_json: Json = False,
) -> None:
    if sum((everything, older_than is not None, to_gb is not None)) != 1:
        raise wrong_call("give one of --all, --older-than and --to-gb")
    age = None if older_than is None else _seconds(older_than)
    with _opened(place, settings, tier) as at:
        entries = at.shelf.entries()
        chosen = entries
        if age is not None:
            chosen = [entry for entry in entries if entry.used_at < time.time() - age]
        elif to_gb is not None:
            chosen = _beyond(entries, to_gb * 1e9)
        amount = sum(entry.num_bytes for entry in chosen)
        if chosen and not dry_run and not yes:
            typer.confirm(
                f"Remove {len(chosen)} of {len(entries)} records, {size(amount)}?", abort=True
            )
        for entry in chosen if not dry_run else ():
            at.shelf.remove(entry)
    if as_json:
        print_json(
            {"records": len(entries), "removed": len(chosen), "bytes": amount, "dry_run": dry_run}
        )
    else:
        said = "would be removed" if dry_run else "removed"
        say(f"{len(chosen)} of {len(entries)} records, {size(amount)}: {said}")


def _opened(
    place: str | None, settings: str | None, tier: str | None
) -> AbstractContextManager[Opened]:
    from vllm_blend.cli.places import opened

    return opened(place, settings, tier)


def _row(at: Opened, entry: Entry, decode: Any) -> dict[str, Any]:
    """What is told of a record."""
    from vllm_blend.store.audit import look
    from vllm_blend.store.record import Rejected

    row: dict[str, Any] = {
        "key": entry.digest.hex(),
        "bytes": entry.num_bytes,
        "used_at": entry.used_at,
    }
    row |= {"tokens": 0, "kept_as": "?", "scored": None, "text": ""}
    try:
        found = look(at.shelf, entry, at.checksum_key, whole=False)
    except Rejected as error:
        return row | {"kept_as": str(error.reason)}
    if found is None:
        return row | {"kept_as": "gone"}
    key = found.layout.key
    shape = key.model.shape
    kind = "fp8" if key.model.storage == "fp8" else str(shape.dtype).removeprefix("torch.")
    kept_as = f"{shape.num_layers} layers x {shape.num_kv_heads} x {shape.head_size} {kind}"
    text = " ".join(decode(list(key.token_ids[:32])).split())[:48] if decode else ""
    return row | {
        "tokens": key.num_tokens,
        "kept_as": kept_as,
        "scored": found.layout.scored,
        "text": text,
    }


def _decoder(model: str | None) -> Any:
    if model is None:
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model, local_files_only=True).decode
    except (OSError, ValueError) as error:
        raise wrong_call(
            f"no tokenizer in {model}: {str(error).splitlines()[0]}", "--tokenizer"
        ) from None


def _beyond(entries: list[Entry], num_bytes: float) -> list[Entry]:
    """The least recently used ones without which the others have that size at most."""
    left, count = sum(entry.num_bytes for entry in entries), 0
    while left > num_bytes:
        left -= entries[count].num_bytes
        count += 1
    return entries[:count]


def _seconds(age: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", age)
    if match is None:
        raise wrong_call(f"{age!r} is no time; expected a number and s, m, h or d", "--older-than")
    return float(match[1]) * UNITS[match[2]]


def _ago(at: float) -> str:
    seconds = max(0.0, time.time() - at)
    for unit, length in reversed(UNITS.items()):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return "now"
