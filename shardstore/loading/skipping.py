"""Leaving out samples that cannot be read, where the user asked for it: found one by one, reported, counted."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from shardstore.errors import DamagedStoreError, ImageError, Problem
from shardstore.loading.samples import SampleReader
from shardstore.store.chunks import Numbers

_UNREADABLE = (DamagedStoreError, ImageError)
LIMIT = 10_000  # failures in a row that a worker bears: some shards of photos; more is no damage but a missing disk


class Skipper:
    """Reads what can be read. A worker's run of more than ``LIMIT`` samples that cannot ends the pass."""

    def __init__(self, samples: SampleReader, count: Callable[[int], None]) -> None:
        self._samples, self._count = samples, count
        self._run, self._lock = 0, threading.Lock()

    def batch(self, numbers: Numbers, stand_ins: Iterable[Numbers]) -> Any:
        """The batch of these samples without those that cannot be read. Where none can, the first of ``stand_ins`` that
        has some takes its place, so that all ranks make as many steps.

        Raises:
            DamagedStoreError, ImageError: the run is too long, or there is no sample that can be read.
        """
        own = True
        for tried in itertools.chain([numbers], stand_ins):
            try:
                batch = self._samples.batch(tried)
            except _UNREADABLE as error:
                last = error
            else:
                self._run = 0
                return batch
            good = [n for n in tried.tolist() if not self._fault(n, report=own)]
            if good:
                return self._samples.batch(np.array(good))
            own = False  # of what stands in, nothing is reported: its turn comes
        raise last

    def stream(self, pieces: Iterable[Numbers], again: Iterable[Numbers]) -> Iterator[Any]:
        """The samples of these numbers, as many as there are numbers: where one cannot be read, the next that can comes
        twice, after the last one the first of ``again``, so that all ranks get as many.

        Raises:
            DamagedStoreError, ImageError: the run is too long, or no sample can be read.
        """
        missing = 0
        for sample in (s for numbers in pieces for s in self._tried(numbers)):
            if isinstance(sample, _UNREADABLE):
                missing, error = missing + 1, sample
                continue
            for _ in range(missing + 1):
                yield sample
            missing = 0
        if not missing:
            return
        self._run = 0  # what follows was counted at its turn
        for sample in (s for numbers in again for s in self._tried(numbers, report=False)):
            if not isinstance(sample, _UNREADABLE):
                yield from (sample for _ in range(missing))
                return
        raise error

    def _tried(self, numbers: Numbers, report: bool = True) -> Iterator[Any]:
        """The samples of these numbers, or why they cannot be read."""
        done = 0
        try:
            for sample in self._samples.samples(numbers):
                done, self._run = done + 1, 0
                yield sample
        except _UNREADABLE:
            for number in numbers[done:].tolist():
                error = self._fault(number, report)
                yield from [error] if error else self._samples.samples(np.array([number]))

    def _fault(self, number: int, report: bool = True) -> DamagedStoreError | ImageError | None:
        """Why a sample cannot be read; None where it can."""
        try:
            self._samples.check(number)
        except _UNREADABLE as error:
            self._run += 1
            if self._run > LIMIT:
                error.add_note(f"more than {LIMIT} samples in a row could not be read: leaving out ends here")
                raise
            if report:
                self._report(error.problem, number)
            return error
        self._run = 0
        return None

    def _report(self, problem: Problem, number: int) -> None:
        with self._lock:
            self._count(1)
        key = self._samples.reader.key(number)
        warnings.warn(f"left out sample {number}{f', key {key}' if key else ''}: {problem}", stacklevel=2)
