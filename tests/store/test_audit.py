"""Records looked at without their keys, in each kind of tier."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chunks import MODEL, make_key, make_kv
from servers import RedisServer

from vllm_blend.store import DiskTier, RedisTier, S3Tier
from vllm_blend.store.audit import DiskShelf, Shelf, look, read_key
from vllm_blend.store.audit_remote import RedisShelf, S3Shelf
from vllm_blend.store.record import Reason, Record, Rejected

BUDGET = 1 << 24
FP8 = replace(MODEL, storage="fp8")
SECRET = b"a secret of 16 bytes"


@pytest.fixture(params=["disk", "redis", "s3"])
def both(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    """A tier, and a function that makes a shelf over what it has written."""
    if request.param == "disk":
        yield DiskTier(tmp_path, BUDGET, fsync=False), lambda: DiskShelf(tmp_path)
    elif request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        with closing(RedisTier(server.url, BUDGET)) as tier:
            yield tier, lambda: RedisShelf(RedisTier(server.url, 0))
    else:
        yield from buckets(request)


def buckets(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    import boto3

    endpoint = request.getfixturevalue("s3_endpoint")
    request.getfixturevalue("monkeypatch").setenv("AWS_ACCESS_KEY_ID", "-")
    request.getfixturevalue("monkeypatch").setenv("AWS_SECRET_ACCESS_KEY", "-")
    request.getfixturevalue("monkeypatch").setenv("AWS_DEFAULT_REGION", "us-east-1")
    boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket="audit")
    with closing(S3Tier("audit", BUDGET, endpoint_url=endpoint)) as tier:
        yield tier, lambda: S3Shelf(S3Tier("audit", 0, endpoint_url=endpoint))


def test_every_record_is_found_and_whole(both: tuple[Any, Any]) -> None:
    tier, shelf_of = both
    keys = [make_key(1), make_key(2, 700), make_key(3, model=FP8)]
    for number, key in enumerate(keys):
        tier.write(Record.of(key, make_kv(key, scored=number == 1)))
    with closing(shelf_of()) as shelf:
        entries = shelf.entries()
        assert {entry.digest for entry in entries} == {key.digest for key in keys}
        by_digest = {entry.digest: entry for entry in entries}
        for number, key in enumerate(keys):
            found = look(shelf, by_digest[key.digest])
            assert found is not None and found.layout.key.token_ids == key.token_ids
            assert found.layout.scored == (number == 1)
            assert found.layout.key.model.storage == key.model.storage
            assert by_digest[key.digest].num_bytes == found.layout.num_bytes
        shelf.remove(by_digest[keys[0].digest])
        assert {entry.digest for entry in shelf.entries()} == {key.digest for key in keys[1:]}
        assert look(shelf, by_digest[keys[0].digest]) is None
        assert shelf.mend(dry=True) == []


@pytest.fixture
def disk(tmp_path: Path) -> tuple[Shelf, Path]:
    """A folder's shelf, and the file of its one record."""
    key = make_key()
    DiskTier(tmp_path, BUDGET, fsync=False).write(Record.of(key, make_kv(key, scored=True)))
    (path,) = tmp_path.glob("v1/*/*.safetensors")
    return DiskShelf(tmp_path), path


def test_a_flipped_bit_anywhere_but_in_the_token_ids_is_seen(disk: tuple[Shelf, Path]) -> None:
    shelf, path = disk
    (entry,) = shelf.entries()
    whole = path.read_bytes()
    ids = 8 + int.from_bytes(whole[:8], "little")  # 20 of them: they are not known here, but by a key
    for at in [*range(0, 4096, 61), *range(4096, len(whole), 997), len(whole) - 1]:
        if ids <= at < ids + 20 * 4:
            continue
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(Rejected):
            look(shelf, entry)
    path.write_bytes(whole)
    assert look(shelf, entry) is not None


@pytest.mark.parametrize("size", [0, 5, 4000, 4096, 5000])
def test_a_cut_record_is_seen(disk: tuple[Shelf, Path], size: int) -> None:
    shelf, path = disk
    (entry,) = shelf.entries()
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(Rejected):
        look(shelf, entry, whole=False)


def test_what_is_no_record_is_foreign(disk: tuple[Shelf, Path]) -> None:
    shelf, path = disk
    (entry,) = shelf.entries()
    path.write_text('{"a": 1}' * 100)
    with pytest.raises(Rejected) as error:
        look(shelf, entry)
    assert error.value.reason is Reason.FOREIGN
    source = shelf.open(entry)
    assert source is not None
    with closing(source), pytest.raises(Rejected):
        read_key(source, b"\0" * 16)


def test_checksums_of_a_secret_need_it(tmp_path: Path) -> None:
    key = make_key(model=replace(MODEL, checksum_key=SECRET))
    DiskTier(tmp_path, BUDGET, fsync=False).write(Record.of(key, make_kv(key)))
    shelf = DiskShelf(tmp_path)
    (entry,) = shelf.entries()
    assert look(shelf, entry, SECRET) is not None
    for secret in (b"", b"another secret of more bytes"):
        with pytest.raises(Rejected) as error:
            look(shelf, entry, secret)
        assert error.value.reason is Reason.CORRUPT


def test_a_shelf_of_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no folder of a store"):
        DiskShelf(tmp_path)


def test_records_that_redis_has_not_counted_are_counted_again(redis_server: RedisServer) -> None:
    import redis

    with closing(RedisTier(redis_server.url, BUDGET)) as tier:
        keys = [make_key(seed) for seed in range(3)]
        for key in keys:
            tier.write(Record.of(key, make_kv(key)))
        with redis.Redis.from_url(redis_server.url) as client:
            name = f"vllm_blend:v1:chunk:{keys[0].digest.hex()}"
            data = client.get(name)
            client.delete(name)  # gone, and still counted
            client.set(f"vllm_blend:v1:chunk:{'ab' * 16}", data)  # there, and not counted
        shelf = RedisShelf(tier)
        said = ["1 records that were not counted", "1 records that were counted and are gone"]
        assert shelf.mend(dry=True) == said
        assert shelf.mend(dry=False) == said
        assert shelf.mend(dry=True) == []
        assert {e.digest for e in shelf.entries()} == {keys[1].digest, keys[2].digest, b"\xab" * 16}
