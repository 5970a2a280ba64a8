"""Which epoch a pass is: counted in memory that the trainer shares with the workers of its DataLoaders.

Nothing is called in the trainer when a pass begins, and every worker is a process of its own, so the workers settle it
among themselves: the first of a pass takes the next epoch and notes which pass that was. A pass is told from others by
how many processes the trainer had started before (workers of one pass are started in a row, with fewer other processes
among them than workers) and, as workers may persist, by how many passes the worker has made. torch's ``base_seed``
would not do: a user who seeds before each pass repeats it.

There is no lock, which could not be pickled: every cell is written in one piece, and all workers of a pass write the
same.
"""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from shardstore.errors import OptionError, Problem

EPOCHS = 1 << 28  # epoch, workers (8 bits), passes (7) and processes (20) share the 63 bits of a cell
_MARKS, _STARTS = 1 << 15, 1 << 20
_NEXT, _CURRENT, _LOADED_EPOCH, _LOADED_BATCH = range(4)
_TAKEN = 4  # from here: the latest passes and their epochs
_TAKEN_COUNT = 8
_BEGUN = _TAKEN + _TAKEN_COUNT  # from here: the batches that they began at
_SKIPPED = _BEGUN + _TAKEN_COUNT  # from here: samples that each worker left out
_SKIPPED_COUNT = 256

Cells = np.ndarray[Any, np.dtype[np.int64]]


class Passes:
    """Counts the passes over a data set, alike in the trainer and in all workers of a pass.

    Each trainer (a rank) counts for itself: a process that is no worker of the owner makes cells of its own, from what
    the owner's said then.
    """

    def __init__(self) -> None:
        self._own: tuple[int, torch.Tensor] = _new_cells()
        self._inherited: tuple[int, torch.Tensor] | None = None
        self._made = 0  # passes of this process

    def __getstate__(self) -> dict[str, Any]:
        return {"table": self._table(), "made": self._made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A worker will count in its trainer's cells; a rank that was started with a pickled data set, and the workers
        # that it forks, in its own.
        self._inherited, self._made = state["table"], state["made"]
        self._own = _new_cells(state["table"][1])

    @property
    def next_epoch(self) -> int:
        """The epoch of the next pass."""
        return int(self._cells()[_NEXT])

    @property
    def epoch(self) -> int:
        """The epoch of the pass that began last, or, before any has, of the next."""
        return int(self._cells()[_CURRENT])

    @property
    def skipped(self) -> int:
        """Samples that all workers have left out."""
        return int(self._cells()[_SKIPPED:].sum())

    def count_skipped(self, samples: int) -> None:
        """Add to the samples left out."""
        info = get_worker_info()
        self._cells()[_SKIPPED + (info.id if info else 0) % _SKIPPED_COUNT] += samples

    def first_batch(self, epoch: int) -> int:
        """The batch that a pass of this epoch begins at: 0 but where a position was loaded."""
        cells = self._cells()
        return int(cells[_LOADED_BATCH]) if cells[_LOADED_EPOCH] == epoch else 0

    def set(self, epoch: int, batch: int | None = None) -> None:
        """Let the next pass be of this epoch, and begin at this batch. Without one, a position that was loaded for this
        very pass stays: a loop that sets every epoch may set the first one too."""
        check_epoch(epoch)
        cells = self._cells()
        waiting = cells[_NEXT] == cells[_LOADED_EPOCH] == epoch
        if batch is not None or not waiting:
            cells[_LOADED_EPOCH], cells[_LOADED_BATCH] = epoch, batch or 0
        cells[_CURRENT] = cells[_NEXT] = epoch

    def begin(self) -> tuple[int, int]:
        """Begin a pass of this process. Returns its epoch, and the batch that it begins at."""
        self._made += 1
        cells, info = self._cells(), get_worker_info()
        epoch = int(cells[_NEXT])  # before the marks: another worker writes them first
        first = self.first_batch(epoch)
        if info is not None:
            started = (multiprocessing.current_process()._identity[-1] - info.id) % _STARTS
            found = self._find(cells, started, info.num_workers)
            if found is not None:
                return found
            mark = started * _MARKS + ((self._made & 127) << 8 | info.num_workers & 255)
            cells[_BEGUN + epoch % _TAKEN_COUNT] = first
            cells[_TAKEN + epoch % _TAKEN_COUNT] = mark * EPOCHS + epoch
        self._write(cells, epoch)
        return epoch, first

    def _find(self, cells: Cells, started: int, workers: int) -> tuple[int, int] | None:
        """What another worker of this pass has noted; None for the first one."""
        found = None
        for i, cell in enumerate(cells[_TAKEN:_BEGUN].tolist()):
            if not cell or not _same_loader(cell, started, workers):
                continue
            older = (self._made - (cell // EPOCHS >> 8)) & 127
            noted = int(cell % EPOCHS), int(cells[_BEGUN + i])
            if older == 0:
                return noted
            if older >= 64:  # a later one has begun: this pass was broken off, and nobody waits for what it gives
                found = noted
            elif older > 4:
                cells[_TAKEN + i] = 0  # of an old pass of these workers: its number will come again
        return found

    def begin_at(self, epoch: int) -> None:
        """Begin a pass of this process, of a known epoch."""
        self._made += 1
        self._write(self._cells(), epoch)

    @staticmethod
    def _write(cells: Cells, epoch: int) -> None:
        cells[_CURRENT] = epoch
        cells[_NEXT] = (epoch + 1) % EPOCHS

    def _cells(self) -> Cells:
        return self._table()[1].numpy()

    def _table(self) -> tuple[int, torch.Tensor]:
        parent = multiprocessing.parent_process() if get_worker_info() else None
        trainer = parent.pid if parent else os.getpid()
        for table in (self._own, self._inherited):
            if table is not None and table[0] == trainer:
                return table
        if parent:
            raise OptionError(
                Problem(
                    "a training process was forked with a data set in hand, and its workers cannot know the epoch",
                    hint="Make the data set in the training process, or call set_epoch there before the first pass.",
                )
            )
        self._own = _new_cells(self._own[1])
        return self._own


def check_epoch(epoch: int) -> None:
    """Raise OptionError for what is no number of an epoch."""
    if not 0 <= epoch < EPOCHS:
        raise OptionError(f"an epoch must be in 0 .. {EPOCHS - 1}; got {epoch}")


def _same_loader(cell: int, started: int, workers: int) -> bool:
    """Whether a worker belongs to the loader of a pass that has been noted."""
    # The trainer may start other processes among the workers; up to W - 1, these are no later W workers.
    apart = (cell // EPOCHS // _MARKS - started) % _STARTS
    return cell // EPOCHS % 256 == workers & 255 and min(apart, _STARTS - apart) < workers


def _new_cells(old: torch.Tensor | None = None) -> tuple[int, torch.Tensor]:
    cells = torch.zeros(_SKIPPED + _SKIPPED_COUNT, dtype=torch.int64)
    if old is not None:
        cells.copy_(old)
    else:
        cells[_LOADED_EPOCH] = -1
    return os.getpid(), cells.share_memory_()  # type: ignore[no-untyped-call]
