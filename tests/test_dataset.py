"""``shardstore.open``: samples by number and key, what they hold, transforms, and life inside a DataLoader."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import pickle
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, RandomSampler, Subset, default_collate
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import shardstore

Make = Callable[..., Path]

# Tests take more workers than a small machine has cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

# What the same pictures are as encoded files, as one array, as arrays of many sizes, and compressed.
STORES: dict[str, tuple[str, dict[str, Any]]] = {
    "encoded-npy": ("npy", {}),
    "encoded-zarr": ("zarr", {"samples_per_shard": 7}),
    "encoded-hdf5": ("hdf5", {"samples_per_shard": 7}),
    "pixels-npy": ("npy", {"size": (24, 20), "samples_per_shard": 7}),
    "ragged-hdf5": ("hdf5", {"store": "pixels", "samples_per_shard": 7}),
    "zstd-zarr": ("zarr", {"size": (24, 20), "codec": "zstd", "samples_per_shard": 8, "chunk_size": 4096}),
    "ragged-zstd-hdf5": ("hdf5", {"store": "pixels", "codec": "zstd", "samples_per_shard": 7}),
}
CONTEXTS = ("fork", "spawn", "forkserver")
# Its workers then need no seconds for importing torch.
multiprocessing.set_forkserver_preload(["torch", "torchvision.transforms.v2"])


@pytest.fixture(scope="module")
def store(make_store: Make) -> Path:
    """The 24 pictures of fixtures/images, encoded, in four shards. Not to be changed."""
    return make_store("zarr", samples_per_shard=7)


@pytest.fixture(scope="module")
def named_store(make_store: Make) -> Callable[[str], Path]:
    """``named_store(name)``: one of STORES, made once. Not to be changed."""
    return functools.cache(lambda name: make_store(STORES[name][0], **STORES[name][1]))


@pytest.fixture(scope="module", params=STORES)
def any_store(request: pytest.FixtureRequest, named_store: Callable[[str], Path]) -> Path:
    return named_store(request.param)


@pytest.fixture(scope="module")
def folder(images_dir: Path) -> ImageFolder:
    """torchvision's view of the same pictures; without a rule of ours it would leave out the GIF."""
    return ImageFolder(str(images_dir), is_valid_file=lambda path: True)


def same(a: Any, b: Any) -> bool:
    """Whether two samples hold the same values of the same types."""
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Image.Image):
        return a.mode == b.mode and np.array_equal(np.asarray(a), np.asarray(b))
    return bool(np.array_equal(a, b))


def without_keys(target: Path, count: int = 6) -> Path:
    """A store made from a Python sequence, which has no keys."""
    random = np.random.default_rng(3)
    samples = [(random.integers(0, 256, (5, 4, 3), np.uint8), i) for i in range(count)]
    shardstore.convert(samples, target)
    return target


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_samples_are_those_of_image_folder(store: Path, folder: ImageFolder, images_dir: Path) -> None:
    dataset = shardstore.open(store, fields=["image", "label", "key"], image_type="pil")
    assert len(dataset) == len(folder) == 24
    for i in range(24):
        image, label, key = dataset[i]
        expected, target = folder[i]
        assert str(images_dir / key) == folder.samples[i][0]
        assert (image.mode, label, type(label)) == ("RGB", target, int)
        assert np.array_equal(np.asarray(image), np.asarray(expected))


def test_negative_numbers_count_from_the_end(any_store: Path) -> None:
    dataset = shardstore.open(any_store)
    for i in range(24):
        assert same(dataset[i - 24], dataset[i])


@pytest.mark.parametrize("number", [24, -25, 10**12, -(10**12), 2**70])
def test_a_number_out_of_range_is_an_index_error(store: Path, number: int) -> None:
    dataset = shardstore.open(store)
    with pytest.raises(IndexError, match="24"):
        dataset[number]
    with pytest.raises(IndexError, match="24"):
        dataset.__getitems__([0, number])
    with pytest.raises(IndexError, match="24"):
        dataset.key(number)


