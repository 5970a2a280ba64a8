"""What ``ReadOptions(verify=...)`` costs: raw pixels read singly and by whole chunks, and encoded pictures.

    python benchmarks/verify.py IMAGES [--copies 18] [--workers 0] [--rounds 5] [--epochs 3] [--folder /tmp/bench]
        [--only ROW ...] [--base ROW ...]

IMAGES is a folder of class folders, copied ``--copies`` times. Warm page cache, batches of 64:

- singly: 224 x 224 pixels, shuffled, so that most samples of a batch lie in a chunk of their own
- chunks: the same store in its order; a batch is eight whole chunks
- encoded: the JPEG files' bytes, shuffled, not decoded

Each run is a process of its own, all in turn; medians over the rounds of each run's median epoch, and the ratio to
``never`` of the same kind. MB/s are of samples, not of what was read for them.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import byhand
import loading
import pictures
from common import Column, in_turn, machine, parser_of, result, table

KINDS = ("singly", "chunks", "encoded")
WAYS = ("never", "chunk", "always")
PIXELS = 224 * 224 * 3


def batches(kind: str, verify: Any, folder: Path, given: argparse.Namespace) -> Any:
    from torch.utils.data import DataLoader

    from shardstore import ReadOptions, ShardDataset

    options = ReadOptions(verify=verify)
    store = folder / "encoded" if kind == "encoded" else loading.store_of(folder / "raw", "", chunk_size=8 * PIXELS)
    fields = ["file", "label"] if kind == "encoded" else None
    data = ShardDataset(store, fields=fields, batch_size=byhand.BATCH, shuffle=kind != "chunks", options=options)
    workers = given.workers
    return DataLoader(data, batch_size=None, num_workers=workers, persistent_workers=workers > 0)


def prepare(given: argparse.Namespace, folder: Path) -> None:
    """The stores: of pixels, and of the files as plain bytes."""
    import shardstore

    loading.prepare("raw", given.images, folder / "raw", given.copies)
    loading.store_of(folder / "raw", "", chunk_size=8 * PIXELS)
    if not (folder / "encoded").exists():
        # Behind one more byte a picture's bytes are data, which no reader decodes.
        files = [{"file": b"\0" + f.read_bytes(), "label": label} for f, label in pictures.files_of(given.images)]
        shardstore.convert(files * given.copies, folder / "encoded", shuffle=True)


def run(name: str, folder: Path, given: argparse.Namespace) -> None:
    kind, verify = name.split(", ")
    loader, rates, seen = batches(kind, verify, folder, given), [], 0
    for _ in range(1 if given.warm_up else given.epochs + 1):
        seen, nbytes, started = 0, 0, time.perf_counter()
        for first, label in loader:
            seen += len(label)
            nbytes += sum(map(len, first)) if kind == "encoded" else first.numel()
        rates.append((seen / (seconds := time.perf_counter() - started), nbytes / 1e6 / seconds))
    rate, speed = map(statistics.median, zip(*(rates[1:] or rates), strict=True))
    result(rate=rate, speed=speed, seen=seen)


def main() -> None:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--copies", type=int, default=18)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=3)
    given = parser.parse_args()
    folder = given.folder / f"verify-{given.copies}"
    if given.run:
        run(given.run, folder, given)
        return
    prepare(given, folder)
    results = in_turn([f"{kind}, {verify}" for kind, verify in itertools.product(KINDS, WAYS)], given)
    print(f"{given.workers} workers; {machine()}; medians of {given.rounds} rounds of {given.epochs} epochs\n")
    columns = [
        Column("rate", "samples/s", spread=True, ratios=True),
        Column("speed", "MB/s"),
        Column("seen", "samples an epoch"),
    ]
    for kind in KINDS:
        some = {name: runs for name, runs in results.items() if name.startswith(f"{kind}, ")}
        if some:
            print(f"{table(some, columns, given.base or [f'{kind}, never'])}\n")


if __name__ == "__main__":
    main()
