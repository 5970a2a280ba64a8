"""How arrays become files that plain tools open: one module a container, all with the same four names.

These modules know arrays and stored chunks, not fields, samples or checksums.

- ``ShardWriter(root, schema, shard, items)``: writes one shard's files; ``append(array, stored)`` takes the chunks of
  each array in order, already encoded; ``close`` makes them durable, ``abort`` removes them.
- ``scan(root, schema, shard)``: reads the finished files back and tells where each array's bytes really are.
- ``finish(root, schema, items, main)``: writes what plain tools need beside the shards.
- ``astray(root, schema, main)``: where that would lead plain tools elsewhere.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np

from shardstore.store.schema import Container, Schema

Extents = np.ndarray[Any, np.dtype[np.int64]]  # shape (n, 2): offset and nbytes


class Writer(Protocol):
    """An open shard."""

    def __init__(self, root: str, schema: Schema, shard: int, items: Mapping[str, int]) -> None: ...

    def append(self, array: str, stored: bytes) -> None:
        """Add the next chunk of an array."""

    def close(self) -> None:
        """Make the shard's files durable under their own names."""

    def abort(self) -> None:
        """Remove what was written."""


class Format(Protocol):
    """What each module of this folder offers."""

    ShardWriter: type[Writer]

    def scan(self, root: str, schema: Schema, shard: int) -> dict[str, Extents]:
        """Byte ranges in the shard's files: one for an array without codec, else one for each chunk.

        Raises:
            ValueError: a file is not what this container's arrays look like.
        """

    def finish(self, root: str, schema: Schema, items: Mapping[str, Sequence[int]], main: str) -> None:
        """Write metadata. ``items``: for each array the items of each shard; ``main``: the file of an HDF5 store."""

    def astray(self, root: str, schema: Schema, main: str) -> list[tuple[str, str]]:
        """Files that plain tools read beside the shards, and what in them leads these elsewhere than to this store's
        arrays: other files, other shapes, what cannot be read. Nothing that they lead to is opened."""


def load(container: Container) -> Format:
    """The module of a container."""
    return cast(Format, importlib.import_module(f"shardstore.formats.{container}"))
