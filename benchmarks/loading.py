"""Loading speed: shardstore's ways beside what people write or install instead, on the same pictures.

    python benchmarks/loading.py IMAGES [--copies 18] [--kind raw|small|jpeg|large|short] [--workers 2] [--rounds 5]
        [--epochs 6] [--consume touch|copy] [--folder /tmp/bench] [--only ROW ...] [--base ROW ...]
        [--python ffcv=/path/to/python mds,litdata=/another]

IMAGES is a folder of class folders; its pictures are copied ``--copies`` times. All loaders give shuffled batches of 64
(uint8):

- raw: pictures of 224 x 224 as pixels
- small: pictures of 32 x 32 as pixels, 60,000 of them
- jpeg: the original JPEG files, decoded, a random crop resized to 224
- large: the same of pictures of 3 megapixels, made from the originals (3 copies by default)
- short: the same of pictures whose short side is 256: files made by Pillow, and a store of the originals that was made
  with ``resize_short=256``

Each run is a process of its own, all in turn, so that a machine whose speed drifts treats them alike; the page cache is
warm, and workers stay from epoch to epoch. images/s are from an epoch's 11th batch to its last: workers start and end
outside of that, inside of the whole epoch's seconds. ``--consume copy`` copies each batch once more, as to a device.
Medians over the rounds of each run's median epoch, ratios round by round; first batch: from the process's start;
private memory: of the largest worker.

What is not installed is left out. The extra ``bench`` has all but FFCV (builds from source) and MosaicML's streaming
(rows ``mds``; wants an older NumPy): they get an interpreter of their own by ``--python``, which needs no shardstore.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import byhand
import numpy as np
import peers
import pictures
from common import Column, in_turn, largest_worker_mb, machine, parser_of, result, since_start, table

SKIP = 10  # batches at an epoch's start that do not count
Loader = Callable[[Path, argparse.Namespace], Iterable[Any]]

# -- ours -------------------------------------------------------------------------------------------------------------


def store_of(folder: Path, ending: str, **options: Any) -> Path:
    """A store of the folder's JPEG files (of ``originals`` where they have to be resized), or of its pixels."""
    import shardstore

    out = folder / f"store{''.join(f'-{value}' for value in options.values())}{ending}"
    if not out.exists():
        source: Any = folder / ("originals" if "resize_short" in options else "imgs")
        if source.exists():
            options["store"] = "encoded"
        else:
            images, labels = byhand.pixels(folder)
            source = [{"image": a, "label": n} for a, n in zip(images, labels.tolist(), strict=True)]
        shardstore.convert(source, out, shuffle=True, **options)
    return out


def ours(ending: str = "", how: str = "batches", **options: Any) -> Loader:
    def load(folder: Path, given: argparse.Namespace) -> Iterable[Any]:
        from torch.utils.data import DataLoader

        from shardstore import ShardDataset
        from shardstore.transforms import RandomResizedCrop

        store = store_of(folder, ending, **options)
        transform = RandomResizedCrop(224) if (folder / "imgs").exists() else None
        if how == "samples":
            data = ShardDataset(store, shuffle=True, transform=transform)
            return byhand.loader(data, given)
        threads = max(given.workers, 1) if how == "threads" else 0
        data = ShardDataset(store, batch_size=byhand.BATCH, shuffle=True, threads=threads, transform=transform)
        workers = 0 if threads else given.workers
        return DataLoader(data, batch_size=None, num_workers=workers, persistent_workers=workers > 0)

    return load


# -- what is measured -------------------------------------------------------------------------------------------------

