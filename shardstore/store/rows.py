"""Rows of the tables that say where samples lie. Each number of a row is checked here before it is used: none leads out
of its file, its chunk or its shard, whatever a damaged or hostile table says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardstore.store.schema import Schema, Table

Array = np.ndarray[Any, np.dtype[Any]]
Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Chunk:
    """One row of a chunk table."""

    number: int  # inside the shard
    offset: int
    nbytes: int
    crc32c: int
    first: int
    count: int
    shard: int


@dataclass(frozen=True)
class Rows:
    """Where each sample of a bytes or ragged field lies in one shard."""

    start: Numbers  # bytes: in the file without a codec, in the decoded chunk with one
    length: Numbers  # bytes
    crc32c: Array
    chunk: Numbers  # row of the chunk table
    shape: Array | None

    @property
    def nbytes(self) -> int:
        """Memory of all of them."""
        arrays = (self.start, self.length, self.crc32c, self.chunk, self.shape)
        return sum(a.nbytes for a in arrays if a is not None)


def impossible(schema: Schema, shards: Table, name: str, rows: Numbers, found: Table) -> Array:
    """Which of these rows of a chunk table cannot be right.

    Args:
        schema: of the store.
        shards: its shard table.
        name: of the array.
        rows: their numbers.
        found: what the chunk table holds there.
    """
    number, spec = schema.array(name)
    here = shards[np.minimum(found["shard"], len(shards) - 1)]
    ends = found["offset"] + found["nbytes"]
    bad: Array = (found["shard"] >= len(shards)) | (ends > here["size"][:, schema.file_number(number)])
    bad |= ends < found["offset"]  # it wrapped
    if not name.endswith(".data"):  # chunks of these are a grid
        inside = (rows - here["rows"][:, number]) * spec.chunk_items
        bad |= found["first"] != found["shard"] * np.int64(schema.shard_samples) + inside
        bad |= found["count"] != np.minimum(spec.chunk_items, here["count"] - inside)
        if spec.codec == "none":
            bad |= found["nbytes"] != found["count"] * np.uint64(spec.item_bytes)
    return bad


def locate(schema: Schema, field: str, shard: int, table: Table, first_row: int, parts: dict[str, Array]) -> Rows:
    """Where the samples of a bytes or ragged field lie in a shard.

    Args:
        schema: of the store.
        field: its name.
        shard: its number.
        table: the shard's rows of the chunk table of the values.
        first_row: the number of the first of these.
        parts: ``start``, ``length``, ``crc32c`` and perhaps ``shape``, of each sample.

    Raises:
        ValueError: they do not fit together.
    """
    spec, count = schema.array(f"{field}.data")[1], len(parts["start"])
    size = np.dtype(spec.dtype).itemsize
    chunk_first = np.cumsum(table["count"], dtype=np.int64) - table["count"]
    if (
        table["count"].sum(dtype=np.int64) != count
        or (table["shard"] != shard).any()
        or (table["first"] - shard * schema.shard_samples != chunk_first).any()
    ):
        raise ValueError("the chunk table does not cover the shard's samples")
    chunk = np.repeat(np.arange(len(table)), table["count"])
    length = parts["length"].astype(np.int64)
    begin = (parts["start"] - parts["start"][chunk_first[chunk]]) * size
    room = table["nbytes"].astype(np.int64) if spec.codec == "none" else np.int64(spec.chunk_items * size)
    room = np.broadcast_to(room, len(table))[chunk]
    # No number may be so large that a sum with it wraps.
    if (begin < 0).any() or (begin > room).any() or (length < 0).any() or (length > (room - begin) // size).any():
        raise ValueError("a sample lies outside its chunk")
    if spec.codec == "none":
        begin = begin + table["offset"].astype(np.int64)[chunk]
    shape = parts.get("shape")
    if shape is not None:
        fixed = np.array(schema.field(field).shape)
        # Products of whole numbers are exact in float64 as far as lengths go, and do not wrap above.
        if ((shape < 0) | ((fixed >= 0) & (shape != fixed))).any() or (shape.prod(axis=1, dtype=float) != length).any():
            raise ValueError("a sample has an impossible shape")
    return Rows(begin, length * size, parts["crc32c"], chunk + first_row, shape)
