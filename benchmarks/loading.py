"""Loading speed: shardstore's ways beside what people write or install instead, on the same pictures.

    python benchmarks/loading.py IMAGES [--copies 18] [--kind raw|small|jpeg] [--workers 2] [--rounds 5] [--epochs 6]
        [--consume touch|copy] [--folder /tmp/bench] [--only NAME ...] [--python ffcv=/path/to/python]

IMAGES is a folder of class folders. All loaders give shuffled batches of 64 (uint8):

- raw: pictures of 224 x 224 as pixels
- small: pictures of 32 x 32 as pixels, 60,000 of them
- jpeg: the original JPEGs, decoded, a random crop resized to 224

Each run is a process of its own, all in turn, so that a machine whose speed drifts treats them alike. The first batches
of an epoch, while workers start, do not count. ``--consume copy`` copies each batch once more, as to a device. Medians
over the rounds of each run's median epoch, their ratio to the first row, and private memory of the largest worker.
What is not installed is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

BATCH = 64
SKIP = 10  # batches at an epoch's start that do not count


def folder_of_images(source: Path, folder: Path, copies: int) -> Path:
    target = folder / "imgs"
    if not target.exists():
        for file in sorted(f for f in source.rglob("*") if f.is_file()):
            where = target / file.parent.name
            where.mkdir(parents=True, exist_ok=True)
            for copy in range(copies):
                shutil.copyfile(file, where / f"{copy:03d}_{file.name}")
    return target


def convert(source: Any, target: Path, **options: Any) -> Path:
    import shardstore

    if not target.exists():
        shardstore.convert(source, target, shuffle=True, **options)
    return target


def pixels(folder: Path, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """All pictures as one array, and their labels, as files."""
    size = 32 if kind == "small" else 224
    file = folder / f"{kind}.npy"
    if not file.exists():
        import shardstore

        store = shardstore.open(convert(folder / "imgs", folder / "pool", size=size, store="pixels"))
        count = 60_000 if kind == "small" else len(store)
        out = np.lib.format.open_memmap(file, "w+", np.uint8, (count, size, size, 3))
        for i in range(count):
            out[i] = store[i % len(store)].image.permute(1, 2, 0)
        np.save(folder / f"{kind}.labels.npy", store.targets[np.arange(count) % len(store)])
        shutil.rmtree(folder / "pool")
    return np.load(file, mmap_mode="r"), np.load(folder / f"{kind}.labels.npy")


# -- what people write ------------------------------------------------------------------------------------------------


class ByHand:
    """A data set over one array that is opened in the worker, as everyone writes it."""

    def __init__(self, open_array: Callable[[], Any], labels: np.ndarray) -> None:
        self.open_array, self.labels, self.array = open_array, labels, None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[Any, int]:
        import torch

        self.array = self.open_array() if self.array is None else self.array
        return torch.from_numpy(np.array(self.array[i])).permute(2, 0, 1), int(self.labels[i])


def loader(dataset: Any, given: argparse.Namespace) -> Iterable[Any]:
    from torch.utils.data import DataLoader

    return DataLoader(dataset, batch_size=BATCH, shuffle=True, num_workers=given.workers)


def memmap(folder: Path, given: argparse.Namespace) -> Iterable[Any]:
    file, labels = str(folder / f"{given.kind}.npy"), pixels(folder, given.kind)[1]
    return loader(ByHand(lambda: np.load(file, mmap_mode="r"), labels), given)


def h5py_by_hand(folder: Path, given: argparse.Namespace) -> Iterable[Any]:
    import h5py

    file, (array, labels) = folder / f"{given.kind}.h5", pixels(folder, given.kind)
    if not file.exists():
        with h5py.File(file, "w") as out:
            out.create_dataset("image", data=array, chunks=(1, *array.shape[1:]))
    return loader(ByHand(lambda: h5py.File(file)["image"], labels), given)


def zarr_by_hand(folder: Path, given: argparse.Namespace) -> Iterable[Any]:
    import zarr

    file, (array, labels) = folder / f"{given.kind}.zarr", pixels(folder, given.kind)
    if not file.exists():
        out = zarr.create_array(file, shape=array.shape, dtype=array.dtype, chunks=(1, *array.shape[1:]))
        out[:] = array
    return loader(ByHand(lambda: zarr.open_array(file, mode="r"), labels), given)


def imagefolder(folder: Path, given: argparse.Namespace) -> Iterable[Any]:
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import Compose, PILToTensor, RandomResizedCrop

    return loader(ImageFolder(folder / "imgs", Compose([RandomResizedCrop(224), PILToTensor()])), given)


# -- what people install ----------------------------------------------------------------------------------------------


def webdataset(folder: Path, given: argparse.Namespace) -> Iterable[Any]:
    import webdataset as wds
    from torchvision.transforms import Compose, PILToTensor, RandomResizedCrop

    out = folder / "wds"
    if not out.exists():
        out.mkdir()
        files = sorted((folder / "imgs").rglob("*.*"))
        with wds.ShardWriter(str(out / "%05d.tar"), maxcount=500, verbose=0) as writer:
            for i in np.random.default_rng(0).permutation(len(files)).tolist():
                writer.write({"__key__": f"{i:08d}", "jpg": files[i].read_bytes(), "cls": 0})
    transform = Compose([RandomResizedCrop(224), PILToTensor()])
    data = wds.WebDataset(sorted(map(str, out.glob("*.tar"))), shardshuffle=100, empty_check=False).shuffle(1000)
    data = data.decode("pil").to_tuple("jpg", "cls").map_tuple(transform, int).batched(BATCH)
    return wds.WebLoader(data, batch_size=None, num_workers=given.workers)


def mds(folder: Path, given: argparse.Namespace) -> Iterable[Any]:
    from streaming import MDSWriter, StreamingDataset
    from torch.utils.data import DataLoader

    out, (array, labels) = folder / f"mds-{given.kind}", pixels(folder, given.kind)
    if not out.exists():
        columns = {"image": f"ndarray:uint8:{','.join(map(str, array.shape[1:]))}", "label": "int"}
        with MDSWriter(out=str(out), columns=columns) as writer:
            for image, label in zip(array, labels.tolist(), strict=True):
                writer.write({"image": image, "label": label})
    data = StreamingDataset(local=str(out), shuffle=True, batch_size=BATCH)
    return ((b["image"], b["label"]) for b in DataLoader(data, batch_size=BATCH, num_workers=given.workers))


def ffcv(folder: Path, given: argparse.Namespace) -> Iterable[Any]:
    from ffcv.fields import IntField, NDArrayField, RGBImageField
    from ffcv.fields.decoders import IntDecoder, NDArrayDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import ToTensor
    from ffcv.writer import DatasetWriter

    out = folder / f"{given.kind}.beton"
    if given.kind == "jpeg":
        first: Any = RGBImageField(write_mode="jpg")
        decoder: Any = RandomResizedCropRGBImageDecoder((224, 224))
    else:
        array, labels = pixels(folder, given.kind)
        first, decoder = NDArrayField(np.dtype(np.uint8), array.shape[1:]), NDArrayDecoder()
    if not out.exists():
        if given.kind == "jpeg":
            from torchvision.datasets import ImageFolder

            data: Any = ImageFolder(folder / "imgs")
        else:
            data = list(zip(array, labels.tolist(), strict=True))
        DatasetWriter(str(out), {"image": first, "label": IntField()}, num_workers=2).from_indexed_dataset(data)
    pipelines = {"image": [decoder, ToTensor()], "label": [IntDecoder(), ToTensor()]}
    order = OrderOption.RANDOM
    return Loader(str(out), BATCH, num_workers=given.workers, order=order, pipelines=pipelines, drop_last=False)


# -- ours -------------------------------------------------------------------------------------------------------------


def ours(container: str, how: str) -> Callable[[Path, argparse.Namespace], Iterable[Any]]:
    def load(folder: Path, given: argparse.Namespace) -> Iterable[Any]:
        from torch.utils.data import DataLoader

        from shardstore import ShardDataset
        from shardstore.transforms import RandomResizedCrop

        suffix = {"npy": "", "zarr": ".zarr", "hdf5": ".h5"}[container]
        target = folder / f"store-{given.kind}{suffix}"
        options: dict[str, Any] = {"transform": RandomResizedCrop(224)} if given.kind == "jpeg" else {}
        if not target.exists():
            if given.kind == "jpeg":
                convert(folder / "imgs", target, store="encoded")
            else:
                array, labels = pixels(folder, given.kind)
                convert([{"image": a, "label": n} for a, n in zip(array, labels.tolist(), strict=True)], target)
        if how == "samples":
            data = ShardDataset(target, shuffle=True, **options)
            return DataLoader(data, batch_size=BATCH, num_workers=given.workers)
        threads = max(given.workers, 1) if how == "threads" else 0
        data = ShardDataset(target, batch_size=BATCH, shuffle=True, threads=threads, **options)
        return DataLoader(data, batch_size=None, num_workers=0 if threads else given.workers)

    return load


LOADERS: dict[str, dict[str, Callable[[Path, argparse.Namespace], Iterable[Any]]]] = {
    "raw": {
        "memmap by hand": memmap,
        "h5py by hand": h5py_by_hand,
        "zarr by hand": zarr_by_hand,
        "mds": mds,
        "ffcv": ffcv,
    },
    "small": {"memmap by hand": memmap, "ffcv": ffcv},
    "jpeg": {"ImageFolder": imagefolder, "webdataset": webdataset, "ffcv": ffcv},
}
for _kind, _containers in {"raw": ("npy", "zarr", "hdf5"), "small": ("npy",), "jpeg": ("npy",)}.items():
    LOADERS[_kind] |= {f"shardstore {c}": ours(c, "batches") for c in _containers}
    LOADERS[_kind] |= {f"shardstore npy, {how}": ours("npy", how) for how in ("samples", "threads")}


def private_mb() -> float:
    """Of the largest child process, or of this one; by ``/proc``."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split() or ["self"]

    def private(process: str) -> int:
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended
            return 0
        return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))

    return max(map(private, children)) / 1e3