@pytest.mark.parametrize("item", [1.5, slice(0, 2), None, (0, 1), b"cat/baseline.jpg"])
def test_what_is_neither_number_nor_key_is_a_type_error(store: Path, item: Any) -> None:
    with pytest.raises(TypeError):
        shardstore.open(store)[item]


def test_numbers_of_numpy_and_torch_will_do(store: Path) -> None:
    dataset = shardstore.open(store)
    for number in (np.int64(3), np.uint8(3), torch.tensor(3)):
        assert same(dataset[number], dataset[3])  # type: ignore[index]


@pytest.mark.parametrize("numbers", [[], [5], [0, 1, 2, 3], [23, 0, 7, 6, 7, 7, -1, 14, 13], list(range(23, -1, -1))])
def test_several_samples_at_once_are_the_single_ones(any_store: Path, numbers: list[int]) -> None:
    dataset = shardstore.open(any_store, fields=["key", "label", "image"])
    several = dataset.__getitems__(numbers)
    assert len(several) == len(numbers)
    assert all(same(a, dataset[i]) for a, i in zip(several, numbers, strict=True))


def test_iterating_gives_every_sample_once_in_order(any_store: Path) -> None:
    dataset = shardstore.open(any_store)
    assert all(same(a, dataset[i]) for i, a in enumerate(dataset))
    assert len(list(dataset)) == 24


def test_a_sample_belongs_to_its_reader_alone(any_store: Path) -> None:
    dataset = shardstore.open(any_store)
    before = dataset[3].image.clone()
    dataset[3].image.fill_(0)
    dataset.__getitems__([2, 3])[1].image.fill_(0)
    assert before.any()
    assert torch.equal(dataset[3].image, before)


# -- keys -------------------------------------------------------------------------------------------------------------


def test_a_key_finds_its_sample(any_store: Path, folder: ImageFolder, images_dir: Path) -> None:
    dataset = shardstore.open(any_store, fields=["key", "image"])
    for i, (path, _) in enumerate(folder.samples):
        key = Path(path).relative_to(images_dir).as_posix()
        assert dataset.key(i) == key
        assert dataset.find(key) == i
        assert same(dataset[key], dataset[i])
    assert dataset.key(-1) == dataset.key(23)


@pytest.mark.parametrize("key", ["", "cat", "cat/baseline", "cat/baseline.jpg ", "CAT/BASELINE.JPG", "café\udce9"])
def test_an_unknown_key_is_a_key_error(store: Path, key: str) -> None:
    dataset = shardstore.open(store)
    for look in (dataset.__getitem__, dataset.find):
        with pytest.raises(KeyError) as caught:
            look(key)
        assert caught.value.args == (key,) or key in str(caught.value)


def test_keys_that_are_no_utf8_are_found(tmp_path: Path, images_dir: Path) -> None:
    name = os.fsdecode(b"caf\xe9.jpg")
    (tmp_path / "imgs/a").mkdir(parents=True)
    shutil.copy(images_dir / "cat/grey.jpg", tmp_path / "imgs/a" / name)
    shutil.copy(images_dir / "cat/cmyk.jpg", tmp_path / "imgs/a/other.jpg")
    shardstore.convert(tmp_path / "imgs", tmp_path / "out", workers=1)
    dataset = shardstore.open(tmp_path / "out", fields=["key"])
    assert dataset[f"a/{name}"].key == f"a/{name}"


def test_a_store_without_keys_says_so(tmp_path: Path) -> None:
    dataset = shardstore.open(without_keys(tmp_path / "out"))
    assert dataset.key(0) is None
    with pytest.raises(shardstore.OptionError, match="no keys"):
        dataset["0"]


# -- classes ----------------------------------------------------------------------------------------------------------


def test_classes_and_targets_are_those_of_image_folder(any_store: Path, folder: ImageFolder) -> None:
    dataset = shardstore.open(any_store)
    assert list(dataset.classes or ()) == folder.classes
    assert dataset.class_to_idx == folder.class_to_idx
    assert list(dataset.targets) == folder.targets
    assert dataset.targets.dtype == np.int64


