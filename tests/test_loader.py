"""``ShardDataset`` in plain DataLoaders: every sample once, the order, who opens what, memory, batches, errors."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import shardstore
from shardstore import ShardDataset

Make = Callable[..., Path]

# Tests take more workers than a small machine has cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

FIELDS = ["image", "label", "key"]
SHARDS, SHARD_SAMPLES = 12, 24
SAMPLES = SHARDS * SHARD_SAMPLES
WORKERS = [(0, None), (2, "fork"), (4, "fork"), (2, "spawn"), (4, "forkserver")]
# Its workers then need no seconds for importing torch.
multiprocessing.set_forkserver_preload(["torch", "torchvision.transforms"])


@pytest.fixture(scope="module")
def pictures(make_images: Make) -> Path:
    """288 pictures of one size in 3 classes."""
    return make_images(SAMPLES, sizes=((9, 8),))


@pytest.fixture(scope="module")
def store(make_store: Make, pictures: Path) -> Path:
    """Those, encoded, in 12 shards of 24."""
    return make_store("zarr", source=pictures, store="encoded", samples_per_shard=SHARD_SAMPLES)


@pytest.fixture(scope="module", params=["npy", "zarr", "hdf5"])
def store_of_each_kind(request: pytest.FixtureRequest, make_store: Make, pictures: Path) -> Path:
    """The same in every container."""
    return make_store(request.param, source=pictures, store="encoded", samples_per_shard=SHARD_SAMPLES)


@pytest.fixture(scope="module")
def images_store(make_store: Make) -> Path:
    """fixtures/images, encoded: 24 pictures of many sizes."""
    return make_store("npy", samples_per_shard=7)


def whole(path: Path, workers: int = 0, context: str | None = None, **options: Any) -> DataLoader[Any]:
    """The fast way: the data set makes whole batches."""
    options.setdefault("batch_size", 8)
    dataset = ShardDataset(path, **options)
    return DataLoader(dataset, batch_size=None, num_workers=workers, multiprocessing_context=context)


def habit(path: Path, workers: int = 0, context: str | None = None, **options: Any) -> DataLoader[Any]:
    """The usual way: the DataLoader makes batches of samples."""
    dataset = ShardDataset(path, **options)
    return DataLoader(dataset, batch_size=8, num_workers=workers, multiprocessing_context=context)


WAYS = {"whole": whole, "habit": habit}
# Errors must find their way out of each of these.
PLACES = [("whole", 0, None), ("habit", 0, None), ("whole", 2, "fork"), ("habit", 2, "fork"), ("habit", 1, "spawn")]


def keys_of(batches: Any) -> list[str]:
    return [key for batch in batches for key in batch.key]


def stored_keys(path: Path) -> list[str]:
    return [str(sample.key) for sample in shardstore.open(path, fields=["key"])]


def failure(loader: DataLoader[Any], kind: type[Exception]) -> Exception:
    """The error in which a pass ends."""
    with pytest.raises(kind) as caught:
        list(loader)
    error = caught.value.with_traceback(None)
    del caught
    gc.collect()  # otherwise the workers live on in the traceback's frames, and delay another test's
    return error


# -- every sample once ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "context"), WORKERS)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_every_sample_comes_exactly_once(
    store: Path, pictures: Path, way: str, shuffle: bool, workers: int, context: str | None
) -> None:
    loader = WAYS[way](store, workers, context, fields=FIELDS, shuffle=shuffle)
    batches = list(loader)
    keys = keys_of(batches)
    expected = sorted(p.relative_to(pictures).as_posix() for p in pictures.rglob("*.png"))
    assert sorted(keys) == expected
    # Picture and label are those of the key.
    names = shardstore.open(store).classes or ()
    assert [names[label] for batch in batches for label in batch.label] == [key.split("/")[0] for key in keys]
    for key, image in list(zip(keys, torch.cat([b.image for b in batches]), strict=True))[::25]:
        with Image.open(pictures / key) as picture:
            assert np.array_equal(image.permute(1, 2, 0), np.asarray(picture))


@pytest.mark.parametrize("container", ["npy", "zarr", "hdf5"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_sample_of_an_uneven_store_comes_exactly_once(
    make_store: Make, container: str, way: str, shuffle: bool
) -> None:
    store = make_store(container, size=8, samples_per_shard=7)  # the last of four shards has 3
    for workers in (0, 1, 3, 5):
        loader = WAYS[way](store, workers, "fork" if workers else None, fields=FIELDS, shuffle=shuffle)
        assert sorted(keys_of(loader)) == sorted(stored_keys(store))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_more_workers_than_shards(make_store: Make, way: str, shuffle: bool) -> None:
    store = make_store("npy", size=4, samples_per_shard=8)
    assert shardstore.open(store).schema.shards == 3
    loader = WAYS[way](store, 40, "fork", fields=["key"], shuffle=shuffle)
    assert sorted(keys_of(loader)) == sorted(stored_keys(store))


def test_one_pass_after_another_with_workers_that_stay(store: Path) -> None:
    dataset = ShardDataset(store, fields=["key"], batch_size=16)
    loader = DataLoader(
        dataset, batch_size=None, num_workers=2, persistent_workers=True, multiprocessing_context="fork"
    )
    passes = [keys_of(loader) for _ in range(3)]
    assert passes[0] == passes[1] == passes[2]
    assert len(set(passes[0])) == SAMPLES


def test_outside_a_data_loader_it_is_simply_iterable(store: Path) -> None:
    samples = list(ShardDataset(store, fields=["key", "label"]))
    assert [sample.key for sample in samples] == stored_keys(store)
    assert all(type(sample.label) is int for sample in samples)
    dataset = ShardDataset(store, fields=["key"], batch_size=8)
    assert keys_of(dataset) == keys_of(DataLoader(dataset, batch_size=None))


# -- the order --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("batch_size", [8, 10, 24, 100, 1000])
def test_whole_batches_are_the_same_for_every_number_of_workers(store: Path, shuffle: bool, batch_size: int) -> None:
    def batches(workers: int) -> list[Any]:
        context = "fork" if workers else None
        return list(whole(store, workers, context, batch_size=batch_size, shuffle=shuffle, fields=FIELDS))

    expected = batches(0)
    assert len(expected) == -(-SAMPLES // batch_size)
    for workers in (1, 2, 4, 5):
        found = batches(workers)
        assert [batch.key for batch in found] == [batch.key for batch in expected]
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a.image, b.image)
            assert torch.equal(a.label, b.label)


def test_without_shuffle_single_samples_come_in_the_stored_order(store: Path) -> None:
    assert keys_of(habit(store, fields=["key"])) == stored_keys(store)
    parts = list(habit(store, 2, "fork", fields=["key"]))
    # Two workers take turns, each with the stored order of its half.
    assert keys_of(parts[0::2]) + keys_of(parts[1::2]) == stored_keys(store)


@pytest.mark.parametrize("way", WAYS)
def test_seeds_and_epochs_give_orders_of_their_own(store: Path, way: str) -> None:
    def order(seed: int, epoch: int) -> tuple[str, ...]:
        loader = WAYS[way](store, fields=["key"], shuffle=True, seed=seed)
        loader.dataset.set_epoch(epoch)  # type: ignore[attr-defined]
        return tuple(keys_of(loader))

    choices = [(seed, epoch) for seed in (0, 1, -1, 2**40) for epoch in range(4)]
    orders = [order(*choice) for choice in choices]
    assert len(set(orders)) == len(choices)
    assert tuple(stored_keys(store)) not in orders
    assert orders == [order(*choice) for choice in choices]


def test_a_shuffled_batch_mixes_classes_and_shards(store: Path) -> None:
    keys = stored_keys(store)
    for batch in whole(store, fields=["label", "key"], shuffle=True, batch_size=24):
        assert len(set(batch.label.tolist())) > 1
        numbers = [keys.index(key) for key in batch.key]
        assert len({number // SHARD_SAMPLES for number in numbers}) > 1
        assert numbers != sorted(numbers)


ORDER_OF_ANOTHER_PROCESS = """
import json, sys, torch
from shardstore import ShardDataset
from torch.utils.data import DataLoader
dataset = ShardDataset(sys.argv[1], fields=["key"], shuffle=True, seed=11, batch_size=8)
dataset.set_epoch(3)
print(json.dumps([batch.key for batch in DataLoader(dataset, batch_size=None)]))
"""


def test_the_order_is_the_same_in_another_process(store: Path) -> None:
    loader = whole(store, 2, "fork", fields=["key"], shuffle=True, seed=11)
    loader.dataset.set_epoch(3)  # type: ignore[attr-defined]
    torch.manual_seed(99)  # no one else's randomness has a say
    done = subprocess.run(
        [sys.executable, "-c", ORDER_OF_ANOTHER_PROCESS, str(store)], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [batch.key for batch in loader]


def test_containers_of_the_same_content_have_the_same_order(make_store: Make, pictures: Path, store: Path) -> None:
    other = make_store("hdf5", source=pictures, store="encoded", samples_per_shard=SHARD_SAMPLES)
    assert keys_of(whole(other, fields=["key"], shuffle=True)) == keys_of(whole(store, fields=["key"], shuffle=True))


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_the_epoch_reaches_workers(store: Path, context: str) -> None:
    loader = whole(store, 2, context, fields=["key"], shuffle=True)
    orders = []
    for epoch in (0, 1):
        loader.dataset.set_epoch(epoch)  # type: ignore[attr-defined]
        orders.append(keys_of(loader))
    assert orders[0] != orders[1]
    single = whole(store, fields=["key"], shuffle=True)
    single.dataset.set_epoch(1)  # type: ignore[attr-defined]
    assert keys_of(single) == orders[1]


def test_samples_of_a_compressed_store_are_mixed_within_the_window(make_store: Make, pictures: Path) -> None:
    each = 9 * 8 * 3
    options = {"store": "pixels", "codec": "zstd", "samples_per_shard": 96, "chunk_size": 12 * each}
    store = make_store("zarr", source=pictures, **options)
    keys = stored_keys(store)

    def chunks_of_each_batch(**options: Any) -> list[int]:
        batches = list(whole(store, fields=["image", "key"], shuffle=True, batch_size=12, **options))
        assert sorted(keys_of(batches)) == sorted(keys)
        assert keys_of(batches) != keys
        return [len({keys.index(key) // 12 for key in batch.key}) for batch in batches]

    assert set(chunks_of_each_batch(options=shardstore.ReadOptions(window_bytes=12 * each))) == {1}
    assert max(chunks_of_each_batch()) > 3


# -- lengths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 7, 8, 10, 288, 289])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("workers", [0, 3])
def test_the_length_is_what_comes(store: Path, batch_size: int, drop_last: bool, workers: int) -> None:
    context = "fork" if workers else None
    loader = whole(store, workers, context, fields=["label"], batch_size=batch_size, drop_last=drop_last, shuffle=True)
    sizes = [len(batch.label) for batch in loader]
    assert len(loader) == len(loader.dataset) == len(sizes)  # type: ignore[arg-type]
    full, rest = divmod(SAMPLES, batch_size)
    assert sizes == [batch_size] * full + ([rest] if rest and not drop_last else [])


def test_without_batches_the_length_is_that_of_the_samples(store: Path) -> None:
    dataset = ShardDataset(store)
    assert len(dataset) == len(list(dataset)) == SAMPLES
    assert len(DataLoader(dataset, batch_size=10)) == 29


# -- who opens what ---------------------------------------------------------------------------------------------------


class Recorder:
    """Writes down, in each worker, which of a store's files it opens."""

    def __init__(self, store: Path, folder: Path) -> None:
        self.store, self.folder = str(store), folder

    def __call__(self, worker: int) -> None:
        log = os.open(self.folder / str(worker), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open" and isinstance(arguments[0], str) and arguments[0].startswith(self.store):
                os.write(log, f"{arguments[0].removeprefix(self.store)}\n".encode())

        sys.addaudithook(hook)

    def shard_files(self) -> list[set[str]]:
        """Per worker, without what belongs to the index."""
        found = []
        for file in sorted(self.folder.iterdir(), key=lambda f: int(f.name)):
            names = set(file.read_text().splitlines())
            found.append({n for n in names if "/index/" not in n and not n.endswith(".json") and n})
        return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("shuffle", [False, True])
def test_each_worker_opens_files_of_its_own(
    tmp_path: Path, store_of_each_kind: Path, way: str, workers: int, shuffle: bool
) -> None:
    schema = shardstore.open(store_of_each_kind).schema
    assert schema.shards == SHARDS
    recorder = Recorder(store_of_each_kind, tmp_path)
    loader = WAYS[way](store_of_each_kind, workers, "fork", shuffle=shuffle)
    loader.worker_init_fn = recorder
    assert sum(len(batch.label) for batch in loader) == SAMPLES
    files = recorder.shard_files()
    assert len(files) == workers
    assert all(files)
    assert sum(map(len, files)) == len(set.union(*files))
    arrays = 1 if schema.container == "hdf5" else 5  # data, start, length and crc32c of the pictures, and labels
    assert [len(f) for f in files] == [SHARDS // workers * arrays] * workers


def test_the_recorder_sees_workers_that_share_files(tmp_path: Path, store: Path) -> None:
    recorder = Recorder(store, tmp_path)
    # Three workers cannot have the four lanes to themselves.
    loader = whole(store, 3, "fork", fields=["image"])
    loader.worker_init_fn = recorder
    assert len(list(loader)) == SAMPLES // 8
    files = recorder.shard_files()
    assert sum(map(len, files)) > len(set.union(*files))


# -- what batches hold ------------------------------------------------------------------------------------------------

PIXELS = [("npy", "none"), ("zarr", "none"), ("hdf5", "none"), ("zarr", "zstd"), ("hdf5", "zstd")]


@pytest.mark.parametrize(("container", "codec"), PIXELS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_of_pixels(make_store: Make, container: str, codec: str, way: str, shuffle: bool) -> None:
    store = make_store(container, size=(6, 10), codec=codec, samples_per_shard=8, chunk_size=1000)
    single = shardstore.open(store, fields=FIELDS)
    count = 0
    for batch in WAYS[way](store, fields=FIELDS, shuffle=shuffle):
        assert batch._fields == tuple(FIELDS)
        assert (batch.image.dtype, batch.image.shape[1:]) == (torch.uint8, (3, 6, 10))
        assert batch.image.is_contiguous(memory_format=torch.channels_last)
        assert batch.label.dtype == torch.int64
        assert batch["image"] is batch.image is batch[0]
        for image, label, key in zip(*batch, strict=True):
            assert torch.equal(image, single[key].image)
            assert label == single[key].label
            count += 1
    assert count == 24


@pytest.mark.parametrize("way", WAYS)
def test_batches_of_encoded_pictures(store: Path, pictures: Path, way: str) -> None:
    for batch in WAYS[way](store, fields=FIELDS):
        assert batch.image.dtype == torch.uint8
        assert batch.image.is_contiguous(memory_format=torch.channels_last)
        assert batch.label.dtype == torch.int64
        for image, key in zip(batch.image, batch.key, strict=True):
            with Image.open(pictures / key) as picture:
                assert np.array_equal(image.permute(1, 2, 0), np.asarray(picture))


def test_a_batch_may_be_written_to_without_harm_to_the_next_pass(make_store: Make) -> None:
    for codec in ("none", "zstd"):
        store = make_store("zarr", size=8, codec=codec)
        loader = whole(store, batch_size=24)
        (first,) = loader
        expected = first.image.clone()
        first.image.zero_()
        (second,) = loader
        assert expected.any()
        assert torch.equal(second.image, expected)


@pytest.mark.parametrize("container", ["npy", "hdf5"])
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_pictures_of_many_sizes_come_in_batches_of_one(make_store: Make, container: str, codec: str) -> None:
    if container == "npy":
        store = make_store("npy") if codec == "zstd" else make_store("npy", store="pixels")
    else:
        store = make_store(container, store="pixels", codec=codec, samples_per_shard=7)
    single = shardstore.open(store, fields=FIELDS)
    keys = []
    for batch in whole(store, batch_size=1, shuffle=True, fields=FIELDS):
        (key,) = batch.key
        keys.append(key)
        assert torch.equal(batch.image[0], single[key].image)
        assert batch.image.is_contiguous(memory_format=torch.channels_last)
    assert sorted(keys) == sorted(stored_keys(store))


@pytest.mark.parametrize("kind", ["encoded", "pixels"])
@pytest.mark.parametrize("way", WAYS)
def test_sixteen_bits_stay_sixteen(tmp_path: Path, odd_dir: Path, kind: str, way: str) -> None:
    folder = tmp_path / "imgs"
    folder.mkdir()
    (folder / "a.png").write_bytes((odd_dir / "sixteen_bit.png").read_bytes())
    shardstore.convert(folder, tmp_path / "out", store=kind, workers=1)  # type: ignore[arg-type]
    (batch,) = WAYS[way](tmp_path / "out", fields=["image"])
    with Image.open(folder / "a.png") as picture:
        expected = np.asarray(picture)
    assert expected.max() > 60_000
    assert (batch.image.dtype, batch.image.shape) == (torch.uint16, (1, 1, *expected.shape))
    assert np.array_equal(batch.image[0, 0].numpy(), expected)


@pytest.mark.parametrize(("name", "dtype"), [("thirty_two_bit.tif", torch.int32), ("float.tif", torch.float32)])
def test_other_values_keep_their_type(tmp_path: Path, odd_dir: Path, name: str, dtype: torch.dtype) -> None:
    folder = tmp_path / "imgs"
    folder.mkdir()
    (folder / name).write_bytes((odd_dir / name).read_bytes())
    shardstore.convert(folder, tmp_path / "out", store="pixels", workers=1)
    (batch,) = whole(tmp_path / "out")
    with Image.open(folder / name) as picture:
        assert np.array_equal(batch.image[0, 0].numpy(), np.asarray(picture))
    assert batch.image.dtype == dtype


@pytest.mark.parametrize("way", WAYS)
def test_other_fields_come_as_tensors_and_lists(tmp_path: Path, way: str) -> None:
    random = np.random.default_rng(0)
    samples = [{"box": random.random((2, 3)), "score": i / 7, "text": f"é{i}", "count": i} for i in range(16)]
    shardstore.convert(samples, tmp_path / "out", samples_per_shard=5)
    found = list(WAYS[way](tmp_path / "out", fields=["box", "score", "text", "count"]))
    assert torch.equal(torch.cat([b.box for b in found]), torch.from_numpy(np.stack([s["box"] for s in samples])))
    assert torch.cat([b.score for b in found]).tolist() == [s["score"] for s in samples]
    assert [text for b in found for text in b.text] == [s["text"] for s in samples]
    assert torch.cat([b["count"] for b in found]).tolist() == list(range(16))


# -- transforms -------------------------------------------------------------------------------------------------------


def classic() -> Any:
    # Here and not at the top: every spawned worker imports this file.
    from torchvision.transforms import Compose, Normalize, Resize, ToTensor

    return Compose([Resize((224, 224)), ToTensor(), Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])])


def test_the_classic_pipeline_gives_the_batches_of_image_folder(images_store: Path, images_dir: Path) -> None:
    from torchvision.datasets import ImageFolder

    # Without a rule of ours, torchvision would leave out the GIF.
    folder = ImageFolder(str(images_dir), transform=classic(), is_valid_file=lambda path: True)
    expected = list(DataLoader(folder, batch_size=8))
    found = list(DataLoader(ShardDataset(images_store, transform=classic()), batch_size=8))
    assert len(found) == len(expected) == 3
    for (images, labels), (expected_images, expected_labels) in zip(found, expected, strict=True):
        assert images.dtype == torch.float32
        assert torch.equal(images, expected_images)
        assert torch.equal(labels, expected_labels)


@pytest.mark.parametrize(("workers", "context"), WORKERS)
def test_transforms_run_in_workers(images_store: Path, workers: int, context: str | None) -> None:
    loader = whole(images_store, workers, context, transform=classic(), fields=FIELDS, batch_size=5)
    single = shardstore.open(images_store, transform=classic())
    count = 0
    for batch in loader:
        for image, key in zip(batch.image, batch.key, strict=True):
            assert torch.equal(image, single[key].image)
            count += 1
    assert count == 24


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("image_type", "expected"), [("pil", Image.Image), ("tensor", torch.Tensor), ("numpy", np.ndarray)]
)
def test_a_transform_gets_what_image_type_says(store: Path, way: str, image_type: Any, expected: type) -> None:
    loader = WAYS[way](store, image_type=image_type, transform=lambda image: int(isinstance(image, expected)))
    assert all(batch.image.tolist() == [1] * len(batch.label) for batch in loader)


