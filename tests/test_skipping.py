"""``ReadOptions(on_error="skip")``: what cannot be read is left out, counted and named, and nothing else is.

Also the hint about stores that lie sorted by class, and the smallest shares of ranks and workers in real DataLoaders.
"""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

import shardstore
from shardstore import DamagedStoreError, ImageError, OptionError, ReadOptions, ShardDataset, StackError
from shardstore.store.index import load

Make = Callable[..., Path]
Steps = list[list[str]]

# Tests take more workers than a small machine has cores, and leave out samples on purpose.
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:left out sample:UserWarning"),
]

FIELDS = ["image", "label", "key"]
SAMPLES, SHARD_SAMPLES, BATCH = 46, 8, 3  # six shards, of which the last holds 6; a last batch of 1
CHUNK = 2  # pictures in a chunk of pixels
SIZE = (40, 32)  # 3,840 bytes of random values: larger than what the reader cuts from cached chunks
WORKERS = [0, 2, 3]
HANG = 300  # seconds; then it is an error, however busy the machine


# -- stores and their damage ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sick:
    """A store with damage.

    Attributes:
        path: the store.
        bad: keys of the samples that cannot be read.
        sound: a store with the same order that can be read.
        fields: those to be read of the sound one.
    """

    path: Path
    bad: frozenset[str]
    sound: Path
    fields: tuple[str, ...] = tuple(FIELDS)

    @property
    def numbers(self) -> dict[str, int]:
        """Each bad sample's number."""
        keys = stored_keys(self.sound)
        return {key: keys.index(key) for key in self.bad}

    def dataset(self, *, rank: int = 0, ranks: int = 1, on_error: Any = "skip", **options: Any) -> ShardDataset:
        options.setdefault("fields", FIELDS)
        read = ReadOptions(rank=rank, world_size=ranks, on_error=on_error)
        return ShardDataset(self.path, options=read, **options)

    def reference(self, *, rank: int = 0, ranks: int = 1, **options: Any) -> ShardDataset:
        """The same without damage."""
        read = ReadOptions(rank=rank, world_size=ranks)
        return ShardDataset(self.sound, fields=self.fields, options=read, **options)


def loader_of(dataset: ShardDataset, workers: int = 0, context: str = "fork", **options: Any) -> DataLoader[Any]:
    """A plain DataLoader, which makes batches where the data set does not."""
    options.setdefault("batch_size", None if dataset.batch_size else BATCH)
    if workers:
        options |= {"multiprocessing_context": context, "timeout": HANG}
    return DataLoader(dataset, num_workers=workers, **options)


def keys_of(batches: Iterable[Any]) -> Steps:
    return [list(batch.key) for batch in batches]


def flat(steps: Steps) -> list[str]:
    return [key for step in steps for key in step]


def stored_keys(path: Path) -> list[str]:
    return [str(sample.key) for sample in shardstore.open(path, fields=["key"])]


def shard_of(path: Path, shard: int, array: str) -> Path:
    return Path(load(path).shard_path(shard, array))


def flip(path: Path, where: int) -> None:
    content = bytearray(path.read_bytes())
    content[where] ^= 1
    path.write_bytes(content)


@pytest.fixture(scope="module")
def pictures(make_images: Make) -> Path:
    """46 pictures of one size in 3 classes."""
    return make_images(SAMPLES, sizes=[SIZE])


@pytest.fixture(scope="module")
def sound(make_store: Make, pictures: Path) -> Callable[..., Path]:
    """``sound(container, store, codec)``: a store of these, which belongs to all tests."""
    made: dict[tuple[str, ...], Path] = {}

    def get(container: str, store: str = "encoded", codec: str = "none") -> Path:
        kind = (container, store, codec)
        if kind not in made:
            options = {"samples_per_shard": SHARD_SAMPLES, "chunk_size": CHUNK * 4000}
            made[kind] = make_store(container, source=pictures, store=store, codec=codec, **options)
        return made[kind]

    return get


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """A store to be damaged."""

    def make(original: Path) -> Path:
        folder = tmp_path_factory.mktemp("sick")
        for path in original.parent.iterdir():
            (shutil.copytree if path.is_dir() else shutil.copy)(path, folder / path.name)
        return folder / original.name

    return make


