"""A record's file, open for reading, and what a failed file operation means to the store."""

from __future__ import annotations

import errno
import os

import numpy as np

from vllm_blend.store.record import PAGE
from vllm_blend.store.tier import TierError

KINDS = {
    errno.ENOSPC: "no_space",
    errno.EDQUOT: "no_space",
    errno.EFBIG: "no_space",
    errno.EROFS: "read_only",
    errno.EACCES: "read_only",
    errno.EPERM: "read_only",
}


class FileSource:
    """An open record; it stays readable after its file is removed.

    Args:
        file: read through the page cache.
        direct: the same file, read past it: whole pages, to where a page of memory begins. The store
            reads layers to such places; what is left over at either end goes through the page cache.
    """

    def __init__(self, file: int, direct: int | None = None) -> None:
        self.num_bytes = os.fstat(file).st_size
        self._file = file
        self._direct = direct
        # the device reads ahead of the checksums; or, with `direct`, nothing that is not asked for
        advice = os.POSIX_FADV_WILLNEED if direct is None else os.POSIX_FADV_RANDOM
        os.posix_fadvise(file, 0, 0, advice)

    def read(self, offset: int, into: memoryview) -> int:
        done = 0
        address = np.frombuffer(into, dtype=np.uint8).ctypes.data if self._direct is not None else 0
        while done < into.nbytes:
            file, end = self._part(offset + done, address + done, into.nbytes - done)
            try:
                count = os.preadv(file, [into[done : done + end]], offset + done)
            except OSError as error:
                if file == self._direct and error.errno == errno.EINVAL:
                    self._close_direct()  # the device's blocks are larger than pages
                    continue
                raise tier_error(error, pause=False) from error
            if count == 0:
                break
            done += count
        return done

    def close(self) -> None:
        os.close(self._file)
        self._close_direct()

    def _part(self, offset: int, address: int, num_bytes: int) -> tuple[int, int]:
        """The file to read from, and how many bytes."""
        before, whole = -offset % PAGE, num_bytes // PAGE * PAGE
        if self._direct is None or (offset - address) % PAGE:
            return self._file, num_bytes
        if before or not whole:
            return self._file, min(before or num_bytes, num_bytes)
        return self._direct, whole

    def _close_direct(self) -> None:
        if self._direct is not None:
            os.close(self._direct)
            self._direct = None


def tier_error(error: OSError, pause: bool = True) -> TierError:
    """The store's error for one of the operating system's."""
    kind = KINDS.get(error.errno or 0, errno.errorcode.get(error.errno or 0, "os_error"))
    return TierError(kind, str(error), pause=pause and kind != "ENOENT")
