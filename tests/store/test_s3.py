"""Records in S3's API on this machine, and through a proxy that fails like a real network."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from chunks import make_key, make_kv, same
from servers import Proxy

from vllm_blend.store import ChunkLost, ChunkStore
from vllm_blend.store.keys import ChunkKey
from vllm_blend.store.record import Layout, Preamble, Reason, Record, Rejected
from vllm_blend.store.tier import TierError

boto3 = pytest.importorskip("boto3")
from vllm_blend.store.s3_tier import S3Tier  # noqa: E402

BUDGET = 1 << 30
SIZE = Layout.of(make_key()).num_bytes


@pytest.fixture
def bucket(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, request: Any) -> str:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    name = f"bucket-{abs(hash(request.node.name))}"
    boto3.client("s3", endpoint_url=s3_endpoint).create_bucket(Bucket=name)
    return name


@pytest.fixture
def proxy(s3_endpoint: str) -> Iterator[Proxy]:
    proxy = Proxy(s3_endpoint)
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    yield proxy
    proxy.released.set()
    proxy.shutdown()
    proxy.server_close()


def make_tier(bucket: str, endpoint: str, budget: int = BUDGET, **options: Any) -> S3Tier:
    tier = S3Tier(bucket, budget, endpoint_url=endpoint, **options)
    assert tier.wait_listed()
    return tier


def record(key: ChunkKey) -> Record:
    return Record.of(key, make_kv(key))


def read(tier: S3Tier, key: ChunkKey) -> bytes | None:
    source = tier.open(key)
    if source is None:
        return None
    data = bytearray(Layout.of(key).num_bytes)
    half = len(data) // 2
    assert source.read(half, memoryview(data)[half:]) == len(data) - half  # a jump
    assert source.read(0, memoryview(data)[:half]) == half
    source.close()
    return bytes(data)


def test_what_is_written_is_read_by_others(bucket: str, s3_endpoint: str) -> None:
    one, key = make_tier(bucket, s3_endpoint), make_key()
    early = make_tier(bucket, s3_endpoint)
    assert one.open(key) is None
    one.write(record(key))
    one.write(record(key))
    expected = b"".join(record(key).parts)
    assert read(one, key) == expected
    assert early.open(key) is None  # not listed yet
    early.refresh()
    assert read(early, key) == expected
    late = make_tier(bucket, s3_endpoint)
    assert late.usage() == one.usage()
    assert late.usage()["entries"] == 1
    late.discard(key)
    with pytest.raises(Rejected) as caught:
        one.open(key)
    assert caught.value.reason == Reason.GONE
    early.refresh()
    assert not early.contains(key)
    for tier in (one, early, late):
        tier.close()


def test_the_least_recently_used_make_room(bucket: str, s3_endpoint: str) -> None:
    tier = make_tier(bucket, s3_endpoint, 3 * (SIZE + 4096))
    keys = [make_key(i) for i in range(5)]
    for key in keys[:3]:
        tier.write(record(key))
    source = tier.open(keys[0])
    assert source is not None
    source.close()
    for key in keys[3:]:
        tier.write(record(key))
    assert [tier.contains(key) for key in keys] == [True, False, False, True, True]
    assert tier.stats["evictions"] == 2
    tier.refresh()
    assert tier.usage()["entries"] == 3
    with pytest.raises(TierError, match="too_large"):
        make_tier(bucket, s3_endpoint, SIZE - 1).write(record(keys[1]))


def test_objects_that_are_not_records(bucket: str, s3_endpoint: str) -> None:
    client, key = boto3.client("s3", endpoint_url=s3_endpoint), make_key()
    client.put_object(Bucket=bucket, Key="vllm_blend/v1/readme.txt", Body=b"x")
    client.put_object(Bucket=bucket, Key=f"vllm_blend/v1/{key.digest.hex()}.safetensors", Body=b"short")
    tier = make_tier(bucket, s3_endpoint)
    assert tier.usage()["entries"] == 1
    source = tier.open(key)
    assert source is not None
    with pytest.raises(Rejected, match="truncated: 5 bytes"):
        Preamble.read(key, source.num_bytes, source.read)
    source.close()


@pytest.mark.parametrize("mode", ["500", "hang", "cut"])
def test_a_failing_service_is_a_miss_and_serving_goes_on(bucket: str, proxy: Proxy, mode: str) -> None:
    key, other = make_key(), make_key(1)
    # short only where it is to run out: a busy machine may take long for an answer
    tier = make_tier(bucket, proxy.url, timeout_s=0.5 if mode == "hang" else 30.0)
    with ChunkStore([tier], host_bytes=1 << 20, timeout_s=60) as store:
        store.put(key, make_kv(key))
        assert store.flush()
        store.discard(key)
        proxy.mode = mode
        kv = store.get(key, layerwise=mode == "cut")
        if mode == "cut":  # the header and a layer arrived
            assert kv is not None and kv.layers[0]
            with pytest.raises(ChunkLost):
                kv.layers[1]
        else:
            assert kv is None
        assert store.flush()
        store.put(other, make_kv(other))
        assert same(store.get(other), make_kv(other))
        assert store.flush()
        stats = store.stats()
        failures = {name: n for name, n in stats.items() if name.startswith("failures.s3.read")}
        assert sum(failures.values()) == 1, stats
        if mode == "500":
            assert failures == {"failures.s3.read.500": 1}
        proxy.mode = "pass"
        proxy.released.set()
        store.lanes[0]._reads.worked()  # the pause is over
        assert same(store.get(key), make_kv(key))
        assert store.stats()["hits.s3"] >= 1


def test_a_bucket_that_cannot_be_listed_is_empty_for_now(bucket: str, proxy: Proxy) -> None:
    proxy.mode = "500"
    tier = S3Tier(bucket, BUDGET, endpoint_url=proxy.url, refresh_s=0.05)
    while not tier.stats["list_failed.500"]:
        pass
    assert tier.open(make_key()) is None
    proxy.mode = "pass"
    assert tier.wait_listed()
    tier.close()
