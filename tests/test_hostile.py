"""Stores and pictures made by somebody who means harm: each threat of ``docs/threats.md``, made for real."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import threading
import tracemalloc
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import google_crc32c
import h5py
import numcodecs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from test_index import JSON, places, read_json, rewrite, root_of, sign, table_of
from torch.utils.data import DataLoader

import shardstore
from shardstore import ReadOptions, ShardstoreError
from shardstore.pictures.opening import MAX_PIXELS
from shardstore.store.index import load
from shardstore.transforms import RandomResizedCrop

pytestmark = pytest.mark.filterwarnings("ignore:.*sorted by class")
posix = pytest.mark.skipif(os.name != "posix", reason="links and pipes as POSIX has them")
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "npy-encoded": ("npy", {"store": "encoded"}),
    "hdf5-encoded": ("hdf5", {"store": "encoded"}),
    "npy-pixels": ("npy", {"size": 24, "chunk_size": 4000}),
    "hdf5-pixels": ("hdf5", {"size": 24, "chunk_size": 4000}),
    "zarr-zstd": ("zarr", {"size": 24, "codec": "zstd", "chunk_size": 4000}),
    "zarr-ragged": ("zarr", {"store": "pixels", "codec": "zstd"}),
}


@pytest.fixture(scope="module")
def stores(make_store: Callable[..., Path], make_images: Callable[..., Path]) -> Callable[[str], Path]:
    made: dict[str, Path] = {}
    one_size, two_sizes = make_images(7, sizes=[(40, 40)]), make_images(7, sizes=[(40, 40), (36, 48)])

    def get(layout: str) -> Path:
        if layout not in made:
            container, options = LAYOUTS[layout]
            source = two_sizes if layout == "zarr-ragged" else one_size
            made[layout] = make_store(container, source=source, samples_per_shard=3, **options)
        return made[layout]

    return get


@pytest.fixture
def copied(tmp_path: Path, stores: Callable[[str], Path]) -> Callable[[str], Path]:
    """A layout's store, in a folder of its own, to be made hostile."""

    def make(layout: str) -> Path:
        original, place = stores(layout), tmp_path / "place"
        place.mkdir()
        for path in original.parent.iterdir():
            (shutil.copytree if path.is_dir() else shutil.copy)(path, place / path.name)
        return place / original.name

    return make


def shard_file(path: Path, array: str, shard: int = 1) -> Path:
    return Path(load(path, follow_links=True).shard_path(shard, array))


def read_all(path: Path, **options: Any) -> None:
    list(shardstore.open(path, fields=["image", "label", "key"], options=ReadOptions(**options)))


def exercise(path: Path, scratch: Path) -> list[str]:
    """Everything that can be done with a store; what came of each. Anything but our own errors ends the test."""
    said = []

    def tried(what: Callable[[], Any]) -> None:
        try:
            what()
        except ShardstoreError as error:
            said.append(str(error))

    def some() -> None:
        dataset = shardstore.open(path)
        for number in (0, len(dataset) - 1):
            dataset[number], dataset.key(number)

    def fields() -> None:
        names = [f.name for f in shardstore.open(path).schema.fields]
        next(iter(shardstore.open(path, fields=names)))

    def batch() -> None:
        with suppress(shardstore.StackError):  # of a ragged store
            next(iter(shardstore.ShardDataset(path, batch_size=2, shuffle=True, options=ReadOptions(verify="always"))))

    tried(some)
    tried(fields)
    tried(lambda: next(iter(shardstore.ShardDataset(path, shuffle=True, options=ReadOptions(verify="never")))))
    tried(batch)
    tried(lambda: shardstore.open(path).info())
    tried(lambda: said.extend(map(str, shardstore.validate(path, level="decode", workers=1))))
    tried(lambda: shardstore.export(path, scratch / "exported"))
    tried(lambda: shardstore.convert(path, scratch / "converted", workers=1))
    for name in ("exported", "converted", "converted.partial"):
        shutil.rmtree(scratch / name, ignore_errors=True)
    return said


def problems(path: Path, level: Any = "structure") -> str:
    return "\n".join(map(str, shardstore.validate(path, level=level, workers=1)))


def test_good_stores_are_used_without_a_word(stores: Callable[[str], Path], tmp_path: Path) -> None:
    for layout in LAYOUTS:
        assert exercise(stores(layout), tmp_path) == []


# -- no code ----------------------------------------------------------------------------------------------------------


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


def test_pickles_in_any_file_of_a_store_are_never_loaded(copied: Callable[[str], Path], tmp_path: Path) -> None:
    path, marker = copied("npy-encoded"), tmp_path / "ran"
    objects = io.BytesIO()
    np.save(objects, np.array([Payload(marker)], dtype=object), allow_pickle=True)
    np.load(io.BytesIO(objects.getvalue()), allow_pickle=True)
    assert marker.exists()  # the control: the payload works
    marker.unlink()
    bare = pickle.dumps(Payload(marker))
    for file in sorted(f for f in path.rglob("*") if f.is_file()):
        content = file.read_bytes()
        for payload in (objects.getvalue(), bare):
            file.write_bytes(payload)
            assert exercise(path, tmp_path)
            # Of the size that the index expects, and with its checksum.
            file.write_bytes(payload[: len(content)].ljust(len(content), b"\0"))
            relative = file.relative_to(path).as_posix()
            if file.name != "shardstore.json":
                raw = before = read_json(path)
                if relative in raw["files"]:
                    raw = copy.deepcopy(raw)
                    raw["files"][relative] = [len(content), google_crc32c.value(file.read_bytes())]
                    sign(path, raw)
                exercise(path, tmp_path)
                sign(path, before)
        file.write_bytes(content)
    assert exercise(path, tmp_path) == []
    assert not marker.exists()