@pytest.fixture(scope="module")
def flipped(copied: Callable[[Path], Path], sound: Callable[..., Path], pictures: Path) -> Callable[..., Sick]:
    """``flipped(keys, container="npy")``: a byte of each of these encoded pictures is another one."""

    def make(keys: Iterable[str], container: str = "npy") -> Sick:
        original = sound(container)
        path, bad = copied(original), frozenset(keys)
        every = stored_keys(original)
        for key in bad:
            picture = (pictures / key).read_bytes()
            file = shard_of(path, every.index(key) // SHARD_SAMPLES, "image.data")
            content = file.read_bytes()
            assert content.count(picture) == 1
            flip(file, content.find(picture) + len(picture) // 2)
        return Sick(path, bad, original)

    return make


@pytest.fixture(scope="module")
def chunks_flipped(copied: Callable[[Path], Path], sound: Callable[..., Path]) -> Callable[..., Sick]:
    """``chunks_flipped(rows, container, codec)``: a byte of each of these chunks of pixels is another one."""

    def make(rows: Sequence[int], container: str, codec: str) -> Sick:
        original = sound(container, "pixels", codec)
        path, keys, bad = copied(original), stored_keys(original), set[str]()
        table = load(path).table("image")
        for row in rows:
            shard, first, count, offset, nbytes = (
                int(table[row][name]) for name in ("shard", "first", "count", "offset", "nbytes")
            )
            assert count == CHUNK
            flip(shard_of(path, shard, "image"), offset + nbytes // 2)
            bad |= set(keys[first : first + count])
        return Sick(path, frozenset(bad), original)

    return make


@pytest.fixture(scope="module")
def no_pictures(tmp_path_factory: pytest.TempPathFactory, pictures: Path) -> Callable[..., Sick]:
    """``no_pictures(keys, container)``: of these, the store faithfully holds bytes that are no picture."""

    def make(keys: Iterable[str], container: str = "npy") -> Sick:
        folder, bad = tmp_path_factory.mktemp("no_pictures"), []
        shutil.copytree(pictures, folder / "imgs")
        for i, key in enumerate(sorted(keys)):
            file = folder / "imgs" / key
            png = file.read_bytes()
            if i % 3 == 0:
                file.write_bytes(png[: len(png) // 2])
            elif i % 3 == 1:
                file.write_bytes(png[:100] + bytes(len(png) - 100))
            else:
                Image.open(file).save(folder / "cut.jpg")
                jpeg = (folder / "cut.jpg").read_bytes()
                file.write_bytes(jpeg[: len(jpeg) // 2])
            bad.append(key)
        path = folder / {"npy": "out", "zarr": "out.zarr", "hdf5": "out.h5"}[container]
        shardstore.convert(
            folder / "imgs", path, store="encoded", check="header", samples_per_shard=SHARD_SAMPLES, workers=1
        )
        assert len(stored_keys(path)) == SAMPLES
        assert shardstore.validate(path, level="checksum", workers=1) == []
        return Sick(path, frozenset(bad), path, ("key",))

    return make


@pytest.fixture(scope="module")
def file_gone(copied: Callable[[Path], Path], sound: Callable[..., Path]) -> Callable[..., Sick]:
    """``file_gone(shard, container, part)``: of this shard's pictures, that part is left; None for no file."""

    def make(shard: int, container: str, part: float | None) -> Sick:
        original = sound(container)
        path, keys = copied(original), stored_keys(original)
        file = shard_of(path, shard, "image.data")
        if part is None:
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[: int(file.stat().st_size * part)])
        dataset, bad = shardstore.open(path, fields=FIELDS), set()
        for number, key in enumerate(keys):
            try:
                dataset[number]
            except DamagedStoreError:
                bad.add(key)
        whole = set(keys[shard * SHARD_SAMPLES :][:SHARD_SAMPLES])
        assert bad == whole if part is None or container == "hdf5" else set() < bad < whole
        return Sick(path, frozenset(bad), original)

    return make


def chosen(dataset: ShardDataset) -> set[str]:
    """Samples to be bad, of a data set without ranks: all of some batches, two in a row among them and the last; all of
    what two ranks would deal out anew at the end; one or two of some other batches."""
    steps = keys_of(dataset)
    assert [len(step) for step in steps] == [BATCH] * 15 + [1]
    return {*flat([steps[i] for i in (2, 5, 6, 14, 15)]), steps[0][0], steps[9][0], steps[9][2]}


SICKNESSES = [
    "flipped-npy", "flipped-zarr", "flipped-hdf5", "no picture-npy", "zstd-zarr", "zstd-hdf5",
    "deleted-npy", "deleted-hdf5", "cut-zarr", "cut-hdf5",
]  # fmt: skip


@pytest.fixture(scope="module")
def sick(
    sound: Callable[..., Path],
    flipped: Callable[..., Sick],
    no_pictures: Callable[..., Sick],
    chunks_flipped: Callable[..., Sick],
    file_gone: Callable[..., Sick],
) -> Callable[[str, bool], Sick]:
    """``sick(sickness, shuffle)``: where the damage can be chosen, batches in that order lose what `chosen` says."""
    made: dict[tuple[str, bool], Sick] = {}

    def make(sickness: str, shuffle: bool) -> Sick:
        what, container = sickness.split("-")
        if what == "zstd":
            return chunks_flipped([0, 7, 8, 11, 22], container, "zstd")
        if what in ("deleted", "cut"):
            return file_gone(2, container, None if what == "deleted" else 0.6)
        original = sound(container)
        # The shuffled order depends on what is stored, and is known only afterwards where bad pictures are stored.
        shuffle = shuffle and what == "flipped"
        bad = chosen(ShardDataset(original, fields=["key"], batch_size=BATCH, shuffle=shuffle))
        return (flipped if what == "flipped" else no_pictures)(bad, container)

    def get(sickness: str, shuffle: bool = False) -> Sick:
        if (sickness, shuffle) not in made:
            made[sickness, shuffle] = make(sickness, shuffle)
        return made[sickness, shuffle]

    return get


def workers_for(sickness: str, ranks: int) -> list[int]:
    """All numbers of workers once, and two where nothing but the kind of damage is another."""
    return WORKERS if sickness == "flipped-npy" else [0, 2] if ranks == 1 else [2]


def check_values(batches: Iterable[Any], good: shardstore.Dataset) -> None:
    """All that was given is what was stored."""
    for batch in batches:
        for image, label, key in zip(batch.image, batch.label, batch.key, strict=True):
            assert torch.equal(image, good[key].image)
            assert label == good[key].label


# -- what is expected -------------------------------------------------------------------------------------------------


def batches_without(steps: Steps, bad: Iterable[str]) -> Steps:
    """Batches less the bad samples; where nothing is left, the next step's that has some, after the last the first."""
    kept = [[key for key in step if key not in bad] for step in steps]
    n = len(steps)
    return [next(kept[u % n] for u in range(t, t + n) if kept[u % n]) for t in range(n)]


def stream_without(keys: Sequence[str], bad: Iterable[str]) -> list[str]:
    """As many samples: for a bad one the next good one, after the last the first."""
    good = [i for i, key in enumerate(keys) if key not in bad]
    return [keys[min((g for g in good if g >= i), default=good[0])] for i in range(len(keys))]


def test_what_is_expected() -> None:
    steps = [["a", "b"], ["x", "y"], ["x"], ["c", "x"], ["y"]]
    assert batches_without(steps, "xy") == [["a", "b"], ["c"], ["c"], ["c"], ["a", "b"]]
    assert stream_without("xabxycx", "xy") == list("aabccca")


# -- the default ------------------------------------------------------------------------------------------------------


def failure(dataset: ShardDataset, kind: type[Exception], workers: int, **options: Any) -> Exception:
    """The error in which a pass ends."""
    with pytest.raises(kind) as caught:
        list(loader_of(dataset, workers, **options))
    assert type(caught.value) is kind
    error = caught.value.with_traceback(None)
    del caught
    gc.collect()  # otherwise the workers live on in the traceback's frames, and delay another test's
    return error


def text_of(error: Exception) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [None, BATCH])
@pytest.mark.parametrize("sickness", ["flipped-npy", "flipped-zarr", "flipped-hdf5", "no picture-npy", "deleted-npy"])
def test_by_default_an_error_reaches_the_training_process(
    sick: Callable[..., Sick], sickness: str, batch_size: int | None, workers: int
) -> None:
    store = sick(sickness)
    kind: type[Exception] = ImageError if sickness == "no picture-npy" else DamagedStoreError
    for options in ({}, {"options": ReadOptions(on_error="raise")})[workers // 2 :]:
        dataset = ShardDataset(store.path, fields=FIELDS, batch_size=batch_size, **options)  # type: ignore[arg-type]
        text = str(failure(dataset, kind, workers))
        named = [key for key in store.bad if f"key {key}" in text]
        assert len(named) == 1
        assert f"shard {store.numbers[named[0]] // SHARD_SAMPLES}," in text
        assert "shardstore validate" in text
        assert dataset.skipped == 0


# -- whole batches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("sickness", SICKNESSES)
def test_whole_batches_are_those_without_damage_less_the_bad_samples(
    sick: Callable[..., Sick], sound: Callable[..., Path], sickness: str, shuffle: bool
) -> None:
    store = sick(sickness, shuffle)
    options = {"batch_size": BATCH, "shuffle": shuffle}
    good = shardstore.open(store.sound, fields=FIELDS)
    stood_in, lengths = 0, set()
    for ranks in (1, 2):
        for workers in workers_for(sickness, ranks):
            skipped = 0
            for rank in range(ranks):
                steps = keys_of(store.reference(rank=rank, ranks=ranks, **options))
                dataset = store.dataset(rank=rank, ranks=ranks, **options)
                batches = list(loader_of(dataset, workers))
                assert keys_of(batches) == batches_without(steps, store.bad)
                assert len(batches) == len(steps) == len(dataset)
                assert dataset.skipped == sum(key in store.bad for key in flat(steps))
                check_values(batches, good)
                lengths.add((ranks, len(batches)))
                stood_in += sum(store.bad.issuperset(step) for step in steps)
                skipped += dataset.skipped
            assert skipped == len(store.bad)
    assert len(lengths) == 2  # all ranks make as many steps
    if sickness.startswith("flipped") or not (shuffle or sickness.startswith("zstd")):
        assert stood_in


def test_a_batch_of_bad_samples_is_filled_by_the_next_step_s_of_the_same_rank(flipped: Callable[..., Sick]) -> None:
    sound = flipped([])
    steps = [keys_of(sound.reference(rank=rank, ranks=2, batch_size=BATCH)) for rank in range(2)]
    assert [len(part) for part in steps] == [8, 8]
    store = flipped([*steps[0][3], *steps[0][4], *steps[0][7], *steps[1][0], *steps[1][1][:2]])
    found = [keys_of(store.dataset(rank=rank, ranks=2, batch_size=BATCH)) for rank in range(2)]
    first, second = steps
    assert found[0] == [first[0], first[1], first[2], first[5], first[5], first[5], first[6], first[0]]
    assert found[1] == [second[1][2:], second[1][2:], *second[2:]]


@pytest.mark.parametrize("shuffle", [False, True])
def test_threads_leave_out_the_same(sick: Callable[..., Sick], shuffle: bool) -> None:
    store = sick("flipped-npy", shuffle)
    options = {"batch_size": BATCH, "shuffle": shuffle}
    expected = batches_without(keys_of(store.reference(**options)), store.bad)
    dataset = store.dataset(threads=3, **options)
    for number_of_pass in (1, 2):
        dataset.set_epoch(0)
        batches = list(dataset)
        assert keys_of(batches) == expected
        assert dataset.skipped == number_of_pass * len(store.bad)
    check_values(batches, shardstore.open(store.sound, fields=FIELDS))


def test_batches_without_damage_are_the_same_with_skip(flipped: Callable[..., Sick]) -> None:
    store = flipped([])
    for options in ({"batch_size": BATCH, "shuffle": True}, {"shuffle": True}):
        dataset = store.dataset(**options)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert [s.key for s in dataset] == [s.key for s in store.reference(**options)]
        assert dataset.skipped == 0


@pytest.mark.parametrize("shuffle", [False, True])
def test_small_pictures_of_a_damaged_chunk_are_left_out_together(
    make_images: Make, make_store: Make, shuffle: bool
) -> None:
    path = make_store("npy", source=make_images(24, sizes=((9, 8),)), store="encoded", samples_per_shard=6)
    before = stored_keys(path)
    options = {"fields": FIELDS, "batch_size": 4, "shuffle": shuffle}
    steps = keys_of(ShardDataset(path, **options))  # type: ignore[arg-type]
    flip(shard_of(path, 1, "image.data"), -1)
    bad = set()
    for number, key in enumerate(before):
        try:
            shardstore.open(path)[number]
        except DamagedStoreError:
            bad.add(key)
    assert set() < bad <= set(before[6:12])
    dataset = ShardDataset(path, options=ReadOptions(on_error="skip"), **options)  # type: ignore[arg-type]
    assert keys_of(dataset) == batches_without(steps, bad)
    assert dataset.skipped == len(bad)


@pytest.mark.parametrize("array", ["label", "key.data", "key.crc32c"])
@pytest.mark.parametrize("batch_size", [None, BATCH])
def test_damaged_labels_and_keys_are_reasons_too(
    copied: Callable[[Path], Path], sound: Callable[..., Path], array: str, batch_size: int | None
) -> None:
    original = sound("npy")
    path, bad = copied(original), set(stored_keys(original)[8:16])
    row = load(path).table(array)[load(path).rows(1, array)][0]
    flip(shard_of(path, 1, array), int(row["offset"]) + int(row["nbytes"]) - 1)
    dataset = Sick(path, frozenset(bad), original).dataset(batch_size=batch_size)
    with pytest.warns(UserWarning, match="left out sample 8") as caught:
        given = {key for step in keys_of(loader_of(dataset)) for key in step}
    assert given == set(stored_keys(original)) - bad
    assert dataset.skipped == len(caught) == len(bad)
    # What is not asked for does not matter.
    dataset = Sick(path, frozenset(), original).dataset(batch_size=batch_size, fields=["image"])
    assert sum(len(batch.image) for batch in loader_of(dataset)) == SAMPLES
    assert dataset.skipped == 0


# -- counts and warnings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [None, BATCH])
@pytest.mark.parametrize("sickness", ["flipped-npy", "flipped-hdf5", "no picture-npy", "zstd-zarr", "deleted-npy"])
def test_each_bad_sample_is_named_in_a_warning(
    sick: Callable[..., Sick], sickness: str, batch_size: int | None
) -> None:
    store = sick(sickness)
    dataset = store.dataset(batch_size=batch_size)
    for number_of_pass in (1, 2):
        with pytest.warns(UserWarning, match="left out") as caught:
            list(loader_of(dataset))
        assert dataset.skipped == number_of_pass * len(store.bad)
        messages = [str(warning.message) for warning in caught]
        assert len(messages) == len(store.bad)
        for key, number in store.numbers.items():
            (message,) = (m for m in messages if m.startswith(f"left out sample {number}, key {key}: "))
            assert f"shard {number // SHARD_SAMPLES}," in message
            assert "shardstore validate" in message


def test_a_key_that_cannot_be_read_is_not_named(sick: Callable[..., Sick]) -> None:
    store = sick("deleted-hdf5")  # keys were in that file
    dataset = store.dataset()
    with pytest.warns(UserWarning, match="left out") as caught:
        list(dataset)
    messages = [str(warning.message) for warning in caught]
    assert sorted(int(m.split()[3].rstrip(":")) for m in messages) == list(range(16, 24))
    assert all("shard 2" in m and "No such file" in m and "key" not in m.split(":")[0] for m in messages)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("batch_size", [None, BATCH])
@pytest.mark.parametrize("persistent", [False, True])
def test_the_trainer_knows_how_many_were_left_out(
    sick: Callable[..., Sick], workers: int, batch_size: int | None, persistent: bool
) -> None:
    store = sick("flipped-zarr")
    dataset = store.dataset(batch_size=batch_size)
    loader = loader_of(dataset, workers, persistent_workers=persistent and workers > 0)
    assert dataset.skipped == 0
    for number_of_pass in (1, 2, 3):
        assert len(list(loader)) > len(store.bad) // BATCH
        assert dataset.skipped == number_of_pass * len(store.bad)


PASSES = """
import json, sys
from shardstore import ReadOptions, ShardDataset
from torch.utils.data import DataLoader
path, context, persistent, batch_size = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
dataset = ShardDataset(
    path, fields=["image", "key"], batch_size=batch_size or None, options=ReadOptions(on_error="skip")
)
loader = DataLoader(
    dataset, batch_size=None if batch_size else 3, num_workers=2, multiprocessing_context=context,
    persistent_workers=bool(persistent), timeout=300,
)
out = []
for _ in range(2):
    out.append(([batch.key for batch in loader], dataset.skipped))
print(json.dumps(out))
"""


@pytest.mark.parametrize(
    ("context", "persistent", "batch_size"),
    [("fork", False, None), ("fork", True, BATCH), ("spawn", True, None)],
)
def test_workers_count_and_warn(
    sick: Callable[..., Sick], context: str, persistent: bool, batch_size: int | None
) -> None:
    store = sick("flipped-npy", True)
    arguments = [str(store.path), context, str(int(persistent)), str(batch_size or 0)]
    done = subprocess.run(
        [sys.executable, "-c", PASSES, *arguments], capture_output=True, text=True, check=True, timeout=900
    )
    passes = json.loads(done.stdout)
    assert [skipped for _, skipped in passes] == [len(store.bad), 2 * len(store.bad)]
    assert passes[0][0] == passes[1][0] == keys_of(loader_of(store.dataset(batch_size=batch_size), 2))
    lines = re.findall(r"left out sample (\d+), key (\S+): .*?shard (\d+),", done.stderr)
    # Workers that stay need not say it again, by Python's rules for warnings.
    counts = Counter(lines)
    assert counts.keys() == {(str(n), key, str(n // SHARD_SAMPLES)) for key, n in store.numbers.items()}
    assert set(counts.values()) <= ({1, 2} if persistent else {2})


# -- per sample -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("sickness", SICKNESSES)
def test_single_samples_are_as_many_as_without_damage(sick: Callable[..., Sick], sickness: str, shuffle: bool) -> None:
    store = sick(sickness, shuffle)
    good = shardstore.open(store.sound, fields=FIELDS)
    for ranks in (1, 2):
        for workers in workers_for(sickness, ranks):
            counts, skipped = [], 0
            for rank in range(ranks):
                share = {"rank": rank, "ranks": ranks, "shuffle": shuffle}
                # One batch of each worker holds all that it reads.
                expected = keys_of(loader_of(store.reference(**share), workers, batch_size=SAMPLES))
                dataset = store.dataset(**share)
                batches = list(loader_of(dataset, workers, batch_size=SAMPLES))
                assert keys_of(batches) == [stream_without(keys, store.bad) for keys in expected]
                assert dataset.skipped == sum(key in store.bad for key in flat(expected))
                assert len(flat(keys_of(batches))) == len(dataset)
                check_values(batches, good)
                counts.append([len(batch.key) for batch in batches])
                skipped += dataset.skipped
            assert skipped == len(store.bad)
            assert sum(map(sum, counts)) == SAMPLES
            assert counts == [counts[0]] * ranks


def test_a_worker_that_can_read_nothing_ends_the_pass(sick: Callable[..., Sick]) -> None:
    """What it could repeat is with other workers; in whole batches the same damage is borne."""
    store = sick("deleted-npy")
    assert "shard 2" in text_of(failure(store.dataset(), DamagedStoreError, 6))
    assert len(keys_of(loader_of(store.dataset(batch_size=BATCH), 6))) == 16


# -- going on ---------------------------------------------------------------------------------------------------------


def single_states(store: Sick, **options: Any) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """The state before each sample of a pass in this process, and what was left then."""
    expected = [sample.key for sample in store.dataset(**options)]
    assert expected == stream_without([s.key for s in store.reference(**options)], store.bad)
    dataset = store.dataset(**options)
    samples = iter(dataset)
    for place in range(len(expected) + 1):
        yield dataset.state_dict(), expected[place:]
        assert [s.key for s in [next(samples, None)] if s] == expected[place : place + 1]


def check_goes_on(store: Sick, state: dict[str, Any], left: Sequence[Any], workers: int = 0, **options: Any) -> None:
    dataset = store.dataset(**options)
    dataset.load_state_dict(json.loads(json.dumps(state)))
    items = loader_of(dataset, workers) if options.get("batch_size") else dataset
    assert [item.key for item in items] == left
    # The pass after it is a whole one again.
    assert dataset.epoch == 1


@pytest.mark.parametrize(
    ("where", "shuffle"), [([0, 1], True), ([17, 18, 19, 30], False), ([0, 15, 16, 31, 32, 44], True)]
)
def test_a_pass_of_single_samples_goes_on_from_every_sample(
    flipped: Callable[..., Sick], where: list[int], shuffle: bool
) -> None:
    order = [sample.key for sample in flipped([]).reference(shuffle=shuffle)]
    store = flipped([order[i] for i in where])
    for state, left in single_states(store, shuffle=shuffle):
        check_goes_on(store, state, left, shuffle=shuffle)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_pass_of_single_samples_goes_on_where_only_bad_ones_are_left(
    flipped: Callable[..., Sick], shuffle: bool
) -> None:
    order = [sample.key for sample in flipped([]).reference(shuffle=shuffle)]
    store = flipped(order[-3:])
    for state, left in single_states(store, shuffle=shuffle):
        check_goes_on(store, state, left, shuffle=shuffle)


def batch_states(store: Sick, workers: int, **options: Any) -> Iterator[tuple[dict[str, Any], Steps]]:
    """The state before each step of a pass, and the batches that were left then."""
    dataset = store.dataset(batch_size=BATCH, **options)
    batches = keys_of(loader_of(dataset, workers))
    assert batches == batches_without(keys_of(store.reference(batch_size=BATCH, **options)), store.bad)
    for step in range(len(batches)):  # after the last one it is the next epoch
        yield dataset.state_at(step), batches[step:]


@pytest.mark.parametrize(
    ("workers", "others", "shuffle"), [(0, 0, False), (0, 0, True), (2, 0, True), (0, 2, True), (0, 2, False)]
)
@pytest.mark.parametrize("steps", [[0], [5, 6, 9], [0, 1, 2, 14]])
def test_whole_batches_go_on_from_every_step(
    flipped: Callable[..., Sick], steps: list[int], workers: int, others: int, shuffle: bool
) -> None:
    order = keys_of(flipped([]).reference(batch_size=BATCH, shuffle=shuffle))
    store = flipped([*flat([order[i] for i in steps]), order[4][1], order[10][2]])
    for state, left in list(batch_states(store, workers, shuffle=shuffle))[:: 4 if others else 1]:
        check_goes_on(store, state, left, others, batch_size=BATCH, shuffle=shuffle)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("place", [3, 15])
def test_whole_batches_go_on_where_the_last_one_is_bad(flipped: Callable[..., Sick], shuffle: bool, place: int) -> None:
    order = keys_of(flipped([]).reference(batch_size=BATCH, shuffle=shuffle))
    store = flipped(order[15])
    state, left = list(batch_states(store, 0, shuffle=shuffle))[place]
    check_goes_on(store, state, left, batch_size=BATCH, shuffle=shuffle)


# -- too many ---------------------------------------------------------------------------------------------------------

LIMIT = 5
NOTE = f"more than {LIMIT} samples in a row"


@pytest.fixture
def low_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    # The true limit needs ten thousand damaged samples; what happens at it is the same.
    monkeypatch.setattr("shardstore.loading.skipping.LIMIT", LIMIT)


@pytest.mark.usefixtures("low_limit")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [None, 2, 8])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_long_run_of_failures_ends_the_pass(
    flipped: Callable[..., Sick], workers: int, batch_size: int | None, shuffle: bool
) -> None:
    options = {"batch_size": batch_size, "shuffle": shuffle}
    reference = flipped([]).reference(**options)
    if batch_size is None:  # one batch of each worker holds all that it reads
        order = keys_of(loader_of(reference, workers, batch_size=SAMPLES))[0][10:]
    elif batch_size == 2:  # what would fill the first bad batch are bad ones
        order = flat(keys_of(reference)[4:])
    else:
        order = keys_of(reference)[2][1:]
    over, below = order[: LIMIT + 1], order[:LIMIT]
    error = failure(flipped(over).dataset(**options), DamagedStoreError, workers)
    assert NOTE in text_of(error)
    assert any(key in text_of(error) for key in over)
    dataset = flipped(below).dataset(**options)
    list(loader_of(dataset, workers))
    assert dataset.skipped == LIMIT


@pytest.mark.usefixtures("low_limit")
@pytest.mark.parametrize("batch_size", [None, 16])
def test_a_good_sample_starts_the_count_anew(flipped: Callable[..., Sick], batch_size: int | None) -> None:
    reference = flipped([]).reference(batch_size=batch_size)
    order = flat(keys_of(loader_of(reference)))
    runs = [*range(LIMIT), *range(LIMIT + 1, 2 * LIMIT + 1), *range(2 * LIMIT + 2, 3 * LIMIT + 1)]
    assert order[LIMIT] != order[2 * LIMIT + 1]  # the good ones between
    dataset = flipped([order[i] for i in runs]).dataset(batch_size=batch_size)
    for number_of_pass in (1, 2):
        list(loader_of(dataset))
        assert dataset.skipped == number_of_pass * len(runs) > number_of_pass * LIMIT
    # And across pieces that are read together, or batches.
    longer = [order[i] for i in (*runs, LIMIT)]
    assert NOTE in text_of(failure(flipped(longer).dataset(batch_size=batch_size), DamagedStoreError, 0))


@pytest.mark.usefixtures("low_limit")
@pytest.mark.parametrize("batch_size", [None, 23])
def test_a_run_ends_with_its_pass(flipped: Callable[..., Sick], batch_size: int | None) -> None:
    order = flat(keys_of(loader_of(flipped([]).reference(batch_size=batch_size))))
    dataset = flipped([*order[:3], *order[-3:]]).dataset(batch_size=batch_size)
    for _ in range(2):
        list(loader_of(dataset))


def test_the_limit_is_one_of_many_samples() -> None:
    from shardstore.loading import skipping

    assert skipping.LIMIT > 500


@pytest.mark.parametrize("limit", [LIMIT, None])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [None, BATCH])
@pytest.mark.parametrize("container", ["npy", "hdf5"])
def test_a_store_in_which_nothing_can_be_read_ends_with_the_error(
    copied: Callable[[Path], Path],
    sound: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    container: str,
    batch_size: int | None,
    workers: int,
    limit: int | None,
) -> None:
    if limit is not None:
        monkeypatch.setattr("shardstore.loading.skipping.LIMIT", limit)  # as in low_limit; None: the true one
    path = copied(sound(container))
    for shard in range(load(path).schema.shards):
        shard_of(path, shard, "image.data").unlink()
    store = Sick(path, frozenset(stored_keys(sound(container))), sound(container))
    options = {"batch_size": batch_size, "threads": 2 if batch_size and container == "hdf5" and not workers else 0}
    text = text_of(failure(store.dataset(**options), DamagedStoreError, workers))
    assert "No such file" in text
    assert (NOTE in text) == (limit is not None)


# -- raw pixels -------------------------------------------------------------------------------------------------------

ALIGNED = 2 * CHUNK  # samples in a batch that reads whole chunks


@pytest.mark.parametrize("container", ["npy", "zarr", "hdf5"])
@pytest.mark.parametrize("workers", [0, 2])
def test_samples_of_a_damaged_chunk_are_never_given_where_it_is_read_whole(
    chunks_flipped: Callable[..., Sick], container: str, workers: int
) -> None:
    store = chunks_flipped([1, 4, 5, 22], container, "none")
    good = shardstore.open(store.sound, fields=FIELDS)
    for options in ({"batch_size": ALIGNED}, {"batch_size": SHARD_SAMPLES}, {}):
        steps = keys_of(loader_of(store.reference(**options), workers, **({} if options else {"batch_size": 16})))
        dataset = store.dataset(**options)
        batches = list(loader_of(dataset, workers, **({} if options else {"batch_size": 16})))
        if options:
            assert keys_of(batches) == batches_without(steps, store.bad)
            assert len(flat(keys_of(batches))) >= SAMPLES - len(store.bad)
        else:  # 16 are read together: each worker's begin at a shard's first
            assert len(flat(keys_of(batches))) == SAMPLES
        assert not store.bad & set(flat(keys_of(batches)))
        assert dataset.skipped == len(store.bad)
        check_values(batches, good)


def test_damage_of_raw_pixels_is_noticed_where_the_batch_reads_all_of_the_chunk_alone(
    chunks_flipped: Callable[..., Sick],
) -> None:
    """Single samples of uncompressed pixels are not checked: what is left out depends on the batches."""
    store = chunks_flipped([1, 4, 5, 22], "npy", "none")
    numbers, good = store.numbers, shardstore.open(store.sound, fields=FIELDS)
    noticed = set()
    for batch_size in (1, 3, 5):
        options = {"batch_size": batch_size}
        steps = keys_of(store.reference(**options))
        dataset = store.dataset(**options)
        batches = list(dataset)
        # A batch that reads a damaged chunk whole is looked at closely, and loses also parts of other damaged ones.
        bad = set()
        for step in steps:
            chunks = Counter(numbers[key] // CHUNK for key in step if key in numbers)
            if CHUNK in chunks.values():
                bad |= store.bad & set(step)
        assert keys_of(batches) == batches_without(steps, bad)
        assert dataset.skipped == len(bad)
        noticed.add(len(bad))
        for batch in batches:
            for image, key in zip(batch.image, batch.key, strict=True):
                # One byte of a chunk is another: one of its two pictures differs.
                assert key in store.bad or torch.equal(image, good[key].image)
        given = {k: i for b in batches for k, i in zip(b.key, b.image, strict=True)}
        wrong = {key for key, image in given.items() if not torch.equal(image, good[key].image)}
        assert len(wrong) <= len(store.bad - bad)
        assert wrong or batch_size > 1
    assert 0 in noticed
    assert len(noticed) > 1


# -- what is not left out ---------------------------------------------------------------------------------------------


@dataclass
class Refusing:
    """A transform that does not like one sample."""

    key: str
    error: Exception

    def __call__(self, image: Any, label: int, key: str) -> tuple[Any, ...]:
        if key == self.key:
            raise self.error
        return torch.from_numpy(np.array(image)), label, key


@pytest.mark.parametrize("batch_size", [None, BATCH])
@pytest.mark.parametrize(
    ("error", "workers"),
    [
        (ValueError("of mine"), 0),
        (ValueError("of mine"), 2),
        (ImageError("of mine"), 0),
        (DamagedStoreError("of mine"), 2),
    ],
)
def test_errors_of_transforms_are_not_left_out(
    sick: Callable[..., Sick], error: Exception, batch_size: int | None, workers: int
) -> None:
    store = sick("flipped-npy")
    steps = keys_of(store.reference(batch_size=BATCH))
    assert steps[9][0] in store.bad
    assert steps[9][1] not in store.bad
    for key in (steps[9][1], steps[1][1]):  # beside bad samples, and in a batch without
        options = {"batch_size": batch_size, "transforms": Refusing(key, error)}
        text = text_of(failure(store.dataset(**options), type(error), workers))
        assert "of mine" in text
        assert key in text or type(error) is not ValueError  # errors of ours say themselves where they are from
    # A bad sample never gets that far.
    dataset = store.dataset(batch_size=batch_size, transforms=Refusing(steps[9][0], error))
    list(loader_of(dataset, workers))
    assert dataset.skipped == len(store.bad)


def too_few(*values: Any) -> tuple[Any, ...]:
    return values[1:]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [None, BATCH])
def test_wrong_options_are_not_left_out(sick: Callable[..., Sick], batch_size: int | None, workers: int) -> None:
    dataset = sick("flipped-npy").dataset(batch_size=batch_size, transforms=too_few)
    assert "must return as many" in text_of(failure(dataset, OptionError, workers))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("way", [{"batch_size": 8}, {}])
def test_pictures_of_different_sizes_are_not_left_out(
    make_images: Make, tmp_path: Path, way: dict[str, int], workers: int
) -> None:
    source = make_images(16, classes=1, sizes=[(40, 32), (32, 44)])
    shardstore.convert(source, tmp_path / "out", store="encoded", samples_per_shard=8, workers=1)
    picture = (source / "class0/000001.png").read_bytes()
    file = shard_of(tmp_path / "out", 0, "image.data")
    flip(file, file.read_bytes().find(picture) + 1000)
    options = ReadOptions(on_error="skip")
    dataset = ShardDataset(tmp_path / "out", fields=FIELDS, options=options, **way)  # type: ignore[arg-type]
    assert "--size" in text_of(failure(dataset, StackError, workers))
    # Of one size each, they can be stacked.
    dataset = ShardDataset(tmp_path / "out", fields=FIELDS, options=options, batch_size=1)
    keys = flat(keys_of(dataset))
    assert len(keys) == 16
    assert len(set(keys)) == 15
    assert dataset.skipped == 1


def test_samples_by_number_cannot_be_left_out(sound: Callable[..., Path]) -> None:
    with pytest.raises(OptionError, match="skip"):
        shardstore.open(sound("npy"), options=ReadOptions(on_error="skip"))
    assert shardstore.open(sound("npy"), options=ReadOptions(on_error="raise"))[0].label == 0


@pytest.mark.parametrize("value", ["ignore", "", None, True, "Skip"])
def test_what_to_do_about_errors_is_one_of_two(value: Any) -> None:
    with pytest.raises(OptionError, match="on_error must be 'raise' or 'skip'"):
        ReadOptions(on_error=value)


# -- what stays open --------------------------------------------------------------------------------------------------


def descriptors() -> list[str]:
    """What this process has open."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            continue  # the listing's own
    return found


def shard_files_open(path: Path) -> list[str]:
    """Of these, a store's shards; the index is in memory maps."""
    return [name for name in descriptors() if name.startswith(str(path)) and "/index/" not in name]


@pytest.mark.skipif(
    not os.path.exists("/proc/self/fd"), reason="descriptors are counted in /proc/self/fd, which only Linux has"
)
@pytest.mark.parametrize(("batch_size", "workers"), [(None, 0), (BATCH, 0), (BATCH, 2)])
def test_left_out_samples_leave_nothing_open(
    sick: Callable[..., Sick], copied: Callable[[Path], Path], batch_size: int | None, workers: int
) -> None:
    store = sick("flipped-npy", True)
    path = copied(store.path)
    shard_of(path, 2, "image.data").unlink()  # of which opening fails
    content = shard_of(path, 3, "image.data").read_bytes()
    shard_of(path, 3, "image.data").write_bytes(content[: len(content) // 2])
    dataset = Sick(path, store.bad, store.sound).dataset(batch_size=batch_size, shuffle=True)
    list(loader_of(dataset, workers))
    open_before, threads_before, done = len(descriptors()), threading.active_count(), dataset.skipped
    assert done > SHARD_SAMPLES
    while dataset.skipped < done + 200:
        list(loader_of(dataset, workers))
        files = shard_files_open(path)
        assert len(files) == len(set(files)) <= 32
        assert bool(files) == (workers == 0)  # workers open their own
    gc.collect()
    assert len(descriptors()) <= open_before + 4
    assert threading.active_count() <= threads_before
    del dataset
    gc.collect()
    assert not [name for name in descriptors() if name.startswith(str(path))]


# -- the hint about sorted stores -------------------------------------------------------------------------------------

CLASSES, EACH = 20, 40
HINT = r"is sorted by class: a batch of (\d+) sees about (\d+) classes, where mixed samples would show (\d+)"


@pytest.fixture(scope="module")
def by_class(make_images: Make) -> Path:
    """800 tiny pictures in 20 classes."""
    return make_images(CLASSES * EACH, classes=CLASSES, sizes=((4, 4),))


@pytest.fixture(scope="module")
def sorted_store(make_store: Make, by_class: Path) -> Path:
    """Those, one class a shard."""
    return make_store("npy", source=by_class, store="encoded", samples_per_shard=EACH)


@pytest.fixture(scope="module")
def sorted_zstd(make_store: Make, by_class: Path) -> Path:
    """The same in compressed chunks of 10."""
    return make_store(
        "zarr", source=by_class, store="pixels", codec="zstd", samples_per_shard=EACH, chunk_size=10 * 4 * 4 * 3
    )


def hints(path: Path, **options: Any) -> tuple[ShardDataset, list[warnings.WarningMessage]]:
    """A data set and all that was said when it was made."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dataset = ShardDataset(path, **options)
    return dataset, caught


def classes_of_a_batch(dataset: ShardDataset, samples: int) -> float:
    """On average over full batches."""
    loader = DataLoader(dataset, batch_size=None if dataset.batch_size else samples)
    labels = [batch.label for batch in loader]
    return float(np.mean([len(set(part.tolist())) for part in labels if len(part) == samples]))


@pytest.mark.parametrize("batch_size", [16, 64, 100, 200])
@pytest.mark.parametrize(("fields", "seed"), [(["label"], 0), (["label"], 1), (["label"], 2), (None, 3)])
def test_a_store_that_lies_sorted_by_class_is_mentioned_once(
    sorted_store: Path, batch_size: int, fields: list[str] | None, seed: int
) -> None:
    dataset, caught = hints(sorted_store, batch_size=batch_size, shuffle=True, fields=fields, seed=seed)
    (hint,) = caught
    assert hint.category is UserWarning
    assert hint.filename == __file__
    text = str(hint.message)
    assert str(sorted_store) in text
    assert "--shuffle" in text
    match = re.search(HINT, text)
    assert match
    samples, seen, evenly = map(int, match.groups())
    assert samples == batch_size
    counted = classes_of_a_batch(dataset, batch_size)
    assert counted / 2 <= seen <= counted * 2
    assert counted < evenly
    assert abs(evenly - CLASSES * (1 - (1 - 1 / CLASSES) ** batch_size)) <= 1
    # A pass says nothing more.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(dataset)


def test_the_hint_counts_the_batches_of_a_data_loader_too(sorted_zstd: Path) -> None:
    # A window of two chunks: 20 samples, of two classes at most.
    options = ReadOptions(window_bytes=2 * 10 * 4 * 4 * 3)
    dataset, caught = hints(sorted_zstd, shuffle=True, options=options)
    match = re.search(HINT, str(caught[0].message))
    assert len(caught) == 1
    assert match
    samples, seen, _ = map(int, match.groups())
    counted = classes_of_a_batch(dataset, samples)
    assert counted / 2 <= seen <= counted * 2
    # All of the store in one window.
    assert hints(sorted_zstd, shuffle=True)[1] == []


def test_the_hint_points_at_the_caller_s_line(sorted_store: Path) -> None:
    with pytest.warns(UserWarning, match="sorted by class") as caught:
        ShardDataset(sorted_store, batch_size=16, shuffle=True)
    (hint,) = caught
    assert hint.filename == __file__
    line = Path(__file__).read_text().splitlines()[hint.lineno - 1]
    assert line.strip() == "ShardDataset(sorted_store, batch_size=16, shuffle=True)"


@pytest.mark.skipif(
    not os.path.exists("/proc/self/fd"), reason="descriptors are counted in /proc/self/fd, which only Linux has"
)
def test_the_hint_leaves_nothing_open(sorted_store: Path) -> None:
    dataset, caught = hints(sorted_store, batch_size=16, shuffle=True)
    assert len(caught) == 1  # labels were read
    assert shard_files_open(sorted_store) == []
    next(iter(dataset))
    assert shard_files_open(sorted_store)


def test_labels_that_cannot_be_read_are_no_matter_of_the_hint(
    copied: Callable[[Path], Path], sorted_store: Path
) -> None:
    path = copied(sorted_store)
    assert len(hints(path, batch_size=16, shuffle=True)[1]) == 1
    for shard in range(CLASSES):
        shard_of(path, shard, "label").unlink()
    dataset, caught = hints(path, batch_size=16, shuffle=True)
    assert caught == []
    with pytest.raises(DamagedStoreError, match="label"):
        list(dataset)


class WithClasses(Sequence[tuple[Any, int]]):
    """A torchvision data set of black pictures with these labels."""

    def __init__(self, labels: list[int]) -> None:
        self.labels = labels
        self.classes = [f"class{number}" for number in range(max(labels) + 1)]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: Any) -> Any:
        return Image.new("RGB", (4, 4)), self.labels[number]


def test_a_sorted_store_of_two_classes_is_mentioned_too(make_store: Make) -> None:
    store = make_store("npy", source=WithClasses([0] * 512 + [1] * 512), samples_per_shard=256, store="pixels")
    # In a third of all orders, the shards of each of the two lanes are of one class.
    said = (hints(store, batch_size=64, shuffle=True, fields=["label"], seed=seed) for seed in range(50))
    (_,) = next(caught for dataset, caught in said if classes_of_a_batch(dataset, 64) == 1)


def test_there_is_no_hint_where_nothing_is_to_be_gained(
    sorted_store: Path, make_store: Make, by_class: Path, tmp_path: Path
) -> None:
    options = {"store": "encoded", "samples_per_shard": EACH}
    shuffled = make_store("npy", source=by_class, shuffle=True, **options)
    labels = [number % CLASSES for number in range(CLASSES * EACH)]
    mixed = make_store("npy", source=WithClasses(labels), samples_per_shard=EACH)  # though not by us
    one_shard = make_store("npy", source=by_class, store="encoded", samples_per_shard=CLASSES * EACH)
    flat_folder = tmp_path / "flat"
    flat_folder.mkdir()
    for i in range(200):
        Image.new("RGB", (4, 4), (i, i, i)).save(flat_folder / f"{i:03d}.png")
    no_labels = make_store("npy", source=flat_folder, samples_per_shard=10)
    assert shardstore.open(no_labels).classes is None
    assert shardstore.open(mixed).schema.options["shuffle"] is False
    assert len(shardstore.open(mixed).classes or ()) == CLASSES
    quiet: list[tuple[Path, dict[str, Any]]] = [
        (sorted_store, {"batch_size": 16}),
        (sorted_store, {"batch_size": 16, "shuffle": False}),
        (sorted_store, {}),
        (sorted_store, {"shuffle": True}),  # one worker alone mixes all of the store
        (sorted_store, {"batch_size": 401, "shuffle": True}),  # not two batches
        (sorted_store, {"batch_size": 5000, "shuffle": True}),
        (sorted_store, {"batch_size": 1, "shuffle": True}),
        *((path, {"batch_size": 16, "shuffle": True}) for path in (shuffled, mixed, one_shard, no_labels)),
        *((path, {"shuffle": True}) for path in (shuffled, mixed, one_shard, no_labels)),
    ]
    for path, how in quiet:
        assert hints(path, **how)[1] == [], (path, how)
    assert len(hints(sorted_store, batch_size=16, shuffle=True)[1]) == 1


# -- the smallest shares ----------------------------------------------------------------------------------------------

TAILS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of the data set, of ReadOptions
    "repeat": ({}, {}),
    "drop": ({"drop_last": True}, {}),
    "exact": ({}, {"exact": True}),
}
EDGES = [
    (97, 10, 10, 2, 6),
    (30, 10, 3, 4, 2),
    (1, 1, 1, 4, 2),
    (7, 2, 4, 3, 2),  # no store of 7 samples has 5 shards: 4, or 7
    (7, 1, 7, 3, 2),
    (9, 2, 5, 3, 2),
]


@pytest.fixture(scope="module")
def tiny(make_store: Make, make_images: Make) -> Callable[[int, int], Path]:
    """``tiny(samples, shard_samples)``: a store of tiny pictures."""
    made: dict[tuple[int, int], Path] = {}

    def get(samples: int, shard_samples: int) -> Path:
        if (samples, shard_samples) not in made:
            source = make_images(samples, sizes=((4, 4),))
            made[samples, shard_samples] = make_store("npy", source=source, samples_per_shard=shard_samples)
        return made[samples, shard_samples]

    return get


@pytest.mark.filterwarnings("error:Length of IterableDataset:UserWarning")
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(("samples", "shard_samples", "shards", "ranks", "workers"), EDGES)
def test_ranks_share_whole_batches_at_the_edge(
    tiny: Callable[[int, int], Path], samples: int, shard_samples: int, shards: int, ranks: int, workers: int,
    tail: str,
) -> None:  # fmt: skip
    path = tiny(samples, shard_samples)
    assert shardstore.open(path).schema.shards == shards
    parts = []
    for rank in range(ranks):
        how, read = TAILS[tail]
        options = ReadOptions(rank=rank, world_size=ranks, **read)
        dataset = ShardDataset(path, fields=["key"], batch_size=BATCH, shuffle=True, options=options, **how)
        loader = loader_of(dataset, workers)
        length = len(loader)  # from here on torch counts
        parts.append(keys_of(loader))
        assert length == len(dataset) == len(parts[-1])
        assert all(parts[-1])
    counts, steps = Counter(key for part in parts for key in flat(part)), [len(part) for part in parts]
    every = set(stored_keys(path))
    if tail == "exact":
        assert counts == Counter(every)
        assert max(steps) - min(steps) <= 1
        return
    assert len(set(steps)) == 1
    if tail == "repeat":
        assert counts.keys() == every
        assert counts.total() - samples <= ranks - 1
    else:
        assert set(counts.values()) <= {1}
        assert len(counts) == samples // (BATCH * ranks) * BATCH * ranks
        assert counts.keys() <= every


@pytest.mark.filterwarnings("error:Length of IterableDataset:UserWarning")
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(("samples", "shard_samples", "shards", "ranks", "workers"), EDGES)
def test_ranks_share_single_samples_at_the_edge(
    tiny: Callable[[int, int], Path], samples: int, shard_samples: int, shards: int, ranks: int, workers: int,
    tail: str,
) -> None:  # fmt: skip
    path = tiny(samples, shard_samples)
    parts = []
    for rank in range(ranks):
        how, read = TAILS[tail]
        options = ReadOptions(rank=rank, world_size=ranks, **read)
        dataset = ShardDataset(path, fields=["key"], shuffle=True, options=options, **how)
        loader = loader_of(dataset, workers)
        assert len(loader) == -(-len(dataset) // BATCH)
        parts.append(keys_of(loader))
        assert len(flat(parts[-1])) == len(dataset)
    counts = Counter(key for part in parts for key in flat(part))
    sizes, numbers = [[len(step) for step in part] for part in parts], [len(flat(part)) for part in parts]
    every = set(stored_keys(path))
    if tail == "exact":
        assert counts == Counter(every)
        assert max(numbers) - min(numbers) <= 1
        return
    assert sizes == [sizes[0]] * ranks  # equal steps, of equal batches
    if tail == "repeat":
        assert counts.keys() == every
        assert counts.total() - samples <= ranks - 1
    else:
        assert set(counts.values()) <= {1}
        assert samples - len(counts) <= ranks - 1
        assert counts.keys() <= every


class OneTooShort(ShardDataset):
    """A length that is wrong."""

    def __len__(self) -> int:
        return super().__len__() - 1


@pytest.mark.filterwarnings("error:Length of IterableDataset:UserWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_torch_says_so_where_a_length_is_wrong(tiny: Callable[[int, int], Path], workers: int) -> None:
    loader = loader_of(OneTooShort(tiny(97, 10), fields=["key"], batch_size=BATCH), workers)
    assert len(loader) == 32
    with pytest.raises(UserWarning, match="Length of IterableDataset"):
        list(loader)
