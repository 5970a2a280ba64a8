"""Reading and writing byte ranges of plain files: the only room that knows descriptors, fsync and rename."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from shardstore.store import aio

_MAX_OPEN = (
    32  # descriptors a reader keeps: a batch of 64 shuffled samples rarely touches more shards, ulimit is 256 on macOS
)
_FAST = 1.5e9  # bytes/s; what is slower is read from a disk. Page caches give 3 to 10 GB/s
_PIECE_SECONDS = 10e-6  # allowed for each piece besides; a disk takes 50 and more
_STAY = 16  # reads after a slow one that are still announced: these are quick for that very reason
_AT_ONCE = 8  # a thread reads pieces of an eighth of them at once: so many threads find some of their own
_COPY_BYTES = 1 << 20
_NO_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS)  # of a file system that syncs no folders
_AT_FDCWD, _EXCHANGE = -100, 2  # linux/fs.h: RENAME_EXCHANGE; macOS's stdio.h: RENAME_SWAP


def crc32c(data: bytes | np.ndarray[Any, Any], start: int = 0) -> int:
    """CRC-32C (Castagnoli, RFC 3720 appendix B.4) of ``data``, continuing from the checksum ``start``."""
    return int(google_crc32c.extend(start, data))


def checksum_file(path: str | Path) -> tuple[int, int]:
    """Size in bytes and CRC-32C of a whole file, read in pieces of 1 MiB."""
    size, crc = 0, 0
    with open(path, "rb", buffering=0) as f:
        while block := f.read(_COPY_BYTES):
            size += len(block)
            crc = crc32c(block, crc)
    return size, crc


def sync_folder(path: str | Path) -> None:
    """Make renames inside a folder durable (a no-op where folders cannot be opened or synced, as on Windows)."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(fd)


def sync_file(path: str | Path) -> None:
    """Make what another library wrote into a file durable."""
    with open(path, "rb+") as f:  # Windows syncs no file that was opened for reading only
        os.fsync(f.fileno())


def leads_out(root: str, path: str) -> str | None:
    """Where a path below a folder (with forward slashes) really leads, if a link in it leads out of the folder."""
    here = root
    for part in path.split("/"):
        here = f"{here}/{part}"
        if os.path.islink(here):
            real, inside = os.path.realpath(f"{root}/{path}"), os.path.realpath(root)
            return None if real.startswith(f"{inside.rstrip(os.sep)}{os.sep}") else real
    return None


def is_special(path: str) -> bool:
    """Whether this is a pipe, socket, device or folder: to open one may wait without end, or do something."""
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False  # opening it will say why


def exchange(a: str, b: str) -> bool:
    """Exchange two names in one moment (Linux: renameat2, macOS: renamex_np); False where the system cannot."""
    if os.name != "posix":
        return False
    libc, names = ctypes.CDLL(None), (os.fsencode(a), os.fsencode(b))
    if hasattr(libc, "renameat2"):
        return not libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _EXCHANGE)
    return hasattr(libc, "renamex_np") and not libc.renamex_np(*names, _EXCHANGE)


