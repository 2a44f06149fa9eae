"""A store from plain values."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
from chunks import make_key, make_kv, same

from vllm_blend.store import open_store


def test_values_make_a_store(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "host_gb": 0.001,
        "disk": {"folder": str(tmp_path), "budget_gb": 1, "fsync": False},
        "redis": None,
        "write_behind_gb": 0.5,
        "load_threads": 2,
        "timeout_s": 9,
        "storage": "fp8",
    }
    key = make_key()
    with open_store(values) as store:
        store.put(key, make_kv(key))
        assert store.timeout_s == 9 and store.storage == "fp8"
        assert [lane.name for lane in store.lanes] == ["disk"]
    with open_store({"host_gb": 0, "disk": {"folder": tmp_path, "budget_gb": 1}}) as store:
        assert same(store.get(key), make_kv(key))
    with open_store({"host_gb": 0.001}) as store:
        assert not store.lanes


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "store has no 'host_gb'"),
        ({"host_gb": -1}, "host_gb of store is -1; expected a number of GB"),
        ({"host_gb": True}, "host_gb of store is True"),
        (
            {"host_gb": 1, "dsk": {}},
            "unknown key 'dsk' of store; allowed: checksum_key, disk, gpu",
        ),
        ({"host_gb": 1, "disk": "/tmp"}, "disk is a str; expected a mapping with folder"),
        ({"host_gb": 1, "disk": {"folder": "x"}}, "disk has no 'budget_gb'"),
        ({"host_gb": 1, "redis": {"budget_gb": 1}}, "redis has no 'url'"),
        ({"host_gb": 1, "s3": {"bucket": "b", "budget_gb": 1, "x": 2}}, "unknown key 'x' of s3"),
        ({"host_gb": 1, "storage": "fp4"}, "storage is 'fp4'; allowed: auto, fp8"),
        ({"host_gb": 1, "write_behind_gb": "1"}, "write_behind_gb of store is '1'"),
    ],
)
def test_bad_values_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_store(values)


def test_secrets_are_named_not_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLEND_KEY", "k" * 32)
    (tmp_path / "key").write_text("k" * 32 + "\n")
    found = []
    for place in ({"env": "BLEND_KEY"}, {"file": str(tmp_path / "key")}):
        with open_store({"host_gb": 0.001, "checksum_key": place}) as store:
            found.append(store.checksum_key)
    assert found == [b"k" * 32] * 2
    with open_store({"host_gb": 0.001}) as store:
        assert store.checksum_key == b""


SECRET = "correct horse battery"
PLACE = "checksum_key must be"
REDIS = {"budget_gb": 1, "url": "redis://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"checksum_key": SECRET}, PLACE),
        ({"checksum_key": {"env": "A", "file": SECRET}}, PLACE),
        ({"checksum_key": {"value": SECRET}}, PLACE),
        ({"checksum_key": {"env": "NOT_SET"}}, "checksum_key is empty, or not set: env NOT_SET"),
        ({"checksum_key": {"env": "SHORT"}}, "checksum_key has 5 bytes; allowed: 16 or more"),
        ({"checksum_key": {"file": "/not/there"}}, "cannot be read from /not/there"),
        ({"redis": f"redis://:{SECRET}@127.0.0.1:1"}, "redis is a str"),
        ({"redis": REDIS | {"url": f"redis://me:{SECRET}@127.0.0.1:1"}}, "url of redis has a user"),
        ({"redis": REDIS | {"url": f"redis://:{SECRET}/@127.0.0.1"}}, "url of redis has a user"),
        ({"redis": REDIS | {"url": f"redis://127.0.0.1?password={SECRET}"}}, "url of redis has a user"),
        ({"redis": REDIS | {"password": SECRET}}, "password of redis must be"),
        (
            {"s3": {"bucket": "b", "budget_gb": 1, "endpoint_url": f"http://me:{SECRET}@127.0.0.1"}},
            "endpoint_url of s3 has a user",
        ),
    ],
)
def test_a_secret_in_settings_is_refused_and_not_shown(
    values: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "redis" in values:
        pytest.importorskip("redis")
    if "s3" in values:
        pytest.importorskip("boto3")
    monkeypatch.setenv("SHORT", "short")
    with pytest.raises(ValueError, match=message) as caught:
        open_store({"host_gb": 0.001} | values)
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    monkeypatch.delitem(sys.modules, "vllm_blend.store.redis_tier", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'vllm-blend\[redis\]'"):
        open_store({"host_gb": 0, "redis": {"url": "redis://127.0.0.1", "budget_gb": 1}})
