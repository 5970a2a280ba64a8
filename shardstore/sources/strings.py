"""Many strings in two arrays: a million Python strings would cost 100 bytes each, and a copy in every forked worker."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class Strings:
    """A packed list of strings.

    Attributes:
        data: their UTF-8 bytes (with surrogateescape), one after the other.
        ends: where each one ends in ``data``.
    """

    data: np.ndarray[Any, np.dtype[np.uint8]]
    ends: Numbers

    @classmethod
    def pack(cls, strings: Iterable[str]) -> Strings:
        """Pack them."""
        data, ends = bytearray(), []
        for string in strings:
            data += string.encode("utf-8", "surrogateescape")
            ends.append(len(data))
        return cls(np.frombuffer(data, np.uint8), np.array(ends, np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    def lengths(self) -> Numbers:
        """The bytes of each."""
        return np.diff(self.ends, prepend=0)

    def encoded(self, number: int) -> bytes:
        """The bytes of one."""
        start = int(self.ends[number - 1]) if number else 0
        return self.data[start : self.ends[number]].tobytes()

    def __getitem__(self, number: int) -> str:
        return self.encoded(number).decode("utf-8", "surrogateescape")

    def take(self, numbers: Numbers) -> Strings:
        """These, in this order."""
        lengths = self.lengths()[numbers]
        ends = np.cumsum(lengths)
        starts = self.ends[numbers] - lengths
        where = np.repeat(starts - (ends - lengths), lengths) + np.arange(int(ends[-1]) if len(ends) else 0)
        return Strings(self.data[where], ends)
