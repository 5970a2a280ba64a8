"""A lock that ends with the process that has it, however that ends."""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress

_POLL = 0.05
_TAKEN = (errno.EAGAIN, errno.EACCES, errno.EDEADLK)
_UNKNOWN = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # the file system has no locks


class Lock:
    """A file that one living process has at a time. However the process ends, the lock ends with it, and with the
    processes that it has forked: these may still be writing where the lock keeps others off.

    Where the file system knows no locks (some network mounts), everybody gets it.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = -1

    def take(self, seconds: float) -> bool:
        """Wait so long for it; whether it could be had.

        Raises:
            FileNotFoundError: its folder is gone.
        """
        end = time.monotonic() + seconds
        while True:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
            try:
                # Who had it may have removed the file: then another may have made and locked a new one.
                if _lock(fd) and os.path.samestat(os.fstat(fd), os.stat(self.path)):
                    self._fd, fd = fd, -1
                    return True
            except FileNotFoundError:
                continue
            finally:
                if fd >= 0:
                    os.close(fd)
            if time.monotonic() > end:
                return False
            time.sleep(_POLL)

    def remove(self) -> None:
        """Remove the file and let go."""
        if os.name == "posix":
            with suppress(FileNotFoundError):
                os.unlink(self.path)  # while it is ours
            self.release()
        else:
            self.release()
            with suppress(OSError):  # an open file stays, and then it is another's
                os.unlink(self.path)

    def release(self) -> None:
        """Let go, for forked processes too."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            _unlock(fd)
            os.close(fd)


def _lock(fd: int) -> bool:
    """Lock an open file without waiting; False where another process has it."""
    try:
        if os.name == "posix":
            import fcntl

            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            import msvcrt

            msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        if error.errno not in _UNKNOWN:
            raise
    return True


def _unlock(fd: int) -> None:
    with suppress(OSError):
        if os.name == "posix":
            import fcntl

            fcntl.flock(fd, fcntl.LOCK_UN)
        else:
            import msvcrt

            msvcrt.locking(fd, msvcrt.LK_UNLCK, 1)  # type: ignore[attr-defined]
