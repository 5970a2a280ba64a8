"""The index: its checksum, each column of its tables, and what hostile or contradictory ones lead to."""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import re
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import h5py
import numcodecs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardstore
from shardstore.store import prove
from shardstore.store.index import load
from shardstore.store.schema import from_json, to_json

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "npy-encoded": ("npy", {"store": "encoded"}),
    "zarr-encoded": ("zarr", {"store": "encoded"}),
    "hdf5-encoded": ("hdf5", {"store": "encoded"}),
    "npy-fixed": ("npy", {"store": "pixels", "size": 32, "chunk_size": 2 * 32 * 32 * 3}),
    "zarr-fixed-zstd": ("zarr", {"store": "pixels", "size": 32, "codec": "zstd", "chunk_size": 2 * 32 * 32 * 3}),
    "hdf5-fixed-zstd": ("hdf5", {"store": "pixels", "size": 32, "codec": "zstd", "chunk_size": 2 * 32 * 32 * 3}),
    "hdf5-ragged": ("hdf5", {"store": "pixels"}),
    "zarr-ragged-zstd": ("zarr", {"store": "pixels", "codec": "zstd", "chunk_size": 60_000}),
}


def root_of(path: Path) -> Path:
    """The folder of ``shardstore.json``, found as the specification says."""
    if path.is_dir():
        return path
    (folder,) = path.with_name(path.name + ".shards").iterdir()
    return folder


def read_json(path: Path) -> Any:
    return json.loads((root_of(path) / "shardstore.json").read_bytes())


def signed(raw: Any) -> bytes:
    """A description with a right checksum, whatever it says."""
    if isinstance(raw, dict) and "crc32c" in raw:
        raw = {**raw, "crc32c": "00000000"}
    text = json.dumps(raw, indent=1) + "\n"
    return text.replace('"crc32c": "00000000"', f'"crc32c": "{google_crc32c.value(text.encode()):08x}"').encode()


def sign(path: Path, raw: Any) -> None:
    (root_of(path) / "shardstore.json").write_bytes(signed(raw))


def file_name(table: str) -> str:
    return "shards.npy" if table == "shards" else f"{table}.chunks.npy"


def rewrite(path: Path, name: str, table: np.ndarray[Any, Any]) -> None:
    """Replace a table of the index and make all checksums above it right again."""
    file, raw = root_of(path) / "index" / file_name(name), read_json(path)
    np.save(file, table)
    raw["files"][f"index/{file_name(name)}"] = [file.stat().st_size, google_crc32c.value(file.read_bytes())]
    sign(path, raw)


def table_of(path: Path, name: str) -> np.ndarray[Any, Any]:
    return np.load(root_of(path) / "index" / file_name(name))


@pytest.fixture(scope="module")
def stores(make_store: Callable[..., Path]) -> Callable[[str], Path]:
    """``fixtures/images`` in each layout, 10 samples a shard; not to be changed."""
    made: dict[str, Path] = {}

    def get(layout: str) -> Path:
        if layout not in made:
            container, options = LAYOUTS[layout]
            made[layout] = make_store(container, samples_per_shard=10, **options)
        return made[layout]

    return get


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[Path], Path]:
    """A copy of a store that may be damaged."""

    def make(store: Path) -> Path:
        for path in store.parent.glob(f"{store.name}*"):
            (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / path.name)
        return tmp_path / store.name

    return make


def use(path: Path) -> None:
    """Open, read and check a store."""
    dataset = shardstore.open(path)
    for number in (0, len(dataset) - 1):
        dataset[number], dataset.key(number)
    next(iter(shardstore.ShardDataset(path, shuffle=True)))
    shardstore.validate(path, level="decode", workers=1)


# -- the description --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_description_survives_a_round_trip(layout: str, stores: Callable[[str], Path]) -> None:
    data = (root_of(stores(layout)) / "shardstore.json").read_bytes()
    assert to_json(from_json(data)) == data


