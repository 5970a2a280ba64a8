"""Finds what is broken in a store, or in a folder before it is converted, and says what to do.

Each level includes those before: ``structure`` (files, sizes, ranges, sums), ``checksum`` (every byte), ``decode``
(every chunk and picture), ``source`` (compared with the folder the store was made from).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from shardstore import formats
from shardstore.converting.plan import Recipe
from shardstore.converting.write import make_values
from shardstore.errors import ImageError, NoStoreError, OptionError, Problem, ShardstoreError, SourceError
from shardstore.options import ReadOptions
from shardstore.pictures import images
from shardstore.pictures.opening import MAX_PIXELS
from shardstore.pool import Pool, Progress
from shardstore.sources.folder import FolderSource
from shardstore.store import prove
from shardstore.store.chunks import Reader
from shardstore.store.files import checksum_file, crc32c, leads_out
from shardstore.store.index import JSON_NAME, Index, lacks_description, load
from shardstore.store.schema import Field, shard_files

Level = Literal["structure", "checksum", "decode", "source"]
LEVELS: tuple[Level, ...] = get_args(Level)
_RESTORE = "Restore the file from a copy, or convert the source again with --overwrite."
_COPY = "Copy the store with its links resolved (cp -rL)."
_FOLDER_STEP = 256  # pictures of a plain folder checked in one task


def validate(
    path: str | Path,
    *,
    level: Level = "checksum",
    source: str | Path | None = None,
    max_pixels: int = MAX_PIXELS,
    workers: int | None = None,
    progress: Progress | None = None,
) -> list[Problem]:
    """Check a store, or say which files of an image folder would not convert.

    Args:
        path: a store, or a folder of images (each picture is decoded then, whatever the level).
        level: how deep, see above.
        source: the folder the store was made from; level ``source`` needs it.
        max_pixels: a picture that has more, by its header, is a problem and is not decoded.
        workers: processes; None for one a core.
        progress: called with (samples done, samples in all).

    Returns:
        All problems found, in the order of shards; an empty list if there are none.

    Raises:
        NoStoreError: the path is neither a store nor a folder.
        OptionError: ``source`` and ``level`` do not fit together.
        SourceError: the folder holds no pictures.
    """
    if level not in LEVELS:
        raise OptionError(f"level must be one of {', '.join(LEVELS)}; got {level!r}")
    if (source is not None) != (level == "source"):
        raise OptionError("level='source' compares with a folder: give both level and source, or neither")
    report = progress or (lambda done, total: None)
    try:
        index = load(path)
    except NoStoreError:
        if not os.path.isdir(path) or lacks_description(path):
            raise
        if source is not None:
            raise OptionError(
                Problem("only a store can be compared with a folder, and this is none", os.fspath(path))
            ) from None
        return _validate_folder(FolderSource.scan(os.fspath(path)), max_pixels, workers, report)
    except ShardstoreError as error:
        return [error.problem]
    return _validate_store(index, level, source, max_pixels, workers, report)


def _validate_folder(source: FolderSource, max_pixels: int, workers: int | None, report: Progress) -> list[Problem]:
    steps = [np.arange(a, min(a + _FOLDER_STEP, len(source))) for a in range(0, len(source), _FOLDER_STEP)]
    problems: dict[int, list[Problem]] = {}
    done = 0
    with Pool(workers, None) as pool:
        for first, found in pool.run(_check_pictures, ((int(s[0]), source.take(s), max_pixels) for s in steps)):
            problems[first] = found
            done += min(_FOLDER_STEP, len(source) - first)
            report(done, len(source))
    return [p for first in sorted(problems) for p in problems[first]]


def _check_pictures(task: tuple[int, FolderSource, int]) -> tuple[int, list[Problem]]:
    first, source, max_pixels = task
    problems = []
    for number in range(len(source)):
        try:
            images.decode(source.read(number)[0], max_pixels)
        except SourceError as error:
            hint = error.problem.hint or "Mend or remove it, or convert with --on-error skip."
            path = f"{source.root}/{source.key(number)}"
            problems.append(replace(error.problem, path=path, key=source.key(number), hint=hint))
    return first, problems


def _validate_store(
    index: Index, level: Level, source: str | Path | None, max_pixels: int, workers: int | None, report: Progress
) -> list[Problem]:
    depth = LEVELS.index(level)
    problems = _check_tables(index) + _find_strangers(index) + (_check_other_files(index) if depth >= 1 else [])
    tables_good = not problems
    problems += _check_metadata(index, {problem.path for problem in problems})
    found: dict[int, list[Problem]] = {}
    with Pool(workers, None) as pool:
        check = functools.partial(_check_shard, index, depth if tables_good else min(depth, 1), tables_good, max_pixels)
        done = 0
        for shard, some in pool.run(check, range(index.schema.shards)):
            found[shard] = some
            done += int(index.shards["count"][shard])
            report(done, index.schema.samples)
    problems += [p for shard in sorted(found) for p in found[shard]]
    if source is not None and not problems:
        problems += list(_compare(index, FolderSource.scan(os.fspath(source)), max_pixels))
    return problems


def _check_tables(index: Index) -> list[Problem]:
    try:
        return prove.prove(index)
    except ShardstoreError as error:
        return [error.problem]


def _find_strangers(index: Index) -> list[Problem]:
    """Files among the store's own that it does not know: plain tools that list a folder would take them for its own."""
    known = {JSON_NAME, *(index.schema.files or {})}
    known |= {path for shard in range(index.schema.shards) for path in shard_files(index.schema, shard)}
    problems = []
    for folder, folders, files in os.walk(index.root):
        for name in folders:
            if elsewhere := leads_out(index.root, os.path.relpath(f"{folder}/{name}", index.root).replace(os.sep, "/")):
                problems.append(
                    Problem(f"a link leads out of the store, to {elsewhere}", f"{folder}/{name}", hint=_COPY)
                )
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            path = os.path.relpath(f"{folder}/{name}", index.root).replace(os.sep, "/")
            if path not in known and not name.startswith("."):
                problems.append(Problem("a file that is no part of the store", f"{folder}/{name}", hint="Remove it."))
    return sorted(problems, key=str)


