"""Many reads with one system call: Linux's ``io_submit``, which has read from the page cache when it returns.

A thread that calls ``preadv`` for each piece gives up the interpreter's lock and waits for it again each time; with
other threads about, of ours or of the DataLoader's queue, that costs as much as the copying (``benchmarks/NOTES.md``).
Here it gives it up once for a whole batch. Structures and numbers are those of the kernel's
``include/uapi/linux/aio_abi.h`` and its tables of system calls. Where there is no such call, or it is not allowed, as
in some sandboxes, :func:`read` returns False and nothing is lost.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

ON = True  # the one switch

PIECE = np.dtype([("fd", "<i8"), ("offset", "<i8"), ("begin", "<i8"), ("nbytes", "<i8")])

_SETUP, _SUBMIT, _GETEVENTS = range(3)
_NUMBERS = {"x86_64": (206, 209, 208), "aarch64": (0, 2, 4)}  # by machine, for programs of 64 bits
_CALLS = _NUMBERS.get(platform.machine()) if sys.platform == "linux" and sys.maxsize > 1 << 32 else None
_AT_ONCE = 64  # pieces: counts against the machine's limit of 65,536 (fs.aio-max-nr), for each thread
_IOCB = np.dtype(
    [
        ("data", "<u8"), ("key", "<u4"), ("rw_flags", "<u4"), ("opcode", "<u2"), ("priority", "<i2"), ("fd", "<u4"),
        ("buffer", "<u8"), ("nbytes", "<u8"), ("offset", "<i8"), ("reserved", "<u8"), ("flags", "<u4"),
        ("result_fd", "<u4"),
    ]
)  # fmt: skip
_EVENT = np.dtype([("data", "<u8"), ("iocb", "<u8"), ("result", "<i8"), ("result2", "<i8")])
_waiting: list[_Context] = []  # to be used by any thread
_made: list[_Context] = []


def _after_fork() -> None:
    _waiting.clear()  # another process's queues
    _made.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def read(pieces: Array, out: Array) -> bool:
    """Read pieces of open files into memory.

    Args:
        pieces: of dtype :data:`PIECE`: descriptor, where in the file, where in ``out``, bytes.
        out: uint8, contiguous, of shape (bytes,).

    Returns:
        Whether all were read whole. If not, any of them may be missing.
    """
    if not ON or _CALLS is None:
        return False
    context = _waiting.pop() if _waiting else _Context.made()
    if context is None:
        return False
    done = all(context.read(pieces[i : i + _AT_ONCE], out) for i in range(0, len(pieces), _AT_ONCE))
    if context.reading is None:
        _waiting.append(context)
    return done


class _Context:
    """A queue of the kernel's, for one thread at a time. It lives as long as the process.

    Attributes:
        reading: what the kernel may be writing into. It stays, and with it the context is never used again, where a
            signal's exception came between a submission and its end.
    """

    def __init__(self, number: int) -> None:
        self._number = ctypes.c_long(number)
        self._iocbs, self._events = np.zeros(_AT_ONCE, _IOCB), np.zeros(_AT_ONCE, _EVENT)
        self._addresses = self._iocbs.ctypes.data + np.arange(_AT_ONCE, dtype=np.uint64) * _IOCB.itemsize
        self.reading: Array | None = None
        _made.append(self)

    @staticmethod
    def made() -> _Context | None:
        """A new one; None where the system refuses."""
        number = ctypes.c_ulong(0)
        return None if _call(_SETUP, ctypes.c_long(_AT_ONCE), ctypes.byref(number)) else _Context(number.value)

    def read(self, pieces: Array, out: Array) -> bool:
        """:func:`read` of a few pieces."""
        count, iocbs = len(pieces), self._iocbs[: len(pieces)]
        for name in ("fd", "nbytes", "offset"):
            iocbs[name] = pieces[name]
        iocbs["buffer"] = out.ctypes.data + pieces["begin"]
        self.reading = out
        sent = _call(_SUBMIT, self._number, ctypes.c_long(count), ctypes.c_void_p(self._addresses.ctypes.data))
        came = 0
        while came < sent:  # on ordinary files all are there; a signal may interrupt the waiting
            events, wanted = ctypes.c_void_p(self._events[came:].ctypes.data), ctypes.c_long(sent - came)
            got = _call(_GETEVENTS, self._number, wanted, wanted, events, None)
            if got < 0 and ctypes.get_errno() != errno.EINTR:
                return False
            came += max(got, 0)
        self.reading = None
        return sent == count and bool(self._events["result"][:count].sum() == pieces["nbytes"].sum())


def _call(number: int, *arguments: Any) -> int:
    assert _CALLS is not None
    return int(_syscall(ctypes.c_long(_CALLS[number]), *arguments))


if _CALLS is not None:
    _syscall = ctypes.CDLL(None, use_errno=True).syscall
    _syscall.restype = ctypes.c_long
