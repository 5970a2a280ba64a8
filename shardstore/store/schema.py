"""The description of a store, ``shardstore.json``: its classes, its checksum, and the paths that follow from it.

The whole format is specified in :mod:`shardstore.store.index`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import keyword
import math
import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np

from shardstore.store.codecs import CODECS, Codec
from shardstore.store.files import crc32c

FORMAT_VERSION = 0
HDF5_FOLDER = ".shards"  # beside NAME.h5
REJECTS = "rejects.jsonl"  # a line of JSON for each bad file that was left out: key and reason
CHUNK = np.dtype(
    [("offset", "<u8"), ("nbytes", "<u4"), ("crc32c", "<u4"), ("first", "<i8"), ("count", "<u4"), ("shard", "<u4")]
)

Container = Literal["npy", "hdf5", "zarr"]
Kind = Literal["array", "ragged", "bytes"]
Content = Literal["image", "label", "text", "data"]
CONTAINERS: tuple[Container, ...] = get_args(Container)
Table = np.ndarray[Any, np.dtype[np.void]]

Sure = Callable[[bool, str], None]
MAX_CHUNK = (1 << 32) - 1  # bytes; u4 in the chunk table
ROW_DTYPES = {"start": "<i8", "length": "<i8", "crc32c": "<u4", "shape": "<i4"}  # the parts of bytes and ragged fields

_NO_CRC = '"crc32c": "00000000"'


@dataclass(frozen=True)
class Field:
    """A named column.

    Attributes:
        name: an identifier.
        kind: see the table above.
        dtype: of a sample's elements, as numpy spells it (``|u1``); ``|u1`` for bytes.
        shape: of a sample; -1 where it varies; ``(-1,)`` for bytes.
        content: what the values mean: a picture (encoded, or height x width x channels), a class number, text in UTF-8
            (with surrogateescape), or just data.
    """

    name: str
    kind: Kind
    dtype: str
    shape: tuple[int, ...]
    content: Content


@dataclass(frozen=True)
class Array:
    """One array on disk.

    Attributes:
        name: the field's name, or that and a dot and the part (``image.data``).
        dtype, item_shape: of one item.
        shard_items: items for which a shard has room.
        chunk_items: items of a Zarr inner chunk or HDF5 chunk; divides ``shard_items``.
        codec: of each chunk.
    """

    name: str
    dtype: str
    item_shape: tuple[int, ...]
    shard_items: int
    chunk_items: int
    codec: Codec

    @functools.cached_property
    def item_bytes(self) -> int:
        """Bytes of one item, uncompressed."""
        return np.dtype(self.dtype).itemsize * math.prod(self.item_shape)  # of Python's integers: no wrapping


@dataclass(frozen=True)
class Schema:
    """What ``shardstore.json`` says.

    Attributes:
        container: the kind of files.
        samples, shard_samples: see above.
        fields, arrays: in the order of the tables' columns.
        classes: names by class number, or None.
        options: those of the conversion that shaped the content.
        name: of the file of an HDF5 store, which leads to the shards by it; else empty.
        fingerprint: see above.
        files: path below the folder -> (size, crc32c); for hdf5 the file itself stands under ``.h5``.
    """

    container: Container
    samples: int
    shard_samples: int
    fields: tuple[Field, ...]
    arrays: tuple[Array, ...]
    classes: tuple[str, ...] | None
    options: Mapping[str, Any]
    name: str = ""
    fingerprint: str = ""
    files: Mapping[str, tuple[int, int]] | None = None

    @property
    def shards(self) -> int:
        """How many shards there are."""
        return -(-self.samples // self.shard_samples)

    def field(self, name: str) -> Field:
        """The field of this name (KeyError where there is none)."""
        return {f.name: f for f in self.fields}[name]

    @property
    def array_names(self) -> tuple[str, ...]:
        """The names of all arrays, in order."""
        return tuple(a.name for a in self.arrays)

    def array(self, name: str) -> tuple[int, Array]:
        """Number and description of the array of this name."""
        return self._by_name[name]

    @functools.cached_property
    def _by_name(self) -> dict[str, tuple[int, Array]]:
        return {a.name: (i, a) for i, a in enumerate(self.arrays)}

    def file_number(self, array: int) -> int:
        """Which of a shard's files (:func:`shard_files`) holds this array."""
        return 0 if self.container == "hdf5" else array


def parts(kind: Kind) -> tuple[str, ...]:
    """The names of a field's arrays after its own name, the first holding the values."""
    if kind == "array":
        return ("",)
    return (".data", ".start", ".length", ".crc32c") + ((".shape",) if kind == "ragged" else ())


