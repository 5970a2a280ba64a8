"""What a conversion will write, decided before a byte is written: same source and options, same plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from shardstore.converting.options import Check, ConvertOptions
from shardstore.errors import OptionError, Problem, SourceError
from shardstore.pictures.images import Fit
from shardstore.sources import Numbers, Source
from shardstore.store.codecs import Codec
from shardstore.store.schema import MAX_CHUNK, ROW_DTYPES, Array, Container, Field, Schema, parts

# 256 samples let batches and workers divide shards evenly, and that wins until a shard would pass 512 MiB.
_SHARD_LIMIT = 512 << 20
_SHARD_MULTIPLE = 256
_SHARD_COUNTS = (24, 12, 6, 4, 3, 2)
_BLOB_CHUNK_BYTES = 1 << 20
_INNER_BYTES = 1 << 20  # Zarr's inner chunks of an uncompressed byte stream; nothing of ours reads by them
_AUTO_GROWTH = 2  # "auto" takes pixels up to this many times the files' bytes


@dataclass(frozen=True)
class Recipe:
    """How a worker makes the values to store from the source's.

    Attributes:
        pixels: per field: decode or keep arrays of pixels (else the bytes are stored).
        size, fit: as the options.
        check: how an encoded picture that is kept is checked; None where it was before.
        max_pixels: as the option.
        resize_short: as the option, where the source does not hold the resized pictures already.
    """

    pixels: tuple[bool, ...]
    size: tuple[int, int] | None
    fit: Fit
    check: Check | None
    max_pixels: int
    resize_short: int | None = None


@dataclass(frozen=True)
class Plan:
    """The schema of the store to be, and how its values are made.

    Attributes:
        schema: without fingerprint and files.
        recipe: for the workers.
        items: for each array, the items in each shard.
        reason: why pixels or encoded, or what is resized, in a sentence; empty where the user chose.
    """

    schema: Schema
    recipe: Recipe
    items: dict[str, Numbers]
    reason: str

    @property
    def nbytes(self) -> int:
        """Bytes of all values, uncompressed."""
        return sum(int(n.sum()) * self.schema.array(name)[1].item_bytes for name, n in self.items.items())

    def numbers(self, shard: int) -> Numbers:
        """Which of the source's samples a shard holds."""
        first = shard * self.schema.shard_samples
        return np.arange(first, min(first + self.schema.shard_samples, self.schema.samples))


@dataclass(frozen=True)
class Shapes:
    """What the headers of all pictures of one field say: see :func:`needs_shapes`."""

    shapes: Numbers  # (samples, 3); zeros for a picture without a usable header
    dtypes: tuple[str, ...]  # all that occur


def picture_field(source: Source) -> Field | None:
    """The field of encoded pictures that could be decoded, if the source has one."""
    return next((f for f in source.fields if f.content == "image" and f.kind == "bytes"), None)


def needs_shapes(source: Source, options: ConvertOptions) -> bool:
    """Whether the plan depends on the headers of all pictures."""
    decided = options.store == "encoded" or options.size is not None or options.resize_short is not None
    return picture_field(source) is not None and not decided


def make_plan(source: Source, container: Container, options: ConvertOptions, shapes: Shapes | None) -> Plan:
    """Decide fields, shards and chunks.

    Raises:
        OptionError: the options do not fit the source or each other.
        SourceError: the pictures cannot be stored as asked.
    """
    stored, reason = _stored_fields(source, options, shapes)
    if options.codec != "none" and container == "npy":
        raise OptionError("npy files are plain arrays without compression: use a .zarr or .h5 target with codec='zstd'")
    if options.codec != "none" and not any(f.content == "image" and f.kind != "bytes" for f in stored):
        raise OptionError(f"codec={options.codec!r} is for pixels, and pictures are stored encoded: add store='pixels'")
    counts = {f.name: _counts(source, f, shapes) for f in stored if f.kind != "array"}
    each = sum(_field_bytes(f, counts) for f in stored)
    shard_samples = options.samples_per_shard or _shard_samples(len(source), each, options.shard_size)
    shard_samples = min(shard_samples, len(source))
    arrays: list[Array] = []
    items: dict[str, Numbers] = {}
    for field in stored:
        made = _arrays(field, counts.get(field.name), shard_samples, options)
        for array in made:
            arrays.append(array)
            items[array.name] = _shard_items(array, counts.get(field.name), len(source), shard_samples)
    pixels = tuple(f.content == "image" and f.kind != "bytes" for f in stored)
    content = _content_options(source, options, any(pixels))
    schema = Schema(container, len(source), shard_samples, stored, tuple(arrays), source.classes, content)
    recipe = Recipe(pixels, options.height_width, options.fit, options.check, options.max_pixels)
    return Plan(schema, recipe, items, reason)