@pytest.mark.parametrize("way", WAYS)
def test_transforms_see_whole_samples(store: Path, way: str) -> None:
    def joint(image: Image.Image, label: int, key: str) -> tuple[Any, ...]:
        return torch.tensor(image.size), label * 10, key.upper()

    for batch in WAYS[way](store, fields=FIELDS, transforms=joint):
        assert batch.image.tolist() == [[9, 8]] * len(batch.key)
        assert set(batch.label.tolist()) <= {0, 10, 20}
        assert all(key.startswith("CLASS") for key in batch.key)


def fail_on_one(image: Any, label: int, key: str) -> Any:
    if key == "class1/000100.png":
        raise ZeroDivisionError("of mine")
    return 0, label, key


@pytest.mark.parametrize(("way", "workers", "context"), PLACES)
def test_an_error_in_a_transform_carries_sample_and_key(
    store: Path, way: str, workers: int, context: str | None
) -> None:
    loader = WAYS[way](store, workers, context, fields=FIELDS, transforms=fail_on_one)
    error = failure(loader, ZeroDivisionError)
    text = str(error) + "".join(getattr(error, "__notes__", []))
    assert "of mine" in text
    assert "class1/000100.png" in text
    assert f"sample {stored_keys(store).index('class1/000100.png')}" in text