def test_targets_of_a_shuffled_store_are_those_of_its_samples(make_store: Make) -> None:
    dataset = shardstore.open(make_store("hdf5", shuffle=True, samples_per_shard=5))
    labels = [sample.label for sample in dataset]
    assert labels != sorted(labels)
    assert list(dataset.targets) == labels


def test_a_folder_without_classes_has_no_labels(make_store: Make, images_dir: Path) -> None:
    dataset = shardstore.open(make_store("npy", source=images_dir / "dog"))
    assert dataset.classes is None
    assert dataset.class_to_idx == {}
    assert dataset[0]._fields == ("image",)
    with pytest.raises(shardstore.OptionError, match="label"):
        _ = dataset.targets


def test_path_and_schema(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(store.parent)
    dataset = shardstore.open(store.name)
    assert dataset.path == str(store)
    assert (dataset.schema.samples, dataset.schema.shards) == (24, 4)


# -- fields -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields", [["image"], ["label"], ["key"], ["label", "image"], ["key", "image", "label"], ("label",)]
)
def test_fields_come_in_the_order_asked_for(any_store: Path, fields: Sequence[str]) -> None:
    full = shardstore.open(any_store, fields=["image", "label", "key"])
    dataset = shardstore.open(any_store, fields=fields)
    for i in (0, 9, 23):
        assert dataset[i]._fields == tuple(fields)
        assert all(same(dataset[i][name], full[i][name]) for name in fields)


def test_one_field_may_be_named_alone(store: Path) -> None:
    assert shardstore.open(store, fields="key")[0] == ("cat/baseline.jpg",)


def test_image_and_label_are_the_default(store: Path) -> None:
    assert shardstore.open(store)[0]._fields == ("image", "label")


@pytest.mark.parametrize(("fields", "named"), [(["mask"], "mask"), (["image", "Label"], "Label"), ([], "at least one")])
def test_impossible_fields_are_refused(store: Path, fields: list[str], named: str) -> None:
    with pytest.raises(shardstore.OptionError, match=named):
        shardstore.open(store, fields=fields)


def test_fields_of_a_sequence_keep_their_values(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    samples = [
        {
            "image": random.integers(0, 256, (4, 5, 3), np.uint8),
            "count": i,
            "box": random.random((i, 4)),
            "text": i * "é",
        }
        for i in range(6)
    ]
    shardstore.convert(samples, tmp_path / "out")
    dataset = shardstore.open(tmp_path / "out", fields=["image", "count", "box", "text"], image_type="numpy")
    for found, given in zip(dataset, samples, strict=True):
        assert np.array_equal(found.image, given["image"])
        assert (found.count, found["count"], found.text) == (given["count"], given["count"], given["text"])
        assert np.array_equal(found.box, given["box"])


def test_a_field_named_as_a_keyword_of_python_can_be_read(tmp_path: Path) -> None:
    shardstore.convert([{"class": i, "x": i + 1} for i in range(3)], tmp_path / "out")
    dataset = shardstore.open(tmp_path / "out")
    assert [tuple(map(int, sample)) for sample in dataset] == [(0, 1), (1, 2), (2, 3)]


# -- image_type and transforms ----------------------------------------------------------------------------------------


def test_pictures_are_tensors_arrays_or_pil_images(any_store: Path) -> None:
    arrays = shardstore.open(any_store, image_type="numpy")
    tensors = shardstore.open(any_store, image_type="tensor")
    pictures = shardstore.open(any_store, image_type="pil")
    default = shardstore.open(any_store)
    for i in range(24):
        array = arrays[i].image
        assert isinstance(array, np.ndarray)
        assert (array.dtype, array.shape[2]) == (np.uint8, 3)
        tensor = tensors[i].image
        assert tensor.dtype == torch.uint8
        assert np.array_equal(tensor.permute(1, 2, 0), array)
        assert pictures[i].image.mode == "RGB"
        assert np.array_equal(np.asarray(pictures[i].image), array)
        assert same(default[i], tensors[i])


def test_an_unknown_image_type_is_refused(store: Path) -> None:
    with pytest.raises(shardstore.OptionError, match="pil, tensor, numpy"):
        shardstore.open(store, image_type="jax")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("image_type", "expected"),
    [(None, Image.Image), ("pil", Image.Image), ("tensor", torch.Tensor), ("numpy", np.ndarray)],
)
def test_a_transform_gets_what_image_type_says(any_store: Path, image_type: Any, expected: type) -> None:
    got: list[Any] = []

    def look(image: Any) -> str:
        got.append(image)
        return f"picture {len(got)}"

    dataset = shardstore.open(any_store, transform=look, image_type=image_type)
    assert [dataset[0], dataset[5]] == [("picture 1", 0), ("picture 2", 0)]
    assert all(isinstance(image, expected) for image in got)
    plain = shardstore.open(any_store, image_type=image_type or "pil")
    assert all(same(image, plain[i].image) for image, i in zip(got, (0, 5), strict=True))


