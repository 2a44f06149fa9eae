"""Records as files of a folder, which several processes may share.

    FOLDER/v1/3f/3f09....safetensors    a record; appears whole, by rename
    FOLDER/v1/3f/.3f09....PID-N.tmp     one that is being written; its writer holds a lock on it

A file's modification time is when it was last used, so the order of use outlives the process. Files and
folders can be read by their owner alone, whatever the umask is: KV tells what the text was.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

from vllm_blend.store.file_source import KINDS, FileSource, tier_error
from vllm_blend.store.index import Index
from vllm_blend.store.keys import DIGEST_BYTES, DIGEST_VERSION, ChunkKey
from vllm_blend.store.record import PAGE, Reason, Record, Rejected, token_ids_in
from vllm_blend.store.tier import RecordIds, Stats, TierError

SUFFIX = ".safetensors"
REFRESH_S = 10.0
"""The folder is listed again after this time at the soonest, and never for more than 2% of the time."""

FOLDER_MODE, FILE_MODE = 0o700, 0o600

WRITE_TRIES = 3
HEAD_BYTES, LARGEST_HEAD = 1 << 16, 1 << 22
"""What is read of a record for its token ids; and where these, or the header, are longer than that."""

TICK_NS = 2 * 10**9
"""Of a file system's clock, at most: files that appear within one may leave a folder the same time."""

NEWS = 100_000
"""Records of other processes that are remembered until somebody asks for them."""