def write_file(path: str | Path, data: bytes) -> None:
    """Write a file so that it holds either nothing or all of ``data``: temporary name, fsync, rename."""
    temp = f"{path}.tmp"
    with open(temp, "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temp, path)


class Files:
    """Open descriptors of a reader: opened on first use, a few kept, none used after a fork.

    A descriptor is shared over a fork, but this object notices the new process id and opens its own, so that closing
    in one process never surprises another. Threads may share it.

    Attributes:
        slow: above 0 where one of the last reads seems to have come from a disk: then many are better announced
            together, and only then, for that costs a tenth of what reading from the page cache takes.
    """

    def __init__(self, max_open: int = _MAX_OPEN, before_open: Callable[[str], None] = lambda path: None) -> None:
        self._max_open, self._before_open, self.slow = max_open, before_open, 0
        self._forget()

    def _forget(self) -> None:
        self._open: OrderedDict[str, int] = OrderedDict()
        self._users: dict[int, int] = {}  # of descriptors that threads read from right now
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def read_into(self, path: str, offset: int, buffer: np.ndarray[Any, Any]) -> int:
        """Fill ``buffer`` (C-contiguous) from ``offset`` on; returns the bytes read, fewer only at the file's end."""
        view, done = memoryview(buffer.data).cast("B"), 0
        with self._use(path) as fd, self._timed(len(view)):
            while done < len(view) and (n := read_at(fd, [view[done:]], offset + done)):
                done += n
        return done

    def read_pieces(self, paths: Sequence[str], pieces: np.ndarray[Any, Any], out: np.ndarray[Any, Any]) -> bool:
        """Read pieces of several files at once.

        Args:
            paths: of the files.
            pieces: of dtype :data:`shardstore.store.aio.PIECE`, but ``fd`` is a number in ``paths``; sorted by it.
            out: uint8, contiguous, of shape (bytes,).

        Returns:
            Whether all were read whole.
        """
        step = max(self._max_open // _AT_ONCE, 1)
        firsts = range(0, len(paths), step)
        cuts = [0, *np.searchsorted(pieces["fd"], firsts[1:]).tolist(), len(pieces)]
        return all(
            self._read_together(paths[first : first + step], first, pieces[begin:end], out)
            for first, (begin, end) in zip(firsts, pairwise(cuts), strict=False)
        )

    def _read_together(
        self, paths: Sequence[str], first: int, pieces: np.ndarray[Any, Any], out: np.ndarray[Any, Any]
    ) -> bool:
        with ExitStack() as using:
            fds = np.array([using.enter_context(self._use(path)) for path in paths])
            pieces = pieces.copy()
            pieces["fd"] = fds[pieces["fd"] - first]
            if self.slow:
                for fd, offset, _, nbytes in pieces.tolist():
                    _will_need(fd, offset, nbytes)
            with self._timed(int(pieces["nbytes"].sum()), len(pieces)):
                return aio.read(pieces, out) or _read_singly(pieces, out)

    def announce(self, path: str, offset: int, nbytes: int) -> None:
        """Let the system begin to read, without waiting for it. What is wrong, reading itself will tell."""
        with suppress(OSError), self._use(path) as fd:
            _will_need(fd, offset, nbytes)

    @contextmanager
    def _timed(self, nbytes: int, pieces: int = 1) -> Iterator[None]:
        started = time.perf_counter()
        yield
        slow = time.perf_counter() - started > nbytes / _FAST + pieces * _PIECE_SECONDS
        self.slow = _STAY if slow else max(self.slow - 1, 0)

    @contextmanager
    def _use(self, path: str) -> Iterator[int]:
        if self._pid != os.getpid():
            with _forgetting:
                if self._pid != os.getpid():
                    self._forget()
        with self._lock:
            fd = self._descriptor(path)
            self._users[fd] = self._users.get(fd, 0) + 1
        try:
            yield fd
        finally:
            with self._lock:
                self._users[fd] -= 1
                if not self._users[fd]:
                    del self._users[fd]

    def _descriptor(self, path: str) -> int:
        fd = self._open.pop(path, None)
        if fd is None:
            self._before_open(path)
            self._close_oldest()
            fd = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0))
        self._open[path] = fd
        return fd

    def _close_oldest(self) -> None:
        """Make room for one more, by closing files that no thread is reading from."""
        unused = [(path, fd) for path, fd in self._open.items() if fd not in self._users]
        for path, fd in unused[: max(len(self._open) - self._max_open + 1, 0)]:
            del self._open[path]
            os.close(fd)

    def close(self) -> None:
        """Close all descriptors of this process."""
        if self._pid == os.getpid():
            with self._lock:
                while self._open:
                    os.close(self._open.popitem()[1])

    def __del__(self) -> None:
        # At interpreter shutdown os may be half gone.
        if getattr(self, "_open", None) and os is not None:
            self.close()


def _pread(fd: int, views: list[memoryview], offset: int) -> int:
    return _copy(os.pread(fd, len(views[0]), offset), views[0])


def _seek_and_read(fd: int, views: list[memoryview], offset: int) -> int:
    with _seeking:  # the place in the file is the descriptor's, and threads share that
        os.lseek(fd, offset, os.SEEK_SET)
        return _copy(os.read(fd, len(views[0])), views[0])


def _read_singly(pieces: np.ndarray[Any, Any], out: np.ndarray[Any, Any]) -> bool:
    view = memoryview(out.data)
    for fd, offset, begin, nbytes in pieces.tolist():
        if read_at(fd, [view[begin : begin + nbytes]], offset) != nbytes:
            return False
    return True


_forgetting = threading.Lock()  # the descriptors of another process, by one thread of a forked one
_seeking = threading.Lock()
# Called with one view in a list, as os.preadv is. macOS before 11 has no preadv, Windows neither.
read_at: Callable[[int, list[memoryview], int], int] = (
    os.preadv if hasattr(os, "preadv") else _pread if hasattr(os, "pread") else _seek_and_read
)


def _will_need(fd: int, offset: int, nbytes: int) -> None:
    if hasattr(os, "posix_fadvise"):  # neither macOS nor Windows
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_WILLNEED)


def _copy(data: bytes, view: memoryview) -> int:
    view[: len(data)] = data
    return len(data)


class NewFile:
    """A file being written: under a temporary name until :meth:`commit` makes it durable and gives it its own."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.temp = f"{path}.tmp"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self._file = open(self.temp, "wb", buffering=0)  # noqa: SIM115 (closed by commit or abort)
        self.size = 0

    def write(self, data: bytes) -> None:
        """Append ``data``."""
        view = memoryview(data)
        while len(view):  # a raw write may take less than all, above 2 GiB on Linux
            view = view[self._file.write(view) :]
        self.size += len(data)

    def commit(self) -> None:
        """Flush to the disk and rename."""
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self.temp, self.path)

    def abort(self) -> None:
        """Remove what was written."""
        self._file.close()
        if os.path.exists(self.temp):
            os.unlink(self.temp)
