"""Zarr v3: one group, an array for each of ours, one shard object of the sharding codec for each shard.

Shard objects are written here to the specification of ``sharding_indexed`` (zarr-specs, codecs/sharding-indexed/v1.0),
byte for byte as zarr-python writes them: the inner chunks one after the other, then offset and nbytes of each
(little-endian u8, all ones where there is none) and the CRC-32C of that table. Metadata goes through zarr-python.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardstore.formats import Extents
from shardstore.store.files import NewFile, crc32c
from shardstore.store.schema import Array, Schema, shard_files, zarr_nodes

_MISSING = 2**64 - 1
_MAX_JSON = 1 << 26  # bytes of metadata, some kB for each field


class ShardWriter:
    """Streams chunks; the table at the end of each object is written on closing."""

    def __init__(self, root: str, schema: Schema, shard: int, items: Mapping[str, int]) -> None:
        self._objects = {
            array.name: _ShardObject(array, f"{root}/{path}")
            for array, path in zip(schema.arrays, shard_files(schema, shard), strict=True)
        }

    def append(self, array: str, stored: bytes) -> None:
        """Add the next chunk of an array."""
        self._objects[array].append(stored)

    def close(self) -> None:
        """Make the objects durable."""
        for shard_object in self._objects.values():
            shard_object.close()

    def abort(self) -> None:
        """Remove what was written."""
        for shard_object in self._objects.values():
            shard_object.file.abort()


class _ShardObject:
    def __init__(self, array: Array, path: str) -> None:
        self.array = array
        self.file = NewFile(path)
        self.ends: list[int] = []  # of the inner chunks with a codec: each is one appended chunk

    def append(self, stored: bytes) -> None:
        self.file.write(stored)
        self.ends.append(self.file.size)

    def close(self) -> None:
        inner = self.array.chunk_items * self.array.item_bytes
        if self.array.codec == "none":  # inner chunks are a plain grid over the stream, the last one padded
            self.file.write(bytes(-self.file.size % inner))
            self.ends = list(range(inner, self.file.size + 1, inner))
        table = np.full((self.array.shard_items // self.array.chunk_items, 2), _MISSING, "<u8")
        ends = np.array(self.ends, np.int64)
        table[: len(ends), 1] = np.diff(ends, prepend=0)
        table[: len(ends), 0] = ends - np.diff(ends, prepend=0)
        data = table.tobytes()
        self.file.write(data + crc32c(data).to_bytes(4, "little"))
        self.file.commit()


def scan(root: str, schema: Schema, shard: int) -> dict[str, Extents]:
    """See :mod:`shardstore.formats`."""
    paths = shard_files(schema, shard)
    return {a.name: _scan_object(a, f"{root}/{p}") for a, p in zip(schema.arrays, paths, strict=True)}


def _scan_object(array: Array, path: str) -> Extents:
    count = array.shard_items // array.chunk_items
    with open(path, "rb") as f:
        size = f.seek(0, os.SEEK_END)
        if size < count * 16 + 4:
            raise ValueError(f"{path}: too short for the table of its {count} inner chunks")
        f.seek(size - count * 16 - 4)
        data = f.read()
    if crc32c(data[:-4]) != int.from_bytes(data[-4:], "little"):
        raise ValueError(f"{path}: the table of inner chunks is damaged")
    table = np.frombuffer(data[:-4], "<u8").reshape(count, 2)
    used = table[table[:, 0] != _MISSING].astype(np.int64)
    if (used < 0).any() or (used.sum(axis=1) > size).any():
        raise ValueError(f"{path}: an inner chunk lies outside the file")
    if array.codec != "none":
        return np.asarray(used)
    inner = array.chunk_items * array.item_bytes
    if (used != np.stack([np.arange(len(used)) * inner, np.full(len(used), inner)], axis=1)).any():
        raise ValueError(f"{path}: the inner chunks do not stand one after the other")
    return np.array([[0, len(used) * inner]], np.int64)


def astray(root: str, schema: Schema, main: str) -> list[tuple[str, str]]:
    """See :mod:`shardstore.formats`."""
    nodes, wrong = zarr_nodes(schema), []
    for folder, array in nodes.items():
        path = f"{root}/{folder}zarr.json"
        try:
            if os.path.getsize(path) > _MAX_JSON:
                raise ValueError(f"it is larger than {_MAX_JSON} bytes")
            with open(path, encoding="utf-8") as f:
                node = json.load(f)
            _check_node(node, schema, array)
            if not folder:
                _check_consolidated(node.get("consolidated_metadata"), schema, nodes)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            wrong.append((path, str(error) if isinstance(error, ValueError) else repr(error)))
    return wrong


def _check_node(node: Any, schema: Schema, array: Array | None) -> None:
    """Raise ValueError unless metadata are those of this array, or of a group, with its own files alone."""
    if array is None:
        if node["node_type"] != "group":
            raise ValueError("it is no group")
        return
    expected = {
        "node_type": "array",
        "shape": list(_shape(schema, array)),
        "data_type": np.dtype(array.dtype).name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [array.shard_items, *array.item_shape]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
    }
    for name, value in expected.items():
        if node[name] != value:
            raise ValueError(f"its {name} is {node[name]} and not {value}")
    if node.get("storage_transformers"):
        raise ValueError("it has storage transformers")
    (sharding,) = node["codecs"]
    inner = [codec["name"] for codec in sharding["configuration"]["codecs"]]
    if sharding["name"] != "sharding_indexed" or inner != ["bytes", *(["zstd"] if array.codec == "zstd" else [])]:
        raise ValueError("its codecs are not those of the store")


def _check_consolidated(copy: Any, schema: Schema, nodes: Mapping[str, Array | None]) -> None:
    if copy is None:
        return
    if copy["kind"] != "inline" or {f"{name}/" for name in copy["metadata"]} != nodes.keys() - {""}:
        raise ValueError("its consolidated metadata are of other arrays")
    for name, node in copy["metadata"].items():
        _check_node(node, schema, nodes[f"{name}/"])
        if (node.get("consolidated_metadata") or {}).get("metadata"):
            raise ValueError("its consolidated metadata are of other arrays")


def _shape(schema: Schema, array: Array) -> tuple[int, ...]:
    streamed = array.name.endswith(".data")
    return (schema.shards * array.shard_items if streamed else schema.samples, *array.item_shape)


def finish(root: str, schema: Schema, items: Mapping[str, Sequence[int]], main: str) -> None:
    """Write ``zarr.json`` for the group and each array, consolidated in the root as well."""
    import zarr
    from zarr.codecs import BytesCodec, ZstdCodec

    from shardstore.store.codecs import ZSTD_LEVEL

    store = zarr.storage.LocalStore(root)
    zarr.create_group(store, zarr_format=3)
    for field in schema.fields:
        if field.kind != "array":
            zarr.create_group(store, path=field.name, zarr_format=3)
    for array in schema.arrays:
        codecs: list[Any] = [ZstdCodec(level=ZSTD_LEVEL, checksum=False)] if array.codec == "zstd" else []
        zarr.create_array(
            store,
            name=array.name.replace(".", "/"),
            shape=_shape(schema, array),
            dtype=array.dtype,
            chunks=(array.chunk_items, *array.item_shape),
            shards=(array.shard_items, *array.item_shape),
            serializer=BytesCodec(),
            compressors=codecs or None,
            filters=None,
            fill_value=0,
            zarr_format=3,
        )
    with warnings.catch_warnings():
        # zarr-python notes that consolidated metadata is not in the v3 specification; without it, opening the group
        # warns about our index files.
        warnings.simplefilter("ignore")
        zarr.consolidate_metadata(store, zarr_format=3)