def test_description_is_ascii_json_with_the_documented_keys(stores: Callable[[str], Path]) -> None:
    raw = read_json(stores("hdf5-ragged"))
    assert set(raw) == {
        "shardstore", "container", "samples", "shard_samples", "fields", "arrays", "classes", "options",
        "fingerprint", "name", "files", "crc32c",
    }  # fmt: skip
    assert (raw["shardstore"], raw["container"], raw["samples"], raw["shard_samples"]) == (0, "hdf5", 24, 10)
    assert raw["classes"] == ["cat", "dog", "fish"]
    assert raw["name"] == "out.h5"
    assert [(f["name"], f["kind"], f["dtype"], f["shape"], f["content"]) for f in raw["fields"]] == [
        ("image", "ragged", "|u1", [-1, -1, 3], "image"),
        ("label", "array", "<i8", [], "label"),
        ("key", "bytes", "|u1", [-1], "text"),
    ]
    assert [a["name"] for a in raw["arrays"]] == [
        "image.data", "image.start", "image.length", "image.crc32c", "image.shape", "label",
        "key.data", "key.start", "key.length", "key.crc32c",
    ]  # fmt: skip
    assert raw["options"] == {
        "size": None, "fit": "crop", "codec": "none", "shuffle": False, "seed": 0, "store": "pixels",
    }  # fmt: skip
    assert re.fullmatch("[0-9a-f]{32}", raw["fingerprint"])
    assert root_of(stores("hdf5-ragged")).name == raw["fingerprint"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_checksum_of_the_description_is_taken_with_its_digits_zeroed(
    layout: str, stores: Callable[[str], Path]
) -> None:
    data = (root_of(stores(layout)) / "shardstore.json").read_bytes()
    zeroed, digits = re.sub(rb'("crc32c": ")([0-9a-f]{8})"', rb'\g<1>00000000"', data), read_json(stores(layout))
    assert zeroed != data
    assert digits["crc32c"] == f"{google_crc32c.value(zeroed):08x}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_lists_size_and_checksum_of_all_but_the_shards(layout: str, stores: Callable[[str], Path]) -> None:
    path = stores(layout)
    root, listed = root_of(path), read_json(path)["files"]
    for name, entry in listed.items():
        data = (path if name == ".h5" else root / name).read_bytes()
        assert entry == [len(data), google_crc32c.value(data)], name
    names = {f"index/{file_name(a)}" for a in [*(a["name"] for a in read_json(path)["arrays"]), "shards"]}
    others = {"npy": set(), "hdf5": {".h5"}}.get(layout.partition("-")[0])
    if others is None:
        others = {p.relative_to(root).as_posix() for p in root.rglob("zarr.json")}
        assert len(others) > 3
    assert set(listed) == names | others


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_column_of_the_tables_says_what_the_specification_says(layout: str, stores: Callable[[str], Path]) -> None:
    path = stores(layout)
    raw, root, shards = read_json(path), root_of(path), table_of(path, "shards")
    assert shards["first"].tolist() == [0, 10, 20]
    assert shards["count"].tolist() == [10, 10, 4]
    content = np.zeros((3, len(raw["fields"])), np.uint32)
    for number, array in enumerate(raw["arrays"]):
        table = table_of(path, array["name"])
        column, is_data = 0 if raw["container"] == "hdf5" else number, array["name"].endswith(".data")
        field = [f["name"] for f in raw["fields"]].index(array["name"].partition(".")[0])
        assert shards["rows"][:, number].tolist() == np.searchsorted(table["shard"], [0, 1, 2]).tolist()
        assert table["first"].tolist() == (np.cumsum(table["count"]) - table["count"]).tolist()
        assert table["count"].sum() == 24
        for row in table:
            data = _shard_file(root, raw["container"], array, int(row["shard"])).read_bytes()
            assert shards["size"][row["shard"], column] == len(data)
            assert shards["crc32c"][row["shard"], column] == google_crc32c.value(data)
            stored = data[int(row["offset"]) :][: int(row["nbytes"])]
            assert google_crc32c.value(stored) == row["crc32c"]
            items = stored if array["codec"] == "none" else numcodecs.zstd.decompress(stored)
            item = int(np.dtype(array["dtype"]).itemsize * np.prod(array["item_shape"], dtype=int))
            if array["codec"] != "none":
                assert len(items) == array["chunk_items"] * item
            elif not is_data:
                assert len(items) == row["count"] * item
            if not is_data and not array["name"].endswith(".start"):
                content[row["shard"], field] = google_crc32c.extend(
                    int(content[row["shard"], field]), items[: int(row["count"]) * item]
                )
    assert shards["content"].tolist() == content.tolist()


def _shard_file(root: Path, container: str, array: dict[str, Any], shard: int) -> Path:
    if container == "hdf5":
        return root / f"{shard:05d}.h5"
    field, _, part = array["name"].partition(".")
    if container == "npy":
        return root / field / (f"{shard:05d}.{part}.npy" if part else f"{shard:05d}.npy")
    return root.joinpath(field, *([part] if part else []), "c", str(shard), *("0" for _ in array["item_shape"]))


# -- hostile descriptions ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def victim(make_store: Callable[..., Path], make_images: Callable[..., Path]) -> tuple[Path, bytes]:
    """A small store whose description may be replaced, and the right one."""
    path = make_store("npy", source=make_images(4, sizes=[(9, 8), (8, 8)]), store="encoded", samples_per_shard=3)
    return path, (path / "shardstore.json").read_bytes()


@given(st.data())
@settings(max_examples=300)
def test_changed_bytes_of_the_description_are_noticed(victim: tuple[Path, bytes], data: st.DataObject) -> None:
    path, good = victim
    changed, where = bytearray(good), data.draw(st.integers(0, len(good) - 1))
    some = data.draw(st.binary(min_size=1, max_size=8))
    match data.draw(st.sampled_from(["flip", "overwrite", "insert", "delete", "cut"])):
        case "flip":
            changed[where] ^= 1 << data.draw(st.integers(0, 7))
        case "overwrite":
            changed[where : where + len(some)] = some
        case "insert":
            changed[where:where] = some
        case "delete":
            del changed[where : where + len(some)]
        case "cut":
            del changed[where:]
    if bytes(changed) == good:
        return
    (path / "shardstore.json").write_bytes(changed)
    for entry in (shardstore.open, shardstore.ShardDataset):
        with pytest.raises(shardstore.DamagedStoreError) as caught:
            entry(path)
        assert "shardstore.json" in str(caught.value)
        assert caught.value.problem.hint
    assert shardstore.validate(path, workers=1)


def test_the_unchanged_description_opens(victim: tuple[Path, bytes]) -> None:
    path, good = victim
    (path / "shardstore.json").write_bytes(good)
    use(path)
    sign(path, json.loads(good))
    use(path)
    assert shardstore.validate(path, level="decode", workers=1) == []


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\0" * 64, b"{}", b"null", b"[]", b"0", b'"shardstore"', b"[" * 100_000, b'{"shardstore":' * 50_000,
        b'{"shardstore": 0}', b'{"shardstore": 1e999}', b'{"shardstore": NaN}', b'{"a": ' + b"9" * 9_999 + b"}",
        b"\xef\xbb\xbf{}", b"\xff\xfe{\0}\0", '{"shardstore": "\u00e9"}'.encode(), b'{"crc32c": "00000000"}',
    ],
    ids=lambda content: repr(content[:24]),
)  # fmt: skip
def test_what_is_no_description_is_refused(content: bytes, victim: tuple[Path, bytes]) -> None:
    path, _ = victim
    (path / "shardstore.json").write_bytes(content)
    with pytest.raises(shardstore.DamagedStoreError):
        shardstore.open(path)


