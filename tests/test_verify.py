"""``ReadOptions(verify=...)``: over damaged stores, in all containers and kinds, no pass gives a wrong sample."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import shardstore
from shardstore import ReadOptions
from shardstore.pictures import early
from shardstore.store.files import Files
from shardstore.store.index import load
from shardstore.transforms import RandomResizedCrop

SAMPLES, SHARD_SAMPLES, BATCH = 11, 4, 3
FIELDS = ["image", "label", "key"]
CASES = [
    *((container, kind, "none") for container in ("npy", "zarr", "hdf5") for kind in ("pixels", "encoded", "ragged")),
    *((container, kind, "zstd") for container in ("zarr", "hdf5") for kind in ("pixels", "ragged")),
]
RAW = [case for case in CASES if case[1:] == ("pixels", "none")]
DAMAGES = 120  # of each case
Case = tuple[str, str, str]

pytestmark = pytest.mark.filterwarnings("ignore:.*sorted by class")


def named(case: Case) -> str:
    return "-".join(case)


@pytest.fixture(scope="module")
def originals(make_store: Callable[..., Path], make_images: Callable[..., Path]) -> Callable[[Case], Path]:
    """Each case's store: two pictures a chunk, each larger than what the reader cuts from cached chunks."""
    made: dict[Case, Path] = {}
    sources = {"ragged": make_images(SAMPLES, sizes=[(40, 32), (32, 44)])}
    one_size = make_images(SAMPLES, sizes=[(40, 32)])

    def get(case: Case) -> Path:
        if case not in made:
            container, kind, codec = case
            options: dict[str, Any] = {"store": "encoded" if kind == "encoded" else "pixels", "codec": codec}
            options |= {"samples_per_shard": SHARD_SAMPLES, "chunk_size": 9000}
            made[case] = make_store(container, source=sources.get(kind, one_size), **options)
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


# -- ways to read -----------------------------------------------------------------------------------------------------


def by_number(path: Path, fields: list[str], options: ReadOptions) -> Iterator[Any]:
    return iter(shardstore.open(path, fields=fields, options=options))


def together(path: Path, fields: list[str], options: ReadOptions) -> Iterator[Any]:
    dataset = shardstore.open(path, fields=fields, options=options)
    random = np.random.default_rng(5).permutation(SAMPLES)
    return iter(dataset.__getitems__(random.tolist()))


def streamed(path: Path, fields: list[str], options: ReadOptions) -> Iterator[Any]:
    return iter(shardstore.ShardDataset(path, fields=fields, shuffle=True, seed=3, options=options))


def whole_chunks(path: Path, fields: list[str], options: ReadOptions) -> Iterator[Any]:
    return iter(shardstore.ShardDataset(path, fields=fields, batch_size=SHARD_SAMPLES, options=options))


def batches(path: Path, fields: list[str], options: ReadOptions) -> Iterator[Any]:
    return iter(shardstore.ShardDataset(path, fields=fields, batch_size=BATCH, shuffle=True, seed=3, options=options))


def in_threads(path: Path, fields: list[str], options: ReadOptions) -> Iterator[Any]:
    return iter(
        shardstore.ShardDataset(path, fields=fields, batch_size=BATCH, shuffle=True, seed=3, threads=2, options=options)
    )


def in_workers(path: Path, fields: list[str], options: ReadOptions) -> Iterator[Any]:
    dataset = shardstore.ShardDataset(path, fields=fields, batch_size=BATCH, shuffle=True, seed=3, options=options)
    return iter(DataLoader(dataset, batch_size=None, num_workers=2))


SINGLY = [by_number, together, streamed]
WAYS = [*SINGLY, whole_chunks, batches, in_threads]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    return bool(a == b)


def pass_over(way: Callable[..., Iterator[Any]], path: Path, fields: list[str], verify: Any) -> list[Any]:
    """What a pass gives, each batch as its values."""
    # A window of a few chunks: some are read again, some are not.
    return [tuple(sample) for sample in way(path, fields, ReadOptions(verify=verify, window_bytes=40_000))]


def fields_and_ways(case: Case) -> list[tuple[Callable[..., Iterator[Any]], list[str]]]:
    """All ways to read, and what: pictures of two sizes make no batch."""
    choices = [[name] for name in FIELDS] + [FIELDS]
    every = [(way, fields) for way in WAYS for fields in choices]
    ragged = case[1] == "ragged"
    return [(w, f) for w, f in every if not (ragged and "image" in f) or w in SINGLY]


# -- damage -----------------------------------------------------------------------------------------------------------


