"""What people write: a data set over one array, or torchvision's ImageFolder; and what all loaders share.

A loader gets a folder (``imgs`` of JPEG files, or ``pixels.npy`` and ``labels.npy``) and the script's arguments, makes
its own files there if it finds none, and gives batches of images and labels: uint8 tensors, shuffled.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pictures
import writers

BATCH = 64
Loader = Callable[[Path, argparse.Namespace], Iterable[Any]]


def written(out: Path, write: Callable[[Path], None]) -> Path:
    """``out``, written if it is not there; a half-written one never has its name."""
    if not out.exists():
        part = out.with_name(f"part-{out.name}")  # the ending stays: some formats go by it
        pictures.remove(part)
        write(part)
        part.rename(out)
    return out


def jpegs(folder: Path, name: str) -> Path:
    """The folder's pictures in the format of that name."""
    return written(folder / name, partial(writers.WRITERS[name], folder / "imgs"))


def pixels(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    return np.load(folder / "pixels.npy", mmap_mode="r"), np.load(folder / "labels.npy")


@cache
def crop(of_tensors: bool = False) -> Any:
    """torchvision's: of a PIL image, which it makes a tensor, or of a tensor."""
    from torchvision.transforms import Compose, PILToTensor, RandomResizedCrop

    return RandomResizedCrop(224) if of_tensors else Compose([RandomResizedCrop(224), PILToTensor()])


def loader(dataset: Any, given: argparse.Namespace, **options: Any) -> Iterable[Any]:
    from torch.utils.data import DataLoader

    # Workers stay for the next epoch: one of a few thousand pictures would be gone while they start and warm up.
    stay = given.workers > 0
    return DataLoader(dataset, batch_size=BATCH, num_workers=given.workers, persistent_workers=stay, **options)


class Mapped:
    """An iterable, again each epoch, with something done to each batch."""

    def __init__(self, batches: Iterable[Any], function: Callable[[Any], Any]) -> None:
        self.batches, self.function = batches, function

    def __iter__(self) -> Iterator[Any]:
        return map(self.function, self.batches)


def as_pair(batch: dict[str, Any]) -> tuple[Any, Any]:
    return batch["image"], batch["label"]


def channels_first(batches: Iterable[Any]) -> Iterable[Any]:
    """Another view of the same memory, as shardstore and FFCV give it: moving bytes would be work they do not do."""
    return Mapped(batches, lambda batch: (batch["image"].permute(0, 3, 1, 2), batch["label"]))


class ByHand:
    """A data set over one array that is opened in the worker, as everyone writes it."""

    def __init__(self, open_array: Callable[[], Any], labels: np.ndarray) -> None:
        self.open_array, self.labels, self.array = open_array, labels, None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, Any]:
        import torch

        self.array = self.open_array() if self.array is None else self.array
        image = self.array[i]
        image = torch.from_numpy(image if image.flags.writeable else image.copy())  # h5py and zarr have copied it
        return {"image": image, "label": int(self.labels[i])}


def memmap(folder: Path, given: argparse.Namespace) -> Iterable[Any]:
    return channels_first(loader(ByHand(lambda: pixels(folder)[0], pixels(folder)[1]), given, shuffle=True))


def h5py_by_hand(folder: Path, given: argparse.Namespace) -> Iterable[Any]:
    import h5py

    def write(out: Path) -> None:
        with h5py.File(out, "w") as opened:
            opened.create_dataset("image", data=array, chunks=(1, *array.shape[1:]))

    array, labels = pixels(folder)
    file = written(folder / "by-hand.h5", write)
    return channels_first(loader(ByHand(lambda: h5py.File(file)["image"], labels), given, shuffle=True))


def zarr_by_hand(folder: Path, given: argparse.Namespace) -> Iterable[Any]:
    import zarr

    def write(out: Path) -> None:
        chunks = (1, *array.shape[1:])
        zarr.create_array(out, shape=array.shape, dtype=array.dtype, chunks=chunks, compressors=None)[:] = array

    array, labels = pixels(folder)
    file = written(folder / "by-hand.zarr", write)
    return channels_first(loader(ByHand(lambda: zarr.open_array(file, mode="r"), labels), given, shuffle=True))


def imagefolder(folder: Path, given: argparse.Namespace) -> Iterable[Any]:
    from torchvision.datasets import ImageFolder

    return loader(ImageFolder(folder / "imgs", crop()), given, shuffle=True)
