"""Reading a compressed store in its order: shardstore beside tensorstore and zarr-python, on the same zstd Zarr store.

    python benchmarks/sequential.py IMAGES [--copies 18] [--threads 1] [--rounds 5] [--epochs 3] [--batch-size 64]
        [--folder /tmp/bench] [--only ROW ...] [--base ROW ...] [--python ROW=/path/to/python]

IMAGES is a folder of class folders, copied ``--copies`` times into a store of 224 x 224 pixels. One process on
``--threads`` cores (the process is bound to them, and each library is told so); every row gives all batches as uint8
tensors and their labels, not shuffled, from a warm page cache. Medians over the rounds of each run's median epoch; the
first epoch of a run does not count.

- shardstore: ``ShardDataset(store, batch_size=64)`` in a DataLoader without workers; with more than one thread,
  ``threads=N``
- tensorstore: driver ``zarr3``, ranges of 64; N + 1 reads in flight, so that no core waits
- zarr-python: ``zarr.open_group(store)["image"][a:b]``
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pictures
from common import Column, in_turn, machine, parser_of, result, table

Batches = Iterable[tuple[Any, Any]]
Reader = Callable[[Path, argparse.Namespace], Callable[[], Batches]]  # opens; what it returns reads one epoch


def ranges(count: int, size: int) -> Iterator[slice]:
    return (slice(a, min(a + size, count)) for a in range(0, count, size))


def labels_of(store: Path) -> np.ndarray:
    import zarr

    return np.asarray(zarr.open_group(store, mode="r")["label"][:])


def ours(store: Path, given: argparse.Namespace) -> Callable[[], Batches]:
    from torch.utils.data import DataLoader

    from shardstore import ShardDataset

    threads = given.threads if given.threads > 1 else 0
    data = DataLoader(ShardDataset(store, batch_size=given.batch_size, threads=threads), batch_size=None)
    return lambda: data


def tensorstore(store: Path, given: argparse.Namespace) -> Callable[[], Batches]:
    import tensorstore as ts
    import torch

    limit = {"limit": given.threads}
    context = ts.Context({"data_copy_concurrency": limit, "file_io_concurrency": limit})
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{store / 'image'}/"}}
    array, labels = ts.open(spec, context=context, open=True, read=True).result(), labels_of(store)

    def read() -> Batches:
        flying: deque[Any] = deque()
        for part in ranges(len(labels), given.batch_size):
            flying.append((array[part].read(), labels[part]))
            if len(flying) > given.threads:
                image, label = flying.popleft()
                yield torch.from_numpy(image.result()), torch.from_numpy(label)
        for image, label in flying:
            yield torch.from_numpy(image.result()), torch.from_numpy(label)

    return read


def zarr_python(store: Path, given: argparse.Namespace) -> Callable[[], Batches]:
    import torch
    import zarr

    zarr.config.set({"threading.max_workers": given.threads})
    array, labels = zarr.open_group(store, mode="r")["image"], labels_of(store)
    return lambda: (
        (torch.from_numpy(array[part]), torch.from_numpy(labels[part]))
        for part in ranges(len(labels), given.batch_size)
    )


READERS: dict[str, Reader] = {"tensorstore": tensorstore, "zarr-python": zarr_python, "shardstore": ours}


def run(name: str, store: Path, given: argparse.Namespace) -> None:
    cores = sorted(os.sched_getaffinity(0))[: given.threads]
    os.sched_setaffinity(0, cores)  # before any library counts them
    read, rates = READERS[name](store, given), []
    for _ in range(1 if given.warm_up else given.epochs + 1):
        seen, started = 0, time.perf_counter()
        for images, _labels in read():
            int(images[-1, 0, 0, 0])
            seen += len(images)
        rates.append(seen / (time.perf_counter() - started))
    result(rate=statistics.median(rates[1:] or rates), seen=seen)


def main() -> None:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--copies", type=int, default=18)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    given = parser.parse_args()
    folder = given.folder / f"sequential-{given.copies}"
    store = folder / "zstd.zarr"
    if given.run:
        run(given.run, store, given)
        return
    if not store.exists():
        import shardstore

        images = pictures.folder_of(given.images, folder / "imgs", given.copies, pictures.original)
        shardstore.convert(images, store, store="pixels", size=224, codec="zstd")
    results = in_turn(READERS, given)
    print(f"{given.threads} threads, batches of {given.batch_size}; {machine()}; medians of {given.rounds} rounds\n")
    columns = [Column("rate", "images/s", spread=True, ratios=True), Column("seen", "images an epoch")]
    print(table(results, columns, given.base or ["tensorstore", "zarr-python"]))


if __name__ == "__main__":
    main()
