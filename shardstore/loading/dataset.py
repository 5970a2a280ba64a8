"""``open`` and the map-style ``Dataset``: samples by number or key, in any order that a sampler asks for."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch.utils.data

from shardstore.errors import DamagedStoreError, OptionError, Problem
from shardstore.loading.samples import ImageType, SampleReader, View
from shardstore.options import ReadOptions
from shardstore.store.chunks import Numbers, Reader
from shardstore.store.index import load
from shardstore.store.schema import Field, Schema

_KEYS_AT_ONCE = 65536


def open(
    path: str | Path,
    *,
    fields: Sequence[str] | None = None,
    transform: Callable[[Any], Any] | None = None,
    transforms: Callable[..., Any] | None = None,
    image_type: ImageType | None = None,
    options: ReadOptions | None = None,
) -> Dataset:
    """Open a store for reading by number or key. The time does not grow with the number of samples.

    Args:
        path: the store.
        fields: which fields samples have, in this order; None for image and label.
        transform: called with each image.
        transforms: called with all values of a sample, returns as many.
        image_type: what transforms get: ``pil`` (the default, RGB), ``tensor`` (uint8, CHW) or ``numpy`` (uint8, HWC).
            Without transforms, what samples hold; the default is then ``tensor``.
        options: see :class:`ReadOptions`.

    Raises:
        NoStoreError: there is no finished store at this path.
        DamagedStoreError: its description is damaged.
        OptionError: a field that the store does not have.
    """
    return Dataset(path, View(fields, transform, transforms, image_type), options)


class Dataset(torch.utils.data.Dataset[Any]):
    """The samples of a store by number; made by :func:`open`.

    A DataLoader takes it as it is, with any sampler. Workers open their own files.
    """

    def __init__(self, path: str | Path, view: View, options: ReadOptions | None = None) -> None:
        if options is not None and options.on_error == "skip":
            raise OptionError("a sample that is asked for by number cannot be left out; on_error='skip' is for streams")
        options = options or ReadOptions()
        self._reader = Reader(load(path, follow_links=options.follow_links), options)
        self._samples = SampleReader(self._reader, view)
        self._by_key: tuple[Numbers, Numbers] | None = None

    @property
    def path(self) -> str:
        """The store's absolute path."""
        return self._reader.index.path

    @property
    def schema(self) -> Schema:
        """Fields, counts and options: what ``shardstore.json`` says."""
        return self._reader.index.schema

    def __len__(self) -> int:
        return self.schema.samples

    def __getitem__(self, item: int | str) -> Any:
        """The sample of a number (negative ones count from the end) or a key.

        Raises:
            IndexError: no such number.
            KeyError: no such key.
        """
        number = self.find(item) if isinstance(item, str) else self._number(item)
        return next(self._samples.samples(np.array([number])))

    def __getitems__(self, items: Sequence[int]) -> list[Any]:
        """Several samples at once, which is how a DataLoader asks."""
        return list(self._samples.samples(np.array([self._number(i) for i in items], np.int64)))

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def _number(self, item: int) -> int:
        number = operator.index(item)
        number += len(self) if number < 0 else 0
        if not 0 <= number < len(self):
            raise IndexError(f"sample {item} of a store with {len(self)}")
        return number

    def key(self, number: int) -> str | None:
        """The key of a sample; None where the store has none."""
        if "key.data" not in self.schema.array_names:
            return None
        return str(self._reader.read("key", np.array([self._number(number)]))[0].decode("utf-8", "surrogateescape"))

    def find(self, key: str) -> int:
        """The number of the sample with this key; the first, should there be several.

        The first call reads all keys and keeps 16 bytes for each.

        Raises:
            KeyError: no such key.
            OptionError: the store has no keys.
        """
        if "key.data" not in self.schema.array_names:
            raise OptionError("this store has no keys")
        if self._by_key is None:
            hashes = self._key_hashes()
            by_hash = np.argsort(hashes, kind="stable")
            self._by_key = hashes[by_hash], by_hash
        encoded = key.encode("utf-8", "surrogateescape")
        hashes, numbers = self._by_key
        first, last = np.searchsorted(hashes, hash(encoded)), np.searchsorted(hashes, hash(encoded), side="right")
        for number in numbers[first:last].tolist():
            if self._reader.read("key", np.array([number]))[0] == encoded:
                return int(number)
        raise KeyError(key)

    def _key_hashes(self) -> Numbers:
        out = np.empty(len(self), np.int64)
        for first in range(0, len(self), _KEYS_AT_ONCE):
            numbers = np.arange(first, min(first + _KEYS_AT_ONCE, len(self)))
            out[numbers] = [hash(k) for k in self._reader.read("key", numbers)]
        return out

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_by_key": None}  # bytes hash differently in another process

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names by class number, or None."""
        return self.schema.classes

    @property
    def class_to_idx(self) -> dict[str, int]:
        """Class numbers by name."""
        return {name: number for number, name in enumerate(self.classes or ())}

    @property
    def targets(self) -> Numbers:
        """The labels of all samples: shape (samples,).

        Raises:
            OptionError: the store has no field ``label``.
        """
        if "label" not in self.schema.array_names:
            raise OptionError("this store has no field 'label'")
        return self._reader.read("label", np.arange(len(self)))  # type: ignore[no-any-return]

    def info(self) -> dict[str, Any]:
        """What is in the store and how it is laid out, as plain values for JSON."""
        schema, index = self.schema, self._reader.index
        counts = self._class_counts()
        return {
            "path": _short(self.path),
            "container": schema.container,
            "samples": len(self),
            "shards": schema.shards,
            "shard_samples": schema.shard_samples,
            "bytes": index.nbytes,
            "fields": [{**asdict(f), "dtype": str(np.dtype(f.dtype)), "shape": _shape_text(f)} for f in schema.fields],
            "arrays": [asdict(a) for a in schema.arrays],
            "chunks": {name: len(index.table(name)) for name in schema.array_names},
            "class_counts": dict(zip(self.classes or (), counts, strict=True)),
            "options": dict(schema.options),
            "fingerprint": schema.fingerprint,
            "open_with": self._open_with(),
        }

    def _class_counts(self) -> list[int]:
        classes = len(self.classes or ())
        if not classes or not any(f.content == "label" and f.name == "label" for f in self.schema.fields):
            return [0] * classes
        labels = self.targets
        if (labels < 0).any() or (labels >= classes).any():
            hint = "Convert the source again with --overwrite."
            raise DamagedStoreError(Problem("a label is the number of no class", self.path, "label", hint=hint))
        return [int(n) for n in np.bincount(labels.astype(np.int64), minlength=classes)]

    def _open_with(self) -> str:
        """One line of Python that opens the first field with plain tools."""
        name = self.schema.array_names[0].replace(".", "/")
        path = _short(self.path)
        zstd = any(a.codec == "zstd" for a in self.schema.arrays)
        if self.schema.container == "zarr":
            return f"zarr.open_group({path!r}, mode='r')[{name!r}]"
        if self.schema.container == "hdf5":
            return f"h5py.File({path!r})[{name!r}]" + ("  # after import hdf5plugin" if zstd else "")
        file = _short(self._reader.index.shard_path(0, self.schema.array_names[0]))
        return f"np.load({file!r}, mmap_mode='r')  # one file a shard"


def _short(path: str) -> str:
    """Relative to the working directory, where it lies below that."""
    try:
        relative = os.path.relpath(path)
    except (ValueError, OSError):  # another drive of Windows; a working directory that is gone
        return path
    return path if relative.startswith(os.pardir) else relative


def _shape_text(field: Field) -> str:
    return " x ".join("?" if n < 0 else str(n) for n in field.shape) or "one number"
