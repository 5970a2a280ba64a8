"""What people install, each used as its documentation says; loaders as in ``byhand.py``."""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from byhand import BATCH, Mapped, as_pair, channels_first, crop, jpegs, loader, pixels, written
from common import WORKERS

# -- pixels -----------------------------------------------------------------------------------------------------------


def mds_pixels(folder: Path, given: argparse.Namespace) -> Iterable[Any]:
    from streaming import MDSWriter, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    def write(out: Path) -> None:
        columns = {"image": f"ndarray:uint8:{','.join(map(str, array.shape[1:]))}", "label": "int"}
        with MDSWriter(out=str(out), columns=columns) as writer:
            for image, label in zip(array, labels.tolist(), strict=True):
                writer.write({"image": image, "label": label})

    array, labels = pixels(folder)
    out = written(folder / "mds", write)
    clean_stale_shared_memory()
    return channels_first(loader(StreamingDataset(local=str(out), shuffle=True, batch_size=BATCH), given))


def ffcv_pixels(folder: Path, given: argparse.Namespace) -> Iterable[Any]:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.rgb_image import SimpleRGBImageDecoder
    from ffcv.writer import DatasetWriter

    def write(out: Path) -> None:
        data = list(zip(array, labels.tolist(), strict=True))
        fields = {"image": RGBImageField(write_mode="raw"), "label": IntField()}
        DatasetWriter(str(out), fields, num_workers=WORKERS).from_indexed_dataset(data)

    array, labels = pixels(folder)
    return _ffcv(written(folder / "ffcv", write), SimpleRGBImageDecoder(), given)


def _ffcv(file: Path, decoder: Any, given: argparse.Namespace) -> Iterable[Any]:
    from ffcv.fields.basics import IntDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import Squeeze, ToTensor, ToTorchImage

    pipelines = {"image": [decoder, ToTensor(), ToTorchImage()], "label": [IntDecoder(), ToTensor(), Squeeze()]}
    # As advised where the data fits in memory: truly random, by the operating system's cache.
    how = {"order": OrderOption.RANDOM, "os_cache": True, "drop_last": False}
    return Loader(str(file), BATCH, num_workers=max(given.workers, 1), pipelines=pipelines, **how)


# -- JPEG files -------------------------------------------------------------------------------------------------------


def webdataset(folder: Path, given: argparse.Namespace) -> Iterable[Any]:
    import webdataset as wds

    shards = sorted(map(str, jpegs(folder, "webdataset").glob("*.tar")))
    data = wds.WebDataset(shards, shardshuffle=len(shards), empty_check=False).shuffle(1000)
    data = data.decode("pil").to_tuple("jpg", "cls").map_tuple(crop(), int).batched(BATCH)
    return wds.WebLoader(data, batch_size=None, num_workers=given.workers)


def mds_jpegs(folder: Path, given: argparse.Namespace) -> Iterable[Any]:
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    class Pictures(StreamingDataset):  # type: ignore[misc]
        transform = staticmethod(crop())

        def __getitem__(self, at: Any) -> tuple[Any, int]:
            sample = super().__getitem__(at)
            return self.transform(sample["image"].convert("RGB")), sample["label"]

    clean_stale_shared_memory()
    return loader(Pictures(local=str(jpegs(folder, "mds")), shuffle=True, batch_size=BATCH), given)


def _litdata_crop(sample: dict[str, Any]) -> tuple[Any, int]:
    return crop(of_tensors=True)(sample["image"]), sample["label"]  # JPEG comes decoded, as a tensor


def litdata(folder: Path, given: argparse.Namespace) -> Iterable[Any]:
    from litdata import StreamingDataLoader, StreamingDataset

    data = StreamingDataset(str(jpegs(folder, "litdata")), shuffle=True, transform=_litdata_crop)
    return StreamingDataLoader(data, batch_size=BATCH, num_workers=given.workers)


def datasets(folder: Path, given: argparse.Namespace) -> Iterable[Any]:
    from datasets import load_from_disk

    transform = crop()

    def cropped(batch: dict[str, Any]) -> dict[str, Any]:
        return {"image": [transform(i.convert("RGB")) for i in batch["image"]], "label": batch["label"]}

    data = load_from_disk(str(jpegs(folder, "datasets") / "disk"))
    return Mapped(loader(data.with_transform(cropped), given, shuffle=True), as_pair)


def _record(record: bytes) -> tuple[np.ndarray, int]:
    from PIL import Image

    image = crop()(Image.open(io.BytesIO(record[8:])).convert("RGB"))
    return image.numpy(), int.from_bytes(record[:8], "little")


def array_record(folder: Path, given: argparse.Namespace) -> Iterable[Any]:
    """By Grain, the loader that array_record is made for."""
    import grain
    import torch

    source = grain.sources.ArrayRecordDataSource(str(jpegs(folder, "array_record")))
    # As much is made ahead as in a DataLoader, and pictures, not batches. Otherwise a large part of epochs as short as
    # these would be ready before the time begins that counts.
    ahead = grain.ReadOptions(prefetch_buffer_size=2 * BATCH)
    batches = grain.MapDataset.source(source).shuffle(seed=1).map(_record).to_iter_dataset(ahead).batch(BATCH)
    if given.workers:
        batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=given.workers))
    return Mapped(batches, lambda batch: (torch.from_numpy(batch[0]), torch.from_numpy(batch[1])))


def ffcv_jpegs(folder: Path, given: argparse.Namespace) -> Iterable[Any]:
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder

    return _ffcv(jpegs(folder, "ffcv"), RandomResizedCropRGBImageDecoder((224, 224)), given)
