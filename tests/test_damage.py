"""Damage of every kind, in every file: ``validate`` finds it, and readers refuse instead of giving wrong values."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardstore
from shardstore.store.index import load

SHARD_SAMPLES = 4
SAMPLES = 11  # two whole shards and a short one
FLIPS = 200


@dataclass(frozen=True)
class Case:
    """One way to store."""

    container: str
    kind: str
    codec: str = "none"

    def __str__(self) -> str:
        return f"{self.container}-{self.kind}-{self.codec}"


CASES = [
    *(Case(container, kind) for container in ("npy", "zarr", "hdf5") for kind in ("encoded", "pixels")),
    *(Case(container, "pixels", "zstd") for container in ("zarr", "hdf5")),
    Case("npy", "ragged"),
    Case("zarr", "ragged", "zstd"),
]
ENCODED = [case for case in CASES if case.kind == "encoded"]
PACKED = [case for case in CASES if case.codec == "zstd"]


@pytest.fixture(scope="module")
def originals(make_store: Callable[..., Path], make_images: Callable[..., Path]) -> Callable[[Case], Path]:
    """Each case's store, and the source that it was made from beside it."""
    made: dict[Case, Path] = {}
    # Random pictures of 3,840 bytes: larger than what the reader cuts from cached chunks.
    one_size = make_images(SAMPLES, sizes=[(40, 32)])
    two_sizes = make_images(SAMPLES, sizes=[(40, 32), (32, 44)])

    def get(case: Case) -> Path:
        if case not in made:
            options: dict[str, Any] = {"store": "encoded" if case.kind == "encoded" else "pixels", "codec": case.codec}
            source = two_sizes if case.kind == "ragged" else one_size
            # Two pictures a chunk.
            options |= {"samples_per_shard": SHARD_SAMPLES, "chunk_size": 9000}
            made[case] = make_store(case.container, source=source, **options)
        return made[case]

    return get


@pytest.fixture
def copied(tmp_path: Path, originals: Callable[[Case], Path]) -> Callable[[Case], Path]:
    """A case's store to be damaged."""

    def make(case: Case) -> Path:
        original = originals(case)
        for path in original.parent.iterdir():
            (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / path.name)
        return tmp_path / original.name

    return make


def flip(path: Path, where: int, mask: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(where)
        (byte,) = file.read(1)
        file.seek(where)
        file.write(bytes([byte ^ mask]))


@contextmanager
def kept(path: Path) -> Iterator[bytes]:
    """Gives a file its content back."""
    content = path.read_bytes()
    try:
        yield content
    finally:
        path.write_bytes(content)


def shard_of(path: Path, shard: int, array: str) -> Path:
    return Path(load(path).shard_path(shard, array))


def read_all(path: Path, case: Case) -> None:
    """Every sample alone, and all whole chunks."""
    for sample in shardstore.open(path, fields=["image", "label", "key"]):
        assert sample.key
    if case.kind != "ragged":
        for batch in shardstore.ShardDataset(path, fields=["image", "label", "key"], batch_size=SHARD_SAMPLES):
            assert len(batch.image)


def assert_tells_place(error: shardstore.DamagedStoreError, shard: int, chunk: int, key: str, file: Path) -> None:
    """An error must say where the damage is and what to do next."""
    problem = error.problem
    assert (problem.path, problem.shard, problem.chunk, problem.key) == (str(file), shard, chunk, key)
    for part in (str(file), f"shard {shard}", f"chunk {chunk}", key, "shardstore validate"):
        assert part in str(error)


# -- one byte ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_validate_finds_one_changed_byte_in_any_file(
    case: Case, copied: Callable[[Case], Path], tree: Callable[[Path], dict[str, Path]]
) -> None:
    path = copied(case)
    files = list(tree(path).values())
    sizes = [file.stat().st_size for file in files]
    random = np.random.default_rng(CASES.index(case))
    # One place in each file, however small, and all others anywhere.
    places = [(file, int(random.integers(size))) for file, size in zip(files, sizes, strict=True)]
    ends = np.cumsum(sizes)
    for where in random.integers(ends[-1], size=FLIPS - len(places)):
        number = int(np.searchsorted(ends, where, side="right"))
        places.append((files[number], int(where - ends[number] + sizes[number])))
    assert len(places) == FLIPS
    assert shardstore.validate(path, level="checksum", workers=1) == []
    for file, where in places:
        mask = int(random.integers(1, 256))
        flip(file, where, mask)
        problems = shardstore.validate(path, level="checksum", workers=1)
        assert str(file) in {problem.path for problem in problems}, (file, where, mask)
        assert all(problem.hint for problem in problems)
        flip(file, where, mask)
    assert shardstore.validate(path, level="checksum", workers=1) == []


