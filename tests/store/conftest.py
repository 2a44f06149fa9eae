"""Fixtures of the store's tests: an S3."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from servers import s3_server


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    if find_spec("moto") is None:
        pytest.skip("no moto in this environment")
    with s3_server() as endpoint:
        yield endpoint
