"""Bad files that are left out change the plan, and leave nothing of the first one behind."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import shardstore
from shardstore.store.index import load
from shardstore.store.schema import shard_files

CONTAINERS = {"npy": "out", "zarr": "out.zarr", "hdf5": "out.h5"}


def files_of(store: Path) -> set[str]:
    root = load(store).root
    return {os.path.relpath(f"{folder}/{name}", root) for folder, _, names in os.walk(root) for name in names}


def expected_files(store: Path) -> set[str]:
    schema = load(store).schema
    shards = {path for shard in range(schema.shards) for path in shard_files(schema, shard)}
    return shards | {"shardstore.json", *(schema.files or {})} - {".h5"}


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """33 pictures of several sizes, the first one bad: without it there is a shard fewer."""
    folder = tmp_path / "imgs" / "a"
    folder.mkdir(parents=True)
    for i in range(33):
        Image.new("RGB", (8 + i % 4, 8), (i, i, i)).save(folder / f"{i:02d}.png")
    (folder / "00.png").write_bytes(b"no picture")
    return tmp_path / "imgs"


@pytest.mark.parametrize("container", CONTAINERS)
def test_no_shard_of_the_first_plan_stays(container: str, mixed: Path, tmp_path: Path) -> None:
    store = tmp_path / CONTAINERS[container]
    shardstore.convert(mixed, store, on_error="skip", samples_per_shard=16, workers=1)
    assert load(store).schema.shards == 2
    assert files_of(store) == expected_files(store)
    assert shardstore.validate(store, level="decode", workers=1) == []


def test_what_auto_chose_stays_when_files_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "imgs" / "a"
    folder.mkdir(parents=True)
    for i in range(20):
        pixels = np.random.Generator(np.random.PCG64(i)).integers(0, 256, (32, 32, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:02d}.png")
    Image.new("RGB", (40, 40)).save(folder / "zz.jpg")
    data = (folder / "zz.jpg").read_bytes()
    (folder / "zz.jpg").write_bytes(data[:-40])
    store = tmp_path / "out.zarr"
    summary = shardstore.convert(tmp_path / "imgs", store, on_error="skip", samples_per_shard=4, workers=1)
    assert [p.key for p in summary.rejects] == ["a/zz.jpg"]
    assert summary.schema.options["store"] == "encoded"
    assert "different sizes" in summary.reason
    assert files_of(store) == expected_files(store)


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_stranger_in_a_store_is_found(container: str, make_store: Callable[..., Path]) -> None:
    store = make_store(container)
    stranger = Path(load(store).root) / "image.npy"
    stranger.write_bytes(b"")
    (problem,) = shardstore.validate(store, level="structure", workers=1)
    assert problem.path == str(stranger)
    stranger.unlink()
    assert shardstore.validate(store, level="structure", workers=1) == []


@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_a_good_picture_of_another_type_is_never_a_bad_file(on_error: str, tmp_path: Path, odd_dir: Path) -> None:
    folder = tmp_path / "imgs" / "a"
    folder.mkdir(parents=True)
    (folder / "00.png").write_bytes((odd_dir / "sixteen_bit.png").read_bytes())
    for i in range(1, 5):
        Image.new("RGB", (9, 8), (i, i, i)).save(folder / f"{i:02d}.png")
    with pytest.raises(shardstore.OptionError, match="value types"):
        shardstore.convert(tmp_path / "imgs", tmp_path / "out", size=8, on_error=on_error, workers=1)
    assert not (tmp_path / "out").exists()
    data = (folder / "00.png").read_bytes()
    (folder / "00.png").write_bytes(data[: len(data) // 2])  # a bad one does not decide for the others
    summary = shardstore.convert(tmp_path / "imgs", tmp_path / "out", size=8, on_error="skip", workers=1)
    assert [p.key for p in summary.rejects] == ["a/00.png"]
    assert summary.schema.samples == 4


@pytest.mark.parametrize("name", ["out.zarr/", "out.h5/"])
def test_a_slash_at_the_end_does_not_change_the_format(name: str, images_dir: Path, tmp_path: Path) -> None:
    summary = shardstore.convert(images_dir, f"{tmp_path}/{name}", workers=1)
    assert summary.schema.container == {"out.zarr/": "zarr", "out.h5/": "hdf5"}[name]


def test_empty_paths_are_refused(
    make_store: Callable[..., Path], images_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for refused in (
        lambda: shardstore.convert(images_dir, ""),
        lambda: shardstore.convert("", "out"),
        lambda: shardstore.export(make_store("npy"), ""),
    ):
        with pytest.raises(shardstore.ShardstoreError, match="empty path"):
            refused()
    assert list(tmp_path.iterdir()) == []


def test_a_link_to_itself_is_one_bad_file(tmp_path: Path) -> None:
    folder = tmp_path / "imgs" / "a"
    folder.mkdir(parents=True)
    Image.new("RGB", (9, 8)).save(folder / "good.png")
    (folder / "loop.png").symlink_to("loop.png")
    summary = shardstore.convert(tmp_path / "imgs", tmp_path / "out", on_error="skip", workers=1)
    assert [p.key for p in summary.rejects] == ["a/loop.png"]


def test_rejects_are_listed_in_the_store(mixed: Path, tmp_path: Path) -> None:
    shardstore.convert(mixed, tmp_path / "out", on_error="skip", workers=1)
    (line,) = (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()
    assert json.loads(line)["key"] == "a/00.png"
