"""The format of a store: this docstring is its specification, ``docs/format.md`` explains it at more length.

Format version 0 (not frozen yet; a later version may not read it).

**Fields and arrays.** A store is a table: ``samples`` rows, named columns (*fields*). On disk a field is one or more
*arrays* whose first axis counts items:

========= =============================================== ==========================================================
kind      what a sample is                                arrays (items)
========= =============================================== ==========================================================
`array`   one array, same dtype and shape for all         ``F`` (samples)
`bytes`   a string of bytes: an image file, text          ``F.data`` (bytes), ``F.start`` ``F.length`` ``F.crc32c``
`ragged`  one array, shape varies                         the same, ``F.data`` counting elements, and ``F.shape``
========= =============================================== ==========================================================

Sample ``i`` of a bytes or ragged field is ``data[start[i] : start[i] + length[i]]``, for ragged reshaped to
``shape[i]``; ``crc32c[i]`` is the CRC-32C of its bytes (little-endian, C order).

**Shards.** Shard ``k`` holds the samples ``k * shard_samples`` on; only the last may be short. Files of shard ``k``,
below the folder that holds ``shardstore.json`` (:func:`shardstore.store.schema.shard_file`):

- npy: ``image/00000.npy``, ``image/00000.data.npy``, … one for each array; ``start`` counts from the file's begin.
- zarr: ``image/c/0/0/0/0``, ``image/data/c/0``, … one shard object of Zarr v3's sharding codec for each array.
- hdf5: ``00000.h5`` with a dataset for each array (``image``, ``image/data``, …).

In zarr and hdf5 ``start`` counts in the whole array, where shard ``k`` begins at item ``k * shard_items``.

**Chunks.** A chunk is a run of samples of one array with one checksum: ``offset`` and ``nbytes`` in the shard's file
(as stored, after the codec), ``crc32c`` of these bytes, ``first`` sample and ``count``, ``shard``. A chunk of an array
field has ``chunk_items`` samples, or what is left of the shard. A chunk of ``F.data`` holds whole samples; without a
codec these stand one after the other, with a codec each chunk decodes to ``chunk_items`` items, the last ones padding.
``F.start`` and its like have one chunk a shard. Compressed chunks decode to ``chunk_items`` items, padding included.

**Files of the index**, all written last, ``shardstore.json`` last of all:

- ``index/<array>.chunks.npy``: the chunk table, a one-dimensional structured array of
  :data:`shardstore.store.schema.CHUNK`, in order of samples.
- ``index/shards.npy``: one row a shard (:func:`shardstore.store.schema.shard_dtype`): ``first``, ``count``; for each
  array the first of its ``rows`` in the chunk table; for each file ``size`` and ``crc32c``; for each field
  ``content``, a CRC-32C of its values in this shard: of the uncompressed items for an array field, else of the arrays
  ``length``, ``crc32c`` and ``shape``.
- ``shardstore.json``: the schema; ``name`` of an HDF5 store's file, which stands in it; ``files``: size and CRC-32C of
  every other file but the shards; ``crc32c`` of itself, taken with the eight digits of that value as zeros.

So each byte of a store is under a checksum that is under another, up to the JSON's own.

**Fingerprint**: the first 32 hexadecimal digits of the SHA-256 of the fields, sample counts and ``content`` checksums.
It does not depend on container or codec.

**Places.** npy and zarr: the store is a folder. hdf5: the store is the file ``NAME.h5`` (virtual datasets over the
shards, one external link a shard), and shards and index lie in ``NAME.h5.shards/<fingerprint>/``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from shardstore.errors import DamagedStoreError, NoStoreError, Problem
from shardstore.store import npyfile
from shardstore.store.files import checksum_file, crc32c, is_special, leads_out, write_file
from shardstore.store.schema import CHUNK, HDF5_FOLDER, REJECTS, Schema, Table, from_json, shard_dtype, shard_file

JSON_NAME = "shardstore.json"
PARTIAL = ".partial"
_MAX_JSON = 1 << 26  # bytes: a class list of millions fits; what is larger is no schema
_MAX_REJECTS = 1 << 28  # bytes: some million bad files
_MUCH = 1 << 28  # bytes
_LINKS = (
    "If the link is to be trusted: copy the store with its links resolved (cp -rL), or read it with "
    "ReadOptions(follow_links=True)."
)
_REPAIR = "Restore the store from a copy, or convert the source again with --overwrite."


class Index:
    """An opened index: the schema, the shard table, chunk tables opened on first use; all tables are mapped memory.

    Attributes:
        path: the store, absolute, as the user names it.
        root: the folder of ``shardstore.json``.
        schema: what it says.
        shards: the shard table, mapped as well.
        follow_links: whether files of the store may be links that lead out of it.
    """

    def __init__(self, path: str, root: str, schema: Schema, shards: Table, follow_links: bool = False) -> None:
        self.path, self.root, self.schema, self.shards, self.follow_links = path, root, schema, shards, follow_links
        self._tables: dict[str, Table] = {}
        self._identity = _identity(root)

    def __reduce__(self) -> tuple[Any, ...]:
        # A spawned worker opens the index itself: a pickled memory map would carry its data along.
        return load, (self.path, self.schema.fingerprint, self.follow_links)

    def table(self, array: str) -> Table:
        """The chunk table of an array, of dtype :data:`CHUNK`."""
        if array not in self._tables:
            table = _load_table(file := f"{self.root}/index/{array}.chunks.npy", CHUNK)
            if not len(table):
                raise DamagedStoreError(Problem("the chunk table is empty", file, hint=_REPAIR))
            self._tables[array] = table
        return self._tables[array]

    def check_file(self, name: str) -> None:
        """Raise DamagedStoreError unless a file of the index holds the bytes that were written."""
        file, (size, crc) = f"{self.root}/{name}", (self.schema.files or {})[name]
        try:
            got = checksum_file(file)
        except OSError as error:
            raise DamagedStoreError(Problem(f"cannot be used: {error}", file, hint=_REPAIR)) from error
        if got != (size, crc):
            what = Problem("the bytes are not those that were written", file, expected=f"{crc:08x}", hint=_REPAIR)
            raise DamagedStoreError(replace(what, got=f"{got[1]:08x}"))

    @property
    def nbytes(self) -> int:
        """The bytes of all files of the store."""
        others = sum(size for size, _ in (self.schema.files or {}).values())
        return int(self.shards["size"].sum()) + others + os.path.getsize(f"{self.root}/{JSON_NAME}")

    def rejects(self) -> list[dict[str, Any]]:
        """What is known of the bad files that were left out: a :class:`shardstore.Problem` as a dict each."""
        if REJECTS not in (self.schema.files or {}):
            return []
        path, known = f"{self.root}/{REJECTS}", {f.name for f in fields(Problem)}
        try:
            if os.path.getsize(path) > _MAX_REJECTS:
                raise ValueError(f"it is larger than {_MAX_REJECTS} bytes")
            with open(path, encoding="ascii") as f:
                lines = [json.loads(line) for line in f]
            if not all(isinstance(line, dict) and {"what"} <= line.keys() <= known for line in lines):
                raise ValueError("a line tells of no bad file")
        except (OSError, ValueError, RecursionError) as error:
            raise DamagedStoreError(Problem(f"cannot be used: {error}", path, hint=_REPAIR)) from error
        return lines

    def check_unchanged(self) -> None:
        """Raise DamagedStoreError if another store has taken this one's place since it was opened."""
        if _identity(self.root) != self._identity:
            load(self.path, self.schema.fingerprint, self.follow_links)
            self._identity = _identity(self.root)

    def check_place(self, path: str) -> None:
        """Raise DamagedStoreError if a file of the store must not be opened: a link leads out of the store, or it is no
        plain file; or another store has taken this one's place."""
        self.check_unchanged()
        _check_place(self.root, path[len(self.root) + 1 :], self.follow_links)

    def rows(self, shard: int, array: str) -> slice:
        """Which rows of that table belong to a shard."""
        number = self.schema.array(array)[0]
        first = int(self.shards["rows"][shard, number])
        last = int(self.shards["rows"][shard + 1, number]) if shard + 1 < len(self.shards) else len(self.table(array))
        return slice(first, last)

    def shard_path(self, shard: int, array: str) -> str:
        """The file that holds a shard's part of an array."""
        return f"{self.root}/{shard_file(self.schema, shard, self.schema.array(array)[0])}"