def shard_files(schema: Schema, shard: int) -> list[str]:
    """Paths of a shard's files below the store's folder, with forward slashes."""
    count = 1 if schema.container == "hdf5" else len(schema.arrays)
    return [shard_file(schema, shard, array) for array in range(count)]


def shard_file(schema: Schema, shard: int, array: int) -> str:
    """The path of the file that holds a shard's part of an array (its number is given), below the store's folder."""
    if schema.container == "hdf5":
        return f"{shard:05d}.h5"
    name, dimensions = schema.arrays[array].name, len(schema.arrays[array].item_shape)
    if schema.container == "zarr":
        return f"{name.replace('.', '/')}/c/{shard}{'/0' * dimensions}"
    field, _, part = name.partition(".")
    return f"{field}/{shard:05d}.{part}.npy" if part else f"{field}/{shard:05d}.npy"


def shard_dtype(schema: Schema) -> np.dtype[np.void]:
    """The dtype of the shard table of such a store."""
    arrays, fields = len(schema.arrays), len(schema.fields)
    files = 1 if schema.container == "hdf5" else arrays
    return np.dtype(
        [
            ("first", "<i8"),
            ("count", "<i8"),
            ("rows", "<i8", (arrays,)),
            ("size", "<i8", (files,)),
            ("crc32c", "<u4", (files,)),
            ("content", "<u4", (fields,)),
        ]
    )


def fingerprint(schema: Schema, shards: Table) -> str:
    """The store's fingerprint: see the specification above."""
    head = [[asdict(f) for f in schema.fields], schema.samples, schema.shard_samples]
    digest = hashlib.sha256(json.dumps(head, sort_keys=True).encode())
    digest.update(np.ascontiguousarray(shards["content"]).tobytes())
    return digest.hexdigest()[:32]


def to_json(schema: Schema) -> bytes:
    """``shardstore.json`` with its checksum."""
    text = json.dumps({"shardstore": FORMAT_VERSION, **asdict(schema), "crc32c": "00000000"}, indent=1) + "\n"
    before, _, after = text.rpartition(_NO_CRC)
    return f'{before}{_NO_CRC[:-9]}{crc32c(text.encode()):08x}"{after}'.encode()


def from_json(data: bytes) -> Schema:
    """Read and check ``shardstore.json``.

    Raises:
        ValueError: it is not one, is damaged, or belongs to another version of the format.
    """
    text = data.decode("ascii")
    where = text.rfind(_NO_CRC[:-9]) + len(_NO_CRC) - 9
    found, zeroed = text[where : where + 8], f"{text[:where]}00000000{text[where + 8 :]}"
    raw = json.loads(text)
    if not isinstance(raw, dict) or "shardstore" not in raw:
        raise ValueError("this is not the description of a store")
    if raw["shardstore"] != FORMAT_VERSION:
        raise ValueError(f"format version {raw['shardstore']}, and this release reads {FORMAT_VERSION}")
    if found != f"{crc32c(zeroed.encode()):08x}":
        raise ValueError(f"its checksum should be {crc32c(zeroed.encode()):08x} and is {found}")
    del raw["shardstore"], raw["crc32c"]
    raw["fields"] = tuple(Field(**{**f, "shape": tuple(f["shape"])}) for f in raw["fields"])
    raw["arrays"] = tuple(Array(**{**a, "item_shape": tuple(a["item_shape"])}) for a in raw["arrays"])
    raw["files"] = {path: (int(size), int(crc)) for path, (size, crc) in raw["files"].items()}
    raw["classes"] = None if raw["classes"] is None else tuple(raw["classes"])
    schema = Schema(**raw)
    _check_schema(schema)
    return schema


def _check_schema(schema: Schema) -> None:
    """Raise ValueError unless all parts fit together, so that later code may rely on them."""

    def sure(condition: bool, what: str) -> None:
        if not condition:
            raise ValueError(what)

    sure(schema.container in CONTAINERS, f"unknown container {schema.container!r}")
    sure(_is_count(schema.samples) and _is_count(schema.shard_samples), "sample counts must be positive numbers")
    sure(isinstance(schema.fingerprint, str) and bool(re.fullmatch("[0-9a-f]{32}", schema.fingerprint)), "fingerprint")
    sure(isinstance(schema.name, str), "the name is no text")
    sure(len({f.name for f in schema.fields}) == len(schema.fields) > 0, "fields must have names of their own")
    for field in schema.fields:
        _check_field(field, sure)
    sure([a.name for a in schema.arrays] == [f.name + p for f in schema.fields for p in parts(f.kind)], "arrays differ")
    for array in schema.arrays:
        _check_array(array, schema, sure)
    sure(schema.classes is None or all(isinstance(name, str) for name in schema.classes), "a class name is no text")
    sure(isinstance(schema.options, dict), "options are no table")
    _check_options(schema.options, sure)
    files = schema.files or {}
    sure(all(0 <= size < 1 << 62 and 0 <= crc < 1 << 32 for size, crc in files.values()), "impossible sizes")
    sure(_needed_files(schema) <= files.keys(), "files of the index are not listed")
    for path in files.keys() - _needed_files(schema) - {REJECTS}:
        raise ValueError(f"path {path!r} is none of a store's files")


