"""One suite for every container, way of storing and codec: right values, for us and for plain tools."""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import h5py
import hdf5plugin  # noqa: F401 (importing it is what lets h5py read zstd)
import numpy as np
import pytest
import tensorstore
import zarr
from PIL import Image
from torchvision.datasets import ImageFolder

import shardstore

SHARD_SAMPLES = 7  # 24 pictures: three whole shards and a short one
KINDS: dict[str, dict[str, Any]] = {
    "encoded": {"store": "encoded"},
    "fixed": {"store": "pixels", "size": 32},
    "ragged": {"store": "pixels"},
}
CONTAINERS = ("npy", "zarr", "hdf5")
PARTS = {"encoded": ("data", "start", "length", "crc32c"), "ragged": ("data", "start", "length", "crc32c", "shape")}
TOOLS = {"npy": ("numpy",), "zarr": ("zarr", "tensorstore"), "hdf5": ("h5py",)}


@dataclass(frozen=True)
class Case:
    """One way to store, and what must come out."""

    container: str
    kind: str
    codec: str

    def __str__(self) -> str:
        return f"{self.container}-{self.kind}-{self.codec}"

    @property
    def options(self) -> dict[str, Any]:
        return {**KINDS[self.kind], "codec": self.codec, "samples_per_shard": SHARD_SAMPLES}


CASES = [
    Case(container, kind, codec)
    for container in CONTAINERS
    for kind in KINDS
    for codec in ("none", "zstd")
    if codec == "none" or (kind != "encoded" and container != "npy")
]
ZARR_AND_TENSORSTORE = [(case, tool) for case in CASES for tool in TOOLS[case.container]]


@pytest.fixture(scope="module")
def stores(make_store: Callable[..., Path]) -> Callable[[Case], Path]:
    """Each case's store, made once; nobody changes them."""
    made: dict[Case, Path] = {}

    def get(case: Case) -> Path:
        if case not in made:
            made[case] = make_store(case.container, **case.options)
        return made[case]

    return get


@dataclass(frozen=True)
class Expected:
    """What ImageFolder and Pillow say of ``fixtures/images``."""

    keys: list[str]
    labels: list[int]
    classes: list[str]
    files: list[bytes]
    pixels: list[np.ndarray[Any, Any]]
    fixed: list[np.ndarray[Any, Any]]

    def values(self, kind: str) -> list[np.ndarray[Any, Any]]:
        """The arrays that a plain tool must find for ``image``."""
        return {
            "encoded": [np.frombuffer(f, np.uint8) for f in self.files],
            "fixed": self.fixed,
            "ragged": self.pixels,
        }[kind]

    def images(self, kind: str) -> list[np.ndarray[Any, Any]]:
        """The pictures that our own readers must give."""
        return self.fixed if kind == "fixed" else self.pixels


@pytest.fixture(scope="module")
def expected(images_dir: Path, fitted: Callable[..., np.ndarray[Any, Any]]) -> Expected:
    folder = ImageFolder(images_dir, is_valid_file=lambda path: True)  # by its own list it would leave out the GIF
    paths = [path for path, _ in folder.samples]
    pictures = [Image.open(path).convert("RGB") for path in paths]
    return Expected(
        [os.path.relpath(path, images_dir).replace(os.sep, "/") for path in paths],
        folder.targets,
        folder.classes,
        [Path(path).read_bytes() for path in paths],
        [np.asarray(picture) for picture in pictures],
        [fitted(picture, (32, 32)) for picture in pictures],
    )


def opened(path: Path, tool: str, names: list[str]) -> list[dict[str, np.ndarray[Any, Any]]]:
    """The arrays of these names as a plain tool reads them: for the whole store, or for each shard (numpy)."""
    if tool == "numpy":
        return [
            {n: np.load(path / _npy_name(n, shard), mmap_mode="r") for n in names}
            for shard in range(len(list((path / "label").iterdir())))
        ]
    if tool == "h5py":
        with h5py.File(path, "r") as file:
            return [{n: file[n][...] for n in names}]
    if tool == "zarr":
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            group = zarr.open_group(path, mode="r")
            return [{n: group[n][...] for n in names}]  # type: ignore[index]
    return [{n: _tensorstore(path / n).read().result() for n in names}]


