"""Reads past the page cache: any offset, length and place in memory, and disks that cannot."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chunks import make_key, make_kv, same
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_blend.core.kv import KVShape
from vllm_blend.store import ChunkStore, DiskTier, ModelKey
from vllm_blend.store.file_source import FileSource
from vllm_blend.store.record import PAGE, Record

SIZE = 5 * PAGE + 123
DATA = np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8).tobytes()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("direct") / "file"
    found.write_bytes(DATA)
    return found


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """What is read past the page cache: offset and length."""
    found: list[tuple[int, int]] = []
    stock = os.preadv

    def preadv(file: int, buffers: list[Any], offset: int) -> int:
        if _is_direct(file):
            found.append((offset, buffers[0].nbytes))
        return stock(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    yield found


def _is_direct(file: int) -> bool:
    return bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)


def source(path: Path) -> FileSource:
    try:
        direct = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        pytest.skip("this file system has no O_DIRECT")
    return FileSource(os.open(path, os.O_RDONLY), direct)


def memory(offset: int, size: int) -> memoryview:
    """Bytes that begin ``offset`` behind the start of a page."""
    block = np.zeros(size + 2 * PAGE, dtype=np.uint8)
    start = -block.ctypes.data % PAGE + offset
    return block[start : start + size].data


@settings(max_examples=300, deadline=None)
@given(st.integers(0, SIZE + 10), st.integers(0, 4 * PAGE), st.integers(0, PAGE - 1))
@example(0, SIZE, 0)
@example(PAGE, 2 * PAGE, 0)
@example(100, 3 * PAGE, 100)
@example(SIZE - 1, 9, 0)
def test_any_part_is_read(path: Path, offset: int, size: int, place: int) -> None:
    for where in (place, offset % PAGE):  # as it comes, and as the store asks for it
        file, into = source(path), memory(where, size)
        expected = DATA[offset : offset + size]
        assert file.read(offset, into) == len(expected)
        assert bytes(into[: len(expected)]) == expected
        file.close()


def test_whole_pages_go_past_the_page_cache(path: Path, reads: list[tuple[int, int]]) -> None:
    file = source(path)
    file.read(0, memory(0, 2 * PAGE))
    file.read(100, memory(100, 3 * PAGE))
    file.read(0, memory(100, PAGE))  # to where no page begins
    assert reads == [(0, 2 * PAGE), (PAGE, 2 * PAGE)]
    file.close()


@pytest.mark.parametrize("num_tokens", [1, 19, 99, 989])
@pytest.mark.parametrize("heads", [(3, 64), (1, 10)])
def test_layers_of_odd_sizes(
    tmp_path: Path, reads: list[tuple[int, int]], num_tokens: int, heads: tuple[int, int]
) -> None:
    shape = KVShape(num_layers=4, num_kv_heads=heads[0], head_size=heads[1], dtype=torch.bfloat16)
    key = make_key(0, num_tokens, ModelKey("w", "{}", shape))
    expected = make_kv(key)
    tier = DiskTier(tmp_path, 1 << 30)
    tier.write(Record.of(key, expected))
    with ChunkStore([tier], host_bytes=1 << 24) as store:
        assert same(store.get(key), expected)
        assert store.stats()["hits.disk"] == 1
    layer = shape.num_kv_heads * shape.head_size * num_tokens * 4
    of_layers = [at for at, _ in reads if at > 0]  # the preamble's memory begins a page by chance alone
    assert len(of_layers) == 4 or layer < 2 * PAGE


def fails_to_open(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = os.open

    def opened(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return stock(path, flags, *rest)

    monkeypatch.setattr(os, "open", opened)


def fails_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = os.preadv

    def preadv(file: int, buffers: list[Any], offset: int) -> int:
        if _is_direct(file):
            raise OSError(errno.EINVAL, "blocks of 64 KiB")
        return stock(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)


@pytest.mark.parametrize("fails", [fails_to_open, fails_to_read])
def test_a_disk_that_cannot_is_read_through_the_page_cache(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fails: Callable[[pytest.MonkeyPatch], None],
) -> None:
    key = make_key(0, 989)
    expected = make_kv(key)
    tier = DiskTier(tmp_path, 1 << 30)
    tier.write(Record.of(key, expected))
    fails(monkeypatch)
    before = len(os.listdir("/proc/self/fd"))
    with ChunkStore([tier], host_bytes=1 << 24) as store:
        assert same(store.get(key), expected)
        assert not [name for name in store.stats() if name.startswith(("failures", "rejected"))]
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_device_error_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = make_key(0, 989)
    tier = DiskTier(tmp_path, 1 << 30)
    tier.write(Record.of(key, make_kv(key)))

    def preadv(file: int, buffers: list[Any], offset: int) -> int:
        raise OSError(errno.EIO, "the medium")

    with ChunkStore([tier], host_bytes=1 << 24) as store:
        monkeypatch.setattr(os, "preadv", preadv)
        assert store.get(key) is None
        assert store.stats()["failures.disk.read.EIO"] == 1


def test_it_can_be_turned_off(tmp_path: Path, reads: list[tuple[int, int]]) -> None:
    key = make_key(0, 989)
    tier = DiskTier(tmp_path, 1 << 30, direct=False)
    tier.write(Record.of(key, make_kv(key)))
    with ChunkStore([tier], host_bytes=1 << 24) as store:
        assert same(store.get(key), make_kv(key))
    assert not reads