def test_pickles_among_the_records_of_an_interrupted_run_are_never_loaded(
    tmp_path: Path, images_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardstore.converting import ledger

    marker = tmp_path / "ran"
    monkeypatch.setattr(ledger, "save", _saved_with(Payload(marker)))
    shardstore.convert(images_dir, tmp_path / "out", workers=1)
    found: list[Any] = []
    folder = tmp_path / "ledger"
    folder.mkdir()
    ledger.save(str(folder), "record", {})
    found.append(ledger.load(str(folder), "record"))
    assert found == [None]
    assert not marker.exists()


def _saved_with(payload: Any) -> Callable[..., None]:
    def save(folder: str, signature: str, arrays: Any) -> None:
        np.savez(f"{folder}/{signature}.npz", samples=np.array([payload], dtype=object))

    return save


# -- no file outside --------------------------------------------------------------------------------------------------

OUTWARD = {
    "a shard file": lambda path: shard_file(path, load(path).schema.array_names[0]),
    "a table of the index": lambda path: root_of(path) / "index/label.chunks.npy",
    "the description": lambda path: root_of(path) / "shardstore.json",
    "a folder of the index": lambda path: root_of(path) / "index",
}


def linked_out(path: Path, file: Path, tmp_path: Path) -> Path:
    """Move a file or folder out of the store and leave a link to it."""
    outside = tmp_path / "outside"
    outside.mkdir(exist_ok=True)
    moved = file.rename(outside / file.name)
    file.symlink_to(moved)
    return moved


@posix
@pytest.mark.parametrize("what", OUTWARD)
@pytest.mark.parametrize("layout", ["npy-encoded", "zarr-zstd", "hdf5-pixels"])
def test_links_out_of_a_store_are_not_followed(
    layout: str, what: str, copied: Callable[[str], Path], tmp_path: Path
) -> None:
    path = copied(layout)
    file = OUTWARD[what](path)
    moved = linked_out(path, file, tmp_path)
    with pytest.raises(shardstore.DamagedStoreError, match="leads out of the store") as caught:
        read_all(path)
    assert str(moved) in str(caught.value)
    assert "follow_links=True" in str(caught.value)
    for batch_size in (None, 2):
        with pytest.raises(shardstore.DamagedStoreError, match="leads out of the store"):
            list(shardstore.ShardDataset(path, batch_size=batch_size))
    found = shardstore.validate(path, level="structure", workers=1)
    assert any("leads out of the store" in p.what and (p.path or "").startswith(str(file)) for p in found)
    assert all(p.hint for p in found)
    with pytest.raises(ShardstoreError):
        shardstore.convert(path, tmp_path / "again", workers=1)
    with pytest.raises(ShardstoreError):
        shardstore.export(path, tmp_path / "folder")
    # Who trusts the link says so.
    read_all(path, follow_links=True)
    dataset = shardstore.ShardDataset(path, batch_size=2, options=ReadOptions(follow_links=True))
    assert len(list(DataLoader(dataset, batch_size=None, num_workers=1))) == 4


@posix
def test_a_linked_folder_of_an_hdf5_store_is_not_followed(copied: Callable[[str], Path], tmp_path: Path) -> None:
    path = copied("hdf5-encoded")
    linked_out(path, root_of(path), tmp_path)
    with pytest.raises(shardstore.DamagedStoreError, match="leads out of the store"):
        shardstore.open(path)
    read_all(path, follow_links=True)


@posix
@pytest.mark.parametrize("layout", ["npy-pixels", "zarr-zstd", "hdf5-encoded"])
def test_a_store_may_be_a_link_and_hold_links_to_itself(
    layout: str, copied: Callable[[str], Path], tmp_path: Path
) -> None:
    path = copied(layout)
    (tmp_path / "links").mkdir()
    for entry in path.parent.iterdir():
        (tmp_path / "links" / entry.name).symlink_to(entry)
    file = shard_file(path, load(path).schema.array_names[0])
    inside = file.rename(file.with_name(".kept"))
    file.symlink_to(inside)
    for store in (path, tmp_path / "links" / path.name):
        read_all(store)
        assert problems(store, "decode") == ""


@posix
@pytest.mark.parametrize("what", ["a shard file", "a table of the index"])
def test_pipes_and_folders_in_place_of_files_are_refused_at_once(what: str, copied: Callable[[str], Path]) -> None:
    path = copied("npy-encoded")
    file = OUTWARD[what](path)
    file.unlink()
    for make, undo in ((os.mkfifo, os.unlink), (os.mkdir, os.rmdir)):
        make(file)
        for options in ({}, {"follow_links": True}):
            with pytest.raises(shardstore.DamagedStoreError, match="no plain file"):
                read_all(path, **options)
        assert str(file) in problems(path)
        undo(file)


def resigned(path: Path, file: Path) -> None:
    """Make the checksums of a changed file right again."""
    data, raw = file.read_bytes(), read_json(path)
    entry = [len(data), google_crc32c.value(data)]
    if file == path:
        raw["files"][".h5"] = entry
    elif file.relative_to(root_of(path)).as_posix() in raw["files"]:
        raw["files"][file.relative_to(root_of(path)).as_posix()] = entry
    else:
        shards = table_of(path, "shards")
        shards["size"][1], shards["crc32c"][1] = entry
        rewrite(path, "shards", shards)
        return
    sign(path, raw)


def _external_link(file: h5py.File, secret: Path) -> None:
    del file["label"]
    file["label"] = h5py.ExternalLink(str(secret), "/label")


def _soft_link(file: h5py.File, secret: Path) -> None:
    del file["label"]
    file["label"] = h5py.SoftLink("/key/start")


def _external_storage(file: h5py.File, secret: Path) -> None:
    shape, dtype = file["label"].shape, file["label"].dtype
    del file["label"]
    file.create_dataset("label", shape, dtype, external=[(str(secret), 0, h5py.h5f.UNLIMITED)])


def _virtual(file: h5py.File, secret: Path) -> None:
    shape, dtype = file["label"].shape, file["label"].dtype
    del file["label"]
    layout = h5py.VirtualLayout(shape, dtype)
    layout[:] = h5py.VirtualSource(str(secret), "label", shape)
    file.create_virtual_dataset("label", layout)


def _one_more(file: h5py.File, secret: Path) -> None:
    file["more"] = h5py.ExternalLink(str(secret), "/")


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """An HDF5 file elsewhere."""
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["label"] = np.arange(7)
    return tmp_path / "secret.h5"


@pytest.mark.parametrize("change", [_external_link, _soft_link, _external_storage, _virtual, _one_more])
@pytest.mark.parametrize("level", ["structure", "decode"])
def test_shards_that_lead_hdf5_elsewhere_are_found(
    change: Callable[..., None], level: str, copied: Callable[[str], Path], secret: Path
) -> None:
    path = copied("hdf5-encoded")
    file = shard_file(path, "label")
    with h5py.File(file, "r+") as opened:
        change(opened, secret)
    resigned(path, file)
    found = problems(path, level)
    assert "plain tools" in found
    assert "cannot" not in found


def _main_link(file: h5py.File, secret: Path) -> None:
    del file["_shards/00001"]
    file["_shards/00001"] = h5py.ExternalLink(str(secret), "/")


def _main_stored(file: h5py.File, secret: Path) -> None:
    values = file["label"][:]
    del file["label"]
    file["label"] = values


def _main_other_dataset(file: h5py.File, secret: Path) -> None:
    folder = file["label"].virtual_sources()[0].file_name
    del file["label"]
    layout = h5py.VirtualLayout((7,), "<i8")
    layout[:3] = h5py.VirtualSource(folder, "key/start", (3,))
    file.create_virtual_dataset("label", layout)


@pytest.mark.parametrize(
    "change", [_external_link, _soft_link, _virtual, _one_more, _main_link, _main_stored, _main_other_dataset]
)
@pytest.mark.parametrize("level", ["structure", "decode"])
def test_a_main_hdf5_file_that_leads_elsewhere_is_found(
    change: Callable[..., None], level: str, copied: Callable[[str], Path], secret: Path
) -> None:
    path = copied("hdf5-encoded")
    assert problems(path, level) == ""
    with h5py.File(path, "r+") as opened:
        change(opened, secret)
    resigned(path, path)
    assert f"{path}: leads plain tools astray" in problems(path, level)
    read_all(path)  # the reader never looks at it


ZARR = {
    "another shape": ("label", lambda raw: raw.update(shape=[9])),
    "another type": ("label", lambda raw: raw.update(data_type="int32")),
    "other keys": ("label", lambda raw: raw["chunk_key_encoding"]["configuration"].update(separator=".")),
    "other chunks": ("label", lambda raw: raw["chunk_grid"]["configuration"].update(chunk_shape=[1])),
    "transformers": ("label", lambda raw: raw.update(storage_transformers=[{"name": "elsewhere"}])),
    "other codecs": ("label", lambda raw: raw["codecs"][0]["configuration"]["codecs"].append({"name": "evil"})),
    "no sharding": ("label", lambda raw: raw.update(codecs=[{"name": "bytes"}])),
    "a group for an array": ("label", lambda raw: raw.update(node_type="group")),
    "an array for a group": ("key", lambda raw: raw.update(node_type="array")),
    "arrays elsewhere": ("", lambda raw: _consolidated(raw).update({"../../outside": _consolidated(raw)["label"]})),
    "arrays that are not there": ("", lambda raw: _consolidated(raw).pop("label")),
    "other metadata in the copy": ("", lambda raw: _consolidated(raw)["label"].update(shape=[9])),
    "a copy elsewhere": ("", lambda raw: raw["consolidated_metadata"].update(kind="http://example.org")),
}


def _consolidated(raw: Any) -> Any:
    return raw["consolidated_metadata"]["metadata"]


@pytest.mark.parametrize("what", ZARR)
def test_zarr_metadata_that_lead_elsewhere_are_found(what: str, copied: Callable[[str], Path]) -> None:
    path = copied("zarr-zstd")
    node, change = ZARR[what]
    file = path / node / "zarr.json"
    raw = json.loads(file.read_text())
    change(raw)
    file.write_text(json.dumps(raw))
    resigned(path, file)
    assert f"{file}: leads plain tools astray" in problems(path)
    read_all(path)


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"{}", b"\xff", b"[" * 100_000, b'{"node_type": "array"}'])
def test_zarr_metadata_that_are_none_are_found(content: bytes, copied: Callable[[str], Path]) -> None:
    path = copied("zarr-zstd")
    for file in (path / "zarr.json", path / "label/zarr.json"):
        good = file.read_bytes()
        file.write_bytes(content)
        resigned(path, file)
        assert str(file) in problems(path)
        file.write_bytes(good)
        resigned(path, file)


