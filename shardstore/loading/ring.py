"""The ring: batches go from a DataLoader's worker to the trainer in memory that both have mapped, and that is reused.

torch would put each batch into shared memory of its own, whose fresh pages both sides pay for. Here a worker owns a few
slots in one anonymous file in memory (``memfd_create``, Linux), and reads into a free one. What travels through the
DataLoader's queue is a few numbers; unpickling them in the trainer maps the file, once, through ``/proc/PID/fd``, and
makes tensors of the slot. When the last of these dies, the trainer notes so in the file, and the worker may use the
slot again. With no slot free, a batch gets memory of its own and travels torch's way.

The file has no name that could be left behind. It starts with two numbers for each slot: of the last time it was sent
(written by the worker alone) and of the last that was returned (by the trainer alone). Nobody needs a lock, which a
finaliser must not take: between the two, a slot belongs to one batch.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from shardstore.loading.memory import Array, Block, lease

_SLOTS = 6  # two that wait in the queue, one being filled, two or three that the trainer holds
_MANY_SLOTS = 32  # of small batches, for a DataLoader with a large prefetch_factor
_SMALL = 1 << 24  # bytes of so many slots
_LIMIT = 1 << 28  # bytes of a ring: batches of which not even three fit travel torch's way
_PAGE = mmap.PAGESIZE


class _Slot(NamedTuple):
    """What travels of a slot."""

    token: int  # of the file: process numbers come again
    pid: int
    fd: int
    nbytes: int  # of the file
    slot: int
    turn: int
    first: int  # where the slot begins
    slot_bytes: int


class _Place(NamedTuple):
    """What travels in a tensor's stead: where in its slot it lies."""

    slot: _Slot
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

    def places(self, values: Sequence[Any]) -> list[Any]:
        """Where each of the values lies that is a tensor in a slot; of others the values themselves."""
        sent: dict[int, _Slot | None] = {}
        return [self._place(value, sent) or value for value in values]

    def _place(self, value: Any, sent: dict[int, _Slot | None]) -> _Place | None:
        if type(value) is not torch.Tensor or not value.numel():
            return None
        address = value.data_ptr()
        for slots in self._files:
            if slots.first <= address < slots.first + slots.nbytes:
                number = slots.number(address)
                key = slots.first + number
                if key not in sent:
                    sent[key] = slots.send(number)
                slot = sent[key]
                if slot is not None:
                    offset = address - slots.first - slot.first
                    return _Place(slot, offset, value.dtype, tuple(value.shape), tuple(value.stride()))
        return None


class _Slots:
    """One file of slots, in the worker."""

    def __init__(self, slot_bytes: int) -> None:
        count = max(min(_SLOTS, _LIMIT // slot_bytes), min(_MANY_SLOTS, _SMALL // slot_bytes))
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
            # Before the numbers: a slot is sent while it still counts as being filled.
            filled = ~np.array(self._filling)
            free = np.flatnonzero(filled & (self._sent == self._returned)[: len(filled)])
            if not len(free):
                return Block()
            slot = int(free[0])
            self._filling[slot] = True
        return Block(lease(self._memory, _PAGE + slot * self.slot_bytes, self.slot_bytes, self._filled(slot)))

    def _filled(self, slot: int) -> Any:
        def back() -> None:
            self._filling[slot] = False

        return back

    def number(self, address: int) -> int:
        return (address - self.first - _PAGE) // self.slot_bytes

    def send(self, slot: int) -> _Slot | None:
        """Note that a slot is sent; None if it already is on its way, pickled for a second time."""
        if self._sent[slot] != self._returned[slot]:
            return None
        turn = self._sent[slot] = int(self._sent[slot]) + 1
        first = _PAGE + slot * self.slot_bytes
        return _Slot(self.token, os.getpid(), self.fd, self.nbytes, slot, turn, first, self.slot_bytes)


def _counts(memory: mmap.mmap) -> tuple[Array, Array]:
    both = np.frombuffer(memory, np.int64, 2 * _MANY_SLOTS).reshape(2, _MANY_SLOTS)
    return both[0], both[1]


class _Mapped:
    """A worker's file, mapped in the trainer."""

    def __init__(self, slot: _Slot) -> None:
        self.pid = slot.pid
        fd = os.open(f"/proc/{slot.pid}/fd/{slot.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self._memory = mmap.mmap(fd, slot.nbytes)
        finally:
            os.close(fd)
        self._returned, self._trainer = _counts(self._memory)[1], os.getpid()

    def lease(self, slot: _Slot) -> Any:
        """The memory of a slot, returned to the worker when its last tensor dies."""
        return lease(self._memory, slot.first, slot.slot_bytes, lambda: self._back(slot))

    def _back(self, slot: _Slot) -> None:
        if os.getpid() == self._trainer:  # a forked process has copies of tensors, not of their slots
            self._returned[slot.slot] = slot.turn


_on = True  # see switch_off
_ring: tuple[int, Ring] | None = None  # of this worker: what is pickled must be found by its address alone
_mapped: dict[int, _Mapped] = {}  # of this process, by the files' tokens
_mapping = threading.Lock()


def _after_fork() -> None:
    global _mapping
    _mapping = threading.Lock()  # another thread may have held it
    _mapped.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


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


def leave(values: Sequence[Any]) -> list[Any]:
    """What travels to the trainer: of tensors that lie in this worker's ring their places, all other values."""
    if _ring is None or _ring[0] != os.getpid():
        return list(values)
    return _ring[1].places(values)


def arrive(values: Sequence[Any]) -> list[Any]:
    """The values that left, in the trainer."""
    slots = {slot: _mapped_file(slot).lease(slot) for slot in {v.slot for v in values if isinstance(v, _Place)}}
    return [_tensor(value, slots[value.slot]) if isinstance(value, _Place) else value for value in values]


def _tensor(place: _Place, memory: Any) -> torch.Tensor:
    count = 1 + sum((n - 1) * s for n, s in zip(place.shape, place.strides, strict=True))
    flat = torch.frombuffer(memory, dtype=place.dtype, count=count, offset=place.offset)
    return flat.as_strided(place.shape, place.strides)


def _mapped_file(slot: _Slot) -> _Mapped:
    with _mapping:
        if slot.token not in _mapped:
            for token in [t for t, m in _mapped.items() if not os.path.exists(f"/proc/{m.pid}")]:
                del _mapped[token]  # its worker has ended; what the user keeps of it, he keeps
            _mapped[slot.token] = _Mapped(slot)
        return _mapped[slot.token]
