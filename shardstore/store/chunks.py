"""From sample numbers to arrays and bytes: ``pread``, check, decompress, cut. The same few lines for all containers.

A reader opens files on first use and keeps a bounded number of descriptors and decoded bytes. It can be pickled and
survives a fork: the other process opens its own files.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np

from shardstore.errors import DamagedStoreError, Problem, ShardstoreError
from shardstore.options import ReadOptions
from shardstore.store.cache import Cache
from shardstore.store.codecs import check_size, decode
from shardstore.store.files import Files, crc32c
from shardstore.store.index import Index
from shardstore.store.pieces import Plan, plans
from shardstore.store.rows import Chunk, Rows, impossible, locate
from shardstore.store.schema import parts

Array = np.ndarray[Any, np.dtype[Any]]
Numbers = np.ndarray[Any, np.dtype[np.int64]]

_SMALL = 1024  # items and blobs below this are cut from a cached chunk: a read each would cost more than the copy
_LARGE = 1 << 20  # bytes: less memory is taken without looking at the file
_HINT = "Run `shardstore validate {path}` to see all that is damaged; then restore the file, or convert again."


class Reader:
    """Reads samples of an open store.

    ``options.verify`` says which checksums are checked. ``chunk``: of each bytes or ragged sample, its own; of each
    chunk that is read as a whole. ``always``: single samples of uncompressed pixels too; the whole chunk is read for
    them and kept among the cached ones, so that its other samples need no second reading; and each table of the index,
    once. ``never``: none.
    """

    def __init__(self, index: Index, options: ReadOptions | None = None) -> None:
        self.index = index
        self.options = options or ReadOptions()
        self._files = Files(before_open=index.check_place)
        self._cache = Cache(self.options.window_bytes)
        self._verify = self.options.verify
        self._checked_tables: set[str] = set()
        if self._verify == "always":
            index.check_file("index/shards.npy")

    def __reduce__(self) -> tuple[Any, ...]:
        return Reader, (self.index, self.options)

    def read(self, field: str, samples: Numbers) -> Any:
        """The values of a field for these samples, in this order.

        Args:
            field: its name.
            samples: int64, each in ``0 .. samples - 1``.

        Returns:
            An array of shape (n, *shape) for a field of kind ``array``; a list of bytes for ``bytes``; a list of
            arrays for ``ragged``.

        Raises:
            DamagedStoreError: the bytes are missing or not those written.
        """
        kind = self.index.schema.field(field).kind
        if kind == "array":
            return self.read_array(field, samples)
        if self._files.slow:
            self._announce(field, samples)
        return [self._read_blob(field, int(s), ragged=kind == "ragged") for s in samples]

    def lengths(self, field: str) -> Numbers:
        """Elements of every sample of a bytes or ragged field: int64 of shape (samples,)."""
        counts = self.index.shards["count"]
        return np.concatenate([self._part(field, "length", s)[:n] for s, n in enumerate(counts.tolist())])

    def content(self, field: str, shard: int) -> int:
        """The ``content`` checksum of a bytes or ragged field in one shard (see :mod:`shardstore.store.index`)."""
        crc, count = 0, int(self.index.shards["count"][shard])
        for part in parts(self.index.schema.field(field).kind)[2:]:
            crc = crc32c(self._part(field, part[1:], shard)[:count].reshape(-1).view(np.uint8), crc)
        return crc

    def check_chunk(self, array: str, row: int) -> None:
        """Read a chunk and raise DamagedStoreError unless its bytes are those that were written."""
        self._load_chunk(array, self._row(array, row))

    def check(self, field: str, sample: int) -> None:
        """Raise DamagedStoreError unless the bytes that this sample is read from are those that were written."""
        if self.index.schema.field(field).kind == "array":
            shard, inside = divmod(sample, self.index.schema.shard_samples)
            chunk_items = self.index.schema.array(field)[1].chunk_items
            row = int(self._rows_before(field)[shard]) + inside // chunk_items
            self._load_chunk(field, self._row(field, row, shard))
        else:
            self.read(field, np.array([sample]))

    def key(self, sample: int) -> str | None:
        """The key of a sample, or None where there is none or it cannot be read."""
        try:
            self.index.schema.field("key")
            return str(self._read_blob("key", sample, ragged=False).decode("utf-8", "surrogateescape"))
        except (KeyError, ShardstoreError):
            return None

    # -- array fields -------------------------------------------------------------------------------------------------

    def plan(self, name: str, batches: list[Numbers]) -> list[Plan | None]:
        """What :meth:`read_array` of each of these batches will read, worked out together; None where samples are cut
        from cached chunks, or where reading will have to say what is wrong."""
        spec = self.index.schema.array(name)[1]
        if spec.codec != "none" or spec.item_bytes < _SMALL or not sum(map(len, batches)):
            return [None] * len(batches)
        samples = np.concatenate(batches)
        rows = self._rows_for(name, samples)[0]
        try:
            found = self._rows_of(name, rows, samples // self.index.schema.shard_samples)
        except DamagedStoreError:
            if len(batches) == 1:
                raise
            return [None] * len(batches)
        made = plans(batches, rows, found, spec.item_bytes)
        # What is not a whole chunk has no checksum of its own.
        always = self._verify == "always"
        return [None if always and len(plan.whole) < len(plan.rows) else plan for plan in made]

    def read_array(self, name: str, samples: Numbers, out: Array | None = None, plan: Plan | None = None) -> Array:
        """:meth:`read` for a field of kind ``array``, into ``out`` if given: C-contiguous, of shape (n, *shape).
        ``plan`` is what :meth:`plan` says of these samples."""
        spec = self.index.schema.array(name)[1]
        if out is None:
            out = np.empty((len(samples), *spec.item_shape), spec.dtype)
        plan = plan or self.plan(name, [samples])[0]
        if plan:
            self._read_planned(name, plan, out.reshape(-1).view(np.uint8))
            return out
        rows, inside = self._rows_for(name, samples)
        shards = len(self.index.shards)
        places = rows * shards + samples // self.index.schema.shard_samples
        for place in np.unique(places).tolist():
            row, shard = divmod(place, shards)
            here = np.flatnonzero(places == place)
            a, b = int(here[0]), int(here[-1]) + 1
            if b - a == len(here) == spec.chunk_items and (inside[a + 1 : b] > inside[a : b - 1]).all():
                self._load_chunk(name, self._row(name, row, shard), out[a:b].reshape(-1).view(np.uint8))
            else:
                out[here] = self._items(name, row, shard)[inside[here]]
        return out

    def _rows_for(self, name: str, samples: Numbers) -> tuple[Numbers, Numbers]:
        """Rows of the chunk table, and places in these chunks."""
        shards, inside = np.divmod(samples, self.index.schema.shard_samples)
        chunks, inside = np.divmod(inside, self.index.schema.array(name)[1].chunk_items)
        return self._rows_before(name)[shards] + chunks, inside

    def _read_planned(self, name: str, plan: Plan, out: Array) -> None:
        """Samples of uncompressed chunks, straight into the batch."""
        if not self._read_pieces(name, plan.shards, plan.pieces, out):
            for row, (_, offset, begin, nbytes) in zip(plan.rows.tolist(), plan.pieces.tolist(), strict=True):
                # Again, each by itself, to tell which it was and why.
                self._fill(name, self._row(name, row), offset, out[begin : begin + nbytes])
        for i in plan.whole:
            chunk, begin = self._row(name, int(plan.rows[i])), int(plan.pieces["begin"][i])
            self._check(name, chunk, chunk.crc32c, out[begin : begin + chunk.nbytes])

    def _read_pieces(self, name: str, shards: list[int], pieces: Array, data: Array) -> bool:
        try:
            return self._files.read_pieces([self.index.shard_path(s, name) for s in shards], pieces, data)
        except OSError:
            return False

    def _items(self, name: str, row: int, shard: int) -> Array:
        """All items of a chunk of this shard, decoded and cached."""
        found = self._cache.get((name, row, shard))
        if found is None:
            spec = self.index.schema.array(name)[1]
            found = self._load_chunk(name, self._row(name, row, shard)).view(spec.dtype).reshape(-1, *spec.item_shape)
            self._cache.put((name, row, shard), found)
        return found  # type: ignore[no-any-return]

    def _load_chunk(self, name: str, chunk: Chunk, out: Array | None = None) -> Array:
        """A chunk's bytes, checked and decompressed; into ``out``, if given, which has that size."""
        spec = self.index.schema.array(name)[1]
        stored = self._room(name, chunk, chunk.nbytes) if spec.codec != "none" or out is None else out
        self._fill(name, chunk, chunk.offset, stored)
        self._check(name, chunk, chunk.crc32c, stored)
        if spec.codec == "none":
            return stored
        try:
            if out is None:
                check_size(spec.codec, stored, spec.chunk_items * spec.item_bytes)
                out = np.empty(spec.chunk_items * spec.item_bytes, np.uint8)
            decode(spec.codec, stored, out)
        except ValueError as error:
            raise self._damaged(f"a chunk cannot be decompressed: {error}", name, chunk) from error
        return out

    # -- bytes and ragged fields --------------------------------------------------------------------------------------

    def _read_blob(self, field: str, sample: int, ragged: bool) -> Any:
        shard, inside = divmod(sample, self.index.schema.shard_samples)
        rows = self._rows(field, shard)
        name, start, length = f"{field}.data", int(rows.start[inside]), int(rows.length[inside])
        spec = self.index.schema.array(name)[1]
        row = int(rows.chunk[inside])
        chunk = self._row(name, row, shard)
        if spec.codec != "none" or chunk.nbytes < _SMALL * chunk.count:
            start -= chunk.offset if spec.codec == "none" else 0
            data = self._items(name, row, shard).view(np.uint8)[start : start + length]
        else:
            data = self._room(name, chunk, length)
            self._fill(name, chunk, start, data)
        self._check(name, chunk, int(rows.crc32c[inside]), data, sample)
        if not ragged or rows.shape is None:
            return data.tobytes()
        return data.copy().view(spec.dtype).reshape(rows.shape[inside])  # the chunk it is cut from may be cached

    def _announce(self, field: str, samples: Numbers) -> None:
        """Let the system begin to read all of these, while the first are decoded."""
        name = f"{field}.data"
        if self.index.schema.array(name)[1].codec == "none":
            for shard, inside in zip(
                *(a.tolist() for a in np.divmod(samples, self.index.schema.shard_samples)), strict=True
            ):
                rows = self._rows(field, shard)
                where = self.index.shard_path(shard, name)
                self._files.announce(where, int(rows.start[inside]), int(rows.length[inside]))

    def _rows(self, field: str, shard: int) -> Rows:
        found = self._cache.get((field, shard))
        if found is None:
            found = self._load_rows(field, shard)
            self._cache.put((field, shard), found)
        return found  # type: ignore[no-any-return]

    def _load_rows(self, field: str, shard: int) -> Rows:
        name, rows = f"{field}.data", self.index.rows(shard, f"{field}.data")
        names = [part[1:] for part in parts(self.index.schema.field(field).kind)[1:]]
        numbers = {part: self._part(field, part, shard) for part in names}
        try:
            return locate(self.index.schema, field, shard, self._table(name)[rows], rows.start, numbers)
        except ValueError as error:
            raise self._damaged(str(error), name, shard=shard) from None

    def _part(self, field: str, part: str, shard: int) -> Array:
        """``start`` and its like of one shard: an array of one chunk a shard."""
        name = f"{field}.{part}"
        row = self.index.rows(shard, name).start
        spec = self.index.schema.array(name)[1]
        return self._load_chunk(name, self._row(name, row, shard)).view(spec.dtype).reshape(-1, *spec.item_shape)

    # -- rows, bytes, checks ------------------------------------------------------------------------------------------

    def _table(self, name: str) -> Array:
        if self._verify == "always" and name not in self._checked_tables:
            self.index.check_file(f"index/{name}.chunks.npy")
            self._checked_tables.add(name)
        return self.index.table(name)

    def _rows_before(self, name: str) -> Numbers:
        return self.index.shards["rows"][:, self.index.schema.array(name)[0]]

    def _row(self, name: str, row: int, wanted: int | None = None) -> Chunk:
        offset, nbytes, crc, first, count, shard = self._rows_of(name, np.array([row]), wanted)[0].item()
        return Chunk(row - int(self._rows_before(name)[shard]), offset, nbytes, crc, first, count, shard)

    def _rows_of(self, name: str, rows: Numbers, wanted: Numbers | int | None = None) -> Array:
        """Rows of the chunk table, their bounds checked; ``wanted``: the shards that they must be of."""
        table = self._table(name)
        if len(rows) and not 0 <= rows.min() <= rows.max() < len(table):
            raise self._damaged(f"the chunk table has no row {rows.max()}", name)
        found = table[rows]
        bad = impossible(self.index.schema, self.index.shards, name, rows, found)
        if wanted is not None:
            bad |= found["shard"] != wanted
        if bad.any():
            raise self._damaged(f"row {rows[bad][0]} of the chunk table is impossible", name)
        return found

    def _room(self, name: str, chunk: Chunk, nbytes: int) -> Array:
        """Memory for bytes of a chunk; for many only if the file can have them, whatever the index says of its size."""
        if nbytes > _LARGE:
            path = self.index.shard_path(chunk.shard, name)
            size = os.path.getsize(path) if os.path.isfile(path) else 0
            if size < chunk.offset + nbytes:
                what = Problem(
                    "the shard file is cut", expected=f"{nbytes} bytes at {chunk.offset}", got=f"{size} bytes"
                )
                raise self._damaged(what, name, chunk)
        return np.empty(nbytes, np.uint8)

    def _fill(self, name: str, chunk: Chunk, offset: int, out: Array) -> None:
        path = self.index.shard_path(chunk.shard, name)
        try:
            got = self._files.read_into(path, offset, out)
        except OSError as error:
            raise self._damaged(f"a shard file cannot be read: {error.strerror}", name, chunk) from error
        if got != len(out):
            what = Problem("the shard file is cut", expected=f"{len(out)} bytes at {offset}", got=f"{got}")
            raise self._damaged(what, name, chunk)

    def _check(self, name: str, chunk: Chunk, expected: int, data: Array, sample: int | None = None) -> None:
        if self._verify == "never":
            return
        got = crc32c(data)
        if got != expected:
            what = Problem("the bytes are not those that were written", expected=f"{expected:08x}", got=f"{got:08x}")
            raise self._damaged(what, name, chunk, sample=sample)

    def _damaged(
        self, what: Problem | str, name: str, chunk: Chunk | None = None, sample: int | None = None,
        shard: int | None = None,
    ) -> DamagedStoreError:  # fmt: skip
        problem = Problem(what) if isinstance(what, str) else what
        field = name.partition(".")[0]
        shard = chunk.shard if chunk else shard
        key = None
        if chunk and field != "key":  # without a sample, the chunk's first one helps to find the place
            key = self.key(chunk.first if sample is None else sample)
        return DamagedStoreError(
            replace(
                problem,
                path=self.index.path if shard is None else self.index.shard_path(shard, name),
                field=field,
                shard=shard,
                chunk=chunk.number if chunk else None,
                sample=sample,
                key=key,
                hint=_HINT.format(path=self.index.path),
            )
        )
