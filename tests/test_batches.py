"""How batches come to be: what transforms return is stacked as torch would, in little memory; pinning, workers that are
started in other ways, any samples in any order, damage in the middle of a batch.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import itertools
import multiprocessing
import shutil
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, default_collate
from torch.utils.data._utils.pin_memory import pin_memory

import shardstore
from shardstore import DamagedStoreError, ReadOptions, ShardDataset, StackError
from shardstore.store import aio
from shardstore.store.index import load

try:
    from torchvision import tv_tensors
except ImportError:
    tv_tensors = None

Make = Callable[..., Path]
Transform = Callable[[torch.Tensor], Any]

# Tests take more workers than a small machine has cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
linux = pytest.mark.skipif(sys.platform != "linux", reason="the ring and what is looked at in /proc are Linux's")

HANG = 120  # seconds; then it is an error, however busy the machine
FIELDS = ["image", "label", "key"]
# Its workers then need no seconds for importing torch.
multiprocessing.set_forkserver_preload(["torch"])


class Place(NamedTuple):
    """Where batches are made."""

    way: str  # "whole" batches of the data set, or by "habit" of the DataLoader
    workers: int
    threads: int
    batch: int

    def __str__(self) -> str:
        return f"{self.way}-{self.workers}w-{self.threads}t-{self.batch}"

    def loader(self, path: Path, **options: Any) -> DataLoader[Any]:
        """Batches, or in the place of one its error, after which a worker has no more."""
        options = {"fields": FIELDS, "image_type": "tensor", **options}
        if self.way == "habit":
            return DataLoader(ShardDataset(path, **options), self.batch, collate_fn=habit, **forked(self.workers))
        dataset = ShardDataset(path, batch_size=self.batch, threads=self.threads, **options)
        return DataLoader(Caught(dataset), batch_size=None, **forked(self.workers))


# Errors are caught where they are raised: after one that comes out of a worker, torch takes seconds to shut it down.


class Caught(IterableDataset[Any]):
    """Batches, and at the end the error, if there was one."""

    def __init__(self, dataset: ShardDataset) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self.dataset
        except Exception as error:
            yield Raised(error)


class Raised:
    """An error that a worker can send."""

    def __init__(self, error: Exception) -> None:
        self.type, self.text = type(error), str(error)

    def __repr__(self) -> str:
        return f"{self.type.__name__}: {self.text}"


def habit(samples: Sequence[Any]) -> Any:
    """What a DataLoader does without a ``collate_fn``."""
    try:
        return default_collate(samples)
    except Exception as error:
        return Raised(error)


def torchs_own(samples: Sequence[Any]) -> Any:
    """The fields of a batch as torch has them, which here never sees a sample of ours."""
    try:
        return [default_collate(list(column)) for column in zip(*samples, strict=True)]
    except Exception as error:
        return Raised(error)


def forked(workers: int) -> dict[str, Any]:
    if not workers:
        return {}
    return {"num_workers": workers, "multiprocessing_context": "fork", "timeout": HANG}


PLACES = [
    Place("whole", 0, 0, 8),  # 8, 8, 8, 3
    Place("whole", 0, 2, 8),
    Place("whole", 2, 0, 8),
    Place("habit", 0, 0, 8),
    Place("habit", 2, 0, 8),
    Place("whole", 0, 0, 1),
    Place("habit", 0, 0, 1),
    Place("whole", 0, 0, 27),
]
IN_EIGHTS = [place for place in PLACES if place.batch == 8]


# -- what transforms return -------------------------------------------------------------------------------------------

SAMPLES = 27


class Mine(torch.Tensor):
    """A tensor of a user's own type."""


def number_of(image: torch.Tensor) -> int:
    return int(image[0, 0, 0])


def switching(first: Transform, then: Transform) -> Transform:
    """Some samples of a batch by one transform, those after them by another."""
    return lambda image: (first if number_of(image) % 8 < 4 else then)(image)


def mixed(one: Transform, other: Transform) -> Transform:
    return lambda image: (one if number_of(image) % 3 else other)(image)


def mean(image: torch.Tensor) -> torch.Tensor:
    return image.to(torch.float32).mean()


def own(image: torch.Tensor) -> Any:
    return image.to(torch.float32).as_subclass(Mine)  # type: ignore[arg-type]


def with_grad(image: torch.Tensor) -> torch.Tensor:
    return image.to(torch.float32).requires_grad_()


