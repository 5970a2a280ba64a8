"""Fixtures that all tests share: folders of pictures, and factories of folders and stores in fresh temporary folders.

All are session-scoped, so that any other fixture and hypothesis may use them: what a factory returns belongs to its
caller alone, the folders of ``fixtures/`` to nobody.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from PIL import Image

import shardstore

# Other people's work on a shared machine must not fail a test.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

FIXTURES = Path(__file__).parent.parent / "fixtures"
SUFFIX = {"npy": "", "zarr": ".zarr", "hdf5": ".h5"}


@pytest.fixture(scope="session")
def images_dir() -> Path:
    """24 good pictures of many formats, modes and sizes, in 3 classes."""
    return FIXTURES / "images"


@pytest.fixture(scope="session")
def odd_dir() -> Path:
    """Pictures whose values RGB would clip: 16-bit, 32-bit, float."""
    return FIXTURES / "odd"


@pytest.fixture(scope="session")
def bad_dir() -> Path:
    """7 files that are no good pictures."""
    return FIXTURES / "bad"


@pytest.fixture(scope="session")
def make_store(tmp_path_factory: pytest.TempPathFactory, images_dir: Path) -> Callable[..., Path]:
    """``make_store(container, source=images_dir, name="out", **options)``: a new store in a folder of its own."""

    def make(container: str, *, source: Any = None, name: str = "out", **options: Any) -> Path:
        target = tmp_path_factory.mktemp("store") / f"{name}{SUFFIX[container]}"
        options.setdefault("workers", 1)
        shardstore.convert(images_dir if source is None else source, target, **options)
        return target

    return make


@pytest.fixture(scope="session")
def make_images(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``make_images(count, classes=3, sizes=((32, 24),), format="png", seed=0)``: a folder of random pictures.

    Picture ``i`` is ``CLASS/00000i.FORMAT`` in class ``i % classes``, of the (width, height) ``sizes[i % len(sizes)]``.
    """

    def make(
        count: int,
        *,
        classes: int = 3,
        sizes: Sequence[tuple[int, int]] = ((32, 24),),
        format: str = "png",
        seed: int = 0,
    ) -> Path:
        root = tmp_path_factory.mktemp("images")
        random = np.random.default_rng(seed)
        for i in range(count):
            width, height = sizes[i % len(sizes)]
            path = root / f"class{i % classes}" / f"{i:06d}.{format}"
            path.parent.mkdir(exist_ok=True)
            Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8)).save(path)
        return root

    return make


@pytest.fixture(scope="session")
def tree() -> Callable[[Path], dict[str, Path]]:
    """``tree(store)``: every file of a store, or of a folder, by its path relative to the store's folder."""

    def files(path: Path) -> dict[str, Path]:
        roots = [path, path.with_name(path.name + ".shards")]
        found = [Path(folder, f) for root in roots for folder, _, names in os.walk(root) for f in names]
        found += [path] if path.is_file() else []
        return {f.relative_to(path.parent).as_posix(): f for f in sorted(found)}

    return files


@pytest.fixture(scope="session")
def fitted() -> Callable[..., np.ndarray[Any, Any]]:
    """``fitted(image, (height, width), fit)``: what ``size`` and ``fit`` promise, by Pillow's own operations."""

    def fit_picture(image: Image.Image, size: tuple[int, int], fit: str = "crop") -> np.ndarray[Any, Any]:
        height, width = size
        if fit == "stretch":
            return np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))
        scales = (height / image.height, width / image.width)
        scale = max(scales) if fit == "crop" else min(scales)
        scaled = [max(round(n * scale), 1) for n in (image.height, image.width)]
        scaled = [max(a, b) if fit == "crop" else min(a, b) for a, b in zip(scaled, size, strict=True)]
        image = image.resize((scaled[1], scaled[0]), Image.Resampling.BILINEAR)
        if fit == "crop":
            top, left = (scaled[0] - height) // 2, (scaled[1] - width) // 2
            return np.asarray(image.crop((left, top, left + width, top + height)))
        padded = Image.new(image.mode, (width, height))
        padded.paste(image, (-((scaled[1] - width) // 2), -((scaled[0] - height) // 2)))  # of an odd margin, more first
        return np.asarray(padded)

    return fit_picture