def _needed_files(schema: Schema) -> set[str]:
    """Paths of all files that a store has beside its shards and its description."""
    needed = {f"index/{name}.npy" for name in ("shards", *(f"{a.name}.chunks" for a in schema.arrays))}
    if schema.container == "hdf5":
        return needed | {".h5"}
    return needed | {f"{node}zarr.json" for node in zarr_nodes(schema)} if schema.container == "zarr" else needed


def zarr_nodes(schema: Schema) -> dict[str, Array | None]:
    """Each group (None) and array of a Zarr store by its folder, which is empty or ends in a slash."""
    groups: dict[str, Array | None] = {"": None, **{f"{f.name}/": None for f in schema.fields}}
    return groups | {f"{array.name.replace('.', '/')}/": array for array in schema.arrays}


def _check_options(options: Mapping[str, Any], sure: Sure) -> None:
    """Those that later code looks at; the others are for people."""
    for name, value in options.items():
        plain = [value] if not isinstance(value, list) else value
        sure(all(v is None or isinstance(v, str | int | float) for v in plain), f"option {name}")
    size = options.get("size")
    sure(size is None or (isinstance(size, list) and len(size) == 2 and all(map(_is_count, size))), "option size")
    sure(options.get("fit", "crop") in ("crop", "pad", "stretch"), "option fit")
    sure(options.get("resize_short") is None or _is_count(options["resize_short"]), "option resize_short")


def _check_field(field: Field, sure: Sure) -> None:
    sure(isinstance(field.name, str) and _is_name(field.name), f"{field.name!r} is no field name")
    sure(field.kind in get_args(Kind) and field.content in get_args(Content), f"field {field.name}: unknown kind")
    sure(
        isinstance(field.dtype, str) and bool(re.fullmatch(r"\|[biu]1|<[iu][248]|<f[248]", field.dtype)),
        f"dtype {field.dtype!r}",
    )
    shape = field.shape
    sure(len(shape) <= 32 and all(type(n) is int and -1 <= n < 1 << 32 for n in shape), f"shape of field {field.name}")
    sure(field.kind != "array" or -1 not in shape, f"field {field.name}: an open shape")
    sure(field.kind != "bytes" or (shape == (-1,) and field.dtype == "|u1"), f"field {field.name}: bytes are |u1")
    sure(field.content != "image" or field.kind == "bytes" or len(shape) == 3, f"field {field.name}: no picture")
    number = field.kind == "array" and shape == () and field.dtype[1] in "iu"
    sure(field.content != "label" or number, f"field {field.name}: labels are whole numbers")
    sure(field.content != "text" or field.kind == "bytes", f"field {field.name}: text is bytes")
    sure(field.kind != "ragged" or len(shape) > 0, f"field {field.name}: one number cannot vary in shape")


def _check_array(array: Array, schema: Schema, sure: Sure) -> None:
    name, _, part = array.name.partition(".")
    field = schema.field(name)
    item_shape = field.shape if not part else (len(field.shape),) if part == "shape" else ()
    dtype = field.dtype if part in ("", "data") else ROW_DTYPES[part]
    sure((array.dtype, array.item_shape) == (dtype, item_shape), f"array {array.name}: dtype or shape of another field")
    sure(array.codec in CODECS and (array.codec == "none" or part in ("", "data")), f"array {array.name}: codec")
    sure(_is_count(array.chunk_items) and _is_count(array.shard_items), f"array {array.name}: impossible chunks")
    sure(array.shard_items % array.chunk_items == 0, f"array {array.name}: chunks do not divide the shard")
    sure(part == "data" or array.shard_items == schema.shard_samples, f"array {array.name}: another shard size")
    sure(array.chunk_items * array.item_bytes <= MAX_CHUNK, f"array {array.name}: chunks above {MAX_CHUNK} bytes")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 < value < 1 << 62


def _is_name(name: str) -> bool:
    plain = unicodedata.normalize("NFKC", name) == name  # as Python itself takes identifiers
    return plain and name.isidentifier() and not name.startswith("_") and not keyword.iskeyword(name)
