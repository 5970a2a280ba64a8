"""What one conversion task does: read samples, check or decode them, and write one shard. Runs in a worker process.

A :class:`Task` goes to the worker, a :class:`ShardResult` comes back; pixels never travel between processes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardstore import formats
from shardstore.converting import ledger
from shardstore.converting.options import Check
from shardstore.converting.plan import Recipe, chunk_room
from shardstore.errors import ImageError, OptionError, Problem, SourceError
from shardstore.pictures import images
from shardstore.sources import Source
from shardstore.store.codecs import encode
from shardstore.store.files import checksum_file, crc32c, sync_folder
from shardstore.store.schema import CHUNK, Array, Field, Schema, Table, shard_files

_PER_FILE = ("size", "crc32c", "content")


@dataclass(frozen=True)
class Task:
    """One shard to write.

    Attributes:
        root: the folder being filled.
        schema: of the store to be.
        recipe: how values are made.
        source: this shard's samples alone.
        shard: its number.
        items: the items of each array in this shard, by the plan.
        max_errors: stop after so many bad samples.
        ledger: the folder of records.
        signature: of all that goes into the shard; empty where that cannot be known.
    """

    root: str
    schema: Schema
    recipe: Recipe
    source: Source
    shard: int
    items: Mapping[str, int]
    max_errors: int
    ledger: str
    signature: str


@dataclass(frozen=True)
class ShardResult:
    """What came of a task.

    Attributes:
        shard: its number.
        samples: how many were looked at.
        rejects: of each bad sample the number inside the shard, what is wrong, and whether its bytes are (it could be
            read); if there are any, nothing was written.
        tables: for each array the rows of its chunk table.
        size, crc32c: of each file.
        content: of each field: see :mod:`shardstore.store.index`.
        reused: an earlier run had written it.
    """

    shard: int
    samples: int
    rejects: tuple[tuple[int, Problem, bool], ...] = ()
    tables: tuple[Table, ...] = ()
    size: tuple[int, ...] = ()
    crc32c: tuple[int, ...] = ()
    content: tuple[int, ...] = ()
    reused: bool = False


def write_shard(task: Task) -> ShardResult:
    """Write one shard, or find that an earlier run has. Bad samples come back in the result; only what makes going on
    senseless is raised."""
    result = _recalled(task) or _written(task)
    if task.signature and not result.rejects and not result.reused:
        for path in shard_files(task.schema, task.shard):
            sync_folder(os.path.dirname(f"{task.root}/{path}"))
        numbers = {name: np.array(getattr(result, name)) for name in _PER_FILE}
        ledger.save(task.ledger, task.signature, numbers | {f"table{i}": t for i, t in enumerate(result.tables)})
    return result


def _recalled(task: Task) -> ShardResult | None:
    """What an earlier run has noted of this very shard, if its files are still those that it wrote."""
    found = ledger.load(task.ledger, task.signature) if task.signature else None
    if found is None:
        return None
    try:
        tables = tuple(found[f"table{i}"] for i in range(len(task.schema.arrays)))
        size, crc, content = (tuple(found[name].tolist()) for name in _PER_FILE)
        files = [checksum_file(f"{task.root}/{path}") for path in shard_files(task.schema, task.shard)]
    except (OSError, KeyError):
        return None
    if files != list(zip(size, crc, strict=True)):
        return None
    return ShardResult(task.shard, len(task.source), (), tables, size, crc, content, reused=True)


def _written(task: Task) -> ShardResult:
    writer = formats.load(task.schema.container).ShardWriter(task.root, task.schema, task.shard, task.items)
    rejects: list[tuple[int, Problem, bool]] = []
    try:
        columns = [_column(field, task, writer) for field in task.schema.fields]
        for number in range(len(task.source)):
            try:
                values = make_values(task.source, number, task.schema.fields, task.recipe)
            except SourceError as error:
                problem = replace(error.problem, key=error.problem.key or task.source.key(number))
                rejects.append((number, problem, isinstance(error, ImageError)))
                if len(rejects) >= task.max_errors:
                    break
                continue
            if not rejects:
                for column, value in zip(columns, values, strict=True):
                    column.add(value)
        if rejects:
            writer.abort()
            return ShardResult(task.shard, len(task.source), tuple(rejects))
        for column in columns:
            column.finish()
        writer.close()
    except BaseException:
        writer.abort()
        raise
    return _result(task, columns)


def make_values(source: Source, number: int, fields: tuple[Field, ...], recipe: Recipe) -> list[Any]:
    """The values to store of one sample of the source.

    Raises:
        SourceError: it cannot be read, or a picture is bad.
    """
    values = list(source.read(number))
    for column, (field, pixels) in enumerate(zip(fields, recipe.pixels, strict=True)):
        value = values[column]
        if recipe.resize_short and field.content == "image" and isinstance(value, bytes):
            values[column] = value = images.shrink(value, recipe.resize_short, recipe.max_pixels) or value
        if pixels:
            array = images.decode(value, recipe.max_pixels) if isinstance(value, bytes) else value
            if recipe.size:
                array = images.resize(array, recipe.size, recipe.fit)
            try:
                values[column] = _fitting(field, array)
            except OptionError as error:
                raise OptionError(replace(error.problem, key=source.key(number))) from None
        elif field.content == "image" and recipe.check:
            check_picture(value, recipe.check, recipe.max_pixels)
    return values


def check_picture(data: bytes, check: Check, max_pixels: int) -> None:
    """Raise ImageError for a bad picture; ``check`` and ``max_pixels`` as the options."""
    if check == "full":
        images.decode(data, max_pixels)
    else:
        images.probe(data, max_pixels)


def _fitting(field: Field, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The picture, if it fits into the field.

    Raises:
        OptionError: it is good, but of another type than the others: no reason to leave it out.
        SourceError: it changed during the conversion.
    """
    expected, got = f"{np.dtype(field.dtype)}{field.shape}", f"{array.dtype}{array.shape}"
    if array.dtype != np.dtype(field.dtype) or array.shape[2] != field.shape[2]:
        what = Problem("the pictures have different value types, and one array holds one", field=field.name)
        hint = "Store them encoded (--store encoded), or convert them apart."
        raise OptionError(replace(what, expected=expected, got=got, hint=hint))
    if any(a not in (-1, b) for a, b in zip(field.shape, array.shape, strict=True)):
        what = Problem("the picture has another size than its header had before", field=field.name)
        raise SourceError(replace(what, expected=expected, got=got))
    return array