TYPES = ["uint8", "int16", "uint16", "int64", "bool", "float16", "complex64", "bfloat16", "float32", "float64"]
ONE_KIND: dict[str, Transform] = {
    **{f"view-{t}": lambda image, t=t: image.to(getattr(torch, t)) for t in TYPES},
    **{f"contiguous-{t}": lambda image, t=t: image.to(getattr(torch, t)).contiguous() for t in TYPES[-3:]},
    "contiguous-uint8": lambda image: image.contiguous(),
    "cut": lambda image: image[:, 1:4, 2:],  # neither CHW nor HWC in memory
    "flipped": lambda image: image.flip(2),
    "expanded": lambda image: image[:1].expand(4, -1, -1),
    "conjugate": lambda image: (image.to(torch.complex64) * 1j).conj(),
    "grey": lambda image: image[0],
    "grey-contiguous": lambda image: image[0].contiguous(),
    "one-channel": lambda image: image[:1],
    "one-channel-contiguous": lambda image: image[:1].contiguous(),
    "one-row": lambda image: image[:, :1],
    "empty": lambda image: image[:, :0],
    "4d": lambda image: torch.stack([image, image + 1]),
    "1d": lambda image: image.flatten()[:5],
    "0d": mean,
    "0d-bfloat16": lambda image: mean(image).to(torch.bfloat16),
    "array": lambda image: image.numpy().copy(),
    "array-float16": lambda image: image.numpy().astype(np.float16),
    "array-0d": lambda image: image.numpy().mean(),
    "int": number_of,
    "float": lambda image: number_of(image) / 7,
    "bool": lambda image: number_of(image) % 2 == 0,
    "str": lambda image: f"é{number_of(image)}",
    "bytes": lambda image: b"%d" % number_of(image),
    "dict": lambda image: {"view": image, "mean": mean(image), "number": number_of(image), "text": "a", "list": [1, 2]},
    "list": lambda image: [image.contiguous(), number_of(image)],
    "tuple": lambda image: (image, mean(image)),
    "own-type": own,
    "parameter": lambda image: torch.nn.Parameter(image.to(torch.float32)),
    "grad": with_grad,
    "none": lambda image: None,
    "object": lambda image: object(),
}
if tv_tensors is not None:
    ONE_KIND["tv_tensor"] = tv_tensors.Image
    ONE_KIND["tv_mask"] = lambda image: tv_tensors.Mask(image[0])

PAIRS: dict[str, tuple[Transform, Transform]] = {
    "uint8-float32": (ONE_KIND["view-uint8"], ONE_KIND["view-float32"]),
    "float32-float64": (ONE_KIND["contiguous-float32"], ONE_KIND["contiguous-float64"]),
    "float32-bfloat16": (ONE_KIND["view-float32"], ONE_KIND["view-bfloat16"]),
    "int16-bool": (ONE_KIND["view-int16"], ONE_KIND["view-bool"]),
    "view-contiguous": (ONE_KIND["view-uint8"], ONE_KIND["contiguous-uint8"]),
    "grey-contiguous": (ONE_KIND["grey"], ONE_KIND["grey-contiguous"]),
    "tensor-int": (mean, number_of),
    "tensor-str": (ONE_KIND["view-uint8"], ONE_KIND["str"]),
    "tensor-none": (ONE_KIND["view-uint8"], lambda image: None),
    "tensor-array": (ONE_KIND["view-uint8"], lambda image: image.numpy().copy()),
    "tensor-dict": (ONE_KIND["view-uint8"], ONE_KIND["dict"]),
    "tensor-own": (ONE_KIND["view-float32"], own),
    "tensor-grad": (ONE_KIND["view-float32"], with_grad),
    "tensor-meta": (ONE_KIND["view-float32"], lambda image: image.to(torch.float32).to("meta")),
    "int-str": (number_of, ONE_KIND["str"]),
    "int-float": (number_of, ONE_KIND["float"]),
}
TRANSFORMS = {
    **ONE_KIND,
    **{f"first-{name}": switching(*pair) for name, pair in PAIRS.items()},
    **{f"first-{name}-reversed": switching(then, first) for name, (first, then) in PAIRS.items()},
    **{f"mixed-{name}": mixed(*PAIRS[name]) for name in ("uint8-float32", "view-contiguous", "tensor-int")},
}
CHANNELS_LAST = {f"view-{t}" for t in TYPES if t != "bfloat16"} | {"flipped", "one-row", "one-channel"}
CONTIGUOUS = {name for name in ONE_KIND if name.startswith("contiguous-")} | {"cut", "expanded", "4d", "1d", "grey"}
# torch cannot send tensors of no memory from a worker, and in one it stacks no conjugates; here it does. The others are
# as some that are left.
NOT_IN_WORKERS = {"conjugate", "first-tensor-meta", "first-tensor-meta-reversed"} | {
    *(f"view-{t}" for t in ("int16", "uint16", "int64", "bool", "float16", "complex64")),
    *("float", "bool", "bytes", "list", "one-row", "1d", "4d", "first-int-float", "first-int-float-reversed"),
}


@pytest.fixture(scope="module")
def numbered(make_store: Make) -> Path:
    """Pictures whose first value is their number; three shards."""
    random = np.random.default_rng(1)
    images = random.integers(0, 256, (SAMPLES, 6, 5, 3), np.uint8)
    images[:, 0, 0, 0] = np.arange(SAMPLES)
    samples = [{"image": image, "label": i % 4, "key": f"k{i:03d}"} for i, image in enumerate(images)]
    return make_store("npy", source=samples, store="pixels", samples_per_shard=10)