def _check_metadata(index: Index, known: set[str | None]) -> list[Problem]:
    """What plain tools read beside the shards must lead to these alone. ``known``: files whose problem was told."""
    if index.schema.container == "hdf5":
        if index.path in known:
            return []
        if damaged := _check_file(index.path, *(index.schema.files or {})[".h5"]):
            return damaged  # and is not opened: HDF5's library may crash on it
    found = formats.load(index.schema.container).astray(index.root, index.schema, index.path)
    return [Problem(f"leads plain tools astray: {what}", f, hint=_RESTORE) for f, what in found if f not in known]


def _check_other_files(index: Index) -> list[Problem]:
    """Index, metadata and the list of rejects, against what the description says."""
    problems = []
    for name, (size, crc) in (index.schema.files or {}).items():
        file = index.path if name == ".h5" else f"{index.root}/{name}"
        problems += _check_file(file, size, crc)
    return problems


def _check_file(file: str, size: int, crc: int, **where: Any) -> list[Problem]:
    try:
        got = checksum_file(file)
    except OSError as error:
        return [Problem(f"the file cannot be read: {error.strerror}", file, hint=_RESTORE, **where)]
    if got == (size, crc):
        return []
    what = "the bytes are not those that were written" if got[0] == size else "the file has another size"
    expected, found = f"{size} bytes, crc32c {crc:08x}", f"{got[0]} bytes, crc32c {got[1]:08x}"
    return [Problem(what, file, expected=expected, got=found, hint=_RESTORE, **where)]


def _check_shard(index: Index, depth: int, tables_good: bool, max_pixels: int, shard: int) -> tuple[int, list[Problem]]:
    problems: list[Problem] = []
    row = index.shards[shard]
    for file, size, crc in zip(shard_files(index.schema, shard), row["size"], row["crc32c"], strict=True):
        path = f"{index.root}/{file}"
        got = os.path.getsize(path) if os.path.isfile(path) else None
        try:
            index.check_place(path)
        except ShardstoreError as error:
            problems.append(replace(error.problem, shard=shard))
            continue
        if got is None:
            problems.append(Problem("a shard file is missing", path, shard=shard, hint=_RESTORE))
        elif got != size:
            what = Problem("a shard file has another size", path, shard=shard, hint=_RESTORE)
            problems.append(replace(what, expected=f"{size} bytes", got=f"{got}"))
        elif depth >= 1:
            problems += _check_file(path, int(size), int(crc), shard=shard)
    if not tables_good:
        return shard, problems
    problems += _damaged_chunks(index, shard) if depth >= 1 else []
    if problems:
        return shard, problems
    problems += _check_places(index, shard)
    if depth >= 2 and not problems:
        problems += _decode_shard(index, shard, max_pixels)
    return shard, problems


def _damaged_chunks(index: Index, shard: int) -> list[Problem]:
    """Which chunks are not what the index says, and their samples."""
    reader, problems = Reader(index), []
    for array in index.schema.arrays:
        rows = index.rows(shard, array.name)
        for row in range(rows.start, rows.stop):
            try:
                reader.check_chunk(array.name, row)
            except ShardstoreError as error:
                first, count = (int(index.table(array.name)[row][n]) for n in ("first", "count"))
                hint = f"It holds samples {first} to {first + count - 1}. {_RESTORE}"
                problems.append(replace(error.problem, hint=hint))
    return problems