@pytest.mark.parametrize("name", ["elsewhere/zarr.json", "image", "index/../../x", ".h5", "a" * 5000, "CON", "x\0y"])
def test_the_description_lists_no_files_but_those_of_a_store(name: str, copied: Callable[[str], Path]) -> None:
    path = copied("npy-encoded")
    raw = read_json(path)
    raw["files"][name] = [1, 1]
    sign(path, raw)
    with pytest.raises(shardstore.DamagedStoreError, match="none of a store's files"):
        shardstore.open(path)


class Samples(list[Any]):
    classes: tuple[str, ...] | None = None


@pytest.mark.parametrize(
    "key", ["../out.png", "/out.png", "a/../../out.png", "a//b.png", "", ".", "..", "a/.", "a\0b", "./x"]
)
def test_keys_that_lead_out_of_the_folder_are_not_exported(key: str, tmp_path: Path) -> None:
    image = np.zeros((4, 4, 3), np.uint8)
    shardstore.convert([{"image": image, "key": "good.png"}, {"image": image, "key": key}], tmp_path / "store")
    with pytest.raises(shardstore.OptionError, match="leads out of the folder"):
        shardstore.export(tmp_path / "store", tmp_path / "folder")
    assert {p.name for p in tmp_path.iterdir()} <= {"store", "folder"}
    assert [p.name for p in (tmp_path / "folder").iterdir()] == ["good.png"]


