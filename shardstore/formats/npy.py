"""NumPy: each array of each shard is one ``.npy`` file (NEP 1), to be opened with ``np.load(..., mmap_mode="r")``."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.lib import format as npy_format

from shardstore.files import NewFile
from shardstore.formats import Extents
from shardstore.schema import Array, Schema, shard_files


class ShardWriter:
    """Writes headers first, since the plan knows all lengths, then streams the chunks."""

    def __init__(self, root: str, schema: Schema, shard: int, items: Mapping[str, int]) -> None:
        self._files: dict[str, NewFile] = {}
        for array, path in zip(schema.arrays, shard_files(schema, shard), strict=True):
            self._files[array.name] = NewFile(f"{root}/{path}")
            self._files[array.name].write(_header(array, items[array.name]))

    def append(self, array: str, stored: bytes) -> None:
        """Add the next chunk of an array."""
        self._files[array].write(stored)

    def close(self) -> None:
        """Make the files durable."""
        for file in self._files.values():
            file.commit()

    def abort(self) -> None:
        """Remove what was written."""
        for file in self._files.values():
            file.abort()


def _header(array: Array, items: int) -> bytes:
    out = io.BytesIO()
    shape = (items, *array.item_shape)
    npy_format.write_array_header_1_0(out, {"descr": array.dtype, "fortran_order": False, "shape": shape})
    return out.getvalue()


def scan(root: str, schema: Schema, shard: int) -> dict[str, Extents]:
    """See :mod:`shardstore.formats`."""
    found = {}
    for array, path in zip(schema.arrays, shard_files(schema, shard), strict=True):
        with open(f"{root}/{path}", "rb") as f:
            if npy_format.read_magic(f) != (1, 0):
                raise ValueError(f"{path}: not version 1.0 of the npy format")
            shape, fortran, dtype = npy_format.read_array_header_1_0(f)
            if fortran or dtype != np.dtype(array.dtype) or shape[1:] != array.item_shape:
                raise ValueError(f"{path}: holds {dtype}{shape}, not {array.dtype}{array.item_shape}")
            found[array.name] = np.array([[f.tell(), shape[0] * array.item_bytes]], np.int64)
    return found


def finish(root: str, schema: Schema, items: Mapping[str, Sequence[int]], main: str) -> None:
    """Nothing: the files stand for themselves."""