THREE_WAYS = {"shardstore npy": ours(), **{f"shardstore npy, {how}": ours(how=how) for how in ("samples", "threads")}}
LOADERS: dict[str, dict[str, Loader]] = {
    "raw": {
        "memmap by hand": byhand.memmap,
        "h5py by hand": byhand.h5py_by_hand,
        "zarr by hand": byhand.zarr_by_hand,
        "mds": peers.mds_pixels,
        "ffcv": peers.ffcv_pixels,
        "shardstore zarr": ours(".zarr"),
        "shardstore hdf5": ours(".h5"),
        **THREE_WAYS,
    },
    "small": {"memmap by hand": byhand.memmap, "ffcv": peers.ffcv_pixels, **THREE_WAYS},
    "jpeg": {
        "ImageFolder": byhand.imagefolder,
        "webdataset": peers.webdataset,
        "mds": peers.mds_jpegs,
        "litdata": peers.litdata,
        "datasets": peers.datasets,
        "array_record": peers.array_record,
        "ffcv": peers.ffcv_jpegs,
        **THREE_WAYS,
    },
    "large": {"ImageFolder": byhand.imagefolder, "ffcv": peers.ffcv_jpegs, **THREE_WAYS},
    "short": {
        "ImageFolder": byhand.imagefolder,
        "ffcv": peers.ffcv_jpegs,
        "shardstore npy, those files": ours(),
        "shardstore npy, resize_short": ours(resize_short=256),
        "shardstore npy, resize_short, threads": ours(how="threads", resize_short=256),
    },
}


def prepare(kind: str, source: Path, folder: Path, copies: int) -> None:
    """What the loaders of a kind find in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "raw":
        pictures.pixels(source, folder, 224, copies * len(pictures.files_of(source)))
    elif kind == "small":
        pictures.pixels(source, folder, 32, 60_000)
    elif kind == "short":
        for name, make in (("imgs", pictures.short_256), ("originals", pictures.original)):
            pictures.folder_of(source, folder / name, copies, make, pictures.at_least_256)
    else:
        make = pictures.three_megapixels if kind == "large" else pictures.original
        pictures.folder_of(source, folder / "imgs", copies, make)


def epoch(batches: Iterable[Any], at_batch: Callable[[int, Any], None]) -> dict[str, float]:
    """One pass: its images, its seconds, and images a second without the first batches and the end."""
    started = time.perf_counter()
    seen, times = [0], [started]
    for k, batch in enumerate(batches):
        int(batch[0][0, 0, 0, 0])
        at_batch(k, batch[0])
        seen.append(seen[-1] + len(batch[0]))
        times.append(time.perf_counter())
    skip = min(SKIP, len(seen) // 2)
    rate = (seen[-1] - seen[skip]) / (times[-1] - times[skip])
    return {"rate": rate, "seen": seen[-1], "epoch": time.perf_counter() - started}


def run(load: Loader, folder: Path, given: argparse.Namespace) -> None:
    numbers: dict[str, float] = {}
    sink = np.empty(0, np.uint8)

    def at_batch(k: int, images: Any) -> None:
        nonlocal sink
        if "first" not in numbers:
            numbers["first"] = since_start()
            sink = np.empty_like(images.numpy())  # with its strides, as on a device
        if given.consume == "copy":
            sink[: len(images)] = images.numpy()
        if k == 2 * SKIP and "memory" not in numbers and (largest := largest_worker_mb()):
            numbers["memory"] = largest

    batches = load(folder, given)
    epochs = [epoch(batches, at_batch) for _ in range(1 if given.warm_up else given.epochs)]
    result(**{key: statistics.median(e[key] for e in epochs) for key in epochs[0]}, **numbers)


def main() -> None:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--copies", type=int)
    parser.add_argument("--kind", choices=list(LOADERS), default="raw")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--consume", choices=("touch", "copy"), default="touch")
    given = parser.parse_args()
    copies = given.copies or (3 if given.kind == "large" else 18)
    folder, loaders = given.folder / f"{given.kind}-{copies}", LOADERS[given.kind]
    if given.run:
        run(loaders[given.run], folder, given)
        return
    prepare(given.kind, given.images, folder, copies)
    results = in_turn(loaders, given)
    print(f"{given.kind}: {given.workers} workers or threads, --consume {given.consume}; {machine()};")
    print(f"medians of {given.rounds} rounds of {given.epochs} epochs\n")
    columns = [
        Column("rate", "images/s", spread=True, ratios=True),
        Column("epoch", "whole epoch, s", ".2f"),
        Column("first", "first batch, s", ".2f"),
        Column("memory", "private MB"),
        Column("seen", "images an epoch"),
    ]
    print(table(results, columns, given.base or [next(iter(loaders)), "ffcv"]))


if __name__ == "__main__":
    main()
