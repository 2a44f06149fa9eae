"""``vllm-blend store``, on folders."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from chunks import make_key, make_kv
from servers import RedisServer, free_port
from typer.testing import CliRunner, Result

from vllm_blend.cli.app import app
from vllm_blend.store import DiskTier, RedisTier
from vllm_blend.store.record import Record

DAY = 86400.0


def call(*arguments: Any, code: int = 0, says: str = "") -> Result:
    result = CliRunner().invoke(app, ["store", *map(str, arguments)], input=says)
    assert result.exit_code == code, result.output
    return result


def told(*arguments: Any, code: int = 0) -> Any:
    return json.loads(call(*arguments, "--json", code=code).stdout)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store of four records: of 1, 2, 3 and 4 days ago."""
    tier = DiskTier(tmp_path / "chunks", 1 << 24, fsync=False)
    for seed in range(4):
        key = make_key(seed, 20 + seed)
        tier.write(Record.of(key, make_kv(key, scored=seed == 0)))
        at = time.time() - (seed + 1) * DAY
        os.utime(file_of(tmp_path / "chunks", seed), (at, at))
    return tmp_path / "chunks"


def file_of(folder: Path, seed: int) -> Path:
    name = make_key(seed, 20 + seed).digest.hex()
    return folder / "v1" / name[:2] / f"{name}.safetensors"


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_ls_has_the_last_used_first(folder: Path) -> None:
    found = told("ls", folder, "--limit", 3)
    assert found["records"] == 4
    assert [row["tokens"] for row in found["listed"]] == [20, 21, 22]
    assert [row["scored"] for row in found["listed"]] == [True, False, False]
    shown = call("ls", folder).stdout
    assert "3 layers x 2 x 8 float32" in shown and "4 of 4 records" in shown and "1 d ago" in shown


def test_ls_shows_texts(tmp_path: Path) -> None:
    from chat_tokenizers import make_tokenizer
    from chunks import MODEL

    tokenizer = make_tokenizer("qwen")
    tokenizer.save_pretrained(tmp_path / "model")
    key = MODEL.chunk(tokenizer.encode("the harbour and the river"))
    DiskTier(tmp_path / "chunks", 1 << 24, fsync=False).write(Record.of(key, make_kv(key)))
    found = told("ls", tmp_path / "chunks", "--tokenizer", tmp_path / "model")
    assert found["listed"][0]["text"] == "the harbour and the river"


def test_stat_counts(folder: Path) -> None:
    found = told("stat", folder)
    (kind,) = found["kinds"]
    assert (kind["records"], kind["tokens"], kind["scored"]) == (4, 20 + 21 + 22 + 23, 1)
    assert found["bytes"] == sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    assert 3 * DAY - 60 < found["latest_use"] - found["oldest_use"] < 3 * DAY + 60
    assert "86" in call("stat", folder).stdout


def test_verify_finds_what_is_damaged(folder: Path) -> None:
    assert told("verify", folder) == {"records": 4, "damaged": [], "beside": []}
    damage(file_of(folder, 2))
    (one,) = told("verify", folder, code=1)["damaged"]
    assert one["key"] == make_key(2, 22).digest.hex() and one["why"] == "corrupt: layer 2"
    assert told("verify", folder, "--quick")["damaged"] == []
    assert "corrupt: layer 2" in call("verify", folder, code=1).stdout


def test_repair_removes_it_and_what_lies_beside(folder: Path) -> None:
    damage(file_of(folder, 2))
    left = file_of(folder, 1).with_name(".left.1-1.tmp")
    left.write_bytes(b"half")
    file_of(folder, 1).chmod(0o644)
    planned = told("repair", folder, "--dry-run")
    assert len(planned["to_be_removed"]) == 1 and len(planned["beside"]) == 2
    assert left.exists() and file_of(folder, 2).exists()
    done = told("repair", folder)
    assert len(done["removed"]) == 1 and len(done["beside"]) == 2
    assert not left.exists() and not file_of(folder, 2).exists()
    assert file_of(folder, 1).stat().st_mode & 0o777 == 0o600
    assert told("verify", folder) == {"records": 3, "damaged": [], "beside": []}


def test_repair_does_not_take_a_store_with_a_key_for_a_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from chunks import MODEL

    secret = "a secret of 16 bytes"
    monkeypatch.setenv("CHUNKS_KEY", secret)
    tier = DiskTier(tmp_path / "chunks", 1 << 24, fsync=False)
    for seed in range(2):
        key = make_key(seed, model=replace(MODEL, checksum_key=secret.encode()))
        tier.write(Record.of(key, make_kv(key)))
    assert "checksum key" in call("repair", tmp_path / "chunks", code=2).stderr
    disk = {"folder": str(tmp_path / "chunks"), "budget_gb": 1}
    values = {"store": {"host_gb": 1, "disk": disk, "checksum_key": {"env": "CHUNKS_KEY"}}}
    assert told("verify", "--settings", json.dumps(values))["records"] == 2


@pytest.mark.parametrize(
    ("choice", "left"),
    [(["--older-than", "60h"], [0, 1]), (["--to-gb", "0.00003"], [0, 1]), (["--all"], [])],
)
def test_purge_removes_the_oldest(folder: Path, choice: list[str], left: list[int]) -> None:
    planned = told("purge", folder, *choice, "--dry-run")
    assert planned["removed"] == 4 - len(left)
    assert told("stat", folder)["records"] == 4
    assert told("purge", folder, *choice, "--yes")["removed"] == 4 - len(left)
    assert [seed for seed in range(4) if file_of(folder, seed).exists()] == left


def test_purge_asks_first(folder: Path) -> None:
    call("purge", folder, "--all", says="n\n", code=1)
    assert told("stat", folder)["records"] == 4
    call("purge", folder, "--all", says="y\n")
    assert told("stat", folder)["records"] == 0


def test_redis(redis_server: RedisServer) -> None:
    tier = RedisTier(redis_server.url, 1 << 24)
    for seed in range(3):
        key = make_key(seed)
        tier.write(Record.of(key, make_kv(key)))
    tier.close()
    assert told("verify", redis_server.url)["records"] == 3
    settings = json.dumps({"store": {"host_gb": 1, "redis": {"url": redis_server.url, "budget_gb": 1}}})
    assert told("purge", "--settings", settings, "--all", "--yes")["removed"] == 3
    assert told("stat", redis_server.url)["records"] == 0


def test_a_server_that_is_not_there_is_no_traceback() -> None:
    result = call("stat", f"redis://127.0.0.1:{free_port()}/0", code=1)
    assert "redis: " in result.stderr and "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ls", "/nowhere"], "no folder of a store"),
        (["ls"], "name a folder or an address"),
        (["purge", "FOLDER"], "give one of --all"),
        (["purge", "FOLDER", "--older-than", "soon"], "'soon' is no time"),
        (["purge", "FOLDER", "--all", "--to-gb", "1"], "give one of --all"),
        (["ls", "FOLDER", "--tokenizer", "/nowhere"], "no tokenizer in /nowhere"),
        (["verify", "--settings", "/nowhere.json"], "cannot be read"),
        (["lst"], "No such command"),
    ],
)
def test_wrong_calls(folder: Path, arguments: list[str], said: str) -> None:
    arguments = [str(folder) if one == "FOLDER" else one for one in arguments]
    shown = call(*arguments, code=2).stderr
    assert said in " ".join(shown.replace("│", " ").split())


@pytest.mark.parametrize("command", ["ls", "stat", "verify", "repair", "purge"])
def test_help_has_examples(command: str) -> None:
    assert "Examples:" in call(command, "--help").stdout