def _check_place(root: str, name: str, follow_links: bool) -> None:
    path = f"{root}/{name}"
    elsewhere = None if follow_links else leads_out(root, name)
    if elsewhere is not None:
        raise DamagedStoreError(Problem(f"a link leads out of the store, to {elsewhere}", path, hint=_LINKS))
    if is_special(path):
        raise DamagedStoreError(Problem("this is no plain file", path, hint=_REPAIR))


def _identity(root: str) -> tuple[int, int, int] | None:
    try:
        info = os.stat(f"{root}/{JSON_NAME}")
    except OSError:
        return None
    return info.st_dev, info.st_ino, info.st_mtime_ns


def lacks_description(path: str | Path) -> bool:
    """Whether this is a store's folder whose ``shardstore.json`` is gone."""
    return os.path.isfile(f"{path}/index/shards.npy") and not os.path.isfile(f"{path}/{JSON_NAME}")


def locate(path: str | Path) -> str:
    """The folder that holds ``shardstore.json`` for the store of this name.

    Raises:
        NoStoreError: nothing there is a finished store.
    """
    path = os.fspath(path)
    if os.path.isfile(f"{path}/{JSON_NAME}"):
        return os.path.abspath(path)
    shards = path + HDF5_FOLDER
    if os.path.isdir(shards) and os.path.isfile(path):
        found = sorted(e.path for e in os.scandir(shards) if os.path.isfile(f"{e.path}/{JSON_NAME}"))
        if len(found) > 1:  # an interrupted --overwrite leaves two: the file itself says which is its own
            found = [f for f in found if _belongs(f, path)]
        if found:
            return os.path.abspath(found[0])
    raise NoStoreError(_why_no_store(path))


