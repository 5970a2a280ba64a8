"""NumPy: each array of each shard is one ``.npy`` file (NEP 1), to be opened with ``np.load(..., mmap_mode="r")``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from shardstore.formats import Extents
from shardstore.store import npyfile
from shardstore.store.files import NewFile
from shardstore.store.schema import Schema, shard_files


class ShardWriter:
    """Writes headers first, since the plan knows all lengths, then streams the chunks."""

    def __init__(self, root: str, schema: Schema, shard: int, items: Mapping[str, int]) -> None:
        self._files: dict[str, NewFile] = {}
        for array, path in zip(schema.arrays, shard_files(schema, shard), strict=True):
            self._files[array.name] = NewFile(f"{root}/{path}")
            shape = (items[array.name], *array.item_shape)
            self._files[array.name].write(npyfile.header(np.dtype(array.dtype), shape))

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


def scan(root: str, schema: Schema, shard: int) -> dict[str, Extents]:
    """See :mod:`shardstore.formats`."""
    found = {}
    for array, path in zip(schema.arrays, shard_files(schema, shard), strict=True):
        start, items = npyfile.measure(f"{root}/{path}", np.dtype(array.dtype), array.item_shape)
        found[array.name] = np.array([[start, items * array.item_bytes]], np.int64)
    return found


def finish(root: str, schema: Schema, items: Mapping[str, Sequence[int]], main: str) -> None:
    """Nothing: the files stand for themselves."""


def astray(root: str, schema: Schema, main: str) -> list[tuple[str, str]]:
    """Nothing, for the same reason."""
    return []
