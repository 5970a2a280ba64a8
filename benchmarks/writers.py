"""A folder of JPEG files into each format, as each format's documentation does it; two processes where it has them.

All keep the files' bytes, but FFCV, which can only encode anew (quality 90, its default).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from common import WORKERS
from pictures import files_of

Writer = Callable[[Path, Path], None]  # a folder of class folders, what is written


def webdataset(images: Path, out: Path) -> None:
    import webdataset as wds

    out.mkdir()
    with wds.ShardWriter(str(out / "%05d.tar"), maxcount=1000, maxsize=1 << 26, verbose=0) as writer:
        for i, (file, label) in enumerate(files_of(images)):
            writer.write({"__key__": f"{i:08d}", "jpg": file.read_bytes(), "cls": label})


def array_record(images: Path, out: Path) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(out), "group_size:1")  # as its documentation advises for random access
    for file, label in files_of(images):
        writer.write(label.to_bytes(8, "little") + file.read_bytes())
    writer.close()


def _imagefolder_of_datasets(images: Path, out: Path) -> Any:
    import datasets

    datasets.disable_progress_bars()
    return datasets.load_dataset("imagefolder", data_dir=str(images), split="train", cache_dir=str(out / "cache"))


def datasets_disk(images: Path, out: Path) -> None:
    _imagefolder_of_datasets(images, out).save_to_disk(str(out / "disk"), num_proc=WORKERS)


def datasets_parquet(images: Path, out: Path) -> None:
    _imagefolder_of_datasets(images, out).to_parquet(str(out / "data.parquet"))


def mds(images: Path, out: Path) -> None:
    from PIL import Image
    from streaming import MDSWriter

    with MDSWriter(out=str(out), columns={"image": "jpeg", "label": "int"}) as writer:
        for file, label in files_of(images):
            with Image.open(file) as image:  # the writer takes the file's bytes
                writer.write({"image": image, "label": label})


def _litdata_sample(pair: tuple[str, int]) -> dict[str, Any]:
    from PIL import Image

    return {"image": Image.open(pair[0]), "label": pair[1]}  # the writer takes the file's bytes


def litdata(images: Path, out: Path) -> None:
    import litdata

    pairs = [(str(file), label) for file, label in files_of(images)]
    litdata.optimize(_litdata_sample, pairs, str(out), chunk_bytes="64MB", num_workers=WORKERS, verbose=False)


def ffcv(images: Path, out: Path) -> None:
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter
    from torchvision.datasets import ImageFolder

    fields = {"image": RGBImageField(write_mode="jpg"), "label": IntField()}
    DatasetWriter(str(out), fields, num_workers=WORKERS).from_indexed_dataset(ImageFolder(images))


def shardstore(images: Path, out: Path, **options: Any) -> None:
    import shardstore as ours

    ours.convert(images, out, store="encoded", workers=WORKERS, **options)


WRITERS: dict[str, Writer] = {
    "webdataset": webdataset,
    "array_record": array_record,
    "datasets": datasets_disk,
    "datasets, parquet": datasets_parquet,
    "mds": mds,
    "litdata": litdata,
    "ffcv": ffcv,
    "shardstore, header": partial(shardstore, check="header"),
    "shardstore, full": partial(shardstore, check="full"),
}