def _belongs(root: str, path: str) -> bool:
    try:
        return (_load_schema(root).files or {}).get(".h5") == checksum_file(path)
    except (OSError, DamagedStoreError):
        return False


def _why_no_store(path: str) -> Problem:
    if os.path.isdir(path + PARTIAL):
        return Problem(
            "unfinished: its conversion was interrupted", path, hint="Run the same `shardstore convert` again."
        )
    if not os.path.exists(path):
        if os.path.isdir(path + HDF5_FOLDER):
            return Problem("the HDF5 file itself is missing", path, hint=f"It belongs beside {path}{HDF5_FOLDER}.")
        return Problem("no such file or folder", path)
    if os.path.isfile(path):
        hint = f"An HDF5 store is two names: this file and {path}{HDF5_FOLDER}; they move and are renamed together."
        return Problem("not a shardstore store", path, hint=hint)
    if lacks_description(path):
        return Problem(f"a store without its description {JSON_NAME}", path, hint=_REPAIR)
    hint = f"To make one from a folder of images: shardstore convert {path} OUT.zarr"
    return Problem(f"not a shardstore store: no {JSON_NAME} in it", path, hint=hint)


def load(path: str | Path, fingerprint: str | None = None, follow_links: bool = False) -> Index:
    """Open the index of a store. Cost does not grow with the number of samples.

    Args:
        path: the store.
        fingerprint: if given, the store must still be this one.
        follow_links: open files of the store that are links leading out of it.

    Raises:
        NoStoreError: there is no finished store.
        DamagedStoreError: its description or shard table is damaged; a file of the index is missing or cut, or a link
            that leads out of the store.
    """
    path = os.path.abspath(path)
    root = locate(path)
    if root != path:
        _check_place(f"{path}{HDF5_FOLDER}", f"{os.path.basename(root)}/{JSON_NAME}", follow_links)
    _check_place(root, JSON_NAME, follow_links)
    schema = _load_schema(root)
    if fingerprint not in (None, schema.fingerprint):
        raise DamagedStoreError(Problem("the store was replaced while it was in use", path, hint="Open it again."))
    if schema.container == "hdf5" and os.path.basename(path) != schema.name:
        hint = f"The file leads to its shards by the name {schema.name}: rename the pair back to it."
        raise DamagedStoreError(Problem("an HDF5 store was renamed", path, expected=schema.name, hint=hint))
    for name, (size, _) in (schema.files or {}).items():
        file = path if name == ".h5" else f"{root}/{name}"
        if name != ".h5":  # which the user named
            _check_place(root, name, follow_links)
        got = os.path.getsize(file) if os.path.isfile(file) else None
        if got != size:
            what = "a file of the store is missing" if got is None else "a file of the store has another size"
            raise DamagedStoreError(Problem(what, file, expected=f"{size} bytes", got=f"{got}", hint=_REPAIR))
    shards = _load_table(f"{root}/index/shards.npy", shard_dtype(schema))
    if len(shards) != schema.shards:
        length = Problem("the shard table has another length", path, expected=f"{schema.shards}", got=f"{len(shards)}")
        raise DamagedStoreError(replace(length, hint=_REPAIR))
    index = Index(path, root, schema, shards, follow_links)
    _check_counts(index)
    return index


