"""HDF5: one file a shard, and one file ``NAME.h5`` whose virtual datasets show all shards as one array.

Without a codec datasets are contiguous; zstd is the registered filter 32015, which plain h5py reads after
``import hdf5plugin``. Writing it imports hdf5plugin too: HDF5 notes the name of a filter that it knows in the file,
and the bytes may not depend on what else the process has imported. Files are readable from HDF5 1.10 on and hold no
times: same input, same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardstore.errors import OptionError, Problem
from shardstore.formats import Extents
from shardstore.store.schema import HDF5_FOLDER, Array, Schema, shard_files

_LIBVER = ("earliest", "v110")  # what HDF5 2.0 writes as "latest" cannot be opened by 1.14
_ZSTD_FILTER = 32015  # registered with The HDF Group
_LINKS = "_shards"  # no field can have this name


class ShardWriter:
    """One shard file; its datasets are allocated at once, since the plan knows all lengths."""

    def __init__(self, root: str, schema: Schema, shard: int, items: Mapping[str, int]) -> None:
        import h5py

        self._path = f"{root}/{shard_files(schema, shard)[0]}"
        self._arrays = {a.name: a for a in schema.arrays}
        self._done = dict.fromkeys(self._arrays, 0)
        self._file = h5py.File(f"{self._path}.tmp", "w", libver=_LIBVER, track_order=False)
        for array in schema.arrays:
            _create(self._file, array, items[array.name])

    def append(self, array: str, stored: bytes) -> None:
        """Add the next chunk of an array."""
        spec, dataset, done = self._arrays[array], self._file[array.replace(".", "/")], self._done[array]
        if spec.codec != "none":
            dataset.id.write_direct_chunk((done, *(0 for _ in spec.item_shape)), stored)
            self._done[array] += spec.chunk_items
            return
        values = np.frombuffer(stored, spec.dtype).reshape(-1, *spec.item_shape)
        dataset[done : done + len(values)] = values
        self._done[array] += len(values)

    def close(self) -> None:
        """Make the file durable."""
        self._file.close()
        with open(f"{self._path}.tmp", "rb+") as f:
            os.fsync(f.fileno())
        os.replace(f"{self._path}.tmp", self._path)

    def abort(self) -> None:
        """Remove what was written."""
        self._file.close()
        os.unlink(f"{self._path}.tmp")


def _create(file: Any, array: Array, items: int) -> None:
    import h5py

    properties = _untimed()
    properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    if array.codec == "zstd":
        import_filter()
        properties.set_chunk((array.chunk_items, *array.item_shape))
        properties.set_filter(_ZSTD_FILTER, h5py.h5z.FLAG_OPTIONAL, ())
    _create_dataset(file, array, _room(array, items), properties)


def import_filter() -> None:
    """Register the zstd filter with HDF5.

    Raises:
        OptionError: hdf5plugin is not installed.
    """
    try:
        import hdf5plugin  # noqa: F401
    except ImportError as error:
        hint = "Install it with: pip install 'shardstore[hdf5-zstd]'"
        raise OptionError(Problem("codec='zstd' in HDF5 needs the package hdf5plugin", hint=hint)) from error


def _untimed() -> Any:
    """Properties of a dataset that does not record when it was made."""
    import h5py

    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_obj_track_times(False)
    return properties


def _create_dataset(file: Any, array: Array, items: int, properties: Any) -> None:
    import h5py

    space = h5py.h5s.create_simple((items, *array.item_shape))
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    kind = h5py.h5t.py_create(np.dtype(array.dtype))
    h5py.h5d.create(file.id, array.name.replace(".", "/").encode(), kind, space, properties, links)


def _room(array: Array, items: int) -> int:
    """Items of the dataset: whole chunks with a codec, since a chunk may not be larger than its dataset."""
    return items if array.codec == "none" else -(-items // array.chunk_items) * array.chunk_items


def scan(root: str, schema: Schema, shard: int) -> dict[str, Extents]:
    """See :mod:`shardstore.formats`."""
    import h5py

    path = f"{root}/{shard_files(schema, shard)[0]}"
    try:
        with h5py.File(path, "r") as file:
            _check_links(file, schema)
            return {a.name: _scan_dataset(file[a.name.replace(".", "/")], a) for a in schema.arrays}
    except (OSError, KeyError, RuntimeError) as error:
        raise ValueError(f"{path}: {error}") from error


def _check_links(file: Any, schema: Schema, *others: str) -> None:
    """Raise ValueError unless a file has these datasets and no other names, each the thing itself and no link: HDF5
    would follow it into another file."""
    import h5py

    wanted: dict[str, set[str]] = {"": {f.name for f in schema.fields} | set(others)}
    for array in schema.arrays:
        field, _, part = array.name.partition(".")
        wanted.setdefault(field, set()).update({part} - {""})
    for group, names in wanted.items():
        if not names:
            continue
        node = file[group] if group else file
        if not isinstance(node, h5py.Group) or set(node) != names:
            raise ValueError(f"its group /{group} does not hold what it should")
        for name in names:
            if not isinstance(node.get(name, getlink=True), h5py.HardLink):
                raise ValueError(f"{name!r} in its group /{group} is a link to something else")


def _scan_dataset(dataset: Any, array: Array) -> Extents:
    if not hasattr(dataset, "external") or dataset.is_virtual or dataset.external:
        raise ValueError(f"{dataset.name} shows values of other files")
    if dataset.dtype != np.dtype(array.dtype) or dataset.shape[1:] != array.item_shape:
        raise ValueError(f"dataset {dataset.name} holds {dataset.dtype}{dataset.shape}")
    if array.codec == "none":
        offset = dataset.id.get_offset()
        if offset is None and dataset.size:
            raise ValueError(f"dataset {dataset.name} is not contiguous")
        return np.array([[offset or 0, dataset.nbytes]], np.int64)
    found: list[tuple[int, int, int]] = []
    dataset.id.chunk_iter(lambda c: found.append((c.chunk_offset[0], c.byte_offset, c.size)))
    return np.array(sorted(found), np.int64).reshape(-1, 3)[:, 1:]


def astray(root: str, schema: Schema, main: str) -> list[tuple[str, str]]:
    """See :mod:`shardstore.formats`."""
    import h5py

    folder = _folder(schema, main)
    files = [f"{folder}/{shard_files(schema, shard)[0]}" for shard in range(schema.shards)]
    try:
        with h5py.File(main, "r") as file:
            _check_links(file, schema, _LINKS)
            for array in schema.arrays:
                _check_virtual(file[array.name.replace(".", "/")], array, _total(schema, array), set(files))
            links = {name: file[_LINKS].get(name, getlink=True) for name in file[_LINKS]}
            found = {n: (link.filename, link.path) for n, link in links.items() if hasattr(link, "filename")}
            if len(links) != len(found) or found != {os.path.basename(f)[: -len(".h5")]: (f, "/") for f in files}:
                raise ValueError(f"the links in {_LINKS} do not lead to the store's shards")
    except (OSError, KeyError, RuntimeError, ValueError) as error:
        return [(main, str(error))]
    return []


def _check_virtual(dataset: Any, array: Array, items: int, files: set[str]) -> None:
    shape, dtype = (items, *array.item_shape), np.dtype(array.dtype)
    if not hasattr(dataset, "is_virtual") or not dataset.is_virtual:
        raise ValueError(f"{dataset.name} is no virtual dataset")
    properties = dataset.id.get_create_plist()
    for number in range(properties.get_virtual_count()):  # before the shape: for that HDF5 might open the sources
        shown, name = _source_file(properties, number), properties.get_virtual_dsetname(number)
        if shown not in files or name != array.name.replace(".", "/"):
            raise ValueError(f"{dataset.name} shows {name} of {shown}, which is no part of it")
    if (dataset.shape, dataset.dtype) != (shape, dtype):
        raise ValueError(f"{dataset.name} holds {dataset.dtype}{dataset.shape} and not {dtype}{shape}")


def _source_file(properties: Any, number: int) -> str:
    """The file that a part of a virtual dataset comes from."""
    try:
        name = properties.get_virtual_filename(number).encode()
    except UnicodeDecodeError as error:  # h5py takes all names for UTF-8
        name = error.object
    return os.fsdecode(name.replace(b"%%", b"%"))


def _folder(schema: Schema, main: str) -> str:
    return f"{os.path.basename(main)}{HDF5_FOLDER}/{schema.fingerprint}"


def _total(schema: Schema, array: Array) -> int:
    """Items of the dataset that shows all shards."""
    return schema.shards * array.shard_items if array.name.endswith(".data") else schema.samples


def finish(root: str, schema: Schema, items: Mapping[str, Sequence[int]], main: str) -> None:
    """Write the file that shows all shards as one: ``main`` ends in the store's own name, in whatever folder."""
    import h5py

    folder = _folder(schema, main)
    with h5py.File(main, "w", libver=_LIBVER) as file:
        for array in schema.arrays:
            total = _total(schema, array)
            properties = _untimed()
            for shard, count in enumerate(items[array.name]):
                if count:
                    _map_shard(properties, array, (total, shard, count), f"{folder}/{shard_files(schema, shard)[0]}")
            _create_dataset(file, array, total, properties)
        links = file.create_group(_LINKS)
        for shard in range(schema.shards):
            name = shard_files(schema, shard)[0]
            links[name.removesuffix(".h5")] = h5py.ExternalLink(f"{folder}/{name}", "/")
    with open(main, "rb+") as f:
        os.fsync(f.fileno())


def _map_shard(properties: Any, array: Array, place: tuple[int, int, int], file: str) -> None:
    """Show a shard's items in the virtual dataset. ``place``: items of that in all, the shard, its items."""
    import h5py

    total, shard, count = place
    zeros, shape = (0,) * len(array.item_shape), array.item_shape
    target = h5py.h5s.create_simple((total, *shape))
    target.select_hyperslab((shard * array.shard_items, *zeros), (count, *shape))
    source = h5py.h5s.create_simple((_room(array, count), *shape))
    source.select_hyperslab((0, *zeros), (count, *shape))
    name = os.fsencode(file).replace(b"%", b"%%")  # HDF5 takes %b for a block's number
    properties.set_virtual(target, name, array.name.replace(".", "/").encode(), source)