def test_a_transform_gives_what_it_gives_with_image_folder(store: Path, images_dir: Path) -> None:
    transform = v2.Compose([v2.Resize((16, 16)), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    expected = ImageFolder(str(images_dir), transform=transform, is_valid_file=lambda path: True)
    dataset = shardstore.open(store, transform=transform)
    assert all(torch.equal(dataset[i].image, expected[i][0]) for i in range(24))


def test_transforms_see_the_whole_sample(any_store: Path) -> None:
    def swap(label: int, image: Any, key: str) -> tuple[Any, ...]:
        return label + 10, f"{key}: {image.size}", image

    plain = shardstore.open(any_store, fields=["label", "image", "key"], image_type="pil")
    dataset = shardstore.open(any_store, fields=["label", "image", "key"], transforms=swap)
    for i in (0, 11, 23):
        label, image, key = plain[i]
        assert dataset[i]._fields == ("label", "image", "key")
        assert same(tuple(dataset[i]), (label + 10, f"{key}: {image.size}", image))


def test_joint_transforms_of_torchvision(store: Path, images_dir: Path) -> None:
    joint = v2.Compose([v2.Resize((8, 12)), v2.RandomHorizontalFlip(1.0), v2.ToImage()])
    expected = ImageFolder(str(images_dir), transform=joint, is_valid_file=lambda path: True)
    dataset = shardstore.open(store, transforms=joint)
    for i in range(24):
        image, label = dataset[i]
        assert torch.equal(image, expected[i][0])
        assert label == expected[i][1]


def test_joint_transforms_treat_picture_and_mask_alike(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    samples = [
        {"image": random.integers(0, 256, (6, 8, 3), np.uint8), "mask": random.integers(0, 4, (6, 8), np.uint8)}
        for _ in range(4)
    ]
    shardstore.convert(samples, tmp_path / "out")
    flip = v2.RandomHorizontalFlip(1.0)

    def joint(image: torch.Tensor, mask: torch.Tensor) -> Any:
        return flip(tv_tensors.Image(image), tv_tensors.Mask(mask))

    dataset = shardstore.open(tmp_path / "out", fields=["image", "mask"], transforms=joint, image_type="tensor")
    for found, given in zip(dataset, samples, strict=True):
        assert np.array_equal(found.image.permute(1, 2, 0), given["image"][:, ::-1])
        assert np.array_equal(found.mask, given["mask"][:, ::-1])


def test_transform_runs_before_transforms(store: Path) -> None:
    dataset = shardstore.open(
        store, transform=lambda image: image.size, transforms=lambda size, label: ({"size": size}, label)
    )
    with Image.open(Path(__file__).parent.parent / "fixtures/images/cat/baseline.jpg") as image:
        assert dataset[0].image == {"size": image.size}


def test_transforms_may_return_a_list_or_one_value_for_one_field(store: Path) -> None:
    assert shardstore.open(store, transforms=lambda image, label: [1, 2])[0] == (1, 2)
    assert shardstore.open(store, fields=["image"], transforms=lambda image: "x")[0] == ("x",)


@pytest.mark.parametrize("result", [(1,), (1, 2, 3), (), 1, None])
def test_transforms_that_return_a_wrong_number_of_values_are_named(store: Path, result: Any) -> None:
    dataset = shardstore.open(store, transforms=lambda image, label: result)
    with pytest.raises(shardstore.OptionError, match=r"2 values \(image, label\)"):
        dataset[0]


def broken_transform(*values: Any) -> Any:
    raise ZeroDivisionError("of mine")


@pytest.mark.parametrize("how", ["transform", "transforms"])
def test_an_error_in_a_transform_carries_sample_and_key(store: Path, how: str) -> None:
    dataset = shardstore.open(store, **{how: broken_transform})  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError, match="of mine") as caught:
        dataset[9]
    note = "\n".join(caught.value.__notes__)
    assert "sample 9" in note
    assert str(dataset.key(9)) in note


def test_an_error_in_a_transform_carries_its_key_out_of_a_worker(store: Path) -> None:
    dataset = shardstore.open(store, transform=broken_transform)
    loader = DataLoader(Subset(dataset, [9]), num_workers=1, multiprocessing_context="fork")
    with pytest.raises(ZeroDivisionError) as caught:
        list(loader)
    text = str(caught.value)
    del caught
    gc.collect()  # otherwise the worker lives on in the traceback's frames, and delays another test's
    assert str(dataset.key(9)) in text
    assert "sample 9" in text


# -- in a DataLoader --------------------------------------------------------------------------------------------------


LOADED = [("encoded-zarr", None), *((name, "fork") for name in STORES)]
LOADED += [("encoded-zarr", "spawn"), ("ragged-zstd-hdf5", "spawn")]
LOADED += [("encoded-hdf5", "forkserver"), ("pixels-npy", "forkserver")]


@pytest.mark.parametrize(("name", "context"), LOADED)
def test_a_data_loader_takes_it_with_any_sampler(
    named_store: Callable[[str], Path], name: str, context: str | None
) -> None:
    dataset = shardstore.open(named_store(name), fields=["image", "label", "key"], transform=shrink)
    sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(5))
    loader = DataLoader(
        dataset,
        batch_size=7,
        sampler=sampler,
        num_workers=0 if context is None else 2,
        multiprocessing_context=context,
    )
    batches = list(loader)
    numbers = list(RandomSampler(dataset, generator=torch.Generator().manual_seed(5)))
    expected = [dataset[i] for i in numbers]
    assert [key for batch in batches for key in batch.key] == [sample.key for sample in expected]
    assert sorted(numbers) == list(range(24)) != numbers
    assert torch.equal(torch.cat([b.image for b in batches]), torch.stack([s.image for s in expected]))
    assert torch.cat([b.label for b in batches]).tolist() == [s.label for s in expected]
    assert batches[0].label.dtype == torch.int64


def shrink(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image.resize((6, 5)))).permute(2, 0, 1)