def _check_places(index: Index, shard: int) -> list[Problem]:
    """The container's own metadata must lead plain tools to the same bytes."""
    try:
        found = formats.load(index.schema.container).scan(index.root, index.schema, shard)
    except (OSError, ValueError) as error:
        return [Problem(f"plain tools could not read this shard: {error}", shard=shard, hint=_RESTORE)]
    problems = []
    for array in index.schema.arrays:
        table = index.table(array.name)[index.rows(shard, array.name)]
        offsets, extents = table["offset"].astype(np.int64), found[array.name]
        same = np.array_equal(offsets, extents[:, 0]) if array.codec != "none" else offsets[0] == extents[0, 0]
        if not same:
            what = "index and container place the chunks differently"
            problems.append(Problem(what, index.shard_path(shard, array.name), array.name, shard, hint=_RESTORE))
    return problems


def _decode_shard(index: Index, shard: int, max_pixels: int) -> list[Problem]:
    reader, schema = Reader(index, ReadOptions(max_pixels=max_pixels)), index.schema
    first, count = shard * schema.shard_samples, int(index.shards["count"][shard])
    problems: list[Problem] = []
    for number, field in enumerate(schema.fields):
        content = 0
        try:
            for sample in range(first, first + count):
                value = reader.read(field.name, np.array([sample]))[0]
                if field.kind == "array":
                    content = crc32c(np.ascontiguousarray(value).reshape(-1).view(np.uint8), content)
                elif field.content == "image" and field.kind == "bytes":
                    problems += _check_picture(reader, field, shard, sample, value)
        except ShardstoreError as error:
            problems.append(error.problem)
            continue
        if field.kind != "array":
            content = reader.content(field.name, shard)
        if content != int(index.shards["content"][shard, number]):
            what = "the shard's values are not those of its fingerprint"
            problems.append(Problem(what, index.path, field.name, shard, hint=_RESTORE))
    return problems


def _check_picture(reader: Reader, field: Field, shard: int, sample: int, data: bytes) -> list[Problem]:
    try:
        images.decode(data, reader.options.max_pixels)
    except ImageError as error:
        hint = error.problem.hint or "It was stored so (--check header): mend the source file and convert again."
        path = reader.index.shard_path(shard, f"{field.name}.data")
        where: dict[str, Any] = {"path": path, "field": field.name, "shard": shard, "sample": sample}
        return [replace(error.problem, **where, key=reader.key(sample), hint=hint)]
    return []


def _compare(index: Index, folder: FolderSource, max_pixels: int) -> Iterator[Problem]:
    """Samples that only one side has, or that differ."""
    schema, reader = index.schema, Reader(index)
    if "key.data" not in schema.array_names:
        raise OptionError(Problem("a store without keys cannot be compared with a folder", index.path))
    numbers = {folder.keys.encoded(i): i for i in range(len(folder))}
    rejected = {line["key"] for line in index.rejects()}
    pixels = tuple(f.content == "image" and f.kind != "bytes" for f in schema.fields)
    size = schema.options.get("size")
    short = schema.options.get("resize_short")
    recipe = Recipe(pixels, tuple(size) if size else None, schema.options.get("fit", "crop"), None, max_pixels, short)
    for sample in range(schema.samples):
        here = np.array([sample])
        key = reader.read("key", here)[0]
        where: dict[str, Any] = {"sample": sample, "key": key.decode("utf-8", "surrogateescape")}
        number = numbers.pop(key, None)
        if number is None:
            yield Problem("the source file is gone", folder.root, **where, hint="Convert again to drop the sample.")
            continue
        try:
            values = make_values(folder, number, schema.fields, recipe)
        except SourceError as error:
            yield replace(error.problem, path=folder.root, **where)
            continue
        for field, value in zip(schema.fields, values, strict=True):
            stored = reader.read(field.name, here)[0]
            same = value == stored if isinstance(value, bytes) else np.array_equal(value, stored)
            if not same and short and field.content == "image" and isinstance(value, bytes):
                same = _made_otherwise(folder.read(number)[0], value, stored, max_pixels)
            if not same:
                yield Problem("differs from the source", folder.root, field.name, **where, hint="Convert again.")
    for key in numbers:
        text = key.decode("utf-8", "surrogateescape")
        if text not in rejected:
            yield Problem("the source file is not in the store", folder.root, key=text, hint="Convert again to add it.")


def _made_otherwise(source: bytes, made: bytes, stored: bytes, max_pixels: int) -> bool:
    """Whether a resized picture has the same pixels: another Pillow, or other metadata, gives other bytes."""
    if made == source:  # small enough to be kept as it is
        return False
    try:
        return np.array_equal(images.decode(made, max_pixels), images.decode(stored, max_pixels))
    except ImageError:
        return False