@pytest.fixture(scope="module")
def numbers(numbered: Path) -> Callable[[Place], list[list[int]]]:
    """``numbers(place)``: which samples each batch has there."""
    known: dict[Place, list[list[int]]] = {}

    def get(place: Place) -> list[list[int]]:
        if place not in known:
            known[place] = [[int(key[1:]) for key in batch.key] for batch in place.loader(numbered)]
            assert sorted(itertools.chain(*known[place])) == list(range(SAMPLES))
        return known[place]

    return get


@pytest.fixture(scope="module")
def expected(numbered: Path, numbers: Callable[[Place], list[list[int]]]) -> Callable[[Place, str], list[Any]]:
    """``expected(place, transform)``: what torch makes of the same samples, in a worker where the place has workers:
    there it stacks in another way."""

    def get(place: Place, transform: str) -> list[Any]:
        samples = shardstore.open(numbered, fields=FIELDS, transform=TRANSFORMS[transform], image_type="tensor")
        options = forked(1 if place.workers else 0)
        return list(DataLoader(samples, batch_sampler=numbers(place), collate_fn=torchs_own, **options))

    return get


def assert_same(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert (found.dtype, found.shape, found.device) == (wanted.dtype, wanted.shape, wanted.device)
        assert found.requires_grad == wanted.requires_grad
        if wanted.device.type != "meta":
            assert torch.equal(found, wanted)
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        assert_same(list(found.values()), list(wanted.values()))
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            assert_same(a, b)
    else:
        assert found == wanted


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence:UserWarning")  # torch's own, of a tensor among dicts
@pytest.mark.parametrize(
    ("transform", "place"),
    [(name, place) for name in TRANSFORMS for place in PLACES if not (place.workers and name in NOT_IN_WORKERS)],
    ids=str,
)
def test_a_batch_is_what_torch_would_make_of_it(
    numbered: Path, expected: Callable[[Place, str], list[Any]], transform: str, place: Place
) -> None:
    batches = list(place.loader(numbered, transform=TRANSFORMS[transform]))
    torchs = expected(place, transform)
    for batch, wanted in zip(batches, torchs, strict=False):
        if isinstance(batch, Raised) or isinstance(wanted, Raised):
            assert isinstance(batch, Raised), wanted
            assert isinstance(wanted, Raised), batch
            assert batch.type is wanted.type, (batch, wanted)
            if place.way == "whole":
                return  # the pass has ended
        else:
            assert batch._fields == tuple(FIELDS)
            assert_same(list(batch), wanted)
            image = batch.image
            if transform in CHANNELS_LAST:
                assert image.is_contiguous(memory_format=torch.channels_last)
            if transform in CONTIGUOUS:
                assert image.is_contiguous()
    assert len(batches) == len(torchs) > 0


def test_a_pass_ends_with_a_short_batch(numbers: Callable[[Place], list[list[int]]]) -> None:
    for place in PLACES:
        sizes = [len(batch) for batch in numbers(place)]
        if place.way == "whole" or not place.workers:
            assert sizes == ([8, 8, 8, 3] if place.batch == 8 else [place.batch] * (SAMPLES // place.batch)), place
        else:  # each of the two has its part, and makes its own batches
            assert max(sizes) == 8
            assert sum(size < 8 for size in sizes) == 2, place


# -- shapes that do not go together -----------------------------------------------------------------------------------


def joint(change: Callable[[torch.Tensor], Any], field: str) -> Callable[..., Any]:
    """A transform of whole samples that gives one field a tensor of the picture, another shape from number 5 on."""

    def transform(image: torch.Tensor, label: int, *key: str) -> Any:
        value = change(image if number_of(image) % 8 < 5 else image[..., 1:])
        return (value, label, *key) if field == "image" else (image, value, *key)

    return transform


SHAPES: dict[str, tuple[Transform, tuple[int, ...], tuple[int, ...]]] = {
    "view": (ONE_KIND["view-uint8"], (3, 6, 5), (3, 6, 4)),
    "contiguous": (ONE_KIND["contiguous-float32"], (3, 6, 5), (3, 6, 4)),
    "bfloat16": (ONE_KIND["view-bfloat16"], (3, 6, 5), (3, 6, 4)),
    "own": (own, (3, 6, 5), (3, 6, 4)),
    "after-a-type": (mixed(ONE_KIND["view-uint8"], ONE_KIND["view-float64"]), (3, 6, 5), (3, 6, 4)),
    "grey": (ONE_KIND["grey"], (6, 5), (6, 4)),
    "dimensions": (lambda image: image[0] if image.shape[2] == 5 else image, (6, 5), (3, 6, 4)),
    "broadcast": (lambda image: image if image.shape[2] == 5 else image[:1, :1, :1], (3, 6, 5), (1, 1, 1)),
}


@pytest.mark.parametrize("place", IN_EIGHTS, ids=str)
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("field", ["image", "label"])
@pytest.mark.parametrize("fields", [FIELDS, FIELDS[:2]], ids=["key", "no-key"])
def test_the_first_sample_of_another_shape_is_named(
    numbered: Path,
    numbers: Callable[[Place], list[list[int]]],
    shapes: str,
    field: str,
    fields: list[str],
    place: Place,
) -> None:
    change, small, large = SHAPES[shapes]
    found = list(place.loader(numbered, fields=fields, transforms=joint(change, field)))
    error, number = first_unlike([[(n % 8) < 5 for n in batch] for batch in numbers(place)]), -1
    number, at = numbers(place)[error[0]][error[1]], error[0]
    raised = found[at]
    assert not any(isinstance(batch, Raised) for batch in found[:at])
    assert isinstance(raised, Raised)
    assert issubclass(raised.type, StackError)
    first, other = (small, large) if numbers(place)[at][0] % 8 < 5 else (large, small)
    where = f"field {field}" + (f", key k{number:03d}" if "key" in fields else "")
    assert f"({where}); expected {first}, got {other}. " in raised.text
    assert ", key" not in raised.text or "key" in fields
    assert "transform" in raised.text


def first_unlike(batches: list[list[bool]]) -> tuple[int, int]:
    """The first value that is unlike the first of its batch: of which batch, and its place in there."""
    for i, batch in enumerate(batches):
        for j, value in enumerate(batch):
            if value != batch[0]:
                return i, j
    raise AssertionError("all are alike")


@pytest.mark.parametrize("way", ["whole", "habit"])
def test_the_error_says_field_shapes_and_key_apart(numbered: Path, way: str) -> None:
    dataset = ShardDataset(
        numbered,
        fields=FIELDS,
        batch_size=8 if way == "whole" else None,
        transforms=joint(ONE_KIND["view-uint8"], "label"),
        image_type="tensor",
    )
    with pytest.raises(RuntimeError) as caught:
        list(DataLoader(dataset, batch_size=None if way == "whole" else 8))
    assert isinstance(caught.value, StackError)
    problem = caught.value.problem
    assert (problem.field, problem.key) == ("label", "k005")
    assert (problem.expected, problem.got) == ("(3, 6, 5)", "(3, 6, 4)")
    assert problem.hint


# -- memory -----------------------------------------------------------------------------------------------------------

MIB = 1 << 20


class Counted:
    """A transform whose results hold how many of them were alive in their thread when they were made."""

    def __init__(self, nbytes: int) -> None:
        self.count, self.alive = nbytes // 4, Counter[int]()

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        thread = threading.get_ident()
        result = torch.empty(self.count)
        self.alive[thread] += 1
        weakref.finalize(result, self._died, thread)
        return result.fill_(self.alive[thread])

    def _died(self, thread: int) -> None:
        self.alive[thread] -= 1


@pytest.fixture(scope="module")
def many(make_store: Make) -> Path:
    random = np.random.default_rng(2)
    samples = [{"image": random.integers(0, 256, (4, 4, 3), np.uint8), "label": i} for i in range(128)]
    return make_store("npy", source=samples, store="pixels", samples_per_shard=64)


@pytest.mark.parametrize(("workers", "threads"), [(0, 0), (0, 2), (2, 0)])
def test_what_a_transform_returned_is_let_go_at_once(many: Path, workers: int, threads: int) -> None:
    def most_alive(batch_size: int | None) -> list[int]:
        dataset = ShardDataset(
            many,
            batch_size=batch_size,
            threads=threads if batch_size else 0,
            transform=Counted(4096),
            image_type="tensor",
        )
        loader = DataLoader(dataset, batch_size=None if batch_size else 64, **forked(workers))
        return [int(batch.image.max()) for batch in loader]

    # One in the making, one that is on its way to its place.
    assert max(most_alive(64)) <= 2
    # A DataLoader that makes the batches has all samples of one before: the count sees these.
    assert most_alive(None) == [64] * 2


def peak_growth(function: Callable[[], Any]) -> int:
    """By how much memory in use grew, at most, while a function ran."""
    clear = Path("/proc/self/clear_refs")
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        pytest.skip("what was freed before would hide what is needed now")
    trim(0)
    try:
        clear.write_text("5")  # the most so far is what is in use now
    except OSError:
        pytest.skip("the system does not let its measure of memory be reset")
    before = status("VmRSS")
    function()
    return status("VmHWM") - before


def status(name: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


@linux
def test_a_batch_is_held_once(many: Path) -> None:
    batch_bytes = 64 * MIB // 2
    dataset = ShardDataset(many, batch_size=64, transform=Counted(MIB // 2), image_type="tensor")

    def train() -> None:
        for batch in dataset:
            assert batch.image.nbytes == batch_bytes
            del batch

    samples = shardstore.open(many, fields=["image"], transform=Counted(MIB // 2), image_type="tensor")

    def stack_all() -> None:
        assert default_collate([samples[i].image for i in range(64)]).nbytes == batch_bytes

    assert peak_growth(stack_all) > 1.9 * batch_bytes  # the measure sees two
    assert 0.9 * batch_bytes < peak_growth(train) < 1.5 * batch_bytes
    assert peak_growth(train) < 1.5 * batch_bytes  # that memory is used again


# -- pinned memory ----------------------------------------------------------------------------------------------------


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Addresses of all tensors that were "pinned"."""
    addresses: list[int] = []

    def clone(tensor: torch.Tensor) -> torch.Tensor:
        addresses.append(tensor.data_ptr())
        return tensor.clone()

    # Without an accelerator memory cannot be pinned. A copy is what it amounts to for who uses the batch.
    monkeypatch.setattr(torch.Tensor, "pin_memory", clone)
    return addresses


def rich_transform(image: torch.Tensor, label: int, key: str) -> Any:
    return image, {"twice": label * 2, "picture": image.to(torch.float32)}, key


PIN = [(0, 0), (0, 2), (2, 0)]
PINNED_FIELDS = {None: 2, rich_transform: 3}


def pinning_dataset(path: Path, threads: int, transforms: Any) -> ShardDataset:
    options = {"fields": FIELDS, "batch_size": 4, "threads": threads, "transforms": transforms, "image_type": "tensor"}
    return ShardDataset(path, shuffle=True, **options)


@pytest.mark.parametrize("transforms", PINNED_FIELDS, ids=["plain", "transforms"])
@pytest.mark.parametrize(("workers", "threads"), PIN)
def test_pinning_keeps_type_fields_and_values(
    numbered: Path, pinned: list[int], workers: int, threads: int, transforms: Any
) -> None:
    wanted = list(pinning_dataset(numbered, 0, transforms))
    kept = []
    for batch in DataLoader(pinning_dataset(numbered, threads, transforms), batch_size=None, **forked(workers)):
        pinned.clear()
        result = pin_memory(batch)
        assert type(result) is type(batch)
        assert len(pinned) == PINNED_FIELDS[transforms]
        assert batch.image.data_ptr() in pinned
        assert result.image.data_ptr() != batch.image.data_ptr()
        assert result.image.is_contiguous(memory_format=torch.channels_last)
        assert result["key"] is result[2]
        kept.append(result)
        del batch  # its memory takes another one's values
    assert_same([list(batch) for batch in kept], [list(batch) for batch in wanted])
    assert [batch._fields for batch in kept] == [tuple(FIELDS)] * len(wanted)


@pytest.mark.filterwarnings(
    "ignore:'pin_memory' argument is set:UserWarning"
)  # here is none, which is torch's business
@pytest.mark.parametrize("way", ["whole", "habit"])
@pytest.mark.parametrize(("workers", "threads"), PIN)
def test_a_data_loader_that_is_to_pin(numbered: Path, way: str, workers: int, threads: int) -> None:
    def batches(**options: Any) -> list[Any]:
        if way == "whole":
            return list(DataLoader(pinning_dataset(numbered, threads, None), batch_size=None, **options))
        dataset = ShardDataset(numbered, fields=FIELDS, shuffle=True)
        return list(DataLoader(dataset, batch_size=4, **options))

    plain, pinning = batches(**forked(workers)), batches(**forked(workers), pin_memory=True)
    assert [type(batch) for batch in pinning] == [type(batch) for batch in plain]
    assert_same([list(batch) for batch in pinning], [list(batch) for batch in plain])


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("on", [True, False], ids=["ring", "torch"])
def test_batches_arrive_in_the_thread_that_pins(
    monkeypatch: pytest.MonkeyPatch, numbered: Path, pinned: list[int], workers: int, on: bool
) -> None:
    # The DataLoader starts its pinning thread, in which batches then arrive, only where it finds an accelerator.
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    options = {"fields": FIELDS, "batch_size": 4, "shuffle": True, "options": ReadOptions(ring=on)}
    wanted, dataset = ShardDataset(numbered, **options), ShardDataset(numbered, **options)
    loader = DataLoader(dataset, batch_size=None, pin_memory=True, persistent_workers=True, **forked(workers))
    kept: list[Any] = []
    for epoch in range(4):
        iterator = iter(loader)
        if not hasattr(iterator, "_pin_memory_thread"):
            pytest.skip("this version of torch finds accelerators in another way")
        kept += list(iterator)
        assert len(pinned) == 2 * len(kept) == 14 * (epoch + 1)
    assert_same([list(batch) for batch in kept], [list(batch) for _ in range(4) for batch in wanted])


# -- workers that are spawned or come from a fork server --------------------------------------------------------------

RING_SAMPLES, RING_BATCH = 150, 5


@pytest.fixture(scope="module")
def ringed(make_store: Make) -> tuple[Path, np.ndarray[Any, Any]]:
    """A store of which one epoch is many times the slots of its rings, and its pictures."""
    images = np.random.default_rng(3).integers(0, 256, (RING_SAMPLES, 8, 9, 3), np.uint8)
    samples = [{"image": image, "label": i, "key": f"k{i:03d}"} for i, image in enumerate(images)]
    return make_store("npy", source=samples, store="pixels", samples_per_shard=16), images


@pytest.mark.parametrize(
    ("context", "workers", "stay", "epochs"),
    [("spawn", 2, True, 3), ("spawn", 3, False, 1), ("forkserver", 3, True, 3), ("forkserver", 2, False, 2)],
)
def test_the_last_three_batches_stay_as_they_were(
    ringed: tuple[Path, np.ndarray[Any, Any]], context: str, workers: int, stay: bool, epochs: int
) -> None:
    path, images = ringed
    expected = torch.from_numpy(images).permute(0, 3, 1, 2)
    dataset = ShardDataset(path, fields=FIELDS, batch_size=RING_BATCH, shuffle=True, seed=workers)
    options = {"multiprocessing_context": context, "persistent_workers": stay, "timeout": HANG}
    loader = DataLoader(dataset, batch_size=None, num_workers=workers, **options)
    last: deque[tuple[Any, Any]] = deque(maxlen=3)  # over the ends of epochs too
    orders, in_rings = [], 0
    for _ in range(epochs):
        labels: list[int] = []
        for batch in loader:
            last.append((batch, [batch.image.clone(), batch.label.clone(), list(batch.key)]))
            labels += batch.label.tolist()
            in_rings += is_in_ring(batch.image)
            for kept, first_seen in last:
                assert_same(list(kept), first_seen)
                assert torch.equal(kept.image, expected[kept.label])
                assert kept.key == [f"k{i:03d}" for i in kept.label.tolist()]
        assert sorted(labels) == list(range(RING_SAMPLES))
        orders.append(tuple(labels))
    assert len(set(orders)) == epochs
    count = epochs * RING_SAMPLES // RING_BATCH
    # All but the first of each worker, before it knows how large slots must be, and a few more.
    assert sys.platform != "linux" or in_rings >= count - (2 if stay else 2 * epochs) * workers
    del batch, kept, first_seen, loader
    for kept, first_seen in last:  # their workers have ended
        assert_same(list(kept), first_seen)


def is_in_ring(tensor: torch.Tensor) -> bool:
    if sys.platform != "linux":
        return False
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        if "memfd:shardstore" in line:
            first, _, end = line.split()[0].partition("-")
            if int(first, 16) <= tensor.data_ptr() < int(end, 16):
                return True
    return False


# -- any samples, in any order ----------------------------------------------------------------------------------------

ANY_SAMPLES, SHARD, CHUNK = 62, 16, 4  # the last shard has three whole chunks and one of two samples
# Above and below 1,024 bytes, where readers take another way.
LARGE, SMALL = (19, 20, 3), (6, 5, 3)
KINDS = [
    *((container, shape, "none") for container in ("npy", "zarr", "hdf5") for shape in (LARGE, SMALL)),
    *((container, shape, "zstd") for container in ("zarr", "hdf5") for shape in (LARGE, SMALL)),
]
every_kind = pytest.mark.parametrize(
    "kind", KINDS, ids=[f"{c}-{'large' if s == LARGE else 'small'}-{codec}" for c, s, codec in KINDS]
)
each_way_to_read = pytest.mark.parametrize("on", [True, False], ids=["aio", "single"])


@pytest.fixture(scope="module")
def arrays() -> Callable[[tuple[int, ...]], dict[str, Any]]:
    """What is in a store with pictures of a shape."""

    def make(shape: tuple[int, ...]) -> dict[str, Any]:
        random = np.random.default_rng(4)
        image = random.integers(0, 256, (ANY_SAMPLES, *shape), np.uint8)
        image[:, ::2] = np.arange(ANY_SAMPLES, dtype=np.uint8)[:, None, None, None]  # compresses a little
        box = random.random((ANY_SAMPLES, 2, 3), np.float32)
        return {"image": image, "box": box, "label": np.arange(ANY_SAMPLES)[::-1].copy()}

    return make


@pytest.fixture(scope="module")
def stored(make_store: Make, arrays: Callable[[tuple[int, ...]], dict[str, Any]]) -> Callable[[Any], Path]:
    known: dict[Any, Path] = {}

    def get(kind: tuple[str, tuple[int, ...], str]) -> Path:
        if kind not in known:
            container, shape, codec = kind
            values = arrays(shape)
            samples = [{name: column[i] for name, column in values.items()} for i in range(ANY_SAMPLES)]
            chunk_size = CHUNK * int(np.prod(shape))
            options = {"store": "pixels", "codec": codec, "samples_per_shard": SHARD, "chunk_size": chunk_size}
            known[kind] = make_store(container, source=samples, **options)
            info = shardstore.open(known[kind]).info()
            assert [(a["codec"], a["chunk_items"]) for a in info["arrays"] if a["name"] == "image"] == [(codec, CHUNK)]
        return known[kind]

    return get


def chunk(number: int) -> list[int]:
    """The samples of a chunk of pictures."""
    shard, inside = divmod(number, -(-SHARD // CHUNK))
    first = shard * SHARD + inside * CHUNK
    return list(range(first, min(first + CHUNK, (shard + 1) * SHARD, ANY_SAMPLES)))


CHUNKS = 16
chunks = st.integers(0, CHUNKS - 1).map(chunk)
runs = st.builds(
    lambda a, n: list(range(a, min(a + n, ANY_SAMPLES))), st.integers(0, ANY_SAMPLES - 1), st.integers(1, 30)
)
pieces = st.one_of(
    st.integers(0, ANY_SAMPLES - 1).map(lambda n: [n]),
    st.integers(0, ANY_SAMPLES - 1).map(lambda n: [n] * 3),
    runs,
    runs.map(lambda run: run[::-1]),
    chunks,
    chunks.map(lambda one: one[::-1]),
    chunks.flatmap(st.permutations),
    chunks.flatmap(lambda one: st.lists(st.sampled_from(one), min_size=len(one), max_size=len(one))),
)
any_numbers = st.lists(pieces, max_size=6).map(lambda parts: list(itertools.chain(*parts)))


def assert_right(samples: Any, numbers: Sequence[int], values: dict[str, Any]) -> None:
    assert len(samples) == len(numbers)
    for sample, number in zip(samples, numbers, strict=True):
        assert np.array_equal(np.asarray(sample.image).transpose(1, 2, 0), values["image"][number]), number
        assert np.array_equal(sample.box, values["box"][number]), number
        assert sample.label == values["label"][number], number


@every_kind
@each_way_to_read
def test_any_samples_in_any_order(
    monkeypatch: pytest.MonkeyPatch,
    stored: Callable[[Any], Path],
    arrays: Callable[[tuple[int, ...]], dict[str, Any]],
    kind: Any,
    on: bool,
) -> None:
    # The one switch: systems without io_submit read in the other way.
    monkeypatch.setattr(aio, "ON", on)
    options = ReadOptions(window_bytes=3 * CHUNK * int(np.prod(kind[1])))  # cached chunks must make room for others
    dataset = shardstore.open(stored(kind), fields=["image", "box", "label"], options=options)
    values = arrays(kind[1])

    @settings(max_examples=40)
    @given(numbers=any_numbers)
    def check(numbers: list[int]) -> None:
        assert_right(dataset.__getitems__(numbers), numbers, values)
        assert_right([dataset[n] for n in numbers[:3]], numbers[:3], values)

    check()


@every_kind
@each_way_to_read
def test_batches_of_any_size_in_any_order(
    monkeypatch: pytest.MonkeyPatch,
    stored: Callable[[Any], Path],
    arrays: Callable[[tuple[int, ...]], dict[str, Any]],
    kind: Any,
    on: bool,
) -> None:
    # The one switch: systems without io_submit read in the other way.
    monkeypatch.setattr(aio, "ON", on)
    values = arrays(kind[1])

    @settings(max_examples=15)
    @given(
        batch_size=st.one_of(st.sampled_from([1, CHUNK, 2 * CHUNK, SHARD, ANY_SAMPLES]), st.integers(1, ANY_SAMPLES)),
        shuffle=st.booleans(),
        seed=st.integers(0, 9),
        window=st.sampled_from([1, 10_000, 1 << 26]),
    )
    def check(batch_size: int, shuffle: bool, seed: int, window: int) -> None:
        options = ReadOptions(window_bytes=window)
        dataset = ShardDataset(
            stored(kind),
            fields=["image", "box", "label"],
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            options=options,
        )
        for _ in range(2):
            seen: list[int] = []
            for batch in dataset:
                assert batch.image.is_contiguous(memory_format=torch.channels_last)
                numbers = (ANY_SAMPLES - 1 - batch.label).numpy()
                assert np.array_equal(batch.image.permute(0, 2, 3, 1), values["image"][numbers])
                assert np.array_equal(batch.box, values["box"][numbers])
                seen += numbers.tolist()
            assert sorted(seen) == list(range(ANY_SAMPLES))

    check()


def orders_of(one: list[int], other: list[int]) -> Iterator[list[int]]:
    """Reads that have to do with all samples of a chunk, and in which not all may be decompressed to their places."""
    yield from map(list, itertools.permutations(one))
    for i, j in itertools.permutations(range(len(one)), 2):
        twice = list(one)
        twice[i] = one[j]  # one missing, one twice
        yield twice
        yield sorted(twice)
    yield one + one
    yield one[:2] + one + one[2:]
    yield [*one, one[-1]]
    yield [one[0], *one]
    for i in range(len(one) + 1):
        yield one[:i] + other[:1] + one[i:]  # something between
    yield list(itertools.chain(*zip(one, other, strict=False)))
    yield other + one
    yield other[::-1] + one
    yield one[:-1] + other + one[-1:]


@every_kind
@pytest.mark.parametrize("number", [0, 3, 12, 15], ids=lambda n: f"chunk{n}")
def test_whole_chunks_in_other_orders(
    stored: Callable[[Any], Path],
    arrays: Callable[[tuple[int, ...]], dict[str, Any]],
    kind: Any,
    number: int,
) -> None:
    one, other, values = chunk(number), chunk(number - 1 if number else 5), arrays(kind[1])
    assert len(one) == (2 if number == 15 else CHUNK)
    opened = shardstore.open(stored(kind), fields=["image", "box", "label"])
    for numbers in orders_of(one, other):
        assert len(numbers) <= 16  # read at once
        assert_right(opened.__getitems__(numbers), numbers, values)
        # A reader that has nothing in its cache.
        fresh = copy.deepcopy(opened)
        assert_right(fresh.__getitems__(numbers), numbers, values)


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(tmp_path: Path, stored: Callable[[Any], Path]) -> Callable[[Any], Path]:
    """A copy of a store, to be damaged."""

    def make(kind: Any) -> Path:
        original = stored(kind)
        for path in original.parent.iterdir():
            (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / path.name)
        return tmp_path / original.name

    return make


def error_of(function: Callable[[], Any]) -> DamagedStoreError:
    with pytest.raises(DamagedStoreError) as caught:
        function()
    return caught.value


def ways_to_read(path: Path, numbers: list[int]) -> list[Callable[[], Any]]:
    def whole(batch_size: int, threads: int) -> Callable[[], Any]:
        return lambda: list(ShardDataset(path, fields=["image"], batch_size=batch_size, threads=threads))

    return [
        lambda: shardstore.open(path, fields=["image"]).__getitems__(numbers),
        whole(ANY_SAMPLES, 0),
        whole(SHARD, 0),
        whole(SHARD, 2),
        lambda: list(ShardDataset(path, fields=["image"], batch_size=ANY_SAMPLES, transform=np.array)),
    ]


LAST_SHARD = 3  # its chunks are 12 to 15, of 4, 4, 4 and 2 samples


def place_of_chunk(path: Path, inside: int) -> tuple[Path, int, int]:
    """Its file, where it begins, how many bytes it has."""
    index = load(path)
    row = index.table("image")[LAST_SHARD * 4 + inside]
    assert (int(row["shard"]), int(row["count"])) == (LAST_SHARD, 2 if inside == 3 else CHUNK)
    return Path(index.shard_path(LAST_SHARD, "image")), int(row["offset"]), int(row["nbytes"])


@every_kind
@each_way_to_read
@pytest.mark.parametrize("inside", [0, 1, 3])
def test_a_changed_byte_of_a_whole_chunk_is_noticed_and_placed(
    monkeypatch: pytest.MonkeyPatch, damaged: Callable[[Any], Path], kind: Any, inside: int, on: bool
) -> None:
    path = damaged(kind)
    file, offset, nbytes = place_of_chunk(path, inside)
    content = bytearray(file.read_bytes())
    monkeypatch.setattr(aio, "ON", on)  # the one switch: systems without io_submit read in the other way
    for where in (0, nbytes // 2, nbytes - 1):
        content[offset + where] ^= 4
        file.write_bytes(content)
        for read in ways_to_read(path, chunk(12 + inside)):
            problem = error_of(read).problem
            assert (problem.path, problem.shard, problem.chunk) == (str(file), LAST_SHARD, inside)
            assert (problem.field, problem.what) == ("image", "the bytes are not those that were written")
        shardstore.open(path, fields=["image"]).__getitems__(chunk(12 + (inside + 1) % 4))
        content[offset + where] ^= 4
    file.write_bytes(content)
    for read in ways_to_read(path, chunk(12 + inside)):
        read()


@every_kind
@pytest.mark.parametrize("inside", [0, 1, 3])
def test_a_file_that_is_cut_in_a_chunk_is_noticed_and_placed(
    monkeypatch: pytest.MonkeyPatch, damaged: Callable[[Any], Path], kind: Any, inside: int
) -> None:
    path = damaged(kind)
    file, offset, nbytes = place_of_chunk(path, inside)
    content = file.read_bytes()
    submitted: list[bool] = []

    def counted(pieces: Any, out: Any) -> bool:
        submitted.append(read_pieces(pieces, out))
        return submitted[-1]

    # The reader takes the other way by itself where one fails; the count proves which was tried.
    read_pieces = aio.read
    monkeypatch.setattr(aio, "read", counted)
    for size in (offset, offset + 1, offset + nbytes // 2, offset + nbytes - 1):
        file.write_bytes(content[:size])
        texts = []
        for on in (True, False):
            monkeypatch.setattr(aio, "ON", on)  # systems without io_submit read in the other way
            texts.append([])
            for read in ways_to_read(path, chunk(12 + inside)):
                submitted.clear()
                error = error_of(read)
                assert (error.problem.path, error.problem.shard) == (str(file), LAST_SHARD)
                # Whole batches may come upon a later chunk of the same cut file first.
                assert inside <= (error.problem.chunk or 0) <= 3
                assert "cut" in str(error)
                texts[-1].append(str(error))
                # Only large pictures that are not compressed are read in pieces.
                pieces = kind[1] == LARGE and kind[2] == "none"
                assert (False in submitted) == pieces
            assert f"chunk {inside}" in texts[-1][0]
        assert texts[0] == texts[1]
        if inside:
            shardstore.open(path, fields=["image"]).__getitems__(chunk(12 + inside - 1))
    file.write_bytes(content)
    for read in ways_to_read(path, chunk(12 + inside)):
        read()
