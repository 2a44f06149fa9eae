"""Records as files: whole or not there, in the order of use, whoever writes them."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chunks import make_key, make_kv

from vllm_blend.store.disk import DiskTier
from vllm_blend.store.keys import ChunkKey
from vllm_blend.store.record import Layout, Preamble, Reason, Record, Rejected
from vllm_blend.store.tier import TierError

BUDGET = 1 << 30
SIZE = Layout.of(make_key()).num_bytes


def record(key: ChunkKey) -> Record:
    return Record.of(key, make_kv(key))


def read(tier: DiskTier, key: ChunkKey) -> bytes | None:
    source = tier.open(key)
    if source is None:
        return None
    data = bytearray(Layout.of(key).num_bytes)
    assert source.read(0, memoryview(data)) == len(data)
    assert source.read(len(data) - 3, memoryview(bytearray(5))) == 3
    source.close()
    return bytes(data)


def files(folder: Path, pattern: str = "*.safetensors") -> list[Path]:
    return sorted(folder.rglob(pattern))


def test_what_is_written_is_read_by_the_next_process_too(tmp_path: Path) -> None:
    tier, key = DiskTier(tmp_path, BUDGET), make_key()
    assert tier.open(key) is None
    tier.write(record(key))
    tier.write(record(key))  # there already
    expected = b"".join(record(key).parts)
    for again in (tier, DiskTier(tmp_path, BUDGET)):
        assert again.contains(key)
        assert not again.contains(make_key(1))
        assert read(again, key) == expected
        assert again.usage()["entries"] == 1
    assert len(files(tmp_path)) == 1
    assert not files(tmp_path, "*.tmp")


def test_the_least_recently_used_make_room(tmp_path: Path) -> None:
    pages = -(-SIZE // 4096) * 4096
    tier, keys = DiskTier(tmp_path, 5 * pages + 4096), [make_key(i) for i in range(7)]
    for key in keys[:4]:
        tier.write(record(key))
    tier.open(keys[0]).close()  # used: younger than 1, 2 and 3
    for key in keys[4:]:
        tier.write(record(key))
    assert [tier.contains(key) for key in keys] == [True, False, False, True, True, True, True]
    assert tier.usage()["bytes"] == 5 * pages
    assert tier.stats["evictions"] == 2
    assert len(files(tmp_path)) == 5


def test_the_order_of_use_outlives_the_process(tmp_path: Path) -> None:
    tier, keys = DiskTier(tmp_path, BUDGET), [make_key(i) for i in range(4)]
    for number, key in enumerate(keys):
        tier.write(record(key))
        os.utime(tier._path(key.digest), (number, number))
    tier.open(keys[0]).close()
    smaller = DiskTier(tmp_path, 3 * (SIZE + 4096))
    smaller.write(record(make_key(9)))
    assert [smaller.contains(key) for key in keys] == [True, False, False, True]


def test_a_record_larger_than_the_budget_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TierError, match="too_large"):
        DiskTier(tmp_path, SIZE - 1).write(record(make_key()))
    assert not files(tmp_path)


def test_two_processes_share_one_folder(tmp_path: Path) -> None:
    one, two = DiskTier(tmp_path, BUDGET), DiskTier(tmp_path, BUDGET)
    keys = [make_key(i) for i in range(3)]
    for key in keys:
        one.write(record(key))
    assert read(two, keys[0]) is not None  # not listed yet, found all the same
    assert two.usage()["entries"] == 1
    two.refresh()
    assert two.usage() == one.usage()
    one.discard(keys[0])
    with pytest.raises(Rejected, match="gone"):
        two.open(keys[0])
    assert two.open(keys[0]) is None
    one.discard(keys[1])
    two.refresh()
    assert two.usage()["entries"] == 1


def test_what_others_write_appears_once(tmp_path: Path) -> None:
    keys = [make_key(i) for i in range(5)]
    early = DiskTier(tmp_path, BUDGET)
    early.write(record(keys[0]))
    one, two = DiskTier(tmp_path, BUDGET), DiskTier(tmp_path, BUDGET)
    assert two.appeared() == []  # it was there before
    one.write(record(keys[1]))
    two.write(record(keys[2]))
    assert two.appeared() == [(keys[1].digest, keys[1].token_ids)]
    assert one.appeared() == [(keys[2].digest, keys[2].token_ids)]
    assert two.appeared() == one.appeared() == []
    one.write(record(keys[3]))
    two.refresh()  # as a write does now and then
    one.write(record(keys[4]))
    assert {digest for digest, _ in two.appeared()} == {keys[3].digest, keys[4].digest}
    one.discard(keys[4])
    two.refresh()
    one.write(record(keys[4]))
    assert [digest for digest, _ in two.appeared()] == [keys[4].digest]


def test_folders_that_did_not_change_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = DiskTier(tmp_path, BUDGET), DiskTier(tmp_path, BUDGET)
    one.write(record(make_key(1)))
    assert len(two.appeared()) == 1
    long_ago = time.time() - 60
    for folder in two.folder.iterdir():
        os.utime(folder, (long_ago, long_ago))
    assert two.appeared() == []
    read: list[Path] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: read.append(path) or scandir(path))  # type: ignore
    assert two.appeared() == [] and not read
    one.write(record(make_key(2)))
    assert len(two.appeared()) == 1 and len(read) == 1


def test_a_file_that_is_read_may_be_removed(tmp_path: Path) -> None:
    tier, key = DiskTier(tmp_path, BUDGET), make_key()
    tier.write(record(key))
    source = tier.open(key)
    assert source is not None
    tier.discard(key)
    data = bytearray(SIZE)
    assert source.read(0, memoryview(data)) == SIZE
    assert bytes(data) == b"".join(record(key).parts)
    source.close()


@pytest.mark.parametrize("length", [0, 1, 4095, SIZE - 1, SIZE + 1])
def test_a_file_of_another_length_is_rejected(tmp_path: Path, length: int) -> None:
    tier, key = DiskTier(tmp_path, BUDGET), make_key()
    tier.write(record(key))
    os.truncate(files(tmp_path)[0], length)
    source = tier.open(key)
    assert source is not None
    with pytest.raises(Rejected) as caught:
        Preamble.read(key, source.num_bytes, source.read)
    assert caught.value.reason == Reason.TRUNCATED
    source.close()


def test_what_a_killed_writer_left_is_swept_and_a_living_one_s_is_not(tmp_path: Path) -> None:
    tier, key = DiskTier(tmp_path, BUDGET), make_key()
    tier.write(record(key))
    folder = files(tmp_path)[0].parent
    (folder / ".dead.1-0.tmp").write_bytes(b"half")
    living = folder / ".alive.2-0.tmp"
    command = ["flock", str(living), "sh", "-c", "echo locked; read _"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"locked\n"
        tier.refresh()
        assert files(tmp_path, "*.tmp") == [living]
    tier.refresh()
    assert not files(tmp_path, "*.tmp")
    assert tier.stats["swept"] == 2
    assert tier.contains(key)


def test_other_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "v1" / "ab").mkdir(parents=True)
    strangers = ["notes.txt", "ab.safetensors", "model.safetensors"]
    for name in strangers:
        (tmp_path / "v1" / "ab" / name).write_text("x")
    tier = DiskTier(tmp_path, BUDGET)
    assert tier.usage()["entries"] == 0
    assert sorted(os.listdir(tmp_path / "v1" / "ab")) == sorted(strangers)


@pytest.fixture
def small_file_limit() -> Iterator[None]:
    """Files of this process cannot grow past half a record: a write fails in the middle."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE // 2, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_fails_in_the_middle_leaves_nothing(
    tmp_path: Path, small_file_limit: None
) -> None:
    tier, key = DiskTier(tmp_path, BUDGET), make_key()
    with pytest.raises(TierError) as caught:
        tier.write(record(key))
    assert caught.value.kind == "no_space"
    assert tier.open(key) is None
    assert not files(tmp_path, "*")[3:]  # the two folders above, and nothing in them
    assert not files(tmp_path) and not files(tmp_path, "*.tmp")


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_makes_room_by_itself(tmpfs: Path) -> None:
    tier, keys = DiskTier(tmpfs, BUDGET), [make_key(i) for i in range(10)]
    for key in keys:
        tier.write(record(key))
    held = [key for key in keys if tier.contains(key)]
    assert keys[-1] in held
    assert keys[0] not in held
    assert all(read(tier, key) == b"".join(record(key).parts) for key in held)
    for key in held:
        tier.discard(key)
    with (tmpfs / "another's").open("wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(bytes(4096))
    with pytest.raises(TierError, match="no_space"):
        tier.write(record(make_key(99)))
    assert not files(tmpfs, "*.tmp")


def test_a_read_only_folder_is_read(tmpfs: Path) -> None:
    key = make_key()
    DiskTier(tmpfs, BUDGET).write(record(key))
    subprocess.run(["mount", "-o", "remount,ro", str(tmpfs)], check=True)
    tier = DiskTier(tmpfs, BUDGET)
    assert read(tier, key) == b"".join(record(key).parts)
    with pytest.raises(TierError) as caught:
        tier.write(record(make_key(1)))
    assert caught.value.kind == "read_only"
    with pytest.raises(TierError, match="read_only"):
        tier.discard(key)


def test_a_folder_that_cannot_be_made_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        DiskTier(tmp_path / "file" / "folder", BUDGET)


def test_token_ids_of_all_records_newest_first(tmp_path: Path) -> None:
    sizes = (10, 910, 1810, 20_000)  # the last one's are more than are read at first
    tier, keys = DiskTier(tmp_path, BUDGET), [make_key(i, size) for i, size in enumerate(sizes)]
    for key in keys:
        tier.write(record(key))
    tier.open(keys[0]).close()
    tier._path(keys[1].digest).write_bytes(b"nonsense")
    tier._path(keys[2].digest).unlink()
    found = list(tier.token_ids())
    assert found == [(key.digest, key.token_ids) for key in (keys[0], keys[3])]


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o277])
def test_records_are_their_owner_s_alone(tmp_path: Path, umask: int) -> None:
    key, folder = make_key(), tmp_path / "chunks"
    before = os.umask(umask)
    try:
        DiskTier(folder, BUDGET).write(record(key))
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [folder, *folder.rglob("*")]}
    (file,) = (path for path in modes if path.is_file())
    assert modes.pop(file) == 0o600
    assert set(modes.values()) == {0o700} and len(modes) == 3


def test_a_folder_that_others_could_read_is_closed(tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir(0o755)
    tmp_path.chmod(0o755)
    DiskTier(tmp_path, BUDGET)
    assert stat.S_IMODE((tmp_path / "v1").stat().st_mode) == 0o700
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755  # somebody else made it