@pytest.mark.parametrize("name", ["..", ".", ""])
def test_class_names_that_lead_out_of_the_folder_are_not_exported(name: str, tmp_path: Path) -> None:
    samples = Samples([(np.zeros((4, 4, 3), np.uint8), 0)])
    samples.classes = (name,)
    shardstore.convert(samples, tmp_path / "store")
    with pytest.raises(shardstore.OptionError, match="no folder's name"):
        shardstore.export(tmp_path / "store", tmp_path / "folder")


@pytest.mark.parametrize("label", [-1, 1, 1 << 40, -(1 << 63)])
def test_labels_of_no_class_are_named(label: int, tmp_path: Path) -> None:
    samples = Samples([(np.zeros((4, 4, 3), np.uint8), label)])
    samples.classes = ("only",)
    shardstore.convert(samples, tmp_path / "store")
    tracemalloc.start()
    with pytest.raises(shardstore.DamagedStoreError, match="number of no class"):
        shardstore.open(tmp_path / "store").info()
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()
    with pytest.raises(shardstore.OptionError):
        shardstore.export(tmp_path / "store", tmp_path / "folder")


def test_names_in_a_store_do_not_command_the_terminal(tmp_path: Path) -> None:
    image, key = np.zeros((40, 40, 3), np.uint8), "\x1b]0;evil\x07\x9b31m.png"
    samples = Samples([{"image": image, "label": 0, "key": key}])
    samples.classes = ("\x1b[2Jclass",)
    shardstore.convert(samples, tmp_path / "store", workers=1)
    file = shard_file(tmp_path / "store", "image", 0)
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    done = [run_command(*words) for words in (["info", tmp_path / "store"], ["validate", tmp_path / "store"])]
    output = b"".join(d.stdout + d.stderr for d in done)
    assert b"\\x1b" in output
    assert not set(output) & {0x1B, 0x07}
    assert b"\xc2\x9b" not in output


def run_command(*words: Any) -> subprocess.CompletedProcess[bytes]:
    code = "from shardstore.cli.main import main; main()"
    command = [sys.executable, "-W", "error::UserWarning", "-c", code, *map(str, words)]
    done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL)
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    return done


# -- no memory --------------------------------------------------------------------------------------------------------