def _content_options(source: Source, options: ConvertOptions, pixels: bool) -> dict[str, Any]:
    """What the schema records of how the content came about, a source that is a store included."""
    content = {"size": None, "fit": options.fit, "shuffle": False, "seed": 0, **source.options}
    if options.height_width:
        content |= {"size": list(options.height_width), "fit": options.fit}
    if options.shuffle:
        content |= {"shuffle": True, "seed": options.seed}
    if options.resize_short:
        content["resize_short"] = min(options.resize_short, content.get("resize_short", options.resize_short))
    content.pop("check", None)
    if options.check == "header" and not pixels:
        content["check"] = "header"  # what reads such a store must not take its pictures for good ones
    return content | {"codec": options.codec, "store": "pixels" if pixels else "encoded"}


def _stored_fields(source: Source, options: ConvertOptions, shapes: Shapes | None) -> tuple[tuple[Field, ...], str]:
    """The fields as they will be stored, and why."""
    picture, reason = picture_field(source), ""
    if picture is None and options.store == "encoded":
        raise OptionError("store='encoded' keeps image files, and this source holds decoded arrays")
    if picture is None and options.resize_short:
        raise OptionError("resize_short makes image files from image files, and this source holds none: use size")
    fields = []
    for field in source.fields:
        if field is picture:
            field, reason = _picture_field(source, field, options, shapes)
        elif field.content == "image" and options.height_width:
            field = replace(field, kind="array", shape=(*options.height_width, field.shape[2]))
        fields.append(field)
    return tuple(fields), reason


def _picture_field(source: Source, field: Field, options: ConvertOptions, shapes: Shapes | None) -> tuple[Field, str]:
    nbytes = int(source.lengths(field.name).sum())
    if options.height_width:
        dtype, channels = _first_kind(source, field, options.max_pixels)
        return replace(field, kind="array", dtype=dtype, shape=(*options.height_width, channels)), ""
    if options.resize_short:
        return field, f"shorter sides above {options.resize_short} will be resized to it; sizes are estimated"
    if options.store == "encoded" or shapes is None:
        return field, ""
    known = shapes.shapes[shapes.shapes[:, 0] > 0]
    one = len(known) > 0 and bool((known == known[0]).all()) and len(shapes.dtypes) == 1
    pixels = int(known.prod(axis=1).sum()) * max((np.dtype(d).itemsize for d in shapes.dtypes), default=1)
    if options.store == "auto" and not (one and pixels <= _AUTO_GROWTH * nbytes):
        at_224 = len(source) * 224 * 224 * 3
        why = f"pixels would take {human(pixels)}" if one else "pictures have different sizes or modes"
        return field, f"{why}; encoded takes {human(nbytes)}, pixels at 224x224 would take {human(at_224)} (--size 224)"
    if len(shapes.dtypes) > 1:
        what = Problem("the pictures have different value types, and one array holds one", expected="one type")
        hint = "Store them encoded (--store encoded), or convert them apart."
        raise SourceError(replace(what, got=", ".join(shapes.dtypes), hint=hint))
    if not len(known):
        return replace(field, kind="ragged", shape=(-1, -1, 3)), ""
    shape = tuple(int(a[0]) if (a == a[0]).all() else -1 for a in known.T)
    reason = f"all pictures are {shape[1]}x{shape[0]}; encoded would take {human(nbytes)} (--store encoded)"
    kind: Literal["array", "ragged"] = "ragged" if -1 in shape else "array"
    dtype = np.dtype(shapes.dtypes[0]).newbyteorder("<").str
    return replace(field, kind=kind, dtype=dtype, shape=shape), reason if options.store == "auto" else ""


def _first_kind(source: Source, field: Field, max_pixels: int) -> tuple[str, int]:
    """dtype and channels of the first good picture: with --size, all others must have the same."""
    from shardstore.pictures.images import decode

    column = source.fields.index(field)
    for number in range(len(source)):
        try:
            array = decode(source.read(number)[column], max_pixels)
        except SourceError:
            continue
        return np.dtype(array.dtype).newbyteorder("<").str, array.shape[2]
    return "|u1", 3  # no good picture: writing will say so


def _counts(source: Source, field: Field, shapes: Shapes | None) -> Numbers:
    """Elements of each sample."""
    if field.kind == "ragged" and shapes is not None and field.content == "image":
        return np.asarray(shapes.shapes.prod(axis=1))
    return source.lengths(field.name)


def _field_bytes(field: Field, counts: dict[str, Numbers]) -> float:
    """Bytes a sample, on average."""
    size = np.dtype(field.dtype).itemsize
    if field.kind == "array":
        return float(np.prod(field.shape, dtype=np.int64)) * size
    return float(counts[field.name].mean()) * size


