"""Private memory of a worker, and the time to a first batch: shardstore beside ImageFolder, with few files and many.

    python benchmarks/memory.py IMAGES [--copies 18] [--times 1 8] [--workers 2] [--batches N] [--rounds 3]
        [--folder /tmp/bench] [--only ROW ...] [--base ROW ...]

IMAGES is a folder of class folders, copied ``--copies`` times; that folder is read with each file ``--times`` times
(hard links: a list of files does not know). The original JPEG files, random crops of 224, shuffled batches of 64, one
epoch, or its first ``--batches``. Linux.

- first batch: seconds from the process's start; the page cache is warm
- worker: private memory (``Private_*`` of ``/proc/PID/smaps_rollup``) of the largest worker, its most in the epoch
- all: the trainer and its workers together, what they share counted once (``Pss``)

Each run is a process of its own, all in turn; medians over the rounds.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import byhand
import loading
import pictures
from common import (
    Column,
    children,
    in_turn,
    largest_worker_mb,
    machine,
    memory_kb,
    parser_of,
    result,
    since_start,
    table,
)

EVERY = 5  # batches between two looks
LOADERS = {"ImageFolder": byhand.imagefolder, "shardstore": loading.ours()}


def folder_of(given: argparse.Namespace, times: int) -> Path:
    base = given.folder / f"jpeg-{given.copies}"
    return base if times == 1 else base.with_name(f"{base.name}-times-{times}")


def run(batches: Iterable[Any], count: int | None) -> None:
    first, worker, together, seen = 0.0, 0.0, 0.0, 0
    for k, batch in enumerate(itertools.islice(batches, count)):
        int(batch[0][0, 0, 0, 0])
        seen += len(batch[0])
        first = first or since_start()
        if k % EVERY == EVERY - 1:
            worker = max(worker, largest_worker_mb())
            together = max(together, sum(memory_kb(p, "Pss:") for p in ["self", *children()]) / 1e3)
    result(first=first, worker=worker, together=together, seen=seen)


def main() -> None:
    parser = parser_of(__doc__, rounds=3)
    parser.add_argument("--copies", type=int, default=18)
    parser.add_argument("--times", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batches", type=int)
    given = parser.parse_args()
    rows = {
        f"{name}, {n}x": partial(load, folder_of(given, n), given)
        for n in given.times
        for name, load in LOADERS.items()
    }
    if given.run:
        run(rows[given.run](), 1 if given.warm_up else given.batches)
        return
    loading.prepare("jpeg", given.images, folder_of(given, 1), given.copies)
    for times in given.times:
        pictures.linked(folder_of(given, 1) / "imgs", folder_of(given, times) / "imgs", times)
    results = in_turn(rows, given)
    print(f"{given.workers} workers; {machine()}; medians of {given.rounds} rounds\n")
    columns = [
        Column("seen", "images read"),
        Column("first", "first batch, s", ".2f", spread=True, ratios=True),
        Column("worker", "worker, private MB", spread=True),
        Column("together", "all, MB"),
    ]
    print(table(results, columns, given.base or list(rows)[:1]))


if __name__ == "__main__":
    main()