@contextmanager
def little_memory(limit: int = 48 << 20) -> Iterator[None]:
    """What Python and NumPy ask for stays under a limit, touched or not."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


def test_the_check_of_memory_sees_what_is_asked_for() -> None:
    with pytest.raises(AssertionError), little_memory():
        np.empty(1 << 30, np.uint8)


HUGE = [1 << 32, (1 << 62) - 1, 1 << 40, 10**9]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_huge_counts_in_the_description_take_no_memory(
    layout: str, copied: Callable[[str], Path], tmp_path: Path
) -> None:
    path = copied(layout)
    raw = read_json(path)
    numbers = [p for p in places(raw) if p[-1] in ("samples", "shard_samples", "shard_items", "chunk_items")]
    assert len(numbers) > 6
    for value in HUGE:
        changes = [{place: value} for place in numbers] + [dict.fromkeys([("samples",), ("shard_samples",)], value)]
        # All that has to be the same is, and one shard holds everything.
        changes.append({p: value for p in numbers if p[-1] in ("samples", "shard_samples", "shard_items")})
        for change in changes:
            bad = copy.deepcopy(raw)
            for (*parents, key), new in change.items():
                parent = bad
                for step in parents:
                    parent = parent[step]
                parent[key] = new
            sign(path, bad)
            with little_memory():
                said = exercise(path, tmp_path)
            # How much room a stream of bytes has in its shard, npy files do not say.
            assert said or [key[-1] for key in change] == ["shard_items"], change


@pytest.mark.parametrize("layout", ["npy-encoded", "zarr-zstd", "npy-pixels", "hdf5-pixels"])
def test_huge_sizes_in_the_tables_take_no_memory(layout: str, copied: Callable[[str], Path], tmp_path: Path) -> None:
    path = copied(layout)
    shards = table_of(path, "shards")
    shards["size"] = 1 << 50
    rewrite(path, "shards", shards)
    for name in load(path).schema.array_names:
        good = table_of(path, name)
        for column, value in (("nbytes", (1 << 32) - 1), ("count", (1 << 32) - 1), ("offset", 1 << 49)):
            bad = good.copy()
            bad[column][0] = value
            rewrite(path, name, bad)
            with little_memory():
                assert exercise(path, tmp_path)
        rewrite(path, name, good)


@pytest.mark.parametrize("claim", [1 << 31, (1 << 32) - 1, 1 << 62])
def test_frames_that_promise_much_take_no_memory(claim: int, copied: Callable[[str], Path], tmp_path: Path) -> None:
    path = copied("zarr-zstd")
    table = table_of(path, "image")
    frame = b"\x28\xb5\x2f\xfd" + bytes([0b11100000]) + struct.pack("<Q", claim)  # single segment, 8 bytes of size
    file = shard_file(path, "image", 0)
    content = bytearray(file.read_bytes())
    begin, nbytes = int(table["offset"][0]), int(table["nbytes"][0])
    content[begin : begin + len(frame)] = frame
    file.write_bytes(content)
    table["crc32c"][0] = google_crc32c.value(bytes(content[begin : begin + nbytes]))
    rewrite(path, "image", table)
    with little_memory(), pytest.raises(shardstore.DamagedStoreError, match=f"says {claim} bytes"):
        shardstore.open(path)[0]


def test_a_description_that_promises_much_of_small_frames_takes_no_memory(
    copied: Callable[[str], Path], tmp_path: Path
) -> None:
    path = copied("zarr-zstd")
    raw = read_json(path)
    array = next(a for a in raw["arrays"] if a["name"] == "image")
    many = (1 << 32) // (24 * 24 * 3) // 3 * 3
    array["chunk_items"], raw["shard_samples"] = many, many
    for other in raw["arrays"]:
        other["shard_items"] = many if not other["name"].endswith(".data") else other["shard_items"]
        other["chunk_items"] = many if other["name"] != "key.data" else other["chunk_items"]
    sign(path, raw)
    with little_memory():
        assert exercise(path, tmp_path)


def test_a_huge_description_is_not_read(copied: Callable[[str], Path]) -> None:
    path = copied("npy-encoded")
    with (path / "shardstore.json").open("ab") as file:
        file.truncate(1 << 36)
    with little_memory(), pytest.raises(shardstore.DamagedStoreError, match="larger than"):
        shardstore.open(path)


def test_a_list_of_rejects_that_is_none_is_refused(
    make_store: Callable[..., Path], images_dir: Path, bad_dir: Path, tmp_path: Path
) -> None:
    shutil.copytree(images_dir, tmp_path / "imgs")
    shutil.copytree(bad_dir, tmp_path / "imgs/bad")
    path = make_store("npy", source=tmp_path / "imgs", on_error="skip")
    for content in (b"[]\n", b'{"what": 1, "more": 2}\n', b"\xff", b"[" * 100_000, b'"key"\n', b"{}\n"):
        (path / "rejects.jsonl").write_bytes(content)
        resigned(path, path / "rejects.jsonl")
        with pytest.raises(shardstore.DamagedStoreError, match=r"rejects\.jsonl"):
            shardstore.validate(path, level="source", source=tmp_path / "imgs", workers=1)


# -- anything at all --------------------------------------------------------------------------------------------------


@given(value=JSON, data=st.data())
@settings(max_examples=120)
def test_any_json_in_a_description_gives_our_own_errors(
    stores: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, value: Any, data: st.DataObject
) -> None:
    path = stores(data.draw(st.sampled_from(sorted(LAYOUTS))))
    good = (root_of(path) / "shardstore.json").read_bytes()
    raw = json.loads(good)
    place = data.draw(st.sampled_from([p for p in places(raw) if p != ("crc32c",)]))
    parent = raw
    for step in place[:-1]:
        parent = parent[step]
    parent[place[-1]] = value
    try:
        sign(path, raw)
        exercise(path, tmp_path_factory.mktemp("scratch"))
    finally:
        (root_of(path) / "shardstore.json").write_bytes(good)


@given(data=st.data())
@settings(max_examples=150)
def test_any_numbers_in_the_tables_give_our_own_errors(
    stores: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = stores(data.draw(st.sampled_from(sorted(LAYOUTS))))
    name = data.draw(st.sampled_from(["shards", *load(path).schema.array_names]))
    table, good = table_of(path, name), table_of(path, name)
    description = (root_of(path) / "shardstore.json").read_bytes()
    assert table.dtype.names
    for _ in range(data.draw(st.integers(1, 3))):
        column = data.draw(st.sampled_from(table.dtype.names))
        cell = data.draw(st.sampled_from(list(np.ndindex(table[column].shape))))
        limits = np.iinfo(table[column].dtype)
        table[column][cell] = data.draw(st.integers(int(limits.min), int(limits.max)) | st.integers(0, 12))
    try:
        rewrite(path, name, table)
        exercise(path, tmp_path_factory.mktemp("scratch"))
    finally:
        rewrite(path, name, good)
        (root_of(path) / "shardstore.json").write_bytes(description)


@given(data=st.data())
@settings(max_examples=150)
def test_any_rows_of_samples_give_our_own_errors(
    stores: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """``start``, ``length`` and ``shape`` lie in the shards: bytes of these, with all checksums above them right."""
    path = stores(data.draw(st.sampled_from(["npy-encoded", "zarr-ragged"])))
    names = [n for n in load(path).schema.array_names if n.split(".")[-1] in ("start", "length", "shape")]
    name = data.draw(st.sampled_from(names))
    file, table, good = shard_file(path, name), table_of(path, name), table_of(path, name)
    content, description = file.read_bytes(), (root_of(path) / "shardstore.json").read_bytes()
    begin, nbytes = int(table["offset"][1]), int(table["nbytes"][1])
    dtype = load(path).schema.array(name)[1].dtype
    values = np.frombuffer(content[begin : begin + nbytes], dtype).copy()
    limits = np.iinfo(values.dtype)
    number = data.draw(st.integers(0, len(values) - 1))
    values[number] = data.draw(st.integers(int(limits.min), int(limits.max)) | st.integers(-3, 5000))
    try:
        file.write_bytes(content[:begin] + values.tobytes() + content[begin + nbytes :])
        table["crc32c"][1] = google_crc32c.value(values.tobytes())
        rewrite(path, name, table)
        exercise(path, tmp_path_factory.mktemp("scratch"))
    finally:
        file.write_bytes(content)
        rewrite(path, name, good)
        (root_of(path) / "shardstore.json").write_bytes(description)


# -- pictures ---------------------------------------------------------------------------------------------------------


def png_chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, *extra: bytes, rows: bytes = b"") -> bytes:
    """A PNG of one bit a pixel, with these chunks before its pixels."""
    head = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(extra) + png_chunk(b"IDAT", rows) + png_chunk(b"IEND", b"")


def saved(format: str) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (16, 16)).save(out, format)
    return out.getvalue()


def jpeg_of(width: int, height: int) -> bytes:
    data = bytearray(saved("JPEG"))
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = struct.pack(">HH", height, width)
    return bytes(data)


def bmp_of(width: int, height: int) -> bytes:
    data = bytearray(saved("BMP"))
    data[18:26] = struct.pack("<ii", width, height)
    return bytes(data)


def gif_of(width: int, height: int) -> bytes:
    data = bytearray(saved("GIF"))
    data[6:10] = struct.pack("<HH", width, height)
    return bytes(data)


def tiff_of(width: int, height: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (16, 16)).save(out, "TIFF")
    data = bytearray(out.getvalue())
    first = int.from_bytes(data[4:8], "little")
    for i in range(int.from_bytes(data[first : first + 2], "little")):
        at = first + 2 + 12 * i
        if data[at : at + 2] in (b"\x00\x01", b"\x01\x01"):  # width, height
            wide = data[at] == 0
            data[at + 2 : at + 4] = b"\x04\x00"
            data[at + 8 : at + 12] = struct.pack("<I", width if wide else height)
    return bytes(data)


def real_bomb() -> bytes:
    """400 million pixels in 50 kB, all of them there."""
    packed = zlib.compressobj(9)
    row = bytes(1 + 20_000 // 8)
    return png(20_000, 20_000, rows=b"".join([*(packed.compress(row) for _ in range(20_000)), packed.flush()]))


BOMBS: dict[str, Callable[[], bytes]] = {
    "real.png": real_bomb,
    "header.png": lambda: png(2**31 - 1, 2**31 - 1),
    "header.jpg": lambda: jpeg_of(65_500, 65_500),
    "header.bmp": lambda: bmp_of(60_000, 60_000),
    "header.gif": lambda: gif_of(65_535, 65_535),
    "header.tif": lambda: tiff_of(2**31, 2**31),
}
# What these hold is not their pixels: they need only not take memory or time.
ODD: dict[str, Callable[[], bytes]] = {
    "text.png": lambda: png(16, 16, png_chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(300 << 20), 9))),
    "texts.png": lambda: png(
        16, 16, *[png_chunk(b"zTXt", b"k%d\0\0" % i + zlib.compress(bytes(1 << 20), 9)) for i in range(200)]
    ),
    "profile.png": lambda: png(16, 16, png_chunk(b"iCCP", b"k\0\0" + zlib.compress(bytes(300 << 20), 9))),
    "counts.tif": lambda: b"II*\0\x08\0\0\0" + struct.pack("<H", 65_535) + b"\xff" * 400,
    "deep.tif": lambda: b"II*\0\x08\0\0\0" + struct.pack("<HHHII", 1, 0x8769, 4, 1, 8) + struct.pack("<I", 8),
}


@pytest.fixture(scope="module")
def bombs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of pictures that are too large, and a good one."""
    root = tmp_path_factory.mktemp("bombs")
    (root / "class").mkdir()
    Image.new("RGB", (16, 16), (1, 2, 3)).save(root / "class/good.png")
    for name, make in BOMBS.items():
        (root / "class" / name).write_bytes(make())
    assert all(f.stat().st_size < 60_000 for f in (root / "class").iterdir())
    return root