def damage(files: list[Path], random: np.random.Generator) -> tuple[str, dict[Path, bytes]]:
    """Changes one or two files at random; what was done, and their content before."""
    kind = random.choice(["flip", "flip", "flip", "cut", "swap files", "swap parts"])
    file = files[int(random.integers(len(files)))]
    content = file.read_bytes()
    before, where = {file: content}, int(random.integers(len(content)))
    if kind == "swap files":
        others = [f for f in files if f != file and f.stat().st_size == len(content) and f.read_bytes() != content]
        if others:
            other = others[int(random.integers(len(others)))]
            before[other] = other.read_bytes()
            file.write_bytes(before[other])
            other.write_bytes(content)
            return f"{kind} {file} {other}", before
    changed = bytearray(content)
    if kind == "cut":
        del changed[where:]
    elif kind == "swap parts":
        size = int(random.integers(1, len(content) // 2 + 1))
        a, b = int(random.integers(len(content) // 2 - size + 1)), int(random.integers(len(content) // 2, len(content)))
        b = min(b, len(content) - size)
        changed[a : a + size], changed[b : b + size] = content[b : b + size], content[a : a + size]
    else:
        changed[where] ^= int(random.integers(1, 256))
    file.write_bytes(changed)
    return f"{kind} at {where} in {file}", before


@pytest.mark.parametrize("case", CASES, ids=named)
def test_no_pass_over_a_damaged_store_gives_a_wrong_sample(
    case: Case, copied: Callable[[Case], Path], tree: Callable[[Path], dict[str, Path]]
) -> None:
    path = copied(case)
    files, random = list(tree(path).values()), np.random.default_rng(CASES.index(case))
    # Half of all damage goes to the values of pictures: there it could go unnoticed.
    pictures = [f for f in files if "image" in f.relative_to(path.parent).as_posix()] or files
    pictures = [f for f in pictures if "index" not in f.parts and f.suffix != ".json"]
    every = fields_and_ways(case)
    good = {i: pass_over(*every[i][:1], path, every[i][1], "always") for i in range(len(every))}
    counts = {"raised": 0, "right": 0}
    for number in range(DAMAGES):
        what, before = damage(pictures if number % 2 and pictures else files, random)
        for i in random.choice(len(every), 3, replace=False).tolist():
            way, fields = every[i]
            try:
                got = pass_over(way, path, fields, "always")
            except shardstore.ShardstoreError:
                counts["raised"] += 1
                continue
            counts["right"] += 1
            assert len(got) == len(good[i]), what
            for a, b in zip(got, good[i], strict=True):
                assert all(map(same, a, b)), f"{way.__name__} of {fields}: {what}"
        for file, content in before.items():
            file.write_bytes(content)
    assert min(counts.values()) > 10, counts
    assert shardstore.validate(path, workers=1) == []


def flip_pixel(path: Path, sample: int) -> Path:
    """Change one byte of an uncompressed picture, where its index says that it lies."""
    index = load(path)
    table = index.table("image")
    row = int(np.searchsorted(table["first"], sample, side="right")) - 1
    inside = sample - int(table["first"][row])
    file = Path(index.shard_path(int(table["shard"][row]), "image"))
    content = bytearray(file.read_bytes())
    content[int(table["offset"][row]) + inside * 40 * 32 * 3 + 100] ^= 255
    file.write_bytes(content)
    return file


@pytest.mark.parametrize("case", RAW, ids=named)
def test_without_verification_a_changed_pixel_comes_through(case: Case, copied: Callable[[Case], Path]) -> None:
    path = copied(case)
    ways = [*WAYS, in_workers]
    good = {way: pass_over(way, path, ["image"], "never") for way in ways}
    flip_pixel(path, 6)
    for way in ways:
        got = pass_over(way, path, ["image"], "never")
        assert sum(not torch.equal(a[0], b[0]) for a, b in zip(got, good[way], strict=True)) == 1, way.__name__
        changed = sum(int((a[0] != b[0]).sum()) for a, b in zip(got, good[way], strict=True))
        assert changed == 1, way.__name__


@pytest.mark.parametrize("case", RAW, ids=named)
def test_always_finds_what_reading_by_chunks_does_not_look_at(case: Case, copied: Callable[[Case], Path]) -> None:
    path = copied(case)
    file = flip_pixel(path, 6)
    shard, first = 1, shardstore.open(path).key(6)
    for way in (*WAYS, in_workers):
        with pytest.raises(shardstore.DamagedStoreError) as caught:
            pass_over(way, path, ["image"], "always")
        for part in (str(file), f"shard {shard}", "chunk 1", f"{first}", f"shardstore validate {path}"):
            assert part in str(caught.value), way.__name__
    # The default looks at whole chunks, and single samples pass.
    with pytest.raises(shardstore.DamagedStoreError):
        pass_over(whole_chunks, path, ["image"], "chunk")
    assert len(pass_over(by_number, path, ["image"], "chunk")) == SAMPLES
    assert ReadOptions() == ReadOptions(verify="chunk")


@pytest.mark.parametrize("case", RAW, ids=named)
def test_damaged_samples_are_left_out_and_no_others(case: Case, copied: Callable[[Case], Path]) -> None:
    path = copied(case)
    flip_pixel(path, 6)
    keys = [shardstore.open(path).key(i) for i in range(SAMPLES)]
    options = ReadOptions(verify="always", on_error="skip")
    for batch_size in (None, BATCH):
        dataset = shardstore.ShardDataset(path, fields=FIELDS, batch_size=batch_size, shuffle=True, options=options)
        with pytest.warns(UserWarning, match="left out"):
            seen = [key for sample in dataset for key in ([sample.key] if batch_size is None else sample.key)]
        assert set(seen) == set(keys) - {keys[6], keys[7]}  # the chunk's two
        assert dataset.skipped == 2


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The bytes of each read of a whole chunk or single piece."""
    reads: list[int] = []
    real = Files.read_into

    def read_into(self: Files, path: str, offset: int, buffer: np.ndarray[Any, Any]) -> int:
        reads.append(buffer.nbytes)
        return real(self, path, offset, buffer)

    with monkeypatch.context() as patch:
        patch.setattr(Files, "read_into", read_into)
        yield reads


@pytest.mark.parametrize("case", RAW, ids=named)
def test_the_samples_of_a_chunk_are_read_once(
    case: Case, originals: Callable[[Case], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = originals(case)
    chunks = load(path).table("image")["nbytes"].tolist()
    with counted(monkeypatch) as reads:
        list(by_number(path, ["image"], ReadOptions(verify="always")))
        assert reads == chunks[:-1]  # the last one has a single sample: that is a whole chunk
        del reads[:]
        list(by_number(path, ["image"], ReadOptions(verify="chunk")))
        assert reads == []  # each sample by itself, many in one call
    with counted(monkeypatch) as reads:
        list(together(path, ["image"], ReadOptions(verify="always", window_bytes=1)))
        assert sorted(reads) == sorted(chunks)  # mates in one batch, with no room for more than one chunk


def test_checked_chunks_take_no_more_memory_than_the_window(
    originals: Callable[[Case], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ReadOptions(verify="always", window_bytes=20_000)
    dataset = shardstore.open(originals(RAW[0]), fields=["image"], options=options)
    cache = dataset._reader._cache
    for number in np.random.default_rng(1).integers(SAMPLES, size=200).tolist():
        dataset[number]
        assert cache.used <= options.window_bytes


# -- early stop, other readers, options -------------------------------------------------------------------------------


@pytest.mark.parametrize(("verify", "stops"), [("chunk", True), ("always", True), ("never", False)])
def test_the_decoder_of_unverified_bytes_does_not_stop_early(
    verify: Any, stops: bool, make_store: Callable[..., Path], make_images: Callable[..., Path], monkeypatch: Any
) -> None:
    path = make_store("npy", source=make_images(8, sizes=[(160, 160)], format="jpg"), store="encoded")
    calls, real = [], early.lowered
    monkeypatch.setattr(early, "lowered", lambda data, rows: calls.append(rows) or real(data, rows))
    dataset = shardstore.ShardDataset(
        path, transform=RandomResizedCrop(16, scale=(0.05, 0.1)), options=ReadOptions(verify=verify)
    )
    assert len(list(dataset)) == 8
    assert bool(calls) is stops


@pytest.mark.parametrize("case", RAW, ids=named)
def test_damage_gets_no_new_checksum(case: Case, copied: Callable[[Case], Path], tmp_path: Path) -> None:
    path = copied(case)
    flip_pixel(path, 6)
    with pytest.raises(shardstore.DamagedStoreError):
        shardstore.export(path, tmp_path / "folder")
    with pytest.raises(shardstore.SourceError) as caught:
        shardstore.convert(path, tmp_path / "again", workers=1)
    assert [p.chunk for p in caught.value.problems] == [1, 1]


@pytest.mark.parametrize("value", ["", "ALWAYS", None, True, "sometimes"])
def test_an_unknown_way_to_verify_is_refused(value: Any) -> None:
    with pytest.raises(shardstore.OptionError, match="always, chunk, never"):
        ReadOptions(verify=value)