def test_another_format_version_is_named(victim: tuple[Path, bytes]) -> None:
    path, good = victim
    sign(path, {**json.loads(good), "shardstore": 99})
    with pytest.raises(shardstore.DamagedStoreError, match="version 99"):
        shardstore.open(path)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each value inside a JSON document."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*at, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*at, key))


def changed(raw: Any, place: tuple[Any, ...], change: Callable[[Any, Any], None]) -> Any:
    raw = copy.deepcopy(raw)
    parent = raw
    for key in place[:-1]:
        parent = parent[key]
    change(parent, place[-1])
    return raw


def test_a_description_without_one_of_its_keys_is_refused(victim: tuple[Path, bytes]) -> None:
    path, good = victim
    raw, accepted = json.loads(good), []
    keys = [place for place in places(raw) if isinstance(place[-1], str)]
    assert len(keys) > 60
    for place in keys:
        if place == ("name",) or (place[0] == "options" and len(place) > 1):
            continue  # the name is HDF5's; options are for people, and nothing reads them on opening
        sign(path, changed(raw, place, lambda parent, key: parent.pop(key)))
        if place[0] == "files" and len(place) > 1:
            # The store can be read without it, but not every file is under a checksum any more.
            if not shardstore.validate(path, workers=1):
                accepted.append(place)
            continue
        try:
            shardstore.open(path)
        except shardstore.DamagedStoreError:
            continue
        accepted.append(place)
    assert not accepted, "\n".join(map(str, accepted))