def _check_counts(index: Index) -> None:
    """Raise DamagedStoreError for more samples than the first shard has bytes for: what is worked out for all samples
    takes memory by this number. Few are not looked at."""
    count = min(index.schema.samples, index.schema.shard_samples)
    for array in index.schema.arrays:
        needed = count * array.item_bytes
        if needed > _MUCH and array.codec == "none" and not array.name.endswith(".data"):
            path = index.shard_path(0, array.name)
            size = os.path.getsize(path) if os.path.isfile(path) else 0
            if size < needed:
                what = Problem("the shard file is too short for its samples", path, array.name, 0, hint=_REPAIR)
                raise DamagedStoreError(replace(what, expected=f"at least {needed} bytes", got=f"{size}"))


def _load_schema(root: str) -> Schema:
    file = f"{root}/{JSON_NAME}"
    try:
        if os.path.getsize(file) > _MAX_JSON:
            raise ValueError(f"it is larger than {_MAX_JSON} bytes")
        with open(file, "rb") as f:
            return from_json(f.read())
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise DamagedStoreError(Problem(f"cannot be used: {error}", file, hint=_REPAIR)) from error


def _load_table(file: str, dtype: np.dtype[np.void]) -> Table:
    try:
        start, rows = npyfile.measure(file, dtype)
        return np.memmap(file, dtype, "r", start, (rows,)).view(np.ndarray)  # whose rows come faster
    except (OSError, ValueError) as error:
        raise DamagedStoreError(Problem(f"cannot be used: {error}", file, hint=_REPAIR)) from error


def write_index(root: str | Path, schema: Schema, shards: Table, tables: Sequence[Table]) -> Schema:
    """Write the index files into ``root``, all but ``shardstore.json``; returns the schema that lists them."""
    os.makedirs(f"{root}/index", exist_ok=True)
    files = dict(schema.files or {})
    names = ["shards", *(f"{array.name}.chunks" for array in schema.arrays)]
    for name, table in zip(names, [shards, *tables], strict=True):
        data = npyfile.header(table.dtype, table.shape) + table.tobytes()
        write_file(f"{root}/index/{name}.npy", data)
        files[f"index/{name}.npy"] = (len(data), crc32c(data))
    return replace(schema, files=dict(sorted(files.items())))
