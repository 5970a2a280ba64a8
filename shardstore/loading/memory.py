"""Memory for batches, used again when the last array cut from it has died: fresh pages cost as much as the copying."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

_ALIGN = 64  # bytes: a cache line
_FREE = 8  # buffers that wait to be used again: what a user kept for long and then dropped goes back to the system


class Block:
    """The memory of one batch. Arrays are cut from it one after another; what does not fit gets memory of its own.

    Attributes:
        wanted: bytes asked for so far.
    """

    def __init__(self, lease: Any = None) -> None:
        self._lease, self.wanted = lease, 0

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """A new array, C-contiguous, its values undefined."""
        first, count = self.wanted, math.prod(shape)
        self.wanted += -(-count * np.dtype(dtype).itemsize // _ALIGN) * _ALIGN
        if not count or self._lease is None or self.wanted > len(self._lease):
            return np.empty(shape, dtype)
        return np.frombuffer(self._lease, dtype, count, first).reshape(shape)


class Buffers(Protocol):
    """Where blocks come from."""

    def block(self) -> Block:
        """Memory for the next batch."""

    def learn(self, block: Block) -> None:
        """Take note of how much a batch wanted."""


class Recycled:
    """Buffers of this process: those in use, and a few that were."""

    def __init__(self) -> None:
        self._free: list[Array] = []
        self._nbytes = 0

    def block(self) -> Block:
        """Memory for the next batch; the first batch tells how much that is."""
        if not self._nbytes:
            return Block()
        try:
            memory = self._free.pop()
        except IndexError:
            memory = np.empty(self._nbytes, np.uint8)
        return Block(lease(memory.data, 0, len(memory), lambda: self._back(memory)))

    def _back(self, memory: Array) -> None:
        if len(memory) == self._nbytes and len(self._free) < _FREE:
            self._free.append(memory)

    def learn(self, block: Block) -> None:
        """Take note of how much a batch wanted."""
        if block.wanted > self._nbytes:
            self._nbytes = block.wanted
            self._free.clear()


def lease(memory: Any, first: int, nbytes: int, back: Callable[[], None]) -> Any:
    """A part of writable memory, as an object with the buffer protocol; ``back`` is called when the last array or
    tensor that was made of it has died."""
    part = (ctypes.c_char * nbytes).from_buffer(memory, first)
    weakref.finalize(part, back).atexit = False
    return part