def _column(field: Field, task: Task, writer: formats.Writer) -> _ArrayColumn | _BlobColumn:
    arrays = [a for a in task.schema.arrays if a.name.partition(".")[0] == field.name]
    return (_ArrayColumn if field.kind == "array" else _BlobColumn)(task, writer, arrays)


class _Chunks:
    """Encodes chunks, hands them to the writer, and keeps their rows."""

    def __init__(self, array: Array, task: Task, writer: formats.Writer) -> None:
        self.array, self.writer, self.shard = array, writer, task.shard
        self.next = task.shard * task.schema.shard_samples
        self.rows: list[tuple[int, int, int, int, int, int]] = []

    def add(self, raw: bytes, samples: int) -> None:
        if self.array.codec != "none":
            raw = raw.ljust(self.array.chunk_items * self.array.item_bytes, b"\0")
        stored = encode(self.array.codec, raw)
        self.rows.append((0, len(stored), crc32c(stored), self.next, samples, self.shard))
        self.next += samples
        self.writer.append(self.array.name, stored)


class _ArrayColumn:
    """A field of kind ``array``: whole chunks of equal items."""

    def __init__(self, task: Task, writer: formats.Writer, arrays: list[Array]) -> None:
        self.chunks = [_Chunks(array, task, writer) for array in arrays]
        self.content = 0
        self._waiting: list[bytes] = []

    def add(self, value: Any) -> None:
        self._waiting.append(np.ascontiguousarray(value).tobytes())
        if len(self._waiting) == self.chunks[0].array.chunk_items:
            self.finish()

    def finish(self) -> None:
        if self._waiting:
            raw = b"".join(self._waiting)
            self.content = crc32c(raw, self.content)
            self.chunks[0].add(raw, len(self._waiting))
            self._waiting = []


class _BlobColumn:
    """A field of kind ``bytes`` or ``ragged``: values one after the other, and a row for each."""

    def __init__(self, task: Task, writer: formats.Writer, arrays: list[Array]) -> None:
        self.chunks = [_Chunks(array, task, writer) for array in arrays]
        self.content = 0
        self._array = array = arrays[0]
        self._waiting: list[bytes] = []
        self._waiting_items = 0
        self._room = chunk_room(array)
        self._rows: dict[str, list[Any]] = {a.name.partition(".")[2]: [] for a in arrays[1:]}
        self._base = 0 if task.schema.container == "npy" else task.shard * array.shard_items
        self._next = 0

    def add(self, value: Any) -> None:
        raw = value if isinstance(value, bytes) else np.ascontiguousarray(value).tobytes()
        items = len(raw) // self._array.item_bytes
        if self._waiting and self._waiting_items + items > self._room:
            self._flush()
        self._rows["start"].append(self._base + self._next + self._waiting_items)
        self._rows["length"].append(items)
        self._rows["crc32c"].append(crc32c(raw))
        if "shape" in self._rows:
            self._rows["shape"].append(value.shape)
        self._waiting.append(raw)
        self._waiting_items += items

    def _flush(self) -> None:
        self.chunks[0].add(b"".join(self._waiting), len(self._waiting))
        self._next += self._waiting_items if self._array.codec == "none" else self._array.chunk_items
        self._waiting, self._waiting_items = [], 0

    def finish(self) -> None:
        if self._waiting:
            self._flush()
        for chunks in self.chunks[1:]:
            part = chunks.array.name.partition(".")[2]
            raw = np.array(self._rows[part], chunks.array.dtype).tobytes()
            if part != "start":
                self.content = crc32c(raw, self.content)
            chunks.add(raw, len(self._rows[part]))


def _result(task: Task, columns: list[Any]) -> ShardResult:
    """Derive what the index says from the finished files."""
    found = formats.load(task.schema.container).scan(task.root, task.schema, task.shard)
    tables = []
    for chunks in (c for column in columns for c in column.chunks):
        table = np.array(chunks.rows, CHUNK)
        extents = found[chunks.array.name]
        nbytes = table["nbytes"].astype(np.int64)
        if chunks.array.codec == "none":
            table["offset"] = extents[0, 0] + np.cumsum(nbytes) - nbytes
            fits = nbytes.sum() <= extents[0, 1]
        else:
            fits = len(extents) == len(table) and bool((extents[:, 1] == nbytes).all())
            table["offset"] = extents[:, 0] if fits else 0
        if not fits:
            raise ValueError(f"shard {task.shard}: array {chunks.array.name} was not written as it should have been")
        tables.append(table)
    sums = [checksum_file(f"{task.root}/{path}") for path in shard_files(task.schema, task.shard)]
    size, crc = zip(*sums, strict=True)
    content = tuple(column.content for column in columns)
    return ShardResult(task.shard, len(task.source), (), tuple(tables), size, crc, content)