WAYS: dict[str, dict[str, Any]] = {
    "full": {"store": "encoded"},
    "header": {"store": "encoded", "check": "header"},
    "auto": {},
    "pixels": {"store": "pixels"},
    "size": {"size": 8},
    "resize_short": {"resize_short": 8},
}


@pytest.mark.parametrize("way", WAYS)
def test_pictures_with_too_many_pixels_are_named(way: str, bombs: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(shardstore.SourceError) as caught:
            shardstore.convert(bombs, tmp_path / "out", workers=1, **WAYS[way])
        summary = shardstore.convert(bombs, tmp_path / "out", workers=1, on_error="skip", **WAYS[way])
    assert {p.key for p in caught.value.problems} == {f"class/{name}" for name in BOMBS}
    for problem in caught.value.problems:
        assert "too many pixels" in problem.what, problem
        assert "--max-pixels" in str(problem)
    assert summary.schema.samples == 1
    assert len(shardstore.open(tmp_path / "out")[0].image) == 3


def test_a_folder_with_bombs_is_validated(bombs: Path) -> None:
    found = shardstore.validate(bombs, workers=1)
    assert {p.key for p in found} == {f"class/{name}" for name in BOMBS}
    assert all("too many pixels" in p.what and p.hint for p in found)


def test_the_command_names_bombs_without_a_traceback(bombs: Path, tmp_path: Path) -> None:
    for words in (["convert", bombs, tmp_path / "out", "--workers", "1"], ["validate", bombs, "--workers", "2"]):
        done = run_command(*words)
        assert done.returncode == 1
        lines = [line for line in done.stderr.decode().splitlines() if "too many pixels" in line]
        assert len(lines) == len(BOMBS)
        assert b"Warning" not in done.stderr


@pytest.fixture(scope="module")
def middling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of 10,000 pixels: PNG, JPEG, TIFF, ICO (whose pictures have headers of their own)."""
    root = tmp_path_factory.mktemp("middling")
    (root / "class").mkdir()
    for name in ("a.png", "b.jpg", "c.tif", "d.webp"):
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (100, 100, 3), np.uint8)).save(root / "class" / name)
    return root


@pytest.mark.parametrize("way", WAYS)
def test_max_pixels_is_a_bound_of_the_users(way: str, middling: Path, tmp_path: Path) -> None:
    with pytest.raises(shardstore.SourceError) as caught:
        shardstore.convert(middling, tmp_path / "out", workers=1, max_pixels=9_999, **WAYS[way])
    assert len(caught.value.problems) == 4
    shardstore.convert(middling, tmp_path / "out", workers=1, max_pixels=10_000, **WAYS[way])
    assert len(shardstore.validate(middling, max_pixels=9_999, workers=1)) == 4
    assert shardstore.validate(middling, max_pixels=10_000, workers=1) == []


def test_another_bound_is_another_conversion(middling: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    options: dict[str, Any] = {"workers": 1, "on_error": "skip", "samples_per_shard": 2}

    def stop(done: int, total: int) -> None:
        if done == total:
            raise KeyboardInterrupt

    (middling / "class/e.png").write_bytes(saved("PNG"))
    with suppress(KeyboardInterrupt):
        shardstore.convert(middling, target, max_pixels=5_000, progress=stop, **options)
    assert (tmp_path / "out.partial").exists()
    assert shardstore.convert(middling, target, **options).schema.samples == 5
    (middling / "class/e.png").unlink()


def test_stored_pictures_with_too_many_pixels_are_not_decoded(middling: Path, tmp_path: Path) -> None:
    path = tmp_path / "out"
    shardstore.convert(middling, path, store="encoded", workers=1)
    small = ReadOptions(max_pixels=9_999)
    crop = RandomResizedCrop(8)
    readers: list[Callable[[ReadOptions], Any]] = [
        lambda options: list(shardstore.open(path, options=options)),
        lambda options: list(shardstore.ShardDataset(path, options=options)),
        lambda options: list(shardstore.ShardDataset(path, batch_size=2, options=options)),
        lambda options: list(shardstore.ShardDataset(path, transform=crop, options=options)),
        lambda options: list(shardstore.ShardDataset(path, batch_size=2, transform=crop, threads=2, options=options)),
    ]
    for read in readers:
        with pytest.raises(shardstore.ImageError, match="too many pixels") as caught:
            read(small)
        assert "ReadOptions(max_pixels=)" in str(caught.value)
        assert caught.value.problem.key
        assert len(read(ReadOptions(max_pixels=10_000))) >= 2
    with pytest.warns(UserWarning, match="too many pixels"), pytest.raises(shardstore.ImageError):
        list(shardstore.ShardDataset(path, options=ReadOptions(max_pixels=9_999, on_error="skip")))
    assert len(shardstore.validate(path, level="decode", max_pixels=9_999, workers=1)) == 4
    assert ReadOptions().max_pixels == MAX_PIXELS


@pytest.mark.parametrize("value", [0, -1, 1.5, None, "many"])
def test_an_impossible_bound_is_refused(value: Any, middling: Path, tmp_path: Path) -> None:
    with pytest.raises(shardstore.OptionError, match="max_pixels"):
        shardstore.convert(middling, tmp_path / "out", max_pixels=value)
    with pytest.raises(shardstore.OptionError, match="max_pixels"):
        ReadOptions(max_pixels=value)


def test_pillows_own_bound_is_lifted_only_while_it_must_be(
    middling: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    path = tmp_path / "out"
    failures: list[BaseException] = []

    def read() -> None:
        try:
            for _ in range(20):
                list(shardstore.open(path))
        except BaseException as error:
            failures.append(error)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shardstore.convert(middling, path, store="encoded", workers=1)
        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
    assert Image.MAX_IMAGE_PIXELS == 100


def test_an_icon_may_not_hide_a_large_picture(tmp_path: Path) -> None:
    inner = io.BytesIO()
    Image.new("RGB", (100, 100)).save(inner, "PNG")
    data = inner.getvalue()
    (tmp_path / "imgs").mkdir()
    entry = struct.pack("<BBBBHHII", 16, 16, 0, 0, 1, 32, len(data), 22)
    (tmp_path / "imgs/a.ico").write_bytes(b"\0\0\1\0\1\0" + entry + data)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(shardstore.SourceError) as caught:
            shardstore.convert(tmp_path / "imgs", tmp_path / "out", max_pixels=9_999, workers=1)
    assert "too many pixels" in caught.value.problems[0].what


MEASURE = """
import sys, shardstore
from pathlib import Path
def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) / 1000
folder, options = Path(sys.argv[1]), dict(pair.split("=") for pair in sys.argv[2:])
options = {k: int(v) if v.isdigit() else v for k, v in options.items()}
shardstore.convert(folder / "warm", folder / "warm.out", workers=1, overwrite=True)
before = peak()
try:
    shardstore.convert(folder / "imgs", folder / "out", workers=1, overwrite=True, **options)