# -- pictures that do not fit into one batch --------------------------------------------------------------------------


@pytest.mark.parametrize(("way", "workers", "context"), PLACES)
@pytest.mark.parametrize("fields", [["image", "label"], FIELDS])
def test_pictures_of_different_sizes_are_refused_with_a_way_out(
    images_store: Path, way: str, workers: int, context: str | None, fields: list[str]
) -> None:
    text = str(failure(WAYS[way](images_store, workers, context, fields=fields), shardstore.StackError))
    assert "transform" in text
    assert "--size" in text
    single = shardstore.open(images_store, fields=["image", "key"])
    shapes = [str(tuple(s.image.shape)) for s in single] + [str(tuple(s.image.permute(1, 2, 0).shape)) for s in single]
    assert len([shape for shape in set(shapes) if shape in text]) == 2
    # The DataLoader hands over values alone, and without the field the key is not among them.
    if way == "whole" or "key" in fields:
        assert any(str(s.key) in text for s in single)


def test_ragged_pixels_are_refused_alike(make_store: Make) -> None:
    with pytest.raises(shardstore.StackError, match="cat/"):
        list(whole(make_store("hdf5", store="pixels")))


# -- wrong options ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": -1}, "batch_size"),
        ({"drop_last": True, "options": shardstore.ReadOptions(exact=True)}, "exact"),
        ({"fields": ["mask"]}, "mask"),
        ({"fields": []}, "field"),
        ({"image_type": "jax"}, "image_type"),
    ],
)
def test_impossible_options_are_refused_at_once(store: Path, options: dict[str, Any], named: str) -> None:
    with pytest.raises(shardstore.OptionError, match=named):
        ShardDataset(store, **options)