@pytest.mark.parametrize("key", ["extra", "__class__", "self"])
@pytest.mark.parametrize("place", [(), ("fields", 0), ("arrays", 0)], ids=str)
def test_an_unknown_key_is_refused(key: str, place: tuple[Any, ...], victim: tuple[Path, bytes]) -> None:
    path, good = victim
    raw = json.loads(good)
    parent = raw
    for step in place:
        parent = parent[step]
    parent[key] = 1
    sign(path, raw)
    with pytest.raises(shardstore.DamagedStoreError):
        shardstore.open(path)


ODD = [None, True, -1, 0, 1.5, 2**62, 10**30, "", "../x", "|O", "\ud800", [], {}, [[]], [-1], {"a": 1}]


@pytest.mark.parametrize("layout", ["npy-encoded", "zarr-fixed-zstd", "hdf5-ragged"])
def test_wrong_values_in_the_description_never_surprise(
    layout: str, make_store: Callable[..., Path], make_images: Callable[..., Path]
) -> None:
    container, options = LAYOUTS[layout]
    path = make_store(container, source=make_images(4, sizes=[(9, 8), (8, 8)]), samples_per_shard=3, **options)
    raw, surprises = read_json(path), []
    use(path)
    for place in places(raw):
        for value in ODD:
            if place == ("crc32c",):
                continue
            sign(path, changed(raw, place, lambda parent, key, value=value: parent.__setitem__(key, value)))
            try:
                use(path)
            except shardstore.DamagedStoreError:
                continue
            except Exception as error:
                surprises.append(f"{place} = {value!r}: {error!r}")
    assert not surprises, "\n".join(surprises)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner), max_leaves=6
)


@given(value=JSON, data=st.data())
@settings(max_examples=150)
def test_any_json_in_place_of_a_part_never_surprises(
    victim: tuple[Path, bytes], value: Any, data: st.DataObject
) -> None:
    path, good = victim
    raw = json.loads(good)
    place = data.draw(st.sampled_from([p for p in places(raw) if p != ("crc32c",)]))
    sign(path, changed(raw, place, lambda parent, key: parent.__setitem__(key, value)))
    with contextlib.suppress(shardstore.DamagedStoreError):
        use(path)


@pytest.mark.parametrize("name", ["/etc/passwd", "../../outside", "index/../../x", "C:\\x"])
def test_a_listed_file_outside_the_store_is_refused(name: str, victim: tuple[Path, bytes]) -> None:
    path, good = victim
    raw = json.loads(good)
    raw["files"][name] = [1, 1]
    sign(path, raw)
    with pytest.raises(shardstore.DamagedStoreError):
        shardstore.open(path)


# -- tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_prove_finds_nothing_in_good_indexes(layout: str, stores: Callable[[str], Path]) -> None:
    assert prove.prove(load(stores(layout))) == []