def _shard_samples(samples: int, each: float, target: int) -> int:
    """Samples of a shard: see the constants at the top."""
    near = max(1, round(target / max(each, 1)))
    if each * _SHARD_MULTIPLE > max(target, _SHARD_LIMIT):
        return 1 << (near.bit_length() - 1)
    wanted = -(-samples // near)
    for divisor in _SHARD_COUNTS:
        shards = -(-wanted // divisor) * divisor
        size = -(-samples // (shards * _SHARD_MULTIPLE)) * _SHARD_MULTIPLE
        if -(-samples // size) % divisor == 0 and size * each <= max(target, _SHARD_LIMIT):
            return size
    return -(-samples // (wanted * _SHARD_MULTIPLE)) * _SHARD_MULTIPLE


def _arrays(field: Field, counts: Numbers | None, shard_samples: int, options: ConvertOptions) -> list[Array]:
    """The arrays of one field."""
    codec: Codec = options.codec if field.content == "image" and field.kind != "bytes" else "none"
    if counts is None:
        array = Array(field.name, field.dtype, field.shape, shard_samples, 1, codec)
        _check_chunk(field, array.item_bytes)
        return [replace(array, chunk_items=_divisor(shard_samples, options.chunk_size // max(array.item_bytes, 1)))]
    size = np.dtype(field.dtype).itemsize
    largest = int(counts.max(initial=1))
    _check_chunk(field, largest * size)
    if codec == "none":
        room, chunk = _stream_room(_sums(counts, shard_samples), size)
    else:
        chunk = max(options.chunk_size // size, largest)
        room = chunk * max(len(cut(c, chunk)) for c in _per_shard(counts, shard_samples))
    arrays = [Array(field.name + ".data", field.dtype, (), room, chunk, codec)]
    for part in parts(field.kind)[1:]:
        shape = (len(field.shape),) if part == ".shape" else ()
        arrays.append(Array(field.name + part, ROW_DTYPES[part[1:]], shape, shard_samples, shard_samples, "none"))
    return arrays


def _stream_room(sums: Numbers, size: int) -> tuple[int, int]:
    """Room for a shard's stream of elements, and its inner chunks. The room is rounded up to 4 significant bits, so
    that leaving out a bad file rarely changes it; what is not used takes no space."""
    most = max(int(sums.max(initial=1)), 1)
    step = 1 << max(most.bit_length() - 4, 0)
    inner = min(step, _INNER_BYTES // size)
    return -(-most // step) * step, inner


def _divisor(number: int, limit: int) -> int:
    """The largest divisor of ``number`` up to ``limit``, at least 1."""
    return max((d for d in range(1, min(number, max(limit, 1)) + 1) if number % d == 0), default=1)


def _check_chunk(field: Field, nbytes: int) -> None:
    if nbytes > MAX_CHUNK:
        what = Problem("a sample is too large for one chunk", field=field.name, expected=f"at most {MAX_CHUNK} bytes")
        raise SourceError(replace(what, got=f"{nbytes}"))


def _per_shard(counts: Numbers, shard_samples: int) -> list[Numbers]:
    return np.split(counts, range(shard_samples, len(counts), shard_samples))


def _sums(counts: Numbers, shard_samples: int) -> Numbers:
    return np.add.reduceat(counts, np.arange(0, len(counts), shard_samples))


def _shard_items(array: Array, counts: Numbers | None, samples: int, shard_samples: int) -> Numbers:
    """Items of an array in each shard."""
    if counts is not None and array.name.endswith(".data"):
        if array.codec == "none":
            return _sums(counts, shard_samples)
        chunks = [len(cut(c, array.chunk_items)) for c in _per_shard(counts, shard_samples)]
        return np.array(chunks, np.int64) * array.chunk_items
    firsts = np.arange(0, samples, shard_samples)
    return np.minimum(shard_samples, samples - firsts)


def cut(counts: Numbers, room: int) -> Numbers:
    """Cut samples of these sizes, in order, into chunks with room for ``room`` elements: samples in each chunk."""
    ends, chunks, done = np.cumsum(counts), [], 0
    while done < len(counts):
        before = int(ends[done - 1]) if done else 0
        last = max(int(np.searchsorted(ends, before + room, side="right")), done + 1)
        chunks.append(last - done)
        done = last
    return np.array(chunks, np.int64)


def chunk_room(array: Array) -> int:
    """Elements that a chunk of the values of a bytes or ragged field has room for (a larger sample stands alone)."""
    return array.chunk_items if array.codec != "none" else _BLOB_CHUNK_BYTES // np.dtype(array.dtype).itemsize


def human(nbytes: float) -> str:
    """Bytes for people, in powers of 1,000."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < 999.5 or unit == "TB":
            return f"{nbytes:.0f} {unit}" if nbytes >= 99.5 or unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    raise AssertionError
