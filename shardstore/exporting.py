"""A store back into a folder of image files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from shardstore.errors import OptionError, Problem, printable
from shardstore.options import ReadOptions
from shardstore.pictures import images
from shardstore.pool import Progress
from shardstore.store.chunks import Reader
from shardstore.store.files import write_file
from shardstore.store.index import load
from shardstore.store.schema import Field, Schema

_ANY = 1 << 62  # pixels: only the format is asked for


def export(store: str | Path, folder: str | Path, *, progress: Progress | None = None) -> int:
    """Write each picture of a store as a file, named by its key: ``folder/CLASS/picture.jpg``.

    Encoded pictures come back byte for byte; pixels as PNG files (TIFF for 32 bits), the key's ending replaced, or kept
    before the new one where two keys differ by their ending alone. So does the ending of an encoded picture whose
    format resizing changed. A store without keys gives ``CLASS/00000000.png``.

    Args:
        store: the store.
        folder: must not exist, or be empty.
        progress: called with (samples done, samples in all).

    Returns:
        The number of files.

    Raises:
        NoStoreError: there is no finished store.
        DamagedStoreError: the store is damaged.
        OptionError: the folder is not empty, the store holds no pictures, or a key leads out of the folder.
    """
    reader = Reader(load(store), ReadOptions(verify="always"))  # what leaves the store has no checksum any more
    schema = reader.index.schema
    field = next((f for f in schema.fields if f.content == "image"), None)
    if field is None:
        raise OptionError(Problem("the store holds no pictures to export", os.fspath(store)))
    if not os.fspath(folder):
        raise OptionError("the folder to export into is an empty path")
    if os.path.exists(folder) and (not os.path.isdir(folder) or os.listdir(folder)):
        raise OptionError(Problem("the folder to export into is not empty", os.fspath(folder), hint="Choose another."))
    for number in range(schema.samples):
        sample = np.array([number])
        value = reader.read(field.name, sample)[0]
        path = _free_path(os.fspath(folder), _names(reader, field, sample, value), number)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        write_file(path, value if isinstance(value, bytes) else images.encode_png(value))
        if progress:
            progress(number + 1, schema.samples)
    return schema.samples


def _free_path(folder: str, names: list[str], number: int) -> str:
    for name in names:
        if not os.path.lexists(os.path.join(folder, name)):
            return os.path.join(folder, name)
    raise OptionError(Problem("two samples would become the same file", os.path.join(folder, names[0]), sample=number))


def _names(reader: Reader, field: Field, sample: Any, value: Any) -> list[str]:
    """The file names that a sample may get, the best first."""
    schema = reader.index.schema
    if "key.data" not in schema.array_names:
        return [f"{_class_folder(reader, schema, sample)}{int(sample[0]):08d}{_ending(field, value)}"]
    key = str(reader.read("key", sample)[0].decode("utf-8", "surrogateescape"))
    if not _is_safe(key):
        raise OptionError(Problem("a key leads out of the folder", key=printable(key), sample=int(sample[0])))
    ending = _ending(field, value)
    if field.kind == "bytes" and not (schema.options.get("resize_short") and _is_renamed(key, value)):
        return [key]
    return [os.path.splitext(key)[0] + ending, key + ending]


def _is_safe(path: str) -> bool:
    """Whether a path from a store stays below the folder that it is joined to."""
    elsewhere = os.path.isabs(path) or os.path.splitdrive(path)[0] or (os.sep != "/" and os.sep in path)
    return not elsewhere and "\0" not in path and not {"", ".", ".."} & set(path.split("/"))


def _is_renamed(key: str, value: bytes) -> bool:
    """Whether resizing made the picture one of another format than its key says."""
    made = images.probe(value, _ANY).format
    return made in images.LOSSLESS and not images.is_named_so(key, made)


def _class_folder(reader: Reader, schema: Schema, sample: Any) -> str:
    if schema.classes is None or "label" not in schema.array_names:
        return ""
    label = int(reader.read("label", sample)[0])
    name = schema.classes[label].replace("/", "_") if 0 <= label < len(schema.classes) else ""
    if not _is_safe(name):
        raise OptionError(Problem("the class of a sample gives no folder's name", got=name, sample=int(sample[0])))
    return name + "/"


def _ending(field: Field, value: Any) -> str:
    if field.kind == "bytes":
        return "." + images.probe(value, _ANY).format.lower().replace("jpeg", "jpg")
    return ".png" if images.lossless_format(value.dtype) == "PNG" else ".tif"