def _npy_name(name: str, shard: int) -> str:
    field, _, part = name.partition("/")
    return f"{field}/{shard:05d}.{part}.npy" if part else f"{field}/{shard:05d}.npy"


def _tensorstore(path: Path) -> Any:
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": os.path.abspath(path)}}
    return tensorstore.open(spec, open=True, read=True).result()


def samples(arrays: dict[str, np.ndarray[Any, Any]], field: str, kind: str) -> Iterator[np.ndarray[Any, Any]]:
    """A field's values, cut out as the format's specification says, each checked against its own CRC-32C."""
    if kind == "fixed":
        yield from arrays[field]
        return
    columns = {part: arrays[f"{field}/{part}"] for part in PARTS[kind]}
    for i in range(len(columns["start"])):
        start, length = int(columns["start"][i]), int(columns["length"][i])
        value = columns["data"][start : start + length]
        assert google_crc32c.value(value.tobytes()) == columns["crc32c"][i]
        yield value.reshape(columns["shape"][i]) if kind == "ragged" else value


def assert_plain_tool_agrees(path: Path, tool: str, kind: str, expected: Expected) -> None:
    image = ["image"] if kind == "fixed" else [f"image/{part}" for part in PARTS[kind]]
    names = [*image, "label", *(f"key/{part}" for part in PARTS["encoded"])]
    shards = opened(path, tool, names)
    found = [value for arrays in shards for value in samples(arrays, "image", kind)]
    keys = [value.tobytes().decode() for arrays in shards for value in samples(arrays, "key", "encoded")]
    assert_same_arrays(found, expected.values(kind))
    assert [int(label) for arrays in shards for label in arrays["label"]] == expected.labels
    assert keys == expected.keys


def assert_same_arrays(found: list[Any], wanted: list[Any]) -> None:
    assert len(found) == len(wanted)
    for number, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert a.dtype == b.dtype, number
        np.testing.assert_array_equal(a, b, err_msg=f"sample {number}")


def assert_we_agree(path: Path | str, kind: str, expected: Expected) -> None:
    dataset = shardstore.open(path, image_type="numpy")
    assert_same_arrays([sample.image for sample in dataset], expected.images(kind))
    assert [sample.label for sample in dataset] == expected.labels
    assert [dataset.key(i) for i in range(len(dataset))] == expected.keys
    assert list(dataset.classes or ()) == expected.classes


@pytest.mark.parametrize("case", CASES, ids=str)
def test_samples_are_those_of_image_folder_and_pillow(
    case: Case, stores: Callable[[Case], Path], expected: Expected
) -> None:
    assert_we_agree(stores(case), case.kind, expected)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_stream_is_the_stored_order(case: Case, stores: Callable[[Case], Path], expected: Expected) -> None:
    stream = list(shardstore.ShardDataset(stores(case), fields=["image", "label", "key"]))
    assert_same_arrays([s.image.permute(1, 2, 0).numpy() for s in stream], expected.images(case.kind))
    assert [s.label for s in stream] == expected.labels
    assert [s.key for s in stream] == expected.keys


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shards_are_as_asked_and_the_last_is_short(
    case: Case, stores: Callable[[Case], Path], expected: Expected
) -> None:
    schema = shardstore.open(stores(case)).schema
    assert (schema.container, schema.samples, schema.shard_samples, schema.shards) == (case.container, 24, 7, 4)
    assert {a.codec for a in schema.arrays if a.name in ("image", "image.data")} == {case.codec}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_validate_finds_nothing_at_any_level(case: Case, stores: Callable[[Case], Path], images_dir: Path) -> None:
    path = stores(case)
    for level in ("structure", "checksum", "decode"):
        assert shardstore.validate(path, level=level, workers=1) == []
    assert shardstore.validate(path, level="source", source=images_dir, workers=1) == []