@pytest.mark.parametrize("context", CONTEXTS)
def test_workers_may_start_after_the_parent_has_read(store: Path, context: str) -> None:
    dataset = shardstore.open(store, fields=["key"])
    keys = [sample.key for sample in dataset]
    assert dataset.find(keys[5]) == 5
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context=context)
    assert [sample.key for sample in loader] == keys
    assert [sample.key for sample in dataset] == keys


class ByKey(torch.utils.data.Dataset[Any]):
    """Asks for samples by key, in a worker."""

    def __init__(self, dataset: Any, keys: list[str]) -> None:
        self.dataset, self.keys = dataset, keys

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, number: int) -> Any:
        return self.dataset[self.keys[number]].key


@pytest.mark.parametrize("context", CONTEXTS)
def test_keys_are_found_in_workers_too(store: Path, context: str) -> None:
    # Hashes of strings differ between processes, and a table of them must not travel.
    dataset = shardstore.open(store, fields=["key"])
    keys = [sample.key for sample in dataset]
    assert dataset.find(keys[0]) == 0
    loader = DataLoader(ByKey(dataset, keys), batch_size=None, num_workers=1, multiprocessing_context=context)
    assert list(loader) == keys


def test_a_pickled_dataset_is_small_and_reads_the_same(any_store: Path) -> None:
    dataset = shardstore.open(any_store, fields=["image", "label", "key"], transform=shrink)
    expected = list(dataset)
    dataset.find(expected[3].key)
    data = pickle.dumps(dataset)
    assert len(data) < 100_000
    assert all(map(same, pickle.loads(data), expected))


