"""The pictures that the benchmarks read, made from a folder of class folders. What is there is not made again."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

Make = Callable[[Path, Path], None]  # source file, target file
Wanted = Callable[[Path], bool]


def files_of(folder: Path) -> list[tuple[Path, int]]:
    """All files with the number of their class, in ImageFolder's order."""
    classes = sorted(p for p in folder.iterdir() if p.is_dir())
    return [(file, label) for label, c in enumerate(classes) for file in sorted(c.iterdir())]


def remove(path: Path) -> None:
    """A file or a folder, if it is there."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def folder_of(source: Path, target: Path, copies: int, make: Make, wanted: Wanted = lambda file: True) -> Path:
    """``target``: ``copies`` files of each wanted picture of ``source``, made once by ``make``, then copied.

    Real copies, so that the page cache has as much to hold as with so many pictures.
    """
    if target.exists():
        return target
    part = target.with_name(target.name + ".part")
    remove(part)
    files = [file for file, _ in files_of(source) if wanted(file)]
    with ProcessPoolExecutor() as pool:
        list(pool.map(partial(_one, part, copies, make), files, chunksize=8))
    part.rename(target)
    return target


def _one(target: Path, copies: int, make: Make, file: Path) -> None:
    where = target / file.parent.name
    where.mkdir(parents=True, exist_ok=True)
    first = where / f"000_{file.stem}.jpg"
    make(file, first)
    for copy in range(1, copies):
        shutil.copyfile(first, where / f"{copy:03d}_{file.stem}.jpg")


def original(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)


def three_megapixels(source: Path, target: Path) -> None:
    """Enlarged, so there is less detail and fewer bytes than in a camera's picture of that size."""
    _resized(source, target, lambda width, height: (3e6 / (width * height)) ** 0.5)


def short_256(source: Path, target: Path) -> None:
    _resized(source, target, lambda width, height: 256 / min(width, height))


def _resized(source: Path, target: Path, factor: Callable[[int, int], float]) -> None:
    from PIL import Image

    with Image.open(source) as image:
        by = factor(*image.size)
        size = (round(image.width * by), round(image.height * by))
        image.resize(size, Image.Resampling.BICUBIC).save(target, "JPEG", quality=90, subsampling="4:2:0")


def at_least_256(file: Path) -> bool:
    from PIL import Image

    with Image.open(file) as image:
        return min(image.size) >= 256


def linked(source: Path, target: Path, times: int) -> Path:
    """A folder in which each file of ``source`` stands ``times`` times, without more room on the disk."""
    if not target.exists():
        for file, _ in files_of(source):
            (target / file.parent.name).mkdir(parents=True, exist_ok=True)
            for i in range(times):
                os.link(file, target / file.parent.name / f"{i:03d}_{file.name}")
    return target


def pixels(source: Path, folder: Path, size: int, count: int) -> None:
    """``folder/pixels.npy``: ``count`` pictures as one array, ``size`` x ``size``; ``labels.npy``: their classes."""
    import shardstore

    if (folder / "labels.npy").exists():
        return
    pool = folder / "pool"
    shardstore.convert(source, pool, size=size, store="pixels", overwrite=True)
    store = shardstore.open(pool)
    images, labels = [store[i].image for i in range(len(store))], store.targets
    out = np.lib.format.open_memmap(folder / "pixels.npy", "w+", np.uint8, (count, size, size, 3))
    for i in range(count):
        out[i] = images[i % len(images)].permute(1, 2, 0)
    out.flush()
    np.save(folder / "labels.npy", labels[np.arange(count) % len(labels)])
    shutil.rmtree(pool)