@pytest.mark.parametrize("case", ENCODED, ids=str)
def test_a_damaged_encoded_sample_is_refused_and_no_other(
    case: Case, copied: Callable[[Case], Path], images_bytes: Callable[[Path, str], bytes]
) -> None:
    path = copied(case)
    keys = [shardstore.open(path).key(i) or "" for i in range(SAMPLES)]
    for number in (0, 6, 10):
        shard = number // SHARD_SAMPLES
        file, picture = shard_of(path, shard, "image.data"), images_bytes(path, keys[number])
        with kept(file) as content:
            assert content.count(picture) == 1
            flip(file, content.find(picture) + len(picture) // 2)
            dataset = shardstore.open(path)
            for item in (number, keys[number], number - SAMPLES):
                with pytest.raises(shardstore.DamagedStoreError) as caught:
                    dataset[item]
                assert_tells_place(caught.value, shard, 0, keys[number], file)
                assert caught.value.problem.sample == number
            with pytest.raises(shardstore.DamagedStoreError, match=keys[number]):
                dataset.__getitems__([number])
            for other in range(SAMPLES):
                assert other == number or dataset[other].label in (0, 1, 2)
            for options in ({}, {"batch_size": 3}, {"shuffle": True}):
                with pytest.raises(shardstore.DamagedStoreError, match=keys[number]):
                    list(shardstore.ShardDataset(path, **options))
            assert (shard, 0, "image") in {(p.shard, p.chunk, p.field) for p in shardstore.validate(path, workers=1)}


@pytest.fixture(scope="module")
def images_bytes(make_images: Callable[..., Path]) -> Callable[[Path, str], bytes]:
    """The file that an encoded sample was made from, whatever happened to the store."""
    source = make_images(SAMPLES, sizes=[(40, 32)])
    return lambda path, key: (source / key).read_bytes()


@pytest.mark.parametrize("case", PACKED, ids=str)
def test_a_damaged_compressed_chunk_is_refused_and_no_other(case: Case, copied: Callable[[Case], Path]) -> None:
    path = copied(case)
    array = "image" if case.kind == "pixels" else "image.data"
    table, good = load(path).table(array), shardstore.open(path)
    keys = [good.key(i) or "" for i in range(SAMPLES)]
    assert len(table) > load(path).schema.shards
    for row in range(len(table)):
        shard, first, count = (int(table[row][name]) for name in ("shard", "first", "count"))
        file = shard_of(path, shard, array)
        with kept(file):
            flip(file, int(table[row]["offset"]) + int(table[row]["nbytes"]) // 2)
            dataset = shardstore.open(path)
            for number in range(SAMPLES):
                if not first <= number < first + count:
                    assert dataset[number].image.equal(good[number].image)
                    continue
                with pytest.raises(shardstore.DamagedStoreError) as caught:
                    dataset[number]
                chunk = row - int(np.searchsorted(table["shard"], shard))
                assert_tells_place(caught.value, shard, chunk, keys[first], file)
            with pytest.raises(shardstore.DamagedStoreError):
                list(shardstore.ShardDataset(path))
            assert {p.chunk for p in shardstore.validate(path, workers=1)} >= {chunk}


@pytest.mark.parametrize("container", ["npy", "zarr", "hdf5"])
def test_damaged_pixels_are_refused_where_whole_chunks_are_read(container: str, copied: Callable[[Case], Path]) -> None:
    path = copied(Case(container, "pixels"))
    table = load(path).table("image")
    keys = [shardstore.open(path).key(i) or "" for i in range(SAMPLES)]
    for row in range(len(table)):
        shard, first, count = (int(table[row][name]) for name in ("shard", "first", "count"))
        file = shard_of(path, shard, "image")
        with kept(file):
            flip(file, int(table[row]["offset"]) + int(table[row]["nbytes"]) - 1)
            for options in ({}, {"batch_size": SHARD_SAMPLES}):
                with pytest.raises(shardstore.DamagedStoreError) as caught:
                    list(shardstore.ShardDataset(path, **options))
                chunk = row - int(np.searchsorted(table["shard"], shard))
                assert_tells_place(caught.value, shard, chunk, keys[first], file)
            with pytest.raises(shardstore.DamagedStoreError):
                shardstore.open(path).__getitems__(list(range(first, first + count)))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("array", ["label", "key.data", "key.start", "key.length", "key.crc32c"])
def test_damaged_labels_and_keys_are_refused(array: str, case: Case, copied: Callable[[Case], Path]) -> None:
    path = copied(case)
    index = load(path)
    for shard in range(index.schema.shards):
        row = index.table(array)[index.rows(shard, array)][0]
        file = shard_of(path, shard, array)
        with kept(file):
            flip(file, int(row["offset"]) + int(row["nbytes"]) - 1)
            field = array.partition(".")[0]
            with pytest.raises(shardstore.DamagedStoreError) as caught:
                shardstore.open(path, fields=[field])[shard * SHARD_SAMPLES]
            assert (caught.value.problem.field, caught.value.problem.shard) == (field, shard)
            # Pictures do not depend on it, and an error of theirs must not either.
            assert shardstore.open(path, fields=["image"])[shard * SHARD_SAMPLES].image.numel()


# -- whole files ------------------------------------------------------------------------------------------------------


def shard_files(path: Path) -> list[tuple[int, list[Path]]]:
    """Number and files of each shard."""
    index = load(path)
    return [
        (shard, sorted({shard_of(path, shard, array) for array in index.schema.array_names}))
        for shard in range(index.schema.shards)
    ]


def assert_found(path: Path, case: Case, file: Path, shard: int, level: str) -> None:
    problems = shardstore.validate(path, level=level, workers=1)
    assert str(file) in {problem.path for problem in problems}
    assert shard in {problem.shard for problem in problems}
    assert all(problem.hint for problem in problems)
    with pytest.raises(shardstore.DamagedStoreError) as caught:
        read_all(path, case)
    assert caught.value.problem.path == str(file)
    assert "shardstore validate" in str(caught.value)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_missing_shard_files_are_found(case: Case, copied: Callable[[Case], Path]) -> None:
    path = copied(case)
    read_all(path, case)
    for shard, files in shard_files(path):
        for file in files:
            away = file.rename(file.with_name("away"))
            assert_found(path, case, file, shard, "structure")
            away.rename(file)
    assert shardstore.validate(path, level="decode", workers=1) == []


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cut_and_empty_shard_files_are_found(case: Case, copied: Callable[[Case], Path]) -> None:
    path = copied(case)
    for shard, files in shard_files(path):
        for file in files:
            with kept(file) as content:
                for size in (0, 1):
                    file.write_bytes(content[:size])
                    assert_found(path, case, file, shard, "structure")
                for other in (content[: len(content) // 2], content[:-1], content + b"\0"):
                    file.write_bytes(other)
                    assert str(file) in {p.path for p in shardstore.validate(path, level="structure", workers=1)}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_swapped_shard_files_are_found(case: Case, copied: Callable[[Case], Path]) -> None:
    path = copied(case)
    (_, first), (_, second), _ = shard_files(path)
    for a, b in zip(first, second, strict=True):
        with kept(a) as content_a, kept(b) as content_b:
            if content_a == content_b:
                continue
            a.write_bytes(content_b)
            b.write_bytes(content_a)
            problems = shardstore.validate(path, level="checksum", workers=1)
            assert {str(a), str(b)} <= {problem.path for problem in problems}
            with pytest.raises(shardstore.DamagedStoreError):
                read_all(path, case)
    assert shardstore.validate(path, level="decode", workers=1) == []


@pytest.mark.parametrize("case", CASES, ids=str)
def test_missing_cut_and_empty_files_of_the_index_are_found(
    case: Case, copied: Callable[[Case], Path], tree: Callable[[Path], dict[str, Path]]
) -> None:
    path = copied(case)
    shards = {file for _, files in shard_files(path) for file in files}
    others = [file for file in tree(path).values() if file not in shards and file.name != "shardstore.json"]
    assert len(others) >= 4
    for file in others:
        with kept(file) as content:
            for new in (b"", content[: len(content) // 2], content + b"\0", None):
                if new is None:
                    file.unlink()
                else:
                    file.write_bytes(new)
                with pytest.raises((shardstore.DamagedStoreError, shardstore.NoStoreError)) as caught:
                    shardstore.open(path)
                assert str(file) in str(caught.value)
                if isinstance(caught.value, shardstore.DamagedStoreError):
                    assert str(file) in {problem.path for problem in shardstore.validate(path, workers=1)}
    assert shardstore.validate(path, workers=1) == []


@pytest.mark.parametrize("case", CASES, ids=str)
def test_without_its_description_nothing_is_a_store(
    case: Case, copied: Callable[[Case], Path], tree: Callable[[Path], dict[str, Path]]
) -> None:
    path = copied(case)
    (description,) = (file for file in tree(path).values() if file.name == "shardstore.json")
    description.write_bytes(b"")
    with pytest.raises(shardstore.DamagedStoreError, match=r"shardstore\.json"):
        shardstore.open(path)
    assert shardstore.validate(path, workers=1)
    description.unlink()
    for entry in (shardstore.open, shardstore.ShardDataset):
        with pytest.raises(shardstore.NoStoreError):
            entry(path)
    with pytest.raises(shardstore.ShardstoreError):
        shardstore.validate(path, workers=1)