class DiskTier:
    """Records on a local disk.

    Args:
        folder: made if it is not there. Processes that share it run as one user.
        budget_bytes: of all records in it, whoever wrote them.
        fsync: wait until a record is on the disk before it appears; without it a power failure may
            leave records that are found corrupt later.
        direct: read past the page cache (``O_DIRECT``), where the file system can: the device fills the
            store's memory itself, and host memory holds nothing twice.

    Raises:
        OSError: if the folder is not there and cannot be made.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        budget_bytes: int,
        *,
        fsync: bool = True,
        direct: bool = True,
    ) -> None:
        self.name = "disk"
        self.quick = True
        self.stats = Stats()
        self.budget_bytes = budget_bytes
        self.folder = Path(folder) / f"v{DIGEST_VERSION}"
        self.direct = direct
        self._fsync = fsync
        self._lock = threading.Lock()
        self._index = Index()
        self._numbers = itertools.count()
        self._listed_at, self._listing_s = -REFRESH_S, 0.0
        self._changed_ns: dict[int, int] = {}  # when a folder's last listing was right
        self._news: deque[bytes] = deque(maxlen=NEWS)  # others have written them
        try:
            Path(folder).parent.mkdir(parents=True, exist_ok=True)
            _make_private(Path(folder))
            _make_private(self.folder)
            self.folder.chmod(FOLDER_MODE)  # older software made it for all to read
        except OSError:
            if not Path(folder).is_dir():
                raise
        self.refresh()
        self._news.clear()

    def contains(self, key: ChunkKey) -> bool:
        with self._lock:
            known = key.digest in self._index
        return known or self._path(key.digest).exists()

    def open(self, key: ChunkKey) -> FileSource | None:
        path = self._path(key.digest)
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            with self._lock:
                gone = self._index.remove(key.digest)
            if gone:
                raise Rejected(Reason.GONE) from None
            return None
        except OSError as error:
            raise tier_error(error) from error
        self._used(key.digest, os.fstat(file).st_size, file)
        return FileSource(file, self._open_direct(path, file))

    def write(self, record: Record) -> None:
        digest = record.key.digest
        if time.monotonic() > self._listed_at + max(REFRESH_S, 50 * self._listing_s):
            self.refresh()
        if not record.adds_to(self._beginning(digest, len(record.head))):
            return
        if record.num_bytes > self.budget_bytes:
            raise TierError("too_large", f"{record.num_bytes} bytes", pause=False)
        self._make_room(record.num_bytes)
        for left in range(WRITE_TRIES)[::-1]:
            try:
                self._write(record)
                break
            except OSError as error:
                if not left or not self._worth_another_try(error, record.num_bytes):
                    raise tier_error(error) from error
        with self._lock:
            self._index.put(digest, record.num_bytes)

    def token_ids(self) -> Iterator[RecordIds]:
        """Digest and token ids of each record that can be read, most recently used first.

        They are not verified; a key made of them has the same digest, or they are not to be used.
        """
        with self._lock:
            digests = self._index.digests()
        yield from self._ids_of(reversed(digests))

    def appeared(self) -> list[RecordIds]:
        """The same of records that other processes have written since this was last asked.

        A folder's time changes with the files in it, so that 256 times are read, and few folders.
        """
        for number in range(256):
            try:
                changed = (self.folder / f"{number:02x}").stat().st_mtime_ns
            except OSError:
                continue
            if changed != self._changed_ns.get(number):
                self._take(self._list([number]))
                settled = changed + TICK_NS < time.time_ns()
                self._changed_ns[number] = changed if settled else 0
        with self._lock:
            news = list(self._news)
            self._news.clear()
        return list(self._ids_of(news))

    def _ids_of(self, digests: Iterable[bytes]) -> Iterator[RecordIds]:
        for digest in digests:
            try:
                with self._path(digest).open("rb") as file:
                    ids = token_ids_in(data := file.read(HEAD_BYTES))
                    if ids is None and len(data) == HEAD_BYTES:  # many layers, or many tokens
                        ids = token_ids_in(data + file.read(LARGEST_HEAD))
            except OSError:
                continue
            if ids is not None:
                yield digest, ids

    def discard(self, key: ChunkKey) -> None:
        with self._lock:
            self._index.remove(key.digest)
        try:
            self._path(key.digest).unlink(missing_ok=True)
        except OSError as error:
            raise tier_error(error) from error

    def usage(self) -> dict[str, int]:
        with self._lock:
            return {"entries": len(self._index), "bytes": self._index.num_bytes}

    def close(self) -> None:
        """Nothing to do: every record is a whole file already."""

    def refresh(self) -> None:
        """Reads the folder: what other processes added and removed; sweeps what killed ones left."""
        start = time.monotonic()
        before = set(self._index.digests())
        found = self._list(range(256))
        self._take(found)
        with self._lock:
            for digest in before - found.keys():
                if not self._path(digest).exists():
                    self._index.remove(digest)
        self._listed_at, self._listing_s = time.monotonic(), time.monotonic() - start

    def _take(self, found: dict[bytes, int]) -> None:
        """Puts records that were listed into the index; the new ones are other processes'."""
        with self._lock:
            for digest, size in found.items():
                if digest not in self._index:
                    self._index.put(digest, size)
                    self._news.append(digest)

    def _path(self, digest: bytes) -> Path:
        name = digest.hex()
        return self.folder / name[:2] / (name + SUFFIX)

    def _beginning(self, digest: bytes, num_bytes: int) -> bytes:
        """The first bytes of a record; empty: there is none."""
        try:
            with self._path(digest).open("rb") as file:
                return file.read(num_bytes)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise tier_error(error) from error

    def _open_direct(self, path: Path, file: int) -> int | None:
        """``file`` once more, for reads past the page cache; None where that cannot be."""
        if not self.direct:
            return None
        try:
            direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:  # the file system cannot, or the file was just removed
            return None
        if os.path.samestat(os.fstat(file), os.fstat(direct)):
            return direct
        os.close(direct)  # it was just replaced
        return None

    def _used(self, digest: bytes, size: int, file: int) -> None:
        with self._lock:
            self._index.put(digest, size)  # it may be another process's
        try:
            os.utime(file)
        except OSError:
            self.stats.add("utime_failed")  # a read-only folder: the order of use is not kept

    def _write(self, record: Record) -> None:
        path = self._path(record.key.digest)
        _make_private(path.parent)
        temporary = path.parent / f".{path.stem}.{os.getpid()}-{next(self._numbers)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        file = os.open(temporary, flags, FILE_MODE)
        try:
            os.fchmod(file, FILE_MODE)
            fcntl.flock(file, fcntl.LOCK_EX)
            for part in record.parts:
                left = part
                while left.nbytes:
                    left = left[os.write(file, left) :]
            if self._fsync:
                os.fsync(file)
            if record.scored or not path.exists():  # another process's may have scores
                os.rename(temporary, path)
            else:
                temporary.unlink()
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            os.close(file)

    def _worth_another_try(self, error: OSError, num_bytes: int) -> bool:
        if error.errno == errno.ENOENT:  # swept by another process, between its making and its lock
            return True
        # the disk is fuller than the budget says: in the place of old records
        return KINDS.get(error.errno or 0) == "no_space" and self._evict(num_bytes)

    def _make_room(self, num_bytes: int) -> None:
        with self._lock:
            over = self._index.num_bytes + num_bytes + PAGE - self.budget_bytes
        if over > 0:
            self._evict(over)

    def _evict(self, num_bytes: int) -> bool:
        """Removes the least recently used records, ``num_bytes`` in all; False if there are fewer."""
        freed = 0
        while freed < num_bytes:
            with self._lock:
                digest = self._index.oldest()
                if digest is None:
                    break
                freed += self._index.remove(digest)
            try:
                self._path(digest).unlink(missing_ok=True)
            except OSError as error:
                raise tier_error(error) from error
            self.stats.add("evictions")
        return freed >= num_bytes

    def _list(self, numbers: Iterable[int]) -> dict[bytes, int]:
        """Digests and sizes of the records in folders, least recently used first."""
        found: list[tuple[float, bytes, int]] = []
        for entry in self._entries(numbers):
            if entry.name.endswith(SUFFIX):
                try:
                    digest = bytes.fromhex(entry.name.removesuffix(SUFFIX))
                    stat = entry.stat()
                except (ValueError, OSError):
                    continue
                if len(digest) == DIGEST_BYTES:
                    found.append((stat.st_mtime, digest, stat.st_size))
            elif entry.name.endswith(".tmp") and sweep(entry.path):
                self.stats.add("swept")
        return {digest: size for _, digest, size in sorted(found)}

    def _entries(self, numbers: Iterable[int]) -> Iterator[os.DirEntry[str]]:
        for number in numbers:
            try:
                with os.scandir(self.folder / f"{number:02x}") as entries:
                    yield from entries
            except FileNotFoundError:
                continue
            except OSError:
                self.stats.add("list_failed")


def sweep(path: str | os.PathLike[str], dry: bool = False) -> bool:
    """Removes a temporary file whose writer is dead: nobody holds its lock. Returns whether it did.

    Args:
        dry: only says whether it would.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not dry:
            os.unlink(path)
        return True
    except OSError:
        return False  # the writer is alive, or the folder is read-only
    finally:
        os.close(file)


def _make_private(folder: Path) -> None:
    """Makes a folder, if it is not there, that its owner alone can read."""
    try:
        folder.mkdir(FOLDER_MODE)
    except FileExistsError:
        return
    folder.chmod(FOLDER_MODE)  # the umask may have taken the owner's rights, too