@pytest.mark.parametrize(("case", "tool"), ZARR_AND_TENSORSTORE, ids=str)
def test_plain_tools_give_the_same_arrays(
    case: Case, tool: str, stores: Callable[[Case], Path], expected: Expected
) -> None:
    assert_plain_tool_agrees(stores(case), tool, case.kind, expected)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_moved_store_reads_from_any_working_directory(
    case: Case,
    make_store: Callable[..., Path],
    expected: Expected,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = make_store(case.container, **case.options)
    target, elsewhere = tmp_path / "moved" / made.name, tmp_path / "elsewhere"
    target.parent.mkdir()
    elsewhere.mkdir()
    for path in made.parent.glob("out*"):
        shutil.move(path, target.parent / path.name)
    monkeypatch.chdir(elsewhere)
    for path in (target, Path("..", "moved", target.name)):
        assert_we_agree(path, case.kind, expected)
        for tool in TOOLS[case.container]:
            assert_plain_tool_agrees(path, tool, case.kind, expected)
        assert shardstore.validate(path, workers=1) == []


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_file_is_a_shard_or_listed(
    case: Case, stores: Callable[[Case], Path], tree: Callable[[Path], dict[str, Path]]
) -> None:
    path = stores(case)
    schema = shardstore.open(path).schema
    root = f"{path.name}.shards/{schema.fingerprint}" if case.container == "hdf5" else path.name
    listed = {path.name if name == ".h5" else f"{root}/{name}" for name in schema.files or {}}
    others = set(tree(path)) - listed
    assert listed <= set(tree(path))
    assert f"{root}/shardstore.json" in others
    assert len(others) == 1 + schema.shards * (1 if case.container == "hdf5" else len(schema.arrays))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_file_holds_a_time_or_a_path(
    case: Case, images_dir: Path, tmp_path: Path, tree: Callable[[Path], dict[str, Path]]
) -> None:
    target, start = tmp_path / "out", int(time.time())
    container: Any = case.container
    summary = shardstore.convert(images_dir, target, format=container, workers=1, **case.options)
    seconds = [second.to_bytes(4, "little") for second in range(start, int(time.time()) + 1)]
    paths = [os.fsencode(path) for path in (tmp_path, images_dir)]
    data = {name: file.read_bytes() for name, file in tree(target).items()}
    assert summary.nbytes == sum(map(len, data.values()))
    for name, content in data.items():
        assert not any(second in content for second in seconds), f"{name} holds the time"
        assert not any(path in content for path in paths), f"{name} holds a path"


def test_the_search_for_times_finds_them(tmp_path: Path) -> None:
    start = int(time.time())
    with h5py.File(tmp_path / "timed.h5", "w", libver="latest", track_order=True) as file:
        file.create_dataset("a", data=[1], track_times=True)
    seconds = range(start, int(time.time()) + 1)
    assert any(second.to_bytes(4, "little") in (tmp_path / "timed.h5").read_bytes() for second in seconds)


@pytest.mark.parametrize("kind", KINDS)
def test_the_fingerprint_depends_on_neither_container_nor_codec(kind: str, stores: Callable[[Case], Path]) -> None:
    cases = [case for case in CASES if case.kind == kind]
    prints = {str(case): shardstore.open(stores(case)).schema.fingerprint for case in cases}
    assert len(prints) >= 3
    assert len(set(prints.values())) == 1, prints


def test_fingerprints_of_other_content_differ(
    stores: Callable[[Case], Path], make_store: Callable[..., Path], make_images: Callable[..., Path]
) -> None:
    paths = [stores(Case("npy", kind, "none")) for kind in KINDS]
    paths.append(make_store("npy", store="encoded", samples_per_shard=8))
    paths += [make_store("npy", source=make_images(4, seed=seed)) for seed in (1, 2)]
    assert len({shardstore.open(path).schema.fingerprint for path in paths}) == 6


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_zarr_shard_objects_are_what_zarr_python_writes(
    codec: str, make_store: Callable[..., Path], expected: Expected, tmp_path: Path
) -> None:
    # 10 samples a shard in chunks of 2: a last shard of 4 samples has 3 inner chunks beyond the array's end.
    path = make_store("zarr", store="pixels", size=32, codec=codec, samples_per_shard=10, chunk_size=2 * 32 * 32 * 3)
    theirs = zarr.create_array(
        tmp_path / "theirs.zarr",
        shape=(24, 32, 32, 3),
        dtype="uint8",
        chunks=(2, 32, 32, 3),
        shards=(10, 32, 32, 3),
        compressors=[zarr.codecs.ZstdCodec(level=3)] if codec == "zstd" else None,
        fill_value=0,
        zarr_format=3,
    )
    theirs[...] = np.stack(expected.fixed)
    for shard in range(3):
        name = f"c/{shard}/0/0/0"
        assert (path / "image" / name).read_bytes() == (tmp_path / "theirs.zarr" / name).read_bytes(), name


def test_black_pictures_are_written_and_not_left_out(make_store: Callable[..., Path], tmp_path: Path) -> None:
    # To Zarr a missing object means fill values: black pictures must not look like a lost shard.
    folder = tmp_path / "images" / "black"
    folder.mkdir(parents=True)
    for i in range(6):
        Image.new("RGB", (16, 16)).save(folder / f"{i}.png")
    path = make_store("zarr", source=tmp_path / "images", store="pixels", samples_per_shard=4)
    assert sorted(p.name for p in (path / "image" / "c").iterdir()) == ["0", "1"]
    assert (path / "image/c/0/0/0/0").stat().st_size > 4 * 16 * 16 * 3
    assert not zarr.open_group(path, mode="r")["image"][...].any()  # type: ignore[index, union-attr]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", CONTAINERS)
@pytest.mark.parametrize("target", CONTAINERS)
def test_a_store_becomes_any_container_with_the_same_bytes(
    kind: str,
    source: str,
    target: str,
    stores: Callable[[Case], Path],
    make_store: Callable[..., Path],
    tree: Callable[[Path], dict[str, Path]],
    expected: Expected,
) -> None:
    direct = stores(Case(target, kind, "none"))
    copy = make_store(target, source=stores(Case(source, kind, "none")), samples_per_shard=SHARD_SAMPLES)
    assert shardstore.open(copy).schema.fingerprint == shardstore.open(direct).schema.fingerprint
    ours, theirs = tree(copy), tree(direct)
    assert list(ours) == list(theirs)
    for name in ours:
        # The description tells how each was made, compared below.
        assert name.endswith("shardstore.json") or ours[name].read_bytes() == theirs[name].read_bytes(), name
    assert_we_agree(copy, kind, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_remembers_how_its_content_was_made(
    kind: str, stores: Callable[[Case], Path], make_store: Callable[..., Path], images_dir: Path
) -> None:
    direct = stores(Case("npy", kind, "none"))
    copy = make_store("npy", source=direct, samples_per_shard=SHARD_SAMPLES)
    assert shardstore.open(copy).schema == shardstore.open(direct).schema
    assert shardstore.validate(copy, level="source", source=images_dir, workers=1) == []


@pytest.mark.parametrize("kind", ["fixed", "ragged"])
@pytest.mark.parametrize(("source", "target"), [("zarr", "hdf5"), ("hdf5", "zarr")])
def test_a_compressed_store_becomes_the_other_container_and_plain(
    kind: str, source: str, target: str, stores: Callable[[Case], Path], make_store: Callable[..., Path]
) -> None:
    packed = stores(Case(source, kind, "zstd"))
    for codec in ("zstd", "none"):
        copy = make_store(target, source=packed, codec=codec, samples_per_shard=SHARD_SAMPLES)
        direct = stores(Case(target, kind, codec))
        assert shardstore.open(copy).schema.fingerprint == shardstore.open(direct).schema.fingerprint
        assert shardstore.validate(copy, level="decode", workers=1) == []


@pytest.mark.parametrize("case", [c for c in CASES if c.codec == "none" or c.container == "hdf5"], ids=str)
def test_conversion_is_reproducible_with_any_number_of_workers(
    case: Case, make_store: Callable[..., Path], tree: Callable[[Path], dict[str, Path]]
) -> None:
    trees = [tree(make_store(case.container, workers=workers, **case.options)) for workers in (1, 1, 2)]
    for other in trees[1:]:
        assert list(other) == list(trees[0])
        for name in other:
            assert other[name].read_bytes() == trees[0][name].read_bytes(), name
