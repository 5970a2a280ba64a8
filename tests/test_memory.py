"""Batches in memory that is used again: the ring between workers and trainer, threads that read ahead, whole reads.

What is looked for above all is a batch that changes under its user's hands, and things that are left behind.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import shardstore
from shardstore import DamagedStoreError, OptionError, ReadOptions, ShardDataset
from shardstore.loading import ring
from shardstore.store import aio, files
from shardstore.store.chunks import Reader
from shardstore.store.index import load

Make = Callable[..., Path]
Values = dict[str, dict[str, Any]]

# Tests take more workers than a small machine has cores, and leave out samples on purpose.
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:left out sample:UserWarning"),
]
linux = pytest.mark.skipif(sys.platform != "linux", reason="the ring and what is looked at in /proc are Linux's")

SAMPLES, SHARD_SAMPLES, BATCH = 330, 24, 6  # 14 shards, the last of 18; 55 whole batches
FIELDS = ["image", "label", "key"]
HANG = 120  # seconds; then it is an error, however busy the machine
# Its workers then need no seconds for importing torch.
multiprocessing.set_forkserver_preload(["torch"])


# -- stores, loaders, values ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pictures(make_images: Make) -> Path:
    return make_images(SAMPLES, sizes=((22, 20),))


@pytest.fixture(scope="module")
def store(make_store: Make, pictures: Path) -> Path:
    """Uncompressed pixels of 1,320 bytes: read straight into the batch. Five to a chunk."""
    return make_store(
        "npy", source=pictures, store="pixels", samples_per_shard=SHARD_SAMPLES, chunk_size=5 * 1320, shuffle=True
    )


@pytest.fixture(scope="module")
def zstd(make_store: Make, pictures: Path) -> Path:
    return make_store(
        "zarr", source=pictures, store="pixels", codec="zstd", samples_per_shard=SHARD_SAMPLES, chunk_size=5 * 1320
    )


@pytest.fixture(scope="module")
def encoded(make_store: Make, pictures: Path) -> Path:
    return make_store("zarr", source=pictures, store="encoded", samples_per_shard=SHARD_SAMPLES)


@pytest.fixture(scope="module")
def rich(make_store: Make) -> Path:
    """Fields of many kinds, beside pixels that are cut from cached chunks."""
    random = np.random.default_rng(0)
    samples = [
        {
            "image": random.integers(0, 256, (16, 16, 3), np.uint8),
            "label": i % 3,
            "key": f"{i:06d}",
            "text": f"é{i}" * (i % 4),
            "box": random.random((2, 3)),
            "score": np.float32(i / 7),
            "count": np.int16(-i),
            "mask": random.integers(0, 2, (5, 3)).astype(bool),
        }
        for i in range(SAMPLES)
    ]
    return make_store("npy", source=samples, store="pixels", samples_per_shard=SHARD_SAMPLES, shuffle=True)


@pytest.fixture(scope="module")
def stores(store: Path, zstd: Path, encoded: Path, rich: Path, make_store: Make, pictures: Path) -> dict[str, Path]:
    small = make_store("zarr", source=pictures, store="pixels", size=16, samples_per_shard=SHARD_SAMPLES)
    return {"large": store, "small": small, "zstd": zstd, "encoded": encoded, "rich": rich}


@pytest.fixture(scope="module")
def values() -> Callable[[Path], Values]:
    """``values(store)``: what it holds, sample by sample, by key."""
    known: dict[Path, Values] = {}

    def get(path: Path) -> Values:
        if path not in known:
            samples = shardstore.open(path, fields=fields_of(path))
            known[path] = {s.key: {f: _own(s[f]) for f in s._fields} for s in samples}
            assert len(known[path]) == SAMPLES
        return known[path]

    return get


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def fields_of(path: Path) -> list[str]:
    return [field.name for field in load(path).schema.fields]


def dataset_of(path: Path, way: str = "whole", *, on: bool = True, **options: Any) -> ShardDataset:
    """Whole batches, or single samples (``way`` "habit"); with the ring on or not."""
    options.setdefault("fields", fields_of(path))
    options.setdefault("options", ReadOptions(ring=on))
    return ShardDataset(path, batch_size=BATCH if way == "whole" else None, **options)


def loader_of(dataset: ShardDataset, workers: int = 2, context: str = "fork", **options: Any) -> DataLoader[Any]:
    """A plain DataLoader, which makes batches where the data set does not."""
    options.setdefault("batch_size", None if dataset.batch_size else BATCH)
    if workers:
        options |= {"multiprocessing_context": context, "timeout": HANG}
    return DataLoader(dataset, num_workers=workers, **options)


def check(batch: Any, known: Values) -> None:
    """A batch holds what the store does."""
    for i, key in enumerate(batch.key):
        for name, expected in known[key].items():
            found = batch[name][i]
            if isinstance(expected, torch.Tensor):
                assert found.dtype == expected.dtype
                assert torch.equal(found, expected), (key, name)
            else:
                assert found == expected, (key, name)


def check_all(batches: Iterable[Any], known: Values) -> None:
    """They hold every sample of the store once, rightly."""
    keys: list[str] = []
    for batch in batches:
        check(batch, known)
        keys += batch.key
    assert sorted(keys) == sorted(known)


def keys_of(batches: Iterable[Any]) -> list[list[str]]:
    return [list(batch.key) for batch in batches]


def wait_until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + HANG
    while not happened():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


# -- what the system says ---------------------------------------------------------------------------------------------


def rings() -> list[tuple[int, int]]:
    """Where rings are mapped in this process."""
    found = []
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        if "memfd:shardstore" in line:
            first, _, last = line.split()[0].partition("-")
            found.append((int(first, 16), int(last, 16)))
    return found


def in_ring(tensor: torch.Tensor) -> bool:
    return any(first <= tensor.data_ptr() < last for first, last in rings())


def descriptor_count() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def nothing_left_in_shared_memory() -> Iterator[None]:
    """Names that appear and stay are an error; those of other tests that run now come and go."""
    before = set(os.listdir("/dev/shm"))
    yield
    left = set(os.listdir("/dev/shm")) - before

    def gone() -> bool:
        left.intersection_update(os.listdir("/dev/shm"))
        return not left

    wait_until(gone)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# -- every value, on every way ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", [True, False], ids=["ring", "torch"])
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("way", ["whole", "habit"])
@pytest.mark.parametrize("kind", ["large", "small", "zstd", "encoded", "rich"])
def test_batches_hold_the_values_of_the_store(
    stores: dict[str, Path], values: Callable[[Path], Values], kind: str, way: str, workers: int, on: bool
) -> None:
    path, seen = stores[kind], []
    for batch in loader_of(dataset_of(path, way, on=on, shuffle=True), workers):
        check(batch, values(path))  # each before the next is asked for
        seen.append(list(batch.key))
        if "image" in batch._fields:
            assert batch.image.is_contiguous(memory_format=torch.channels_last)
    assert sorted(itertools.chain(*seen)) == sorted(values(path))
    if way == "whole":
        assert seen == keys_of(dataset_of(path, shuffle=True))


@pytest.mark.parametrize(("context", "workers"), [("spawn", 1), ("forkserver", 2), ("forkserver", 3)])
@pytest.mark.parametrize("way", ["whole", "habit"])
def test_batches_of_workers_that_are_not_forked(
    rich: Path, values: Callable[[Path], Values], way: str, context: str, workers: int
) -> None:
    loader = loader_of(dataset_of(rich, way, shuffle=True), workers, context)
    kept, carried = [], 0
    for i, batch in enumerate(loader):
        carried += sys.platform == "linux" and in_ring(batch.image)
        if i % 3 == 0:
            kept.append(batch)
        check(batch, values(rich))
    assert carried or sys.platform != "linux"
    del loader
    for batch in kept:
        check(batch, values(rich))


def to_float(image: torch.Tensor) -> torch.Tensor:
    return image.to(torch.float32) / 3 - 1


def joint(image: torch.Tensor, label: int, key: str) -> Any:
    return image[:, ::2].to(torch.float64), torch.tensor([label, label + 1], dtype=torch.int32), key


@pytest.mark.parametrize("context", ["fork", "forkserver"])
@pytest.mark.parametrize("way", ["whole", "habit"])
@pytest.mark.parametrize("on", [True, False], ids=["ring", "torch"])
def test_transformed_batches(store: Path, values: Callable[[Path], Values], way: str, context: str, on: bool) -> None:
    known = values(store)
    one = dataset_of(store, way, on=on, fields=FIELDS, transform=to_float, image_type="tensor")
    two = dataset_of(store, way, on=on, fields=FIELDS, transforms=joint, image_type="tensor")
    seen: list[str] = []
    for first, second in zip(loader_of(one, 2, context), loader_of(two, 2, context), strict=True):
        for i, key in enumerate(first.key):
            assert torch.equal(first.image[i], to_float(known[key]["image"]))
            assert first.label[i] == known[key]["label"]
        for i, key in enumerate(second.key):
            image, label, _ = joint(*(known[key][f] for f in FIELDS))
            assert (second.image.dtype, second.label.dtype) == (torch.float64, torch.int32)
            assert torch.equal(second.image[i], image)
            assert torch.equal(second.label[i], label)
        seen += first.key
    assert sorted(seen) == sorted(known)


@pytest.mark.parametrize("context", ["fork", "forkserver"])
@pytest.mark.parametrize("way", ["whole", "habit"])
@pytest.mark.parametrize("on", [True, False], ids=["ring", "torch"])
def test_workers_that_stay_for_three_passes(
    store: Path, values: Callable[[Path], Values], way: str, context: str, on: bool
) -> None:
    dataset = dataset_of(store, way, on=on, shuffle=True)
    loader = loader_of(dataset, 2, context, persistent_workers=True)
    passes = []
    for _ in range(3):
        # Some are kept over the passes, most are not.
        batches, keys = [], []
        for i, batch in enumerate(loader):
            check(batch, values(store))
            keys += batch.key
            batches += [batch] if i % 9 == 0 else []
        assert sorted(keys) == sorted(values(store))
        passes.append((keys, batches))
    assert len({tuple(keys) for keys, _ in passes}) == 3
    for _, batches in passes:
        for batch in batches:
            check(batch, values(store))


def test_a_pass_that_is_broken_off_and_begun_anew_with_workers_that_stay(
    store: Path, values: Callable[[Path], Values]
) -> None:
    loader = loader_of(dataset_of(store, shuffle=True), 2, persistent_workers=True)
    kept = []
    for taken in (1, 3, 5, 2, 7, 4, 1, 6):
        kept += list(itertools.islice(iter(loader), taken))
    keys: list[str] = []
    for batch in loader:
        check(batch, values(store))
        keys += batch.key
    assert sorted(keys) == sorted(values(store))
    for batch in kept:
        check(batch, values(store))


# -- kept batches -----------------------------------------------------------------------------------------------------


@linux
@pytest.mark.parametrize("way", ["whole", "habit"])
@pytest.mark.parametrize("workers", [1, 2])
def test_all_batches_of_an_epoch_may_be_kept(
    monkeypatch: pytest.MonkeyPatch, rich: Path, values: Callable[[Path], Values], way: str, workers: int
) -> None:
    monkeypatch.setattr(ring, "_SMALL", 0)  # or these small batches would have more slots than an epoch fills
    loader = loader_of(dataset_of(rich, way), workers)
    iterator = iter(loader)
    pids = [worker.pid for worker in iterator._workers]
    batches = list(iterator)
    assert len(batches) >= 50
    carried = sum(in_ring(batch.image) for batch in batches)
    assert 3 * workers <= carried <= 6 * workers  # the others came torch's way
    check_all(batches, values(rich))
    del iterator, loader
    wait_until(lambda: not any(map(is_alive, pids)))
    gc.collect()
    check_all(batches, values(rich))
    # Other workers now have rings of their own.
    check_all(loader_of(dataset_of(rich, way), workers), values(rich))
    check_all(batches, values(rich))


@pytest.mark.parametrize("way", ["whole", "habit"])
@pytest.mark.parametrize(
    "part",
    [
        lambda batch: batch.image[3, 0],
        lambda batch: batch.image[3:4].permute(0, 2, 3, 1)[:, ::2, 1:],
        lambda batch: batch.image.numpy()[3],
        lambda batch: batch.label[3:],
        lambda batch: batch.box.view(-1)[7:9],
        lambda batch: batch.mask,
    ],
    ids=["channel", "strided", "numpy", "label", "flat", "bool"],
)
def test_a_part_of_a_batch_may_be_kept_alone(rich: Path, way: str, part: Callable[[Any], Any]) -> None:
    kept = []
    for batch in loader_of(dataset_of(rich, way), 2):
        kept.append((part(batch), copy.deepcopy(part(batch))))
        del batch
    assert len(kept) >= 50
    assert all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in kept)
    assert len({np.asarray(a).tobytes() for a, _ in kept}) > 1


@linux
@pytest.mark.parametrize("name", ["label", "image", "score"])
def test_one_tensor_holds_the_memory_of_all(rich: Path, values: Callable[[Path], Values], name: str) -> None:
    kept = []
    for batch in loader_of(dataset_of(rich), 1):
        kept.append((list(batch.key), batch[name], in_ring(batch[name])))
        del batch
    assert sum(carried for _, _, carried in kept) >= 3
    for keys, tensor, _ in kept:
        for key, value in zip(keys, tensor, strict=True):
            assert torch.equal(value, torch.as_tensor(values(rich)[key][name]))


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("threads", [0, 2])
def test_what_is_written_to_a_kept_batch_is_in_no_other(
    store: Path, values: Callable[[Path], Values], workers: int, threads: int
) -> None:
    loader = loader_of(dataset_of(store, threads=threads), workers)
    kept: list[Any] = []
    for _ in range(2):
        for i, batch in enumerate(loader):
            check(batch, values(store))
            batch.image.fill_(i)
            batch.label.fill_(-i)
            if i % 4 == 0:
                kept.append((i, batch))
    for i, batch in kept:
        assert (batch.image == i).all()
        assert (batch.label == -i).all()


# -- it is the ring that carries them ---------------------------------------------------------------------------------


@linux
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("way", ["whole", "habit"])
@pytest.mark.parametrize("transform", [None, to_float])
def test_few_slots_carry_all_batches(store: Path, way: str, workers: int, transform: Any) -> None:
    loader = loader_of(dataset_of(store, way, transform=transform, image_type="tensor"), workers)
    places, carried = set(), 0
    for batch in loader:
        if in_ring(batch.image):
            carried += 1
            places.add(batch.image.data_ptr())
        del batch
    # Each worker's first batch tells how large slots must be, and while that is not known none is there.
    assert carried >= 54 - 3 * workers
    assert len(places) <= 6 * workers


@linux
@pytest.mark.parametrize("way", ["whole", "habit"])
def test_without_the_ring_none_is_mapped(store: Path, way: str) -> None:
    gc.collect()
    before = rings()
    for batch in loader_of(dataset_of(store, way, on=False), 2):
        assert not in_ring(batch.image)
    assert set(rings()) <= set(before)


@linux
@pytest.mark.parametrize("on", [True, False], ids=["ring", "torch"])
def test_a_map_style_data_set_goes_by_the_option_too(store: Path, on: bool) -> None:
    dataset = shardstore.open(store, fields=FIELDS, options=ReadOptions(ring=on))
    gc.collect()
    before = rings()
    carried = 0
    for batch in DataLoader(dataset, BATCH, num_workers=1, multiprocessing_context="fork"):
        carried += in_ring(batch.image)
    assert bool(carried) == on
    assert on or set(rings()) <= set(before)


# -- nothing is left --------------------------------------------------------------------------------------------------


@linux
@pytest.mark.parametrize("on", [True, False], ids=["ring", "torch"])
def test_nothing_is_left_of_workers_that_are_killed(store: Path, values: Callable[[Path], Values], on: bool) -> None:
    with nothing_left_in_shared_memory():
        iterator = iter(loader_of(dataset_of(store, on=on)))
        kept = [next(iterator) for _ in range(20)]
        for worker in iterator._workers:
            os.kill(worker.pid, signal.SIGKILL)

        def read_on(batches: Iterable[Any]) -> None:
            for batch in batches:
                check(batch, values(store))

        # A batch that travels torch's way, beyond the slots too, is fetched from its worker: of a dead one that fails
        # in torch with a connection's error, should it be unpickled before torch has missed the worker.
        with pytest.raises((RuntimeError, ConnectionError)) as caught:
            read_on(iterator)
        assert isinstance(caught.value, ConnectionError) or "worker" in str(caught.value)
        del iterator, caught
        for batch in kept:
            check(batch, values(store))
        check_all(loader_of(dataset_of(store, on=on)), values(store))
        del kept, batch


@linux
def test_nothing_is_left_of_passes_that_end_or_are_broken_off(store: Path) -> None:
    with nothing_left_in_shared_memory():
        list(loader_of(dataset_of(store)))
        kept = list(itertools.islice(loader_of(dataset_of(store)), 9))
    assert len(kept) == 9


TRAINER = """
import json, sys, time
from shardstore import ShardDataset
from torch.utils.data import DataLoader