@pytest.mark.parametrize("options", [{"batch_size": 2.5}, {"batch_size": "8"}, {"seed": 1.5}, {"seed": "a"}])
def test_options_of_a_wrong_type_are_refused_at_once(store: Path, options: dict[str, Any]) -> None:
    with pytest.raises(shardstore.OptionError, match="integer"):
        ShardDataset(store, shuffle=True, **options)


def test_options_are_named() -> None:
    with pytest.raises(TypeError):
        ShardDataset("x", 8)  # type: ignore[misc]


def test_what_is_no_store_is_refused_at_once(tmp_path: Path, images_dir: Path) -> None:
    for path in (tmp_path / "missing", images_dir):
        with pytest.raises(shardstore.NoStoreError, match=path.name):
            ShardDataset(path)


# -- damage, pickles --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("way", "workers", "context"), PLACES)
def test_damage_stops_the_pass_and_is_named(make_store: Make, way: str, workers: int, context: str | None) -> None:
    store = make_store("npy", samples_per_shard=7)
    shard = store / "image/00002.data.npy"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    key = shardstore.open(store).key(20)
    loader = WAYS[way](store, workers, context, transform=classic())
    text = str(failure(loader, shardstore.DamagedStoreError))
    assert str(shard) in text
    assert str(key) in text