def run(name: str, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    started = time.perf_counter()
    batches = LOADERS[given.kind][name](folder, given)
    first, rates, memory, sink = 0.0, [], 0.0, None
    for _ in range(given.epochs):
        seen, begin, t = 0, 0, time.perf_counter()
        for k, batch in enumerate(batches):
            images = batch[0]
            seen += len(images)
            int(images[0, 0, 0, 0])
            if not first:
                first = time.perf_counter() - started
                sink = np.empty(tuple(images.shape), np.uint8)
            if given.consume == "copy" and sink is not None:
                sink[: len(images)] = images if isinstance(images, np.ndarray) else images.numpy()
            if k == SKIP:
                begin, t = seen, time.perf_counter()
            if k == 2 * SKIP and not memory:
                memory = private_mb()
        rates.append((seen - begin) / (time.perf_counter() - t))
    return {"rate": statistics.median(rates), "first": first, "memory": memory, "seen": seen}


def report(results: dict[str, list[dict[str, Any]]]) -> None:
    base = next(iter(results.values()))
    print(f"{'':26} images/s  (spread)           ratio  first s  private MB")
    for name, runs in results.items():
        rates = sorted(r["rate"] for r in runs)
        ratio = statistics.median(r["rate"] / b["rate"] for r, b in zip(runs, base, strict=True))
        first, memory = (statistics.median(r[key] for r in runs) for key in ("first", "memory"))
        spread = f"({rates[0]:.0f}-{rates[-1]:.0f})"
        print(f"{name:26} {statistics.median(rates):8.0f}  {spread:18} {ratio:6.2f}  {first:7.2f}  {memory:10.0f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("images", type=Path)
    parser.add_argument("--copies", type=int, default=18)
    parser.add_argument("--kind", choices=list(LOADERS), default="raw")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--consume", choices=("touch", "copy"), default="touch")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/bench"))
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--python", nargs="+", default=[])
    parser.add_argument("--run")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.run:
        print(json.dumps(run(given.run, given.folder, given)))
        return
    folder_of_images(given.images, given.folder, given.copies)
    if given.kind != "jpeg":
        pixels(given.folder, given.kind)
    others = dict(pair.split("=", 1) for pair in given.python)
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in given.only or LOADERS[given.kind]}
    passed = ("kind", "workers", "epochs", "consume", "folder")
    arguments = [str(given.images), *(f"--{name}={getattr(given, name)}" for name in passed)]
    for turn in range(given.rounds + 1):  # the first makes the files, and does not count
        for name in list(results):
            command = [others.get(name, sys.executable), __file__, *arguments, "--run", name]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                print(f"{name} is left out: {(done.stderr.strip().splitlines() or ['?'])[-1]}", file=sys.stderr)
                del results[name]
            elif turn:
                results[name].append(json.loads(done.stdout.strip().splitlines()[-1]))
    report(results)


if __name__ == "__main__":
    main()
