"""Transforms from the encoded bytes: torchvision's results, and the same crops on any workers, threads and resumes."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.transforms import functional as reference
from torchvision.transforms import v2

import shardstore
from shardstore import OptionError, ReadOptions, ShardDataset
from shardstore.pictures import early, images
from shardstore.transforms import CenterCrop, Compose, Random, RandomHorizontalFlip, RandomResizedCrop, Resize

SUBSAMPLING = {"4:4:4": 0, "4:2:2": 1, "4:2:0": 2}


def jpeg(height: int, width: int, seed: int = 0, *, mode: str = "RGB", **options: Any) -> bytes:
    """A photo-like JPEG: smooth, with some noise."""
    random = np.random.default_rng(seed)
    small = Image.fromarray(random.integers(0, 256, (height // 16 + 2, width // 16 + 2, 3), np.uint8))
    array = np.asarray(small.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    array = np.clip(array + random.integers(-8, 9, array.shape), 0, 255).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(array).convert(mode).save(out, "JPEG", **{"quality": 90, **options})
    return out.getvalue()


@settings(max_examples=150)
@given(
    height=st.integers(1, 90),
    width=st.integers(1, 90),
    rows=st.integers(1, 90),
    kind=st.sampled_from([*SUBSAMPLING, "grey", "progressive", "optimized"]),
    scale=st.sampled_from([1, 2, 4, 8]),
)
def test_the_first_rows_are_those_of_the_whole_picture(
    height: int, width: int, rows: int, kind: str, scale: int
) -> None:
    options: dict[str, Any] = {"subsampling": SUBSAMPLING[kind]} if kind in SUBSAMPLING else {kind: True}
    options = {"mode": "L"} if kind == "grey" else {"optimize": True} if kind == "optimized" else options
    data = jpeg(height, width, **options)
    rows = min(rows, height)
    whole, part = images.decode_part(data, None, scale), images.decode_part(data, rows, scale)
    assert scale > 1 or (whole == images.decode(data)).all()
    assert part.shape[0] <= whole.shape[0]
    assert (part[: -(-rows // scale)] == whole[: -(-rows // scale)]).all()


def test_the_decoder_really_stops_early(monkeypatch: pytest.MonkeyPatch) -> None:
    data = jpeg(400, 300)
    assert images.decode_part(data, 100).shape[0] == 112  # seven rows of blocks of 16
    assert images.decode_part(data, 100, 2).shape[0] == 56
    assert images.decode_part(data, None).shape[0] == 400
    assert images.decode_part(jpeg(400, 300, progressive=True), 100).shape[0] == 400
    monkeypatch.setattr(early, "ON", False)
    assert images.decode_part(data, 100).shape[0] == 400


@pytest.mark.parametrize("seed", range(20))
def test_a_random_crop_is_that_of_torchvision(seed: int) -> None:
    data = jpeg(170 + 11 * seed, 310 - 7 * seed, seed)
    whole, transform = images.decode(data), RandomResizedCrop((96, 80), exact=True)
    (y, x, h, w), size = transform.box(*whole.shape[:2], Random(seed))
    expected = reference.resized_crop(Image.fromarray(whole), y, x, h, w, list(size))
    found = transform.decode(data, Random(seed), checked=True)
    assert found.dtype == torch.uint8
    assert (found.int() - reference.pil_to_tensor(expected).int()).abs().max() <= 2
    assert torch.equal(found, transform.apply(torch.from_numpy(whole).permute(2, 0, 1), Random(seed)))


def test_random_boxes_are_spread_as_torchvision_s() -> None:
    ours, theirs = [], []
    transform = RandomResizedCrop(8)
    for i in range(3000):
        (_, _, h, w), _ = transform.box(300, 400, Random(i * 7919))
        ours.append((h * w / 120_000, w / h))
        _, _, h, w = v2.RandomResizedCrop(8).make_params([torch.empty(3, 300, 400)]).values()
        theirs.append((h * w / 120_000, w / h))
    a, b = np.array(ours), np.array(theirs)
    assert abs(a.mean(0) - b.mean(0)).max() < 0.05
    assert abs(a.std(0) - b.std(0)).max() < 0.05


@pytest.mark.parametrize("size", [64, (40, 70), 300])
@pytest.mark.parametrize("shape", [(90, 130), (130, 90), (64, 64)])
def test_resize_and_centre_crop_are_those_of_torchvision(size: int | tuple[int, int], shape: tuple[int, int]) -> None:
    data = jpeg(*shape)
    whole = Image.fromarray(images.decode(data))
    sizes = [size] if isinstance(size, int) else list(size)
    resized = reference.pil_to_tensor(reference.resize(whole, sizes))
    found = Resize(size, exact=True).decode(data, Random(0), checked=True)
    assert found.shape == resized.shape
    assert (found.int() - resized.int()).abs().max() <= 2
    cropped = reference.pil_to_tensor(reference.center_crop(whole, sizes))
    assert torch.equal(CenterCrop(size).decode(data, Random(0)), cropped)


def test_scaled_decoding_is_close_and_can_be_forbidden() -> None:
    data = jpeg(640, 640)
    exact = Resize((80, 80), exact=True).decode(data, Random(0)).int()
    scaled = Resize((80, 80)).decode(data, Random(0)).int()
    assert not torch.equal(exact, scaled)
    averages = images.decode(data).reshape(80, 8, 80, 8, 3).mean((1, 3))  # what a scaled inverse DCT amounts to
    assert np.abs(scaled.permute(1, 2, 0).numpy() - averages).mean() < 2


def test_a_flip_flips_as_often_as_asked() -> None:
    picture = torch.arange(6).reshape(1, 2, 3).to(torch.uint8)
    flipped = [torch.equal(RandomHorizontalFlip(0.3).apply(picture, Random(i)), picture.flip(-1)) for i in range(1000)]
    assert 200 < sum(flipped) < 400
    assert torch.equal(RandomHorizontalFlip(1.0)(picture), picture.flip(-1))


PIPELINE = Compose([RandomResizedCrop(24), RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)])


@pytest.fixture(scope="module")
def store(make_images: Callable[..., Path], make_store: Callable[..., Path]) -> Path:
    source = make_images(40, sizes=((60, 50), (45, 70), (33, 33)), format="jpg")
    return make_store("npy", source=source, store="encoded", samples_per_shard=7)


def epoch(dataset: ShardDataset, workers: int = 0) -> list[Any]:
    return list(DataLoader(dataset, batch_size=None, num_workers=workers))


def same(found: list[Any], expected: list[Any]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(a.key == b.key and torch.equal(a.image, b.image) for a, b in pairs)


def dataset(store: Path, **options: Any) -> ShardDataset:
    options = {"batch_size": 4, "transform": PIPELINE, **options}
    return ShardDataset(store, fields=["image", "key"], shuffle=True, **options)


@pytest.mark.parametrize(("workers", "threads"), [(2, 0), (3, 0), (0, 2)])
def test_an_epoch_has_the_same_crops_however_it_is_read(store: Path, workers: int, threads: int) -> None:
    one, other = dataset(store), dataset(store, threads=threads)
    for _ in range(2):
        assert same(epoch(other, workers), epoch(one))
    resumed = dataset(store, threads=threads)
    resumed.load_state_dict(one.state_at(3, epoch=0))
    one.set_epoch(0)
    assert same(epoch(resumed, workers), epoch(one)[3:])


def test_epochs_seeds_and_samples_have_crops_of_their_own(store: Path) -> None:
    def by_key(items: list[Any]) -> dict[str, torch.Tensor]:
        return {key: image for batch in items for key, image in zip(batch.key, batch.image, strict=True)}

    data = dataset(store)
    first, second, seeded = by_key(epoch(data)), by_key(epoch(data)), by_key(epoch(dataset(store, seed=1)))
    assert not any(torch.equal(first[key], second[key]) or torch.equal(first[key], seeded[key]) for key in first)


def test_by_number_and_as_torchvision_s_they_work_too(store: Path) -> None:
    sample = shardstore.open(store, transform=PIPELINE)[3]
    assert sample.image.shape == (3, 24, 24)
    assert sample.image.dtype == torch.float32
    picture = shardstore.open(store, image_type="pil")[3].image
    chained = v2.Compose([RandomResizedCrop(24), RandomHorizontalFlip()])
    assert chained(picture).shape == (3, 24, 24)
    with pytest.raises(OptionError, match="begins with"):
        Compose([v2.RandomCrop(8)])


def test_pixels_and_other_formats_are_transformed_alike(make_store: Callable[..., Path], images_dir: Path) -> None:
    for options in ({"store": "encoded"}, {"store": "pixels", "size": 40}):
        path = make_store("zarr", source=images_dir, **options)
        batch = next(iter(ShardDataset(path, batch_size=24, transform=RandomResizedCrop(16))))
        assert batch.image.shape == (24, 3, 16, 16)


def test_a_picture_that_was_not_checked_is_decoded_strictly(
    make_images: Callable[..., Path], make_store: Callable[..., Path]
) -> None:
    source = make_images(3, sizes=((256, 256),), format="jpg")
    cut = next(source.rglob("*.jpg"))
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 3])
    path = make_store("npy", source=source, store="encoded", check="header")
    transform = RandomResizedCrop(8, scale=(0.001, 0.002))  # most boxes end above the cut
    for number in range(10):
        data = ShardDataset(path, batch_size=3, transform=transform, seed=number)
        with pytest.raises(shardstore.ImageError):
            list(data)
        skipping = ShardDataset(
            path, batch_size=3, transform=transform, seed=number, options=ReadOptions(on_error="skip")
        )
        with pytest.warns(UserWarning, match=cut.name):
            assert len(next(iter(skipping)).image) == 2
