"""The options of a conversion, its decisions, and what it does to the place it writes to."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image

import shardstore

CONTAINERS = ("npy", "zarr", "hdf5")
Tree = Callable[[Path], dict[str, Path]]


def contents(files: dict[str, Path]) -> dict[str, bytes]:
    return {name: file.read_bytes() for name, file in files.items()}


def keys_of(store: Path) -> list[str | None]:
    dataset = shardstore.open(store)
    return [dataset.key(i) for i in range(len(dataset))]


def pixels_of(store: Path) -> list[np.ndarray[Any, Any]]:
    return [sample.image for sample in shardstore.open(store, image_type="numpy")]


# -- size and fit -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fit", ["crop", "pad", "stretch"])
@pytest.mark.parametrize("size", [32, (20, 48), (48, 20), 1, (1, 60)], ids=str)
def test_size_and_fit_are_pillows_bilinear_resize(
    fit: str, size: int | tuple[int, int], make_store: Callable[..., Path], images_dir: Path, fitted: Callable[..., Any]
) -> None:
    store = make_store("npy", size=size, fit=fit)
    shape = (size, size) if isinstance(size, int) else size
    schema = shardstore.open(store).schema
    assert schema.field("image").shape == (*shape, 3)
    assert (schema.options["size"], schema.options["fit"], schema.options["store"]) == (list(shape), fit, "pixels")
    for key, pixels in zip(keys_of(store), pixels_of(store), strict=True):
        picture = Image.open(images_dir / str(key)).convert("RGB")
        np.testing.assert_array_equal(pixels, fitted(picture, shape, fit), err_msg=str(key))


def test_a_picture_that_has_the_size_is_not_resampled(
    make_store: Callable[..., Path], make_images: Callable[..., Path]
) -> None:
    source = make_images(3, sizes=[(32, 24)])
    for fit in ("crop", "pad", "stretch"):
        store = make_store("npy", source=source, size=(24, 32), fit=fit)
        for key, pixels in zip(keys_of(store), pixels_of(store), strict=True):
            np.testing.assert_array_equal(pixels, np.asarray(Image.open(source / str(key))))


# -- how pictures are stored ------------------------------------------------------------------------------------------


def smooth_images(folder: Path, size: tuple[int, int] = (64, 64)) -> Path:
    """Pictures of one size whose files are far smaller than their pixels."""
    (folder / "a").mkdir(parents=True)
    for i in range(3):
        Image.new("RGB", size, (i, 50, 90)).save(folder / "a" / f"{i}.png")
    return folder


def test_auto_takes_pixels_where_one_size_takes_at_most_twice_the_bytes(
    make_images: Callable[..., Path], tmp_path: Path
) -> None:
    summary = shardstore.convert(make_images(5, sizes=[(40, 32)]), tmp_path / "out", workers=1)
    assert summary.schema.options["store"] == "pixels"
    assert summary.schema.field("image").shape == (32, 40, 3)
    assert "40x32" in summary.reason
    assert "--store encoded" in summary.reason
    assert summary.reason in str(summary)


def test_auto_keeps_files_that_pixels_would_more_than_double(tmp_path: Path) -> None:
    source = smooth_images(tmp_path / "source")
    summary = shardstore.convert(source, tmp_path / "out", workers=1)
    assert summary.schema.options["store"] == "encoded"
    assert "pixels would take 36.9 kB" in summary.reason
    assert "--size 224" in summary.reason
    assert shardstore.convert(source, tmp_path / "px", store="pixels", workers=1).schema.options["store"] == "pixels"


@pytest.mark.parametrize("padding", [0, 1])
def test_auto_draws_the_line_at_exactly_twice_the_bytes(padding: int, tmp_path: Path) -> None:
    # A JPEG may be followed by anything, so that its size can be chosen to the byte.
    source = smooth_images(tmp_path / "source", (64, 64))
    shutil.rmtree(source / "a")
    (source / "a").mkdir()
    Image.new("RGB", (64, 64)).save(source / "a" / "0.jpg")
    half = 64 * 64 * 3 // 2
    data = (source / "a" / "0.jpg").read_bytes()
    (source / "a" / "0.jpg").write_bytes(data + bytes(half - len(data) - padding))
    summary = shardstore.convert(source, tmp_path / "out", workers=1)
    assert summary.schema.options["store"] == ("encoded" if padding else "pixels")


@pytest.mark.parametrize("other", ["size", "mode"])
@pytest.mark.parametrize("where", [0, 69])
def test_auto_keeps_files_of_different_sizes_or_modes(
    other: str, where: int, make_images: Callable[..., Path], tmp_path: Path
) -> None:
    # The last of 70 too: a look at the first few would not do.
    source = make_images(70, classes=1, sizes=[(20, 20)])
    shape, dtype = ((20, 21, 3), np.uint8) if other == "size" else ((20, 20), np.uint16)
    Image.fromarray(np.zeros(shape, dtype)).save(source / "class0" / f"{where:06d}.png")
    summary = shardstore.convert(source, tmp_path / "out", workers=1)
    assert summary.schema.options["store"] == "encoded"
    assert "different sizes or modes" in summary.reason
    assert keys_of(tmp_path / "out") == sorted(f"class0/{i:06d}.png" for i in range(70))


def test_one_decision_whatever_the_number_of_workers(
    make_images: Callable[..., Path], make_store: Callable[..., Path], tree: Tree
) -> None:
    source = make_images(8, sizes=[(40, 32)])
    one, two = (contents(tree(make_store("npy", source=source, workers=workers))) for workers in (1, 2))
    assert one == two


@pytest.mark.parametrize("name", ["sixteen_bit.png", "thirty_two_bit.tif", "float.tif"])
@pytest.mark.parametrize("store", ["pixels", "encoded"])
def test_values_beyond_8_bits_are_exact(name: str, store: str, odd_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "source" / "class"
    folder.mkdir(parents=True)
    shutil.copy(odd_dir / name, folder)
    with Image.open(odd_dir / name) as picture:
        wanted = np.asarray(picture)
    wanted = wanted.astype({"i": "int32", "u": "uint16", "f": "float32"}[wanted.dtype.kind])
    for container in CONTAINERS:
        target = tmp_path / container / "out"
        shardstore.convert(tmp_path / "source", target, format=container, store=store, workers=1)
        (pixels,) = pixels_of(target)
        assert pixels.dtype == wanted.dtype
        np.testing.assert_array_equal(pixels[:, :, 0], wanted)
        if store == "pixels" and container == "npy":
            np.testing.assert_array_equal(np.load(target / "image/00000.npy")[0, :, :, 0], wanted)


def test_pictures_of_different_value_types_are_no_array_of_pixels(odd_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(odd_dir, tmp_path / "source" / "class")
    with pytest.raises(shardstore.SourceError) as caught:
        shardstore.convert(tmp_path / "source", tmp_path / "out", store="pixels", workers=1)
    assert "store encoded" in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


# -- shards, chunks, order --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wanted", "shards"), [(1, 24), (5, 5), (23, 2), (24, 1), (1000, 1)])
def test_samples_per_shard_is_exact(wanted: int, shards: int, make_store: Callable[..., Path]) -> None:
    schema = shardstore.open(make_store("npy", samples_per_shard=wanted)).schema
    assert (schema.shard_samples, schema.shards) == (min(wanted, 24), shards)


def test_shards_are_multiples_of_256_samples_near_shard_size(
    make_images: Callable[..., Path], make_store: Callable[..., Path]
) -> None:
    source = make_images(1100, sizes=[(4, 4)])
    schemas = [shardstore.open(make_store("npy", source=source, shard_size=n)).schema for n in (10**9, 40_000, 10_000)]
    assert {schema.shard_samples % 256 for schema in schemas} == {0}
    assert schemas[0].shards < schemas[2].shards
    assert all(schema.shards == -(-1100 // schema.shard_samples) for schema in schemas)


def test_shards_of_large_samples_are_near_shard_size(make_store: Callable[..., Path]) -> None:
    # 256 samples of this size would be beyond all bounds: the multiple is given up.
    samples = [np.zeros((700, 1000, 3), np.uint8)] * 9
    schema = shardstore.open(make_store("npy", source=samples, shard_size=5_000_000)).schema
    assert schema.shard_samples == 2


@pytest.mark.parametrize("container", ["zarr", "hdf5"])
@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_chunks_hold_at_most_chunk_size_and_divide_the_shard(
    container: str, codec: str, make_store: Callable[..., Path]
) -> None:
    picture = 16 * 16 * 3
    for chunk_size, samples in [(1, 1), (picture, 1), (3 * picture + 5, 3), (7 * picture, 6), (10**9, 12)]:
        options = {"size": 16, "samples_per_shard": 12, "chunk_size": chunk_size, "codec": codec}
        store = make_store(container, **options)
        assert shardstore.open(store).schema.array("image")[1].chunk_items == samples
        assert shardstore.open(store).info()["chunks"]["image"] == 24 // samples
        if container == "hdf5" and codec == "zstd":
            (root,) = store.with_name(store.name + ".shards").iterdir()
            with h5py.File(root / "00000.h5") as file:
                assert file["image"].chunks == (samples, 16, 16, 3)


@pytest.mark.parametrize("container", CONTAINERS)
def test_shuffle_stores_another_order_chosen_by_the_seed(
    container: str, make_store: Callable[..., Path], images_dir: Path, tree: Tree
) -> None:
    plain = make_store(container, samples_per_shard=7)
    options: dict[str, Any] = {"samples_per_shard": 7, "shuffle": True}
    one, same, other = (make_store(container, seed=seed, **options) for seed in (1, 1, 2))
    assert contents(tree(one)) == contents(tree(same))
    orders = [keys_of(store) for store in (plain, one, other)]
    assert all(a != b for a, b in itertools.combinations(orders, 2))
    assert all(sorted(map(str, order)) == sorted(map(str, orders[0])) for order in orders)
    recorded = shardstore.open(one).schema.options
    assert (recorded["shuffle"], recorded["seed"]) == (True, 1)
    assert shardstore.open(plain).schema.options["shuffle"] is False
    for number, sample in enumerate(shardstore.open(one, fields=["image", "label", "key"], image_type="numpy")):
        assert sample.key == orders[1][number]
        assert ("cat", "dog", "fish")[sample.label] == sample.key.partition("/")[0]
        assert sample.image.shape[:2] == Image.open(images_dir / sample.key).size[::-1]
    assert shardstore.validate(one, level="source", source=images_dir, workers=1) == []


def test_a_shuffle_is_no_rotation_of_the_classes(
    make_images: Callable[..., Path], make_store: Callable[..., Path]
) -> None:
    store = make_store("npy", source=make_images(300, sizes=[(2, 2)]), shuffle=True)
    labels = shardstore.open(store).targets
    assert np.count_nonzero(np.diff(labels)) > 100  # 200 of 299 in expectation; 2 where classes stay together


# -- the place --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("options", [{}, {"size": 16}, {"store": "pixels"}, {"store": "encoded"}], ids=str)
def test_a_dry_run_tells_the_plan_and_writes_nothing(
    container: str, options: dict[str, Any], tmp_path: Path, images_dir: Path, tree: Tree
) -> None:
    before = contents(tree(images_dir))
    target = tmp_path / "out"
    planned = shardstore.convert(images_dir, target, format=container, dry_run=True, workers=1, **options)
    assert list(tmp_path.iterdir()) == []
    assert contents(tree(images_dir)) == before
    assert planned.dry_run
    assert "would hold 24 images in 3 classes" in str(planned)
    done = shardstore.convert(images_dir, target, format=container, workers=1, **options)
    assert (planned.schema.fields, planned.schema.arrays) == (done.schema.fields, done.schema.arrays)
    assert planned.reason == done.reason
    assert json.dumps(done.to_dict())
    assert done.to_dict()["bytes"] == sum(map(len, contents(tree(target)).values()))


def occupied(kind: str, path: Path, make_store: Callable[..., Path]) -> None:
    """Something at a path that may not be replaced without asking, or at all."""
    if kind.endswith("store"):
        store = make_store(kind.removesuffix(" store"), samples_per_shard=7, name=path.stem)
        for part in store.parent.iterdir():
            shutil.move(part, path.parent / part.name.replace(store.name, path.name))
    elif kind == "file":
        path.write_text("my own")
    elif kind == "link":
        (path.parent / "mine").mkdir()
        path.symlink_to(path.parent / "mine")
    elif kind == "dangling link":
        path.symlink_to(path.parent / "nowhere")
    else:
        path.mkdir()
        if kind == "full folder":
            (path / "thesis.txt").write_text("my own")


STORES = ["npy store", "zarr store", "hdf5 store"]


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("kind", [*STORES, "file", "full folder", "empty folder", "link", "dangling link"])
def test_what_is_there_is_not_touched_without_overwrite(
    kind: str, container: str, tmp_path: Path, images_dir: Path, make_store: Callable[..., Path], tree: Tree
) -> None:
    target = tmp_path / "out.h5"
    occupied(kind, target, make_store)
    before, names = contents(tree(target)), sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(shardstore.OptionError, match="overwrite"):
        shardstore.convert(images_dir, target, format=container, workers=1)
    assert contents(tree(target)) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == names


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("kind", ["file", "full folder", "dangling link"])
def test_overwrite_replaces_nothing_but_stores_and_empty_folders(
    kind: str, container: str, tmp_path: Path, images_dir: Path, make_store: Callable[..., Path], tree: Tree
) -> None:
    target = tmp_path / "out.h5"
    occupied(kind, target, make_store)
    before, names = (
        contents(tree(target)) if kind != "dangling link" else {},
        sorted(p.name for p in tmp_path.iterdir()),
    )
    with pytest.raises(shardstore.OptionError, match="will not be replaced"):
        shardstore.convert(images_dir, target, format=container, overwrite=True, workers=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    assert contents(tree(target)) == before


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("kind", [*STORES, "empty folder"])
def test_overwrite_replaces_any_store_by_any_other(
    kind: str, container: str, tmp_path: Path, images_dir: Path, make_store: Callable[..., Path], tree: Tree
) -> None:
    (tmp_path / "new").mkdir()
    target, fresh = tmp_path / "out.h5", tmp_path / "new" / "out.h5"
    occupied(kind, target, make_store)
    shutil.rmtree(tmp_path / "nothing", ignore_errors=True)
    options: dict[str, Any] = {"format": container, "size": 16, "samples_per_shard": 5, "workers": 1}
    shardstore.convert(images_dir, target, overwrite=True, **options)
    shardstore.convert(images_dir, fresh, **options)
    assert contents(tree(target)) == contents(tree(fresh))
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["new", *(p.name for p in fresh.parent.iterdir())])
    assert shardstore.validate(target, level="source", source=images_dir, workers=1) == []


@pytest.mark.parametrize("container", CONTAINERS)
def test_overwrite_by_the_same_content(
    container: str, make_store: Callable[..., Path], images_dir: Path, tree: Tree
) -> None:
    store = make_store(container)
    before = contents(tree(store))
    shardstore.convert(images_dir, store, overwrite=True, workers=1)
    assert contents(tree(store)) == before
    assert len(list(store.parent.iterdir())) == (2 if container == "hdf5" else 1)


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_failed_overwrite_leaves_the_old_store(
    container: str, make_store: Callable[..., Path], bad_dir: Path, tmp_path: Path, tree: Tree
) -> None:
    store = make_store(container)
    before = contents(tree(store))
    shutil.copytree(bad_dir, tmp_path / "source" / "class")
    for source in (tmp_path / "source", tmp_path / "missing"):
        with pytest.raises(shardstore.SourceError):
            shardstore.convert(source, store, overwrite=True, workers=1)
    assert contents(tree(store)) == before
    assert len(list(store.parent.iterdir())) == (2 if container == "hdf5" else 1)


@pytest.mark.parametrize("below", ["", "out.zarr", "cat", "cat/out.zarr", "new/out.h5", "../images/out"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_target_inside_the_source_is_refused(
    below: str, overwrite: bool, images_dir: Path, tmp_path: Path, tree: Tree
) -> None:
    source = shutil.copytree(images_dir, tmp_path / "images")
    before = contents(tree(source))
    with pytest.raises(shardstore.OptionError):
        shardstore.convert(source, source / below, overwrite=overwrite, workers=1)
    assert contents(tree(source)) == before


@pytest.mark.parametrize("linked", ["source", "target"])
def test_a_target_inside_the_source_is_refused_through_links(
    linked: str, images_dir: Path, tmp_path: Path, tree: Tree
) -> None:
    source = shutil.copytree(images_dir, tmp_path / "images")
    alias = tmp_path / "alias"
    alias.symlink_to(source)
    before = contents(tree(source))
    where = (alias, source / "out.zarr") if linked == "source" else (source, alias / "out.zarr")
    with pytest.raises(shardstore.OptionError):
        shardstore.convert(*where, workers=1)
    assert contents(tree(source)) == before


@pytest.mark.parametrize("container", CONTAINERS)
def test_the_folder_around_the_source_is_not_replaced(
    container: str, images_dir: Path, tmp_path: Path, tree: Tree
) -> None:
    source = shutil.copytree(images_dir, tmp_path / "around" / "images")
    before = contents(tree(source))
    with pytest.raises(shardstore.OptionError):
        shardstore.convert(source, tmp_path / "around", format=container, overwrite=True, workers=1)
    assert contents(tree(source)) == before


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_store_is_never_lost_by_overwriting_it_with_itself(container: str, make_store: Callable[..., Path]) -> None:
    store = make_store(container)
    before = shardstore.open(store).schema.fingerprint
    with pytest.raises(shardstore.OptionError):
        shardstore.convert(store, store, overwrite=True, workers=1)
    assert shardstore.open(store).schema.fingerprint == before
    assert shardstore.validate(store, level="decode", workers=1) == []


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_folder_of_the_user_named_partial_is_in_the_way(container: str, images_dir: Path, tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "thesis.txt").write_text("my own")
    with pytest.raises(shardstore.OptionError, match="in the way"):
        shardstore.convert(images_dir, tmp_path / "out", format=container, workers=1)
    assert (partial / "thesis.txt").read_text() == "my own"


def test_files_of_the_user_beside_hdf5_shards_do_not_end_in_a_crash(
    make_store: Callable[..., Path], images_dir: Path
) -> None:
    # What macOS and Windows leave in folders, for one.
    store = make_store("hdf5")
    (store.with_name("out.h5.shards") / ".DS_Store").write_bytes(b"\0")
    shardstore.convert(images_dir, store, size=16, overwrite=True, workers=1)
    assert shardstore.open(store).schema.options["size"] == [16, 16]
    assert shardstore.validate(store, level="decode", workers=1) == []


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("name", ["store", "replaced", "UNFINISHED.txt", "a.partial", "100%", "naïve 名", "a'b\"c"])
def test_a_store_may_have_any_name(name: str, container: str, images_dir: Path, tmp_path: Path) -> None:
    target = tmp_path / "new folder" / name
    shardstore.convert(images_dir, target, format=container, samples_per_shard=10, workers=1)
    names = {name, f"{name}.shards"} if container == "hdf5" else {name}
    assert {path.name for path in target.parent.iterdir()} == names
    assert shardstore.validate(target, level="source", source=images_dir, workers=1) == []
    if container == "hdf5":
        with h5py.File(target) as file:
            assert np.bincount(file["label"][...]).tolist() == [7, 7, 10]


@pytest.mark.parametrize(
    ("target", "container"),
    [
        ("a.zarr", "zarr"),
        ("A.ZARR", "zarr"),
        ("a.h5", "hdf5"),
        ("a.hdf5", "hdf5"),
        ("a", "npy"),
        ("a.npy", "npy"),
        ("a.b/c", "npy"),
    ],
)
def test_the_ending_chooses_the_container(target: str, container: str, images_dir: Path, tmp_path: Path) -> None:
    summary = shardstore.convert(images_dir, str(tmp_path / target), workers=1, size=8)
    assert summary.schema.container == container
    assert Path(summary.target) == tmp_path / target


# -- impossible options -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"store": "jpeg"}, {"fit": "squash"}, {"codec": "lz4"}, {"check": "none"}, {"on_error": "ignore"},
        {"format": "tiff"}, {"samples_per_shard": 0}, {"samples_per_shard": -1}, {"workers": 0}, {"workers": -1},
        {"shard_size": 0}, {"chunk_size": 0}, {"max_errors": 0}, {"size": 0}, {"size": -4}, {"size": (0, 4)},
        {"size": (4, -1)}, {"size": ()}, {"size": (4,)}, {"size": (4, 4, 3)}, {"size": "32"}, {"size": 1.5},
        {"samples_per_shard": 1.5}, {"size": 32, "store": "encoded"}, {"codec": "zstd", "store": "encoded"},
        {"codec": "zstd", "format": "npy", "store": "pixels"}, {"codec": "zstd", "format": "zarr"},
    ],
    ids=str,
)  # fmt: skip
def test_impossible_options_are_refused_before_anything_is_written(
    options: dict[str, Any], images_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(shardstore.OptionError) as caught:
        shardstore.convert(images_dir, tmp_path / "out", **{"workers": 1, **options})
    assert isinstance(caught.value, ValueError)
    assert any(str(word) in str(caught.value) for word in (*options, *options.values()))
    assert list(tmp_path.iterdir()) == []


# -- executors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("container", CONTAINERS)
def test_any_executor_gives_the_same_bytes_and_stays_open(
    container: str, make_store: Callable[..., Path], tree: Tree
) -> None:
    options: dict[str, Any] = {"samples_per_shard": 5, "store": "pixels"}
    with ThreadPoolExecutor(3) as executor:
        threaded = make_store(container, executor=executor, **options)
        assert executor.submit(int, "7").result() == 7
    assert contents(tree(threaded)) == contents(tree(make_store(container, **options)))


class OutOfOrder(Executor):
    """Runs tasks in the opposite order, as soon as so many are waiting."""

    def __init__(self, together: int) -> None:
        self.together = together
        self.waiting: list[tuple[Future[Any], Callable[..., Any], Any]] = []
        self.most = 0

    def submit(self, function: Callable[..., Any], /, *args: Any, **_: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.waiting.append((future, function, args))
        self.most = max(self.most, len(self.waiting))
        if len(self.waiting) >= self.together:
            while self.waiting:
                waiting, work, given = self.waiting.pop()
                waiting.set_result(work(*given))
        return future


@pytest.mark.parametrize("container", CONTAINERS)
def test_shards_may_finish_in_any_order(container: str, make_store: Callable[..., Path], tree: Tree) -> None:
    options: dict[str, Any] = {"samples_per_shard": 4, "store": "encoded"}
    executor = OutOfOrder(3)
    odd = make_store(container, executor=executor, workers=2, **options)
    assert executor.most == 3
    assert contents(tree(odd)) == contents(tree(make_store(container, **options)))


def test_an_error_of_the_executor_leaves_no_store(images_dir: Path, tmp_path: Path) -> None:
    class Broken(Executor):
        def submit(self, function: Callable[..., Any], /, *args: Any, **_: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_exception(MemoryError("no more"))
            return future

    with pytest.raises(MemoryError):
        shardstore.convert(images_dir, tmp_path / "out", executor=Broken())
    with pytest.raises(shardstore.NoStoreError):
        shardstore.open(tmp_path / "out")
    shardstore.convert(images_dir, tmp_path / "out", workers=1)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_progress_counts_up_to_all_samples(images_dir: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    shardstore.convert(
        images_dir,
        tmp_path / "out",
        samples_per_shard=5,
        workers=1,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(0, 24), (5, 24), (10, 24), (15, 24), (20, 24), (24, 24)]
