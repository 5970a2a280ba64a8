"""``validate``: nothing is said of good stores, and each kind of fault is found at the level that promises it."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from PIL import Image

import shardstore
from shardstore import Problem, validate

Make = Callable[..., Path]

LEVELS = ("structure", "checksum", "decode", "source")
STORES: dict[str, tuple[str, dict[str, Any]]] = {
    "encoded-npy": ("npy", {}),
    "encoded-zarr": ("zarr", {"samples_per_shard": 7}),
    "encoded-hdf5": ("hdf5", {"samples_per_shard": 7, "shuffle": True}),
    "resized-zarr": ("zarr", {"resize_short": 30, "samples_per_shard": 7}),
    "resized-hdf5": ("hdf5", {"resize_short": 45, "samples_per_shard": 7, "shuffle": True}),
    "pixels-npy": ("npy", {"size": (24, 20), "samples_per_shard": 7, "fit": "pad"}),
    "pixels-zarr": ("zarr", {"size": 16, "samples_per_shard": 7, "fit": "stretch"}),
    "pixels-hdf5": ("hdf5", {"size": 16, "samples_per_shard": 7, "shuffle": True, "seed": 5}),
    "ragged-npy": ("npy", {"store": "pixels", "samples_per_shard": 7}),
    "ragged-hdf5": ("hdf5", {"store": "pixels"}),
    "zstd-zarr": ("zarr", {"size": 16, "codec": "zstd", "samples_per_shard": 8, "chunk_size": 2000}),
    "ragged-zstd-hdf5": ("hdf5", {"store": "pixels", "codec": "zstd", "samples_per_shard": 7}),
}


@pytest.fixture
def source(tmp_path: Path, images_dir: Path) -> Path:
    """A copy of fixtures/images that a test may change."""
    return Path(shutil.copytree(images_dir, tmp_path / "imgs"))


@pytest.fixture
def broken(source: Path, bad_dir: Path) -> Path:
    """The same with the 7 bad files, in a class of their own and beside good ones."""
    shutil.copytree(bad_dir, source / "bad")
    for name in ("empty.jpg", "cut.png"):
        shutil.move(source / "bad" / name, source / "cat/kittens" / f"a {name}")
    return source


def flip(path: Path, position: int = -1) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def folder_of(store: Path) -> Path:
    """Where the shards and the index lie."""
    if store.is_dir():
        return store
    (found,) = store.with_name(f"{store.name}.shards").iterdir()
    return found


def check(store: Path, level: str = "checksum", **options: Any) -> list[Problem]:
    """All problems, after making sure that they do not depend on the number of workers and can be printed."""
    problems = validate(store, level=level, workers=1, **options)  # type: ignore[arg-type]
    assert validate(store, level=level, workers=2, **options) == problems  # type: ignore[arg-type]
    for problem in problems:
        assert problem.what in str(problem)
        assert json.loads(json.dumps(problem.to_dict())) == problem.to_dict()
    return problems


# -- good stores ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=STORES)
def good(request: pytest.FixtureRequest, make_store: Make) -> Path:
    container, options = STORES[request.param]
    return make_store(container, **options)


@pytest.mark.parametrize("level", LEVELS)
def test_a_good_store_has_no_problems(good: Path, images_dir: Path, level: str) -> None:
    options = {"source": images_dir} if level == "source" else {}
    assert check(good, level, **options) == []


def test_the_level_is_checksum_unless_said_otherwise(make_store: Make) -> None:
    store = make_store("npy")
    assert validate(store) == validate(str(store)) == []
    flip(store / "image/00000.data.npy")
    assert validate(store) == validate(store, level="checksum") != []


@pytest.mark.parametrize("container", ["npy", "zarr", "hdf5"])
def test_a_store_of_a_sequence_has_no_problems(tmp_path: Path, container: str) -> None:
    random = np.random.default_rng(0)
    samples = [{"image": random.integers(0, 256, (4, 5, 3), np.uint8), "x": random.random(i)} for i in range(9)]
    shardstore.convert(samples, tmp_path / "out", format=container, samples_per_shard=4)  # type: ignore[arg-type]
    assert check(tmp_path / "out", "decode") == []


@pytest.mark.parametrize("workers", [1, 2, None])
def test_progress_reaches_the_end(make_store: Make, images_dir: Path, workers: int | None) -> None:
    store = make_store("zarr", samples_per_shard=5)
    seen: list[tuple[int, int]] = []
    assert validate(store, workers=workers, progress=lambda done, total: seen.append((done, total))) == []
    assert seen[-1] == (24, 24)
    assert seen == sorted(set(seen))
    assert len(seen) == 5
    seen.clear()
    assert validate(images_dir, workers=workers, progress=lambda done, total: seen.append((done, total))) == []
    assert seen[-1] == (24, 24)


# -- what cannot be checked -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["", "deep", "Checksum", None, 1])
def test_an_unknown_level_is_refused(make_store: Make, images_dir: Path, level: Any) -> None:
    for path in (images_dir, images_dir / "missing"):
        with pytest.raises(shardstore.OptionError, match="structure, checksum, decode, source"):
            validate(path, level=level)


@pytest.mark.parametrize("level", ["structure", "checksum", "decode"])
def test_a_source_belongs_to_the_source_level(make_store: Make, images_dir: Path, level: Any) -> None:
    store = make_store("npy")
    with pytest.raises(shardstore.OptionError, match="source"):
        validate(store, level=level, source=images_dir)
    with pytest.raises(shardstore.OptionError, match="source"):
        validate(store, level="source")


def test_what_is_neither_store_nor_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file.h5").write_bytes(b"")
    for name in ("missing", "file.h5"):
        with pytest.raises(shardstore.NoStoreError, match=name):
            validate(tmp_path / name)


def test_a_folder_without_pictures_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/a.txt").write_text("text")
    with pytest.raises(shardstore.SourceError, match="no pictures"):
        validate(tmp_path)


def test_a_source_that_cannot_be_compared_is_refused(tmp_path: Path, make_store: Make, images_dir: Path) -> None:
    store = make_store("npy")
    (tmp_path / "empty").mkdir()
    with pytest.raises(shardstore.SourceError, match="empty"):
        validate(store, level="source", source=tmp_path / "empty", workers=1)
    with pytest.raises((shardstore.SourceError, FileNotFoundError), match="missing"):
        validate(store, level="source", source=tmp_path / "missing", workers=1)
    shardstore.convert([(np.zeros((2, 2, 3), np.uint8), 0)], tmp_path / "keyless")
    with pytest.raises(shardstore.OptionError, match="keys"):
        validate(tmp_path / "keyless", level="source", source=images_dir, workers=1)


# -- compared with the source -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["encoded-zarr", "encoded-hdf5", "pixels-npy", "ragged-hdf5"])
def test_files_that_went_came_or_changed(make_store: Make, source: Path, name: str) -> None:
    container, options = STORES[name]
    store = make_store(container, source=source, **options)
    assert check(store, "source", source=source) == []
    (source / "dog/rgb.png").unlink()
    shutil.copy(source / "cat/grey.jpg", source / "fish/new one.jpg")
    with Image.open(source / "cat/baseline.jpg") as image:
        changed = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    changed.save(source / "cat/baseline.jpg")
    found = {problem.key: problem for problem in check(store, "source", source=source)}
    assert found.keys() == {"dog/rgb.png", "fish/new one.jpg", "cat/baseline.jpg"}
    assert "gone" in found["dog/rgb.png"].what
    assert "not in the store" in found["fish/new one.jpg"].what
    assert "differs" in found["cat/baseline.jpg"].what
    assert found["cat/baseline.jpg"].field == "image"
    dataset = shardstore.open(store)
    for key in ("dog/rgb.png", "cat/baseline.jpg"):
        assert found[key].sample == dataset.find(key)
    assert all(problem.hint for problem in found.values())
    # Less deep levels have no opinion about the source.
    assert check(store, "decode") == []


def test_a_changed_byte_that_no_pixel_shows_differs_only_where_bytes_are_stored(make_store: Make, source: Path) -> None:
    encoded = make_store("npy", source=source)
    pixels = make_store("npy", source=source, size=16)
    with open(source / "cat/grey.jpg", "ab") as f:
        f.write(b"\0")
    assert [problem.key for problem in check(encoded, "source", source=source)] == ["cat/grey.jpg"]
    assert check(pixels, "source", source=source) == []


def test_a_source_file_that_became_bad(make_store: Make, source: Path) -> None:
    store = make_store("zarr", source=source, size=16)
    (source / "dog/grey.png").write_bytes(b"text")
    (problem,) = check(store, "source", source=source)
    assert problem.key == "dog/grey.png"


def test_a_class_that_shifts_the_labels(make_store: Make, source: Path) -> None:
    store = make_store("npy", source=source)
    (source / "ant").mkdir()
    shutil.copy(source / "cat/grey.jpg", source / "ant/a.jpg")
    problems = check(store, "source", source=source)
    shifted = [p.key for p in problems if p.field == "label"]
    assert shifted == [sample.key for sample in shardstore.open(store, fields=["key"])]
    assert [p.key for p in problems if p.field != "label"] == ["ant/a.jpg"]


def test_a_file_that_moved_to_another_class(make_store: Make, source: Path) -> None:
    store = make_store("hdf5", source=source)
    shutil.move(source / "cat/grey.jpg", source / "dog/grey.jpg")
    assert sorted(str(p.key) for p in check(store, "source", source=source)) == ["cat/grey.jpg", "dog/grey.jpg"]


@pytest.mark.parametrize("container", ["npy", "zarr", "hdf5"])
@pytest.mark.parametrize("options", [{}, {"size": 16}])
def test_skipped_files_are_not_missed(make_store: Make, broken: Path, container: str, options: dict[str, Any]) -> None:
    store = make_store(container, source=broken, on_error="skip", samples_per_shard=7, **options)
    assert (folder_of(store) / "rejects.jsonl").is_file()
    assert len(shardstore.open(store)) == 24
    assert check(store, "source", source=broken) == []
    # A bad file that was not there then is no reject.
    (broken / "cat/later.jpg").write_bytes(b"")
    assert [p.key for p in check(store, "source", source=broken)] == ["cat/later.jpg"]


def test_names_that_are_no_utf8_are_compared(make_store: Make, source: Path, images_dir: Path) -> None:
    for name in (b"caf\xe9.jpg", b"\xed\xa0\x80.jpg"):
        shutil.copy(images_dir / "cat/grey.jpg", source / "cat" / os.fsdecode(name))
    store = make_store("zarr", source=source)
    assert check(store, "source", source=source) == []
    (source / "cat" / os.fsdecode(b"caf\xe9.jpg")).unlink()
    (problem,) = check(store, "source", source=source)
    assert problem.key == f"cat/{os.fsdecode(bytes([99, 97, 102, 0xE9]))}.jpg"
    assert "caf\\xe9" in str(problem)


# -- stored wrongly ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("container", ["npy", "zarr", "hdf5"])
def test_a_picture_that_was_stored_broken_is_found_by_decoding(
    make_store: Make, source: Path, bad_dir: Path, container: str
) -> None:
    shutil.copy(bad_dir / "garbled.jpg", source / "dog/garbled.jpg")
    store = make_store(container, source=source, check="header", samples_per_shard=6)
    assert len(shardstore.open(store)) == 25
    assert check(store, "checksum") == []
    (problem,) = check(store, "decode")
    sample = shardstore.open(store).find("dog/garbled.jpg")
    assert (problem.key, problem.field, problem.sample) == ("dog/garbled.jpg", "image", sample)
    assert problem.shard == sample // 6
    assert problem.path is not None
    assert os.path.isfile(problem.path)
    assert "--check header" in (problem.hint or "")
    assert [p.key for p in check(store, "source", source=source)] == ["dog/garbled.jpg"]


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("container", ["npy", "zarr", "hdf5"])
@pytest.mark.parametrize("options", [{}, {"size": 16}])
def test_damage_of_several_shards_comes_in_their_order(
    make_store: Make, container: str, options: dict[str, Any]
) -> None:
    store = make_store(container, samples_per_shard=3, **options)
    folder = folder_of(store)
    names = {
        "npy": "image/{:05d}.npy" if options else "image/{:05d}.data.npy",
        "zarr": "image/c/{}/0/0/0" if options else "image/data/c/{}",
        "hdf5": "{:05d}.h5",
    }
    for shard in (6, 1, 4):
        path = folder / names[container].format(shard)
        flip(path, path.stat().st_size // 2)
    (folder / names[container].format(2)).unlink()
    cut = folder / names[container].format(5)
    os.truncate(cut, cut.stat().st_size - 1)
    structure = check(store, "structure")
    assert {problem.shard for problem in structure} == {2, 5}
    problems = check(store)
    shards = [problem.shard for problem in problems]
    assert shards == sorted(shards, key=lambda shard: -1 if shard is None else shard)
    assert set(shards) == {1, 2, 4, 5, 6}
    assert all(problem.path and problem.hint for problem in problems)


def test_a_damaged_chunk_is_named_with_its_samples(make_store: Make) -> None:
    store = make_store("npy", size=16, samples_per_shard=12, chunk_size=3 * 16 * 16 * 3)
    flip(store / "image/00001.npy")  # the last byte of the last of four chunks of three
    problems = check(store)
    (chunk,) = [problem for problem in problems if problem.chunk is not None]
    assert (chunk.shard, chunk.chunk, chunk.field) == (1, 3, "image")
    assert "21 to 23" in (chunk.hint or "")


@pytest.mark.parametrize(
    "name", ["index/shards.npy", "index/image.data.chunks.npy", "index/label.chunks.npy", "shardstore.json"]
)
@pytest.mark.parametrize("container", ["npy", "zarr", "hdf5"])
def test_a_damaged_index_is_found(make_store: Make, container: str, name: str) -> None:
    store = make_store(container)
    flip(folder_of(store) / name, -10)
    problems = check(store)
    assert problems
    assert any(os.path.basename(name) in str(p.path) or "index" in str(p.path) for p in problems)


def test_a_damaged_list_of_rejects_is_found(make_store: Make, broken: Path) -> None:
    store = make_store("npy", source=broken, on_error="skip")
    flip(store / "rejects.jsonl", 20)
    (problem,) = check(store)
    assert problem.path == str(store / "rejects.jsonl")


# -- metadata of the containers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "consolidated"), [("zarr.json", True), ("label/zarr.json", False)])
def test_zarr_metadata_of_other_content(make_store: Make, name: str, consolidated: bool) -> None:
    store = make_store("zarr")
    file = store / name
    text = file.read_text()
    file.write_text(re.sub(r'("shape": \[\s*)24', r"\g<1>12", text))
    assert len(file.read_text()) == len(text)
    assert zarr.open_group(store, mode="r", use_consolidated=consolidated)["label"].shape == (12,)
    for level in ("structure", "checksum"):
        assert [p.path for p in check(store, level)] == [str(file)]


@pytest.mark.parametrize("name", ["zarr.json", "image/zarr.json", "image/data/zarr.json"])
def test_zarr_metadata_that_is_gone(make_store: Make, name: str) -> None:
    store = make_store("zarr")
    (store / name).unlink()
    for level in ("structure", "checksum"):
        assert [p.path for p in check(store, level)] == [str(store / name)]


def test_a_main_hdf5_file_that_shows_something_else(make_store: Make) -> None:
    store = make_store("hdf5", size=16)
    before = store.stat().st_size
    with h5py.File(store, "r+") as file:
        del file["image"]
        file["image"] = np.zeros((24, 16, 16, 3), np.uint8)
    assert store.stat().st_size != before
    for level in ("structure", "checksum"):
        assert [p.path for p in check(store, level)] == [str(store)]


def test_the_main_hdf5_file_of_another_store(make_store: Make) -> None:
    store, other = (make_store("hdf5", size=16, samples_per_shard=8, shuffle=True, seed=seed) for seed in (1, 2))
    assert store.name == other.name
    assert store.stat().st_size == other.stat().st_size
    shutil.copy(other, store)
    with h5py.File(store) as file:  # it finds no shards, and says nothing
        assert not file["image"][:].any()
    assert [p.path for p in check(store)] == [str(store)]


def test_npy_headers_that_say_something_else(make_store: Make) -> None:
    store = make_store("npy", size=(16, 8))
    file = store / "image/00000.npy"
    data = file.read_bytes()
    file.write_bytes(data.replace(b"(24, 16, 8, 3)", b"(24, 8, 16, 3)"))
    assert np.load(file).shape == (24, 8, 16, 3)
    for level in ("structure", "checksum"):
        problems = check(store, level)
        assert problems
        assert {p.shard for p in problems} == {0}


def test_a_shard_in_the_place_of_another(make_store: Make) -> None:
    store = make_store("npy", size=16, samples_per_shard=8)
    first, second = store / "image/00000.npy", store / "image/00001.npy"
    a, b = first.read_bytes(), second.read_bytes()
    assert len(a) == len(b)
    first.write_bytes(b)
    second.write_bytes(a)
    assert check(store, "structure") == []
    assert {p.shard for p in check(store)} == {0, 1}


# -- folders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS[:3])
def test_a_folder_lists_exactly_its_bad_files(broken: Path, bad_dir: Path, level: str) -> None:
    problems = check(broken, level)
    expected = sorted(
        [f"bad/{n}" for n in os.listdir(bad_dir) if n not in ("empty.jpg", "cut.png")]
        + ["cat/kittens/a empty.jpg", "cat/kittens/a cut.png"]
    )
    assert [problem.key for problem in problems] == expected
    assert [problem.path for problem in problems] == [f"{broken}/{key}" for key in expected]
    assert all(problem.what and problem.hint for problem in problems)


def test_a_folder_without_classes(bad_dir: Path, images_dir: Path) -> None:
    assert check(images_dir / "dog") == []
    assert sorted(str(p.key) for p in check(bad_dir)) == sorted(os.listdir(bad_dir))


def test_a_folder_tells_what_convert_would(broken: Path, tmp_path: Path) -> None:
    with pytest.raises(shardstore.SourceError) as caught:
        shardstore.convert(broken, tmp_path / "out", workers=1)
    told = {(problem.key, problem.what) for problem in caught.value.problems}
    assert {(problem.key, problem.what) for problem in check(broken)} == told


def test_many_files_come_in_the_order_of_the_folder(tmp_path: Path, images_dir: Path) -> None:
    picture = (images_dir / "dog/grey.png").read_bytes()
    bad = set(range(3, 600, 100))
    (tmp_path / "a").mkdir()
    for i in range(600):  # more than one task's worth
        (tmp_path / f"a/{i:04d}.png").write_bytes(b"" if i in bad else picture)
    assert [problem.key for problem in check(tmp_path)] == [f"a/{i:04d}.png" for i in sorted(bad)]