@pytest.mark.parametrize("batch_size", [None, 8])
def test_a_pickled_dataset_is_small_and_gives_the_same(store: Path, batch_size: int | None) -> None:
    dataset = ShardDataset(store, fields=["key"], batch_size=batch_size, shuffle=True, seed=3)
    dataset.set_epoch(5)
    data = pickle.dumps(dataset)
    assert len(data) < 100_000
    assert [item.key for item in pickle.loads(data)] == [item.key for item in dataset]


def test_path_and_classes(store: Path) -> None:
    dataset = ShardDataset(os.path.relpath(store))
    assert dataset.path == str(store)
    assert dataset.classes == ("class0", "class1", "class2")


# -- memory -----------------------------------------------------------------------------------------------------------

MIB = 1 << 20
BOUND = 8 * MIB
LEAK = 64 << 10  # of a sample


def private_bytes() -> int:
    """Memory of this process that is no file's and shared with no one."""
    gc.collect()
    total, anonymous = 0, False
    with open("/proc/self/smaps", encoding="ascii", errors="replace") as f:
        for line in f:
            first = line.split(maxsplit=5)
            if "-" in first[0] and len(first) >= 5:
                anonymous = first[4] == "0"
            elif anonymous and first[0] in ("Private_Clean:", "Private_Dirty:"):
                total += int(first[1]) * 1024
    return total