dataset = ShardDataset(sys.argv[1], batch_size=6)
iterator = iter(DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork"))
kept = [next(iterator) for _ in range(20)]
print(json.dumps([worker.pid for worker in iterator._workers]), flush=True)
time.sleep(1000)
"""


@linux
def test_nothing_is_left_of_a_trainer_that_is_killed(store: Path) -> None:
    with nothing_left_in_shared_memory():
        trainer = subprocess.Popen([sys.executable, "-c", TRAINER, str(store)], stdout=subprocess.PIPE, text=True)
        assert trainer.stdout is not None
        pids = json.loads(trainer.stdout.readline())
        assert all(map(is_alive, pids))
        trainer.kill()
        trainer.communicate()
        wait_until(lambda: not any(map(is_alive, pids)))


@linux
def test_batches_kept_in_the_ring_cost_no_descriptors(store: Path) -> None:
    iterator = iter(loader_of(dataset_of(store), 1))
    next(iterator)  # before there is a ring
    kept, counts = [], []
    for batch in iterator:
        if in_ring(batch.image) and len(kept) < 4:
            kept.append(batch)
            counts.append(descriptor_count())
    assert len(kept) == 4
    assert len(set(counts)) == 1


@linux
def test_passes_leave_neither_descriptors_nor_maps(store: Path) -> None:
    loader, counts = loader_of(dataset_of(store)), []
    for i in range(10):
        carried = 0
        for batch in loader:
            carried += in_ring(batch.image)
        del batch
        assert carried
        counts.append(descriptor_count())
        # The last pass's may stay until others come.
        gc.collect()
        assert len(rings()) <= 2, i
    assert len(set(counts[1:])) == 1, counts


@linux
def test_rings_of_batches_that_are_kept_stay_mapped_until_these_die(store: Path) -> None:
    loader = loader_of(dataset_of(store), 1)
    kept = [next(b for b in iter(loader) if in_ring(b.image)) for _ in range(3)]
    list(loader)
    gc.collect()
    assert len(rings()) == 4
    assert all(in_ring(batch.image) for batch in kept)
    del kept
    list(loader)
    gc.collect()
    assert len(rings()) == 1


# -- forks of the trainer ---------------------------------------------------------------------------------------------


def in_child(function: Callable[[], None]) -> int:
    """Run it in a fork of this process. Returns the exit status."""
    pid = os.fork()
    if not pid:
        try:
            function()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1]


@linux
@pytest.mark.parametrize("way", ["whole", "habit"])
def test_a_forked_process_frees_no_slot_of_its_parent(store: Path, values: Callable[[Path], Values], way: str) -> None:
    iterator = iter(loader_of(dataset_of(store, way), 1))
    kept = list(itertools.islice(iterator, 5))
    assert sum(in_ring(batch.image) for batch in kept) >= 2

    def drop() -> None:
        for batch in kept:
            check(batch, values(store))
        del batch
        kept.clear()
        gc.collect()

    assert in_child(drop) == 0
    assert len(kept) == 5
    for _ in range(30):
        check(next(iterator), values(store))
    for batch in kept:
        check(batch, values(store))
    # When they die here, their slots are free again.
    del batch
    kept.clear()
    assert sum(in_ring(batch.image) for batch in iterator)


@linux
def test_a_forked_process_may_train_itself(store: Path, values: Callable[[Path], Values]) -> None:
    kept = list(itertools.islice(loader_of(dataset_of(store), 1), 9))

    def train() -> None:
        carried = 0
        for batch in loader_of(dataset_of(store), 2):
            check(batch, values(store))
            carried += in_ring(batch.image)
        assert carried > 20

    assert in_child(train) == 0
    for batch in kept:
        check(batch, values(store))


# -- pickles, copies, collate_fn --------------------------------------------------------------------------------------


def pickled(batch: Any) -> tuple[list[str], bytes]:
    if isinstance(batch, list):
        batch = torch.utils.data.default_collate(batch)
    return batch.key, pickle.dumps(batch)


@pytest.mark.parametrize("way", ["whole", "habit"])
def test_a_pickle_made_in_a_worker_holds_values(rich: Path, values: Callable[[Path], Values], way: str) -> None:
    loader = loader_of(dataset_of(rich, way), 2, collate_fn=pickled)
    found = list(loader)
    del loader  # and with it the workers
    gc.collect()
    batches = [pickle.loads(data) for _, data in found]
    assert keys_of(batches) == [keys for keys, _ in found]
    check_all(batches, values(rich))


def test_pickles_and_copies_of_what_arrived(rich: Path, values: Callable[[Path], Values]) -> None:
    copies = []
    for batch in loader_of(dataset_of(rich), 1):
        copies.append((pickle.dumps(batch), copy.deepcopy(batch)))
        del batch
    check_all([c for _, c in copies], values(rich))
    check_all([pickle.loads(p) for p, _ in copies], values(rich))
    assert not any(in_ring(c.image) for _, c in copies)


def deeply_copied(batch: Any) -> Any:
    return copy.deepcopy(batch)


def as_dict(batch: Any) -> dict[str, Any]:
    return {name: batch[name] for name in batch._fields}


def as_cat(batch: Any) -> list[Any]:
    return [list(batch.key), torch.cat([batch.image.flatten(1).to(torch.int64), batch.label[:, None]], 1)]


def as_parts(batch: Any) -> Any:
    """Views that share a slot, one of them twice, of another order of dimensions, and one of no elements."""
    return batch._replace(image=batch.image[:, :, ::2].flip(0), label=batch.label.expand(2, BATCH), box=batch.box[:0])


def twice(batch: Any) -> Any:
    """The same object, and another one of the same slot."""
    return batch, batch, [batch._replace(score=batch.score + 0)]


@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_collate_fn_makes_of_a_batch_arrives(rich: Path, values: Callable[[Path], Values], workers: int) -> None:
    def arrived(collate_fn: Callable[[Any], Any]) -> list[Any]:
        kept = list(loader_of(dataset_of(rich), workers, collate_fn=collate_fn))
        assert len(kept) == 55
        # Once more, dropping each.
        for a, b in zip(loader_of(dataset_of(rich), workers, collate_fn=collate_fn), kept, strict=True):
            assert_equal(a, b)
        return kept

    known = values(rich)
    kind = type(next(iter(dataset_of(rich))))
    check_all(arrived(deeply_copied), known)
    check_all([kind(**parts) for parts in arrived(as_dict)], known)
    for keys, both in arrived(as_cat):
        for key, row in zip(keys, both, strict=True):
            assert torch.equal(row[:-1], known[key]["image"].flatten().to(torch.int64))
            assert row[-1] == known[key]["label"]
    for batch in arrived(as_parts):
        assert batch.box.shape == (0, 2, 3)
        for i, key in enumerate(batch.key):
            assert torch.equal(batch.image.flip(0)[i], known[key]["image"][:, ::2])
            assert batch.label[:, i].tolist() == [known[key]["label"]] * 2
    both = arrived(twice)
    for place in range(2):
        check_all([batch[place] for batch in both], known)
    check_all([batch[2][0] for batch in both], known)


def assert_equal(a: Any, b: Any) -> None:
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert_equal(list(a.items()), list(b.items()))
    elif isinstance(a, tuple | list):
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    else:
        assert a == b


# -- where something is missing ---------------------------------------------------------------------------------------


@linux
@pytest.mark.parametrize("way", ["whole", "habit"])
def test_without_memfd_create(
    monkeypatch: pytest.MonkeyPatch, store: Path, values: Callable[[Path], Values], way: str
) -> None:
    monkeypatch.delattr(os, "memfd_create")  # as on macOS and Windows, whose way is taken then
    gc.collect()
    before = rings()
    check_all(list(loader_of(dataset_of(store, way))), values(store))
    assert set(rings()) <= set(before)


@pytest.mark.parametrize("read_at", [getattr(os, "preadv", files._pread), files._pread, files._seek_and_read])
@pytest.mark.parametrize(("workers", "threads"), [(0, 0), (2, 0), (0, 4), (1, 2)])
def test_other_ways_to_read(
    monkeypatch: pytest.MonkeyPatch,
    stores: dict[str, Path],
    values: Callable[[Path], Values],
    read_at: Any,
    workers: int,
    threads: int,
) -> None:
    calls: list[int] = []

    def counted(*args: Any) -> int:
        calls.append(1)
        return int(read_at(*args))

    # The reads of systems without io_submit and preadv, which this one has; the count proves that they were taken.
    monkeypatch.setattr(aio, "ON", False)
    monkeypatch.setattr(files, "read_at", counted)
    for kind in ("large", "encoded", "zstd"):
        path = stores[kind]
        check_all(list(loader_of(dataset_of(path, shuffle=True, threads=threads), workers)), values(path))
        assert calls or workers


@linux
@pytest.mark.parametrize("refused", ["setup", "submit"])
@pytest.mark.parametrize(("workers", "threads"), [(0, 0), (2, 0), (0, 4)])
def test_io_submit_refused(
    monkeypatch: pytest.MonkeyPatch,
    stores: dict[str, Path],
    values: Callable[[Path], Values],
    refused: str,
    workers: int,
    threads: int,
) -> None:
    # A number that no system call has is answered as a sandbox answers; the system's own cannot be taken away here.
    setup, submit, events = aio._CALLS or pytest.skip("no io_submit on this machine")
    nowhere = 1 << 20
    calls = (nowhere, submit, events) if refused == "setup" else (setup, nowhere, events)
    monkeypatch.setattr(aio, "_CALLS", calls)
    monkeypatch.setattr(aio, "_waiting", [])
    check_all(list(loader_of(dataset_of(stores["large"], threads=threads), workers)), values(stores["large"]))
    assert bool(aio._waiting) == (refused == "submit" and not workers)


@linux
@pytest.mark.parametrize("has_fadvise", [True, False])
@pytest.mark.parametrize("threads", [0, 4])
def test_reads_from_a_slow_disk_are_announced(
    monkeypatch: pytest.MonkeyPatch,
    stores: dict[str, Path],
    values: Callable[[Path], Values],
    has_fadvise: bool,
    threads: int,
) -> None:
    # Any disk is slow then; this machine's page cache cannot be emptied for a test.
    monkeypatch.setattr(files, "_PIECE_SECONDS", -1.0)
    announced: list[tuple[int, int]] = []

    def counted(fd: int, offset: int, nbytes: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        announced.append((offset, nbytes))

    monkeypatch.setattr(os, "posix_fadvise", counted)
    if not has_fadvise:
        monkeypatch.delattr(os, "posix_fadvise")  # as on macOS and Windows
    for kind in ("large", "encoded"):
        announced.clear()
        check_all(list(loader_of(dataset_of(stores[kind], threads=threads), 0)), values(stores[kind]))
        assert bool(announced) == has_fadvise
    monkeypatch.setattr(files, "_PIECE_SECONDS", 1.0)
    dataset = dataset_of(stores["large"])
    announced.clear()
    check_all(list(loader_of(dataset, 0)), values(stores["large"]))
    assert not announced


@linux
def test_io_submit_reads_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # No piece may take the other way. 150 pieces need three submissions.
    if aio._CALLS is None:
        pytest.skip("no io_submit on this machine")
    monkeypatch.setattr(files, "read_at", lambda *_: 0)
    file = tmp_path / "bytes.bin"
    content = np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8)
    file.write_bytes(content.tobytes())
    pieces = np.zeros(150, aio.PIECE)
    rng = np.random.default_rng(1)
    pieces["offset"], pieces["nbytes"] = rng.integers(0, 90_000, 150), rng.integers(1, 10_000, 150)
    pieces["begin"] = np.cumsum(pieces["nbytes"]) - pieces["nbytes"]
    out = np.zeros(int(pieces["nbytes"].sum()), np.uint8)
    reader = files.Files()
    assert reader.read_pieces([str(file)], pieces, out)
    for _, offset, begin, nbytes in pieces.tolist():
        assert (out[begin : begin + nbytes] == content[offset : offset + nbytes]).all()
    pieces[149]["offset"] = 100_000 - pieces[149]["nbytes"] + 1  # one byte is not there
    assert not reader.read_pieces([str(file)], pieces, out)
    reader.close()


@linux
@pytest.mark.parametrize("limit", [0, 100, 4096, 20_000, 40_000])
def test_a_ring_too_small(
    monkeypatch: pytest.MonkeyPatch, store: Path, values: Callable[[Path], Values], limit: int
) -> None:
    # A batch takes 8 KB; one that is too large for the true limit would take 85 MB.
    monkeypatch.setattr(ring, "_LIMIT", limit)
    gc.collect()
    before = rings()
    check_all(list(loader_of(dataset_of(store))), values(store))
    carried = sum([in_ring(batch.image) for batch in loader_of(dataset_of(store))])
    if limit // 3 < BATCH * 1320:
        assert carried == 0
        assert set(rings()) <= set(before)
    else:
        assert carried


# -- batches that grow ------------------------------------------------------------------------------------------------


class Grow:
    """A picture of a size that follows from what it shows: up to 60 times as much as the smallest."""

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        times = 1 + int(image[0, 0, 0]) % 60
        return image[:, :4, :4].repeat(1, times, 1)


class Creep:
    """A picture that is larger the larger its class and its first value, in small steps."""

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return image.flatten()[: 200 + 3 * int(image[0, 0, 0])].clone()


@pytest.mark.parametrize("transform", [Grow(), Creep()], ids=["much", "little"])
@pytest.mark.parametrize(("workers", "context", "threads"), [(1, "fork", 0), (2, "fork", 0), (2, "forkserver", 0),
                                                             (0, "fork", 3), (1, "fork", 2)])  # fmt: skip
def test_batches_that_grow(
    encoded: Path,
    values: Callable[[Path], Values],
    transform: Callable[[Any], Any],
    workers: int,
    context: str,
    threads: int,
) -> None:
    known, kept = values(encoded), []
    dataset = ShardDataset(
        encoded, fields=FIELDS, batch_size=1, shuffle=True, transform=transform, image_type="tensor", threads=threads
    )
    sizes, carried = set(), 0
    for i, batch in enumerate(loader_of(dataset, workers, context)):
        assert torch.equal(batch.image[0], transform(known[batch.key[0]]["image"]))
        sizes.add(batch.image.shape)
        carried += bool(workers and i % 10 == 9 and sys.platform == "linux" and in_ring(batch.image))
        if i % 30 == 0:
            kept.append(batch)
    assert len(sizes) > 30
    assert carried or not workers or sys.platform != "linux"
    for batch in kept:
        assert torch.equal(batch.image[0], transform(known[batch.key[0]]["image"]))


# -- threads ----------------------------------------------------------------------------------------------------------


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("shardstore")]


@pytest.fixture
def no_thread_left() -> Iterator[None]:
    assert our_threads() == []
    yield
    assert our_threads() == []


@pytest.mark.usefixtures("no_thread_left")
@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("kind", ["large", "small", "zstd", "encoded", "rich"])
def test_threads_give_the_same_batches(
    stores: dict[str, Path], values: Callable[[Path], Values], kind: str, threads: int
) -> None:
    path = stores[kind]
    plain, ahead = dataset_of(path, shuffle=True), dataset_of(path, shuffle=True, threads=threads)
    for _ in range(3):
        seen = []
        for batch in loader_of(ahead, 0):
            assert len(our_threads()) <= threads
            check(batch, values(path))
            seen.append(list(batch.key))
        assert seen == keys_of(loader_of(plain, 0))
        kept = list(ahead)
        check_all(kept, values(path))
        assert keys_of(kept) == keys_of(plain)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", ["large", "encoded"])
def test_threads_in_workers(stores: dict[str, Path], values: Callable[[Path], Values], kind: str, workers: int) -> None:
    path = stores[kind]
    plain, ahead = dataset_of(path, shuffle=True), dataset_of(path, shuffle=True, threads=3)
    for _ in range(3):
        kept = list(loader_of(ahead, workers))
        check_all(kept, values(path))
        assert keys_of(kept) == keys_of(plain)


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_memory_of_this_process_is_used_again(store: Path, threads: int) -> None:
    places = set()
    for batch in loader_of(dataset_of(store, threads=threads), 0):
        places.add(batch.image.data_ptr())
        del batch
    # One is with the trainer, the others wait or are being filled; the first few are there before their size is known.
    assert len(places) <= 2 * (3 * threads + 2)


@pytest.mark.usefixtures("no_thread_left")
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_place_is_exact_though_threads_read_ahead(store: Path, threads: int) -> None:
    plain = dataset_of(store, shuffle=True, seed=5)
    epochs = [keys_of(plain), keys_of(plain)]
    for taken in (0, 1, 7, 54):
        dataset = dataset_of(store, shuffle=True, seed=5, threads=threads)
        iterator = iter(dataset)
        assert keys_of(itertools.islice(iterator, taken)) == epochs[0][:taken]
        state, step_state = json.loads(json.dumps(dataset.state_dict())), dataset.state_at(taken)
        reference = dataset_of(store, shuffle=True, seed=5)
        begun = iter(reference)
        assert len(list(itertools.islice(begun, taken))) == taken
        assert (state, step_state) == (reference.state_dict(), reference.state_at(taken))
        for loaded in (state, step_state):
            for other in (threads, 0):
                resumed = dataset_of(store, shuffle=True, seed=5, threads=other)
                resumed.load_state_dict(loaded)
                assert keys_of(resumed) == epochs[0][taken:]
                assert keys_of(resumed) == epochs[1]
        # Who saved it goes on undisturbed.
        assert keys_of(iterator) == epochs[0][taken:]


@pytest.fixture
def damaged(tmp_path: Path, zstd: Path) -> Path:
    """Compressed pixels, two chunks of which are damaged, 8 samples."""
    path = tmp_path / zstd.name
    shutil.copytree(zstd, path)
    table = load(path).table("image")
    for row in (len(table) // 2, len(table) - 2):
        file = Path(load(path).shard_path(int(table[row]["shard"]), "image"))
        data = bytearray(file.read_bytes())
        data[int(table[row]["offset"]) + int(table[row]["nbytes"]) // 2] ^= 1
        file.write_bytes(data)
    return path


def until_error(batches: Iterable[Any]) -> tuple[list[list[str]], str]:
    """What comes before the error, and that."""
    found: list[list[str]] = []

    def read() -> None:
        for batch in batches:
            found.append(list(batch.key))

    with pytest.raises(DamagedStoreError) as caught:
        read()
    return found, str(caught.value)


@pytest.mark.usefixtures("no_thread_left")
@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("shuffle", [False, True])
def test_an_error_comes_at_its_turn(damaged: Path, threads: int, shuffle: bool) -> None:
    expected = until_error(dataset_of(damaged, shuffle=shuffle))
    assert expected[0] or shuffle
    dataset = dataset_of(damaged, shuffle=shuffle, threads=threads)
    assert until_error(dataset) == expected
    assert our_threads() == []
    again = dataset_of(damaged, shuffle=shuffle, threads=threads)
    assert until_error(loader_of(again, 0)) == expected


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_threads_leave_out_the_same_samples(damaged: Path, threads: int) -> None:
    def batches(threads: int) -> tuple[list[list[str]], int]:
        skip = ReadOptions(on_error="skip")
        dataset = dataset_of(damaged, shuffle=True, threads=threads, options=skip)
        found = keys_of(loader_of(dataset, 0)) + keys_of(loader_of(dataset, 0))
        return found, dataset.skipped

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = batches(0)
        assert expected[1] == 2 * 8
        assert batches(threads) == expected


@pytest.mark.usefixtures("no_thread_left")
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_no_thread_outlives_its_pass(store: Path, values: Callable[[Path], Values], threads: int) -> None:
    dataset = dataset_of(store, threads=threads)
    for batch in loader_of(dataset, 0):
        assert our_threads()
        check(batch, values(store))
        break
    check(batch, values(store))
    assert our_threads() == []
    for loop in (dataset, loader_of(dataset, 0)):
        iterator = iter(loop)
        kept = next(iterator)
        assert our_threads()
        del iterator
        gc.collect()
        assert our_threads() == []
        check(kept, values(store))
    iterator = iter(dataset)
    del iterator  # before its first batch
    assert our_threads() == []
    # Two passes at a time do not get in each other's way.
    for a, b in zip(dataset_of(store, threads=threads), dataset_of(store, threads=threads), strict=True):
        assert a.key == b.key
        check(a, values(store))
        check(b, values(store))


@pytest.mark.usefixtures("no_thread_left")
def test_an_error_of_the_loop_leaves_no_thread(store: Path) -> None:
    def train() -> None:
        for _ in loader_of(dataset_of(store, threads=2), 0):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    gc.collect()
    assert our_threads() == []


@pytest.mark.parametrize(
    "options",
    [
        {"threads": 1},
        {"threads": -1, "batch_size": 8},
        {"threads": 1.5, "batch_size": 8},
        {"threads": "2", "batch_size": 8},
        {"threads": None, "batch_size": 8},
    ],
)
def test_impossible_threads_are_refused(store: Path, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="threads"):
        ShardDataset(store, **options)


@linux
@pytest.mark.parametrize("limit", [1, 2, 4])
@pytest.mark.parametrize("kind", ["large", "encoded"])
def test_threads_keep_few_files_open(
    monkeypatch: pytest.MonkeyPatch, stores: dict[str, Path], values: Callable[[Path], Values], kind: str, limit: int
) -> None:
    # So few open files that threads take them from each other; the true limit would need a store of hundreds of shards.
    monkeypatch.setattr(files.Files.__init__, "__defaults__", (limit, lambda: None))
    path, threads = stores[kind], 4
    dataset = dataset_of(path, shuffle=True, threads=threads)

    def open_files() -> int:
        count = 0
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                name = os.readlink(f"/proc/self/fd/{fd}")
                count += name.startswith(str(path)) and "/index/" not in name
        return count

    for _ in range(3):
        most = 0
        for batch in dataset:
            most = max(most, open_files())
            check(batch, values(path))
        # A thread that finds all in use opens one more.
        assert 0 < most <= max(limit, threads)
    del dataset, batch
    gc.collect()
    assert open_files() == 0


# -- reads of many samples --------------------------------------------------------------------------------------------

runs = st.lists(
    st.tuples(st.integers(0, SAMPLES - 1), st.integers(1, 2 * SHARD_SAMPLES), st.sampled_from([1, 1, 1, 0, -1, 2])),
    max_size=12,
)


@settings(max_examples=150)
@given(pieces=runs, field=st.sampled_from(["image", "label", "box", "mask"]), codec=st.booleans())
def test_any_samples_in_any_order(
    stores: dict[str, Path], values: Callable[[Path], Values], pieces: list[Any], field: str, codec: bool
) -> None:
    path = stores["rich"] if field in ("box", "mask") else stores["zstd" if codec else "large"]
    key = (str(path), field)
    if key not in _readers:
        samples = [shardstore.open(path, fields=[field])[i][0] for i in range(SAMPLES)]
        _readers[key] = Reader(load(path)), np.stack([np.asarray(s) for s in samples])
    reader, expected = _readers[key]
    if field == "image":
        expected = expected.transpose(0, 2, 3, 1)
    numbers = [n for start, count, step in pieces for n in range(start, start + count * step, step or 1)]
    numbers += [start for start, _, step in pieces if step == 0 for _ in range(3)]
    asked = np.array([n for n in numbers if 0 <= n < SAMPLES], np.int64)
    found = reader.read(field, asked)
    assert np.array_equal(found, expected[asked])
    assert found.flags.c_contiguous


_readers: dict[tuple[str, str], tuple[Reader, Any]] = {}


@pytest.fixture
def copied(tmp_path: Path, store: Path) -> Path:
    shutil.copytree(store, tmp_path / store.name)
    return tmp_path / store.name


def test_a_damaged_chunk_is_noticed_wherever_it_is_read_whole(copied: Path) -> None:
    table = load(copied).table("image")
    assert len(table) > 4 * 14
    for row in (0, 3, 17, len(table) - 1):
        shard, first, count = (int(table[row][name]) for name in ("shard", "first", "count"))
        file = Path(load(copied).shard_path(shard, "image"))
        good = file.read_bytes()
        data = bytearray(good)
        data[int(table[row]["offset"]) + int(table[row]["nbytes"]) - 1] ^= 128
        file.write_bytes(data)
        reader = Reader(load(copied))
        whole = np.arange(first, first + count)
        others = np.array([(first + 100) % SAMPLES, 5, 5])
        for numbers in (whole, np.concatenate([others, whole]), np.concatenate([whole, others, whole])):
            with pytest.raises(DamagedStoreError) as caught:
                reader.read("image", numbers)
            assert (caught.value.problem.path, caught.value.problem.shard) == (str(file), shard)
        # Its neighbours are not touched.
        reader.read("image", np.setdiff1d(np.arange(SAMPLES), whole))
        file.write_bytes(good)
        reader.read("image", np.arange(SAMPLES))


@pytest.mark.parametrize("column", ["offset", "nbytes", "crc32c", "first", "count", "shard"])
@pytest.mark.parametrize("change", [1, -1, 1320, 1 << 31])
def test_a_damaged_row_of_the_chunk_table_is_noticed(copied: Path, column: str, change: int) -> None:
    file = copied / "index" / "image.chunks.npy"
    table = load(copied).table("image")
    for row in (0, 3, len(table) - 1):
        good = file.read_bytes()
        changed = table[row : row + 1].copy()
        first, count = int(changed["first"][0]), int(changed["count"][0])
        start = len(good) - table.nbytes + row * table.itemsize
        with np.errstate(all="ignore"):
            changed[column] += np.array(change).astype(changed[column].dtype)
        if changed.tobytes() == table[row : row + 1].tobytes():
            continue  # too large a change for so small a type
        file.write_bytes(good[:start] + changed.tobytes() + good[start + table.itemsize :])
        reader = Reader(load(copied))
        with pytest.raises(DamagedStoreError):
            reader.read("image", np.arange(first, first + count))
        with pytest.raises(DamagedStoreError):
            reader.read("image", np.arange(SAMPLES))
        file.write_bytes(good)
        Reader(load(copied)).read("image", np.arange(first, first + count))


def test_a_file_that_is_cut_is_noticed_by_every_sample_beyond(copied: Path) -> None:
    index = load(copied)
    file = Path(index.shard_path(2, "image"))
    good = file.read_bytes()
    file.write_bytes(good[: len(good) - 10])
    last, reader = 3 * SHARD_SAMPLES - 1, Reader(load(copied))
    for numbers in ([last], [0, last, 1], list(range(SAMPLES))):
        with pytest.raises(DamagedStoreError, match="cut") as caught:
            reader.read("image", np.array(numbers))
        assert caught.value.problem.path == str(file)
    reader.read("image", np.array([last - 1, 0]))
    file.unlink()
    with pytest.raises(DamagedStoreError, match="cannot be read"):
        Reader(load(copied)).read("image", np.array([0, last]))