except shardstore.SourceError as error:
    assert error.problems
print(round(peak() - before))
"""


def measured(folder: Path, **options: Any) -> int:
    """MB that converting ``folder/imgs`` adds to a process's most memory."""
    command = [sys.executable, "-W", "error", "-c", MEASURE, folder, *(f"{k}={v}" for k, v in options.items())]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is measured by Linux's /proc")
def test_hostile_pictures_take_no_memory(tmp_path: Path, bombs: Path, images_dir: Path) -> None:
    shutil.copytree(images_dir, tmp_path / "warm")
    shutil.copytree(bombs, tmp_path / "imgs")
    for name, make in ODD.items():
        (tmp_path / "imgs/class" / name).write_bytes(make())
    for way in ("full", "header", "pixels", "resize_short"):
        assert measured(tmp_path, on_error="skip", **WAYS[way]) < 130, way
    # The control: what the bound keeps away.
    shutil.rmtree(tmp_path / "imgs")
    (tmp_path / "imgs").mkdir()
    (tmp_path / "imgs/real.png").write_bytes(real_bomb())
    assert measured(tmp_path, max_pixels=400_000_000, size=8) > 1000


def test_pickles_and_frames_are_what_they_seem() -> None:
    """Controls of the tests above: zstd itself would take a frame at its word."""
    frame = numcodecs.zstd.compress(bytes(1 << 20), 3)
    assert len(frame) < 200
    with little_memory(4 << 20):
        assert len(numcodecs.zstd.decompress(frame)) == 1 << 20