class Measured(IterableDataset[Any]):
    """Passes batches on, and after the last one says what memory the worker has."""

    def __init__(self, dataset: ShardDataset, leak: int) -> None:
        self.dataset, self.leak = dataset, leak

    def __iter__(self) -> Iterator[Any]:
        assert get_worker_info() is not None
        kept = []
        for batch in self.dataset:
            if self.leak:
                kept.append(os.urandom(self.leak * len(batch.label)))
            yield len(batch.label)
        yield private_bytes()


def measure(path: str, leak: int) -> None:
    """Print the samples of an epoch and the memory of its worker at the end; runs in a process of its own."""
    dataset = Measured(ShardDataset(path, batch_size=32, shuffle=True), leak)
    *sizes, memory = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="fork")
    print(json.dumps([sum(sizes), memory]))


def start_measuring(path: Path, leak: int) -> subprocess.Popen[str]:
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_loader; "
    code += f"test_loader.measure({str(path)!r}, {leak})"
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="only Linux tells what memory is private")
def test_memory_does_not_grow_with_the_store(make_store: Make, make_images: Make) -> None:
    few, many = 128, 1024
    stores = [
        make_store("hdf5", source=make_images(n, sizes=((64, 48),), format="jpg"), samples_per_shard=64)
        for n in (few, many)
    ]
    # The same measurement with a leak must fail the same bound.
    running = [start_measuring(store, leak) for leak in (0, LEAK) for store in stores]
    found = [json.loads(process.communicate()[0]) for process in running]
    assert [samples for samples, _ in found] == [few, many, few, many]
    memory_few, memory_many, leaking_few, leaking_many = [memory for _, memory in found]
    assert memory_few > MIB
    assert memory_many - memory_few < BOUND
    assert leaking_many - leaking_few > BOUND
    assert leaking_many - leaking_few > 0.9 * LEAK * (many - few)
