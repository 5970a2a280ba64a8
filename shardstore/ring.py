"""The ring: batches go from a DataLoader's worker to the trainer in memory that both have mapped, and that is reused.

torch would put each batch into shared memory of its own, whose fresh pages both sides pay for. Here a worker owns a few
slots in one anonymous file in memory (``memfd_create``, Linux), and reads into a free one. What travels through the
DataLoader's queue is a few numbers; unpickling them in the trainer maps the file, once, through ``/proc/PID/fd``, and
makes tensors of the slot. When the last of these dies, the trainer notes so in the file, and the worker may use the
slot again. With no slot free, a batch gets memory of its own and travels torch's way.

The file has no name that could be left behind. It starts with two counts for each slot: how often it was sent (written
by the worker alone) and returned (by the trainer alone).
"""

from __future__ import annotations

import mmap
import os
import threading
from typing import Any, NamedTuple

import numpy as np
import torch

from shardstore.memory import Array, Block, lease

_SLOTS = 6  # two that wait in the queue, one being filled, two or three that the trainer holds
_LIMIT = 1 << 28  # bytes of a ring: batches of which not even three fit travel torch's way
_PAGE = mmap.PAGESIZE


class _Place(NamedTuple):
    """Where a tensor lies: what travels in its stead."""

    token: int  # of the file: process numbers come again
    pid: int
    fd: int
    nbytes: int  # of the file
    slot: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Ring:
    """The slots of this worker. Until the first batch has told how large slots must be, and where the system has no
    ``memfd_create``, blocks are empty."""

    def __init__(self) -> None:
        self._files: list[_Slots] = []  # the last one is in use; batches of earlier ones may be on their way

    def block(self) -> Block:
        """A free slot."""
        return self._files[-1].block() if self._files and _on else Block()

    def learn(self, block: Block) -> None:
        """Make slots as large as the largest batch."""
        largest = self._files[-1].slot_bytes if self._files else 0
        if _on and largest < block.wanted <= _LIMIT // 3 and hasattr(os, "memfd_create"):
            # Pictures of many sizes: with some room, few files are made until one is large enough.
            wanted = block.wanted if not largest else block.wanted * 5 // 4
            self._files.append(_Slots(-(-wanted // _PAGE) * _PAGE))

    def place(self, tensor: torch.Tensor) -> _Place | None:
        """Where this tensor lies in a slot, which is then counted as sent; None if it lies elsewhere."""
        for slots in self._files:
            if slots.first <= tensor.data_ptr() < slots.first + slots.nbytes:
                return slots.place(tensor)
        return None


class _Slots:
    """One file of slots, in the worker."""

    def __init__(self, slot_bytes: int) -> None:
        count = min(_SLOTS, _LIMIT // slot_bytes)
        self.slot_bytes, self.nbytes = slot_bytes, _PAGE + count * slot_bytes
        self.fd = os.memfd_create("shardstore", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.nbytes)
        self.token = int.from_bytes(os.urandom(8), "little")
        self._memory = mmap.mmap(self.fd, self.nbytes)
        self.first = int(np.frombuffer(self._memory, np.uint8).ctypes.data)
        self._sent, self._returned = _counts(self._memory)
        self._filling, self._lock = [False] * count, threading.Lock()

    def block(self) -> Block:
        with self._lock:
            free = np.flatnonzero((self._sent == self._returned)[: len(self._filling)] & ~np.array(self._filling))
            if not len(free):
                return Block()
            slot = int(free[0])
            self._filling[slot] = True
        return Block(lease(self._memory, _PAGE + slot * self.slot_bytes, self.slot_bytes, self._filled(slot)))

    def _filled(self, slot: int) -> Any:
        def back() -> None:
            self._filling[slot] = False

        return back

    def place(self, tensor: torch.Tensor) -> _Place:
        offset = tensor.data_ptr() - self.first
        slot = (offset - _PAGE) // self.slot_bytes
        self._sent[slot] += 1
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        return _Place(self.token, os.getpid(), self.fd, self.nbytes, slot, offset, tensor.dtype, shape, strides)


def _counts(memory: mmap.mmap) -> tuple[Array, Array]:
    both = np.frombuffer(memory, np.int64, 2 * _SLOTS).reshape(2, _SLOTS)
    return both[0], both[1]


class _Mapped:
    """A worker's file, mapped in the trainer."""

    def __init__(self, place: _Place) -> None:
        self.pid = place.pid
        fd = os.open(f"/proc/{place.pid}/fd/{place.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self._memory = mmap.mmap(fd, place.nbytes)
        finally:
            os.close(fd)
        self._returned = _counts(self._memory)[1]
        self._lock, self._trainer = threading.Lock(), os.getpid()

    def tensor(self, place: _Place) -> torch.Tensor:
        item = place.dtype.itemsize
        nbytes = item * (1 + sum((n - 1) * s for n, s in zip(place.shape, place.strides, strict=True)))
        part = lease(self._memory, place.offset, nbytes, lambda: self._back(place.slot))
        return torch.frombuffer(part, dtype=place.dtype).as_strided(place.shape, place.strides)

    def _back(self, slot: int) -> None:
        if os.getpid() == self._trainer:  # a forked process has copies of tensors, not of their slots
            with self._lock:
                self._returned[slot] += 1


_on = True  # see switch_off
_ring: tuple[int, Ring] | None = None  # of this worker: what is pickled must be found by its address alone
_mapped: dict[int, _Mapped] = {}  # of this process, by the files' tokens
_mapping = threading.Lock()


def of_this_worker() -> Ring:
    """The ring of this process."""
    global _ring
    if _ring is None or _ring[0] != os.getpid():
        _ring = os.getpid(), Ring()
    return _ring[1]


def switch_off() -> None:
    """Let this worker's batches travel torch's way."""
    global _on
    _on = False


def place_of(value: Any) -> Any:
    """What travels to the trainer in place of a tensor that lies in this worker's ring; any other value itself."""
    if _ring is None or _ring[0] != os.getpid() or type(value) is not torch.Tensor or not value.numel():
        return value
    return _ring[1].place(value) or value


def value_at(place: Any) -> Any:
    """The tensor at a place, or the value that travelled itself."""
    if not isinstance(place, _Place):
        return place
    with _mapping:
        if place.token not in _mapped:
            for token in [t for t, m in _mapped.items() if not os.path.exists(f"/proc/{m.pid}")]:
                del _mapped[token]  # its worker has ended; what the user keeps of it, he keeps
            _mapped[place.token] = _Mapped(place)
        mapped = _mapped[place.token]
    return mapped.tensor(place)