def _set(table: str, column: str, where: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(tables: dict[str, Any]) -> None:
        tables[table][column][where] = value

    return change


def _all(*changes: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    def change(tables: dict[str, Any]) -> None:
        for one in changes:
            one(tables)

    return change


# npy-fixed: shards of 10, 10 and 4 samples; image in chunks of 2, rows 0-4, 5-9, 10-11; label one chunk a shard.
CONTRADICTIONS: list[tuple[str, Callable[[dict[str, Any]], None]]] = [
    ("the shard table's first samples are wrong", _set("shards", "first", 1, 11)),
    ("shards have wrong counts", _set("shards", "count", 2, 3)),
    ("shards have wrong counts", _set("shards", "count", 0, 11)),
    ("the fingerprint is not that of the content", _set("shards", "content", (0, 0), 1)),
    ("the fingerprint is not that of the content", _set("shards", "content", (2, 1), 1)),
    ("the shard table's rows are not in order", _set("shards", "rows", (1, 0), 11)),
    ("the shard table's rows are not in order", _set("shards", "rows", (0, 0), 1)),
    ("the shard table's rows are not in order", _set("shards", "rows", (2, 0), 99)),
    ("the shard table's rows are not in order", _set("shards", "rows", (1, 0), -1)),
    ("chunks of wrong shards", _set("shards", "rows", (1, 0), 4)),
    ("chunks of wrong shards", _set("image", "shard", 0, 1)),
    ("chunks of shards that do not exist", _set("image", "shard", -1, 99)),
    ("chunks do not follow one another", _set("image", "first", 1, 3)),
    ("chunks do not follow one another", _set("image", "first", 0, -1)),
    ("a chunk without samples", _set("image", "count", 3, 0)),
    ("chunks do not cover all samples", _set("image", "count", -1, 1)),
    ("a chunk lies outside its shard", _all(
        _set("image", "count", slice(4, 6), [1, 3]), _set("image", "first", 5, 9))),
    ("a chunk lies outside its file", _set("image", "offset", -1, 10**6)),
    ("a chunk lies outside its file", _set("image", "offset", -1, 2**64 - 1)),
    ("a chunk lies outside its file", _set("shards", "size", (1, 0), 10)),
    ("a chunk lies outside its file", _set("shards", "size", (1, 0), -1)),
    ("a chunk has too many samples", _all(
        _set("image", "count", slice(0, 2), [3, 1]), _set("image", "first", 1, 3))),
    ("a chunk has a wrong size", _set("image", "nbytes", 2, 6143)),
    ("a chunk has a wrong size", _set("label", "nbytes", 0, 8)),
    ("two chunks of a file overlap", _set("image", "offset", 1, 129)),
]  # fmt: skip


@pytest.mark.parametrize(("what", "change"), CONTRADICTIONS, ids=[f"{i}" for i in range(len(CONTRADICTIONS))])
def test_prove_finds_each_contradiction(
    what: str,
    change: Callable[[dict[str, Any]], None],
    stores: Callable[[str], Path],
    copied: Callable[[Path], Path],
) -> None:
    path = copied(stores("npy-fixed"))
    tables = {name: table_of(path, name) for name in ("shards", "image", "label")}
    change(tables)
    for name, table in tables.items():
        rewrite(path, name, table)
    assert what in [problem.what for problem in prove.prove(load(path))]
    assert shardstore.validate(path, level="structure", workers=1)


def test_there_is_a_contradiction_for_each_check() -> None:
    checks = re.findall(r',\s+"([a-z][^"]+)"[,)]', inspect.getsource(prove))
    assert len(checks) >= 14
    assert set(checks) == {what for what, _ in CONTRADICTIONS}


SWEPT = ["npy-encoded", "zarr-encoded", "npy-fixed", "zarr-fixed-zstd", "hdf5-fixed-zstd", "zarr-ragged-zstd"]


@pytest.mark.parametrize("layout", SWEPT)
def test_validate_finds_a_change_of_any_cell_of_the_tables(
    layout: str, make_store: Callable[..., Path], make_images: Callable[..., Path]
) -> None:
    # All checksums above the tables are made right again: only what they say is wrong.
    container, options = LAYOUTS[layout]
    sizes = [(40, 40), (36, 48)]  # larger than what the reader cuts from cached chunks
    path = make_store(container, source=make_images(6, sizes=sizes), samples_per_shard=4, **options)
    missed, count = [], 0
    assert shardstore.validate(path, level="decode", workers=1) == []
    for name in ["shards", *(a.name for a in shardstore.open(path).schema.arrays)]:
        good = table_of(path, name)
        assert good.dtype.names
        for column in good.dtype.names:
            for cell in np.ndindex(good[column].shape):
                for step in (-1, 1):
                    bad = good.copy()
                    with np.errstate(over="ignore"):
                        bad[column][cell] += np.array(step).astype(good[column].dtype)
                    rewrite(path, name, bad)
                    count += 1
                    if not shardstore.validate(path, level="decode", workers=1):
                        missed.append((name, column, cell, step))
        rewrite(path, name, good)
    assert shardstore.validate(path, level="decode", workers=1) == []
    assert count > 100
    assert not missed, "\n".join(map(str, missed))


@pytest.mark.parametrize("layout", ["npy-encoded", "zarr-ragged-zstd", "npy-fixed", "zarr-fixed-zstd"])
@pytest.mark.parametrize("column", ["count", "nbytes"])
def test_a_damaged_count_of_the_tables_costs_no_memory(
    column: str, layout: str, stores: Callable[[str], Path], copied: Callable[[Path], Path]
) -> None:
    path = copied(stores(layout))
    for name in shardstore.open(path).schema.array_names:
        good = table_of(path, name)
        bad = good.copy()
        bad[column][0] += 1 << 26
        np.save(root_of(path) / "index" / file_name(name), bad)
        tracemalloc.start()
        try:
            use(path)
        except shardstore.DamagedStoreError:
            pass
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 16 << 20, name
        np.save(root_of(path) / "index" / file_name(name), good)
    assert shardstore.validate(path, workers=1) == []


@given(st.data())
@settings(max_examples=250)
def test_changed_bytes_of_the_tables_never_surprise(
    stores: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    store = stores(data.draw(st.sampled_from(["npy-encoded", "zarr-fixed-zstd"])))
    files = sorted((store / "index").iterdir())
    file = data.draw(st.sampled_from(files))
    good, where = file.read_bytes(), data.draw(st.integers(0, file.stat().st_size - 1))
    bad = bytearray(good)
    some = data.draw(st.binary(min_size=1, max_size=8))
    bad[where : where + len(some)] = some
    try:
        file.write_bytes(bad[: len(good)])
        use(store)
        if bytes(bad[: len(good)]) != good:
            assert shardstore.validate(store, workers=1)
    except shardstore.DamagedStoreError:
        assert shardstore.validate(store, workers=1)
    finally:
        file.write_bytes(good)


# -- the HDF5 pair ----------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(copied: Callable[[Path], Path], stores: Callable[[str], Path]) -> tuple[Path, Path]:
    path = copied(stores("hdf5-fixed-zstd"))
    return path, path.with_name("out.h5.shards")


def refusal(path: Path) -> str:
    """What ``open``, ``ShardDataset`` and ``validate`` say alike of a store that they refuse."""
    said = []
    for entry in (shardstore.open, shardstore.ShardDataset):
        with pytest.raises((shardstore.NoStoreError, shardstore.DamagedStoreError)) as caught:
            entry(path)
        said.append(str(caught.value))
    assert said[0] == said[1]
    return said[0]


def test_hdf5_file_renamed_without_its_shards_is_refused(pair: tuple[Path, Path]) -> None:
    file, _ = pair
    other = file.rename(file.with_name("renamed.h5"))
    assert "renamed.h5.shards" in refusal(other)
    assert "out.h5.shards" in refusal(file)


def test_hdf5_file_and_shards_renamed_alike_are_refused(pair: tuple[Path, Path]) -> None:
    # The file itself leads plain HDF5 to the shards by their old name: h5py would answer fill values.
    file, shards = pair
    shards.rename(shards.with_name("renamed.h5.shards"))
    other = file.rename(file.with_name("renamed.h5"))
    with h5py.File(other) as opened:
        assert not opened["label"][...].any()
    said = refusal(other)
    assert "renamed" in said
    assert "out.h5" in said


def test_hdf5_file_moved_without_its_shards_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    file, _ = pair
    (tmp_path / "elsewhere").mkdir()
    other = file.rename(tmp_path / "elsewhere" / file.name)
    assert "out.h5.shards" in refusal(other)


def test_hdf5_shards_without_their_file_are_refused(pair: tuple[Path, Path]) -> None:
    file, _ = pair
    file.unlink()
    assert "out.h5" in refusal(file)
    assert "missing" in refusal(file)


def test_hdf5_file_of_another_store_is_found(
    pair: tuple[Path, Path], make_store: Callable[..., Path], make_images: Callable[..., Path]
) -> None:
    file, _ = pair
    options = LAYOUTS["hdf5-fixed-zstd"][1]
    other = make_store("hdf5", source=make_images(24, sizes=[(32, 32)]), samples_per_shard=10, **options)
    shutil.copy(other, file)
    problems = shardstore.validate(file, workers=1)
    assert problems[0].path == str(file)
    assert all(problem.hint for problem in problems)


def test_what_is_no_store_is_refused_with_the_next_step(images_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "plain.h5").write_bytes(b"")
    for path in (images_dir, tmp_path / "nothing", tmp_path / "plain.h5"):
        with pytest.raises(shardstore.NoStoreError) as caught:
            shardstore.open(path)
        assert isinstance(caught.value, FileNotFoundError)
        assert caught.value.problem.path == str(path)
    with pytest.raises(shardstore.NoStoreError, match="shardstore convert"):
        shardstore.open(images_dir)
