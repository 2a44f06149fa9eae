"""Records that only who knows a key can write, and credentials that nobody gets to see."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chunks import MODEL, make_key, make_kv, same
from servers import RedisServer

from vllm_blend.store import ChunkKey, ChunkStore, DiskTier, open_store
from vllm_blend.store.record import Layout, Preamble, Reason, Record, Rejected
from vllm_blend.store.tier import TierError

KEY = b"a secret of many bytes"
SECRET = "correct horse battery"


def keyed(secret: bytes = KEY) -> ChunkKey:
    return make_key(model=replace(MODEL, checksum_key=secret))


def write(folder: Path, key: ChunkKey, **options: Any) -> None:
    with ChunkStore([DiskTier(folder, 1 << 30)], host_bytes=1 << 20, **options) as store:
        store.put(key, make_kv(key))
        assert store.flush()


def test_what_was_written_with_a_key_is_read_with_it_alone(tmp_path: Path) -> None:
    write(tmp_path, keyed())
    with ChunkStore([DiskTier(tmp_path, 1 << 30)], host_bytes=1 << 20) as store:
        assert store.get(make_key()) is None
        assert store.get(keyed(b"another of many bytes")) is None
        assert same(store.get(keyed()), make_kv(keyed()))
        assert not [name for name in store.stats() if name.startswith("rejected")]  # nothing is lost


def test_records_from_before_there_was_a_key(tmp_path: Path) -> None:
    write(tmp_path, make_key())
    with ChunkStore([DiskTier(tmp_path, 1 << 30)], host_bytes=1 << 20) as store:
        assert store.get(keyed()) is None
        assert same(store.get(make_key()), make_kv(make_key()))


@pytest.mark.parametrize("scored", [False, True])
def test_who_lacks_the_key_forges_no_record(tmp_path: Path, scored: bool) -> None:
    """All that a forger sees is there: the record's name, header and token ids, and the software."""
    tier, key = DiskTier(tmp_path, 1 << 30), keyed()
    tier.write(Record.of(key, make_kv(key, scored)))
    (path,) = tmp_path.rglob("*.safetensors")
    layout, forged = Layout.of(key, scored), make_kv(make_key(1), scored)
    guess = make_key()  # the same chunk without a key, under the name of the one with it
    guess.__dict__["digest"] = key.digest
    data = b"".join(Record.of(guess, forged).parts)
    assert data[: len(layout.head)] == layout.head
    path.write_bytes(data)
    source = tier.open(guess)
    assert source is not None
    Preamble.read(guess, source.num_bytes, source.read)  # so it was well made
    with ChunkStore([tier], host_bytes=1 << 20) as store:
        assert store.get(key) is None
        assert store.stats()[f"rejected.disk.{Reason.CORRUPT}"] == 1
    assert not path.exists()


def test_a_key_is_not_shown() -> None:
    key = keyed()
    for shown in (repr(key), str(key), repr(key.model)):
        assert "secret" not in shown
    assert len({keyed().digest, keyed(b"another of many bytes").digest, make_key().digest}) == 3
    for short in (b"x", b"fifteen bytes .."[:15]):
        with pytest.raises(ValueError, match="checksum_key has .* bytes; allowed: 16 or more"):
            keyed(short)


def test_the_password_of_redis(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    redis = pytest.importorskip("redis")
    client: Any = redis.Redis.from_url(redis_server.url)
    client.acl_setuser(
        "blend", enabled=True, passwords=[f"+{SECRET}"], keys=["*"], categories=["+@all"]
    )
    client.config_set("requirepass", "nobody")
    caplog.set_level(logging.DEBUG)
    logging.getLogger("vllm").addHandler(caplog.handler)
    monkeypatch.setenv("BLEND_REDIS", SECRET)
    place = {"url": redis_server.url, "budget_gb": 1, "username": "blend"}
    key, shown = make_key(), []
    with open_store(
        {"host_gb": 0, "redis": place | {"password": {"env": "BLEND_REDIS"}}, "timeout_s": 20}
    ) as store:
        store.put(key, make_kv(key))
        assert store.flush()
        assert same(store.get(key), make_kv(key))
        assert store.flush()  # else the next read may share this one's load
        shown += [repr(store), repr(store.lanes[0].tier), repr(vars(store.lanes[0].tier))]
        client.acl_setuser("blend", reset_passwords=True, passwords=["+changed"])
        client.client_kill_filter(_type="normal", skipme=True)
        with pytest.raises(TierError) as caught:
            for _ in range(2):  # the first may see the connection end
                store.lanes[0].tier.contains(key)
                client.client_kill_filter(_type="normal", skipme=True)
        assert store.get(key) is None
        shown += [str(caught.value), repr(caught.value.__cause__), *store.stats()]
    logging.getLogger("vllm").removeHandler(caplog.handler)
    assert "redis: read failed" in caplog.text
    assert not [text for text in [*shown, caplog.text] if SECRET in text]


def test_the_credentials_of_s3(
    s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("boto3")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "blend-user")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    caplog.set_level(logging.INFO)
    logging.getLogger("vllm").addHandler(caplog.handler)
    values = {"bucket": f"not-there-{os.getpid()}", "budget_gb": 1, "endpoint_url": s3_endpoint}
    key = make_key()
    with open_store({"host_gb": 0, "s3": values}) as store:
        store.put(key, make_kv(key))
        assert store.flush()
        assert store.stats()["failures.s3.write.404"] == 1
        shown = [repr(store.lanes[0].tier), repr(vars(store.lanes[0].tier)), *store.stats()]
    logging.getLogger("vllm").removeHandler(caplog.handler)
    assert "s3: write failed" in caplog.text
    assert not [text for text in [*shown, caplog.text] if SECRET in text]


def test_forged_scores_alone_are_seen(tmp_path: Path) -> None:
    tier, key = DiskTier(tmp_path, 1 << 30), keyed()
    tier.write(Record.of(key, make_kv(key, scored=True)))
    (path,) = tmp_path.rglob("*.safetensors")
    data, guess = bytearray(path.read_bytes()), make_key()
    guess.__dict__["digest"] = key.digest
    forged = Record.of(guess, replace(make_kv(key), scores=make_kv(make_key(1), scored=True).scores))
    size = Layout.of(key, scored=True).preamble_bytes
    data[:size] = forged.parts[0]
    path.write_bytes(data)
    source = tier.open(key)
    assert source is not None
    with pytest.raises(Rejected, match="scores"):
        Preamble.read(key, source.num_bytes, source.read)