def test_a_pickled_dataset_does_not_grow_with_the_store(tmp_path: Path) -> None:
    sizes = []
    for count in (100, 20_000):
        shardstore.convert([(i, f"key of {i:08d}") for i in range(count)], tmp_path / f"{count:06d}")
        dataset = shardstore.open(tmp_path / f"{count:06d}")
        assert len(list(dataset.__getitems__(range(count)))) == count
        sizes.append(len(pickle.dumps(dataset)))
    assert abs(sizes[1] - sizes[0]) < 100


def replace_store(store: Path, images_dir: Path) -> None:
    shardstore.convert(images_dir / "dog", store, overwrite=True, workers=1)


@pytest.mark.parametrize("container", ["npy", "zarr", "hdf5"])
def test_a_dataset_of_a_replaced_store_does_not_come_back_from_a_pickle(
    make_store: Make, images_dir: Path, container: str
) -> None:
    store = make_store(container)
    data = pickle.dumps(shardstore.open(store))
    replace_store(store, images_dir)
    with pytest.raises(shardstore.DamagedStoreError, match="replaced"):
        list(pickle.loads(data))


def test_a_worker_of_a_replaced_store_says_what_happened(
    make_store: Make, images_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store = make_store("zarr")
    dataset = shardstore.open(store)
    replace_store(store, images_dir)
    loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    with pytest.raises((shardstore.DamagedStoreError, RuntimeError)) as caught:
        list(loader)
    text = str(caught.value)
    del caught
    gc.collect()  # otherwise the worker lives on in the traceback's frames, and delays another test's
    # In the trainer, or from the worker that could not start.
    assert "replaced while it was in use" in text + capfd.readouterr().err


def test_a_store_replaced_by_the_same_content_goes_on(make_store: Make, images_dir: Path) -> None:
    store = make_store("hdf5")
    dataset = shardstore.open(store)
    expected = dataset[0]
    data = pickle.dumps(dataset)
    shardstore.convert(images_dir, store, overwrite=True, workers=1)
    assert same(pickle.loads(data)[0], expected)


@pytest.mark.parametrize("container", ["npy", "zarr", "hdf5"])
def test_pixels_of_a_replaced_store_are_never_taken_for_the_old_ones(
    tmp_path: Path, make_images: Make, container: str
) -> None:
    target = tmp_path / {"npy": "out", "zarr": "out.zarr", "hdf5": "out.h5"}[container]
    shardstore.convert(make_images(6, seed=1), target, store="pixels", workers=1)
    dataset = shardstore.open(target, image_type="numpy")
    expected = [sample.image for sample in shardstore.open(target, image_type="numpy")]
    shardstore.convert(make_images(6, seed=2), target, store="pixels", overwrite=True, workers=1)
    try:
        found = [dataset[i].image for i in range(6)]
    except shardstore.DamagedStoreError:
        return
    assert all(map(np.array_equal, found, expected))


# -- the named tuple --------------------------------------------------------------------------------------------------


@pytest.fixture
def sample(store: Path) -> Any:
    return shardstore.open(store, fields=["image", "label", "key"])[4]


def test_values_by_position_attribute_and_name(sample: Any) -> None:
    image, label, key = sample
    assert isinstance(sample, tuple)
    assert sample[0] is sample.image is sample["image"] is image
    assert sample[1] is sample.label is sample["label"] is label
    assert sample[-1] is sample.key is sample["key"] is key
    assert sample[1:] == (label, key)
    assert sample._fields == ("image", "label", "key")
    assert sample._asdict().keys() == {"image", "label", "key"}


def test_a_sample_without_such_a_value_says_so(sample: Any) -> None:
    with pytest.raises(IndexError):
        sample[3]
    with pytest.raises(AttributeError, match="mask"):
        _ = sample.mask


@pytest.mark.parametrize("name", ["mask", "count", "index", "_fields", "__class__"])
def test_only_fields_can_be_had_by_name(sample: Any, name: str) -> None:
    with pytest.raises(KeyError, match=name):
        sample[name]


def test_a_sample_can_be_pickled_and_keeps_its_type(sample: Any) -> None:
    again = pickle.loads(pickle.dumps(sample))
    assert type(again) is type(sample)
    assert same(again, sample)


def test_a_sample_can_be_rebuilt_from_its_values(sample: Any) -> None:
    # So do torch's pinning of memory and the loops of many trainers that move a batch to a device.
    again = type(sample)(*sample)
    assert same(again, sample)
    again = type(sample)(*(value for value in sample))
    assert again["key"] == sample.key
    assert sample._replace(label=7).label == 7


def test_samples_of_the_same_fields_have_one_type(store: Path, make_store: Make) -> None:
    first = shardstore.open(store)[0]
    second = shardstore.open(make_store("npy", size=8))[0]
    assert type(first) is type(second)
    assert type(shardstore.open(store, fields=["label", "image"])[0]) is not type(first)


def test_default_collate_makes_a_batch_of_the_same_type(make_store: Make) -> None:
    dataset = shardstore.open(make_store("npy", size=(6, 9)), fields=["image", "label", "key"])
    samples = [dataset[i] for i in (1, 8, 20)]
    batch = default_collate(samples)
    assert type(batch) is type(samples[0])
    assert torch.equal(batch.image, torch.stack([s.image for s in samples]))
    assert batch["image"].shape == (3, 3, 6, 9)
    assert batch.image.is_contiguous(memory_format=torch.channels_last)
    assert batch.label.tolist() == [s.label for s in samples]
    assert batch.label.dtype == torch.int64
    assert batch.key == [s.key for s in samples]


def test_default_collate_of_pictures_of_different_sizes_says_what_to_do(store: Path) -> None:
    dataset = shardstore.open(store, fields=["image", "key"])
    samples = [dataset[0], dataset[1]]
    with pytest.raises(shardstore.StackError) as caught:
        default_collate(samples)
    shapes = [str(tuple(sample.image.shape)) for sample in samples]
    for part in (samples[1].key, *shapes, "transform", "--size"):
        assert part in str(caught.value)


# -- what is wrong with a store ---------------------------------------------------------------------------------------


def test_opening_what_is_no_store(tmp_path: Path, images_dir: Path) -> None:
    for path in (tmp_path / "missing", images_dir):
        with pytest.raises(shardstore.NoStoreError, match=path.name):
            shardstore.open(path)
    with pytest.raises(FileNotFoundError):
        shardstore.open(tmp_path / "missing")


def test_the_error_for_a_damaged_sample_names_its_place(make_store: Make) -> None:
    store = make_store("npy", samples_per_shard=7)
    shard = store / "image/00001.data.npy"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    dataset = shardstore.open(store)
    for number in (0, 12, 14):
        dataset[number]
    with pytest.raises(shardstore.DamagedStoreError) as caught:
        dataset[13]
    problem = caught.value.problem
    assert (problem.path, problem.field, problem.shard, problem.sample) == (str(shard), "image", 1, 13)
    assert problem.key == dataset.key(13)
    assert "validate" in (problem.hint or "")


def test_a_dataset_that_is_gone_leaves_no_open_files(store: Path) -> None:
    folder = Path("/proc/self/fd")
    if not folder.is_dir():
        return

    def open_files() -> int:
        return sum(os.path.realpath(fd).startswith(str(store)) for fd in folder.iterdir())

    dataset = shardstore.open(store)
    list(dataset)
    assert open_files() > 0
    del dataset
    gc.collect()
    assert open_files() == 0


def test_a_field_key_that_is_no_text_is_no_key(tmp_path: Path) -> None:
    shardstore.convert([{"key": i, "x": i} for i in range(3)], tmp_path / "out")
    dataset = shardstore.open(tmp_path / "out")
    assert dataset.key(1) is None
    with pytest.raises(shardstore.OptionError, match="no keys"):
        dataset.find("1")
