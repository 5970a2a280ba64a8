"""What conversions are made from: folders with bad and odd files in them, and Python sequences of samples."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import ImageFolder

import shardstore

CONTAINERS = ("npy", "zarr", "hdf5")
Tree = Callable[[Path], dict[str, Path]]
BAD = ["cut.jpg", "cut.png", "empty.jpg", "garbled.jpg", "lfs.jpg", "no_end.jpg", "text.png"]
ONLY_FULL_CHECK = ["cut.jpg", "cut.png", "garbled.jpg", "no_end.jpg"]  # their headers are good


@pytest.fixture
def mixed_dir(tmp_path: Path, images_dir: Path, bad_dir: Path) -> Path:
    """The good pictures, and the bad ones spread over their classes and a class of their own."""
    source = shutil.copytree(images_dir, tmp_path / "mixed")
    for i, name in enumerate(BAD):
        folder = source / ("cat", "dog", "worse")[i % 3]
        folder.mkdir(exist_ok=True)
        shutil.copy(bad_dir / name, folder)
    (source / "worse" / "good.png").write_bytes((images_dir / "dog" / "rgb.png").read_bytes())
    return source


@pytest.fixture
def good_dir(tmp_path: Path, mixed_dir: Path) -> Path:
    """The same folder without the bad files."""
    source = shutil.copytree(mixed_dir, tmp_path / "good")
    for path in source.rglob("*"):
        if path.name in BAD:
            path.unlink()
    return source


def bad_keys(source: Path) -> list[str]:
    return sorted(path.relative_to(source).as_posix() for path in source.rglob("*") if path.name in BAD)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- bad files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"size": 24}, {"store": "pixels"}, {"shuffle": True}], ids=str)
@pytest.mark.parametrize("workers", [1, 2])
def test_stop_lists_every_bad_file_and_keeps_what_is_finished(
    options: dict[str, Any], workers: int, mixed_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "new").mkdir()
    with pytest.raises(shardstore.SourceError) as caught:
        shardstore.convert(mixed_dir, tmp_path / "new" / "out", samples_per_shard=5, workers=workers, **options)
    assert sorted(problem.key or "" for problem in caught.value.problems) == bad_keys(mixed_dir)
    assert all(problem.what for problem in caught.value.problems)
    assert "7 bad files" in str(caught.value)
    assert "skip" in str(caught.value)
    kept = names(tmp_path / "new") == ["out.partial"]  # there may be a bad file in every shard
    assert kept == ("out.partial: the same command goes on" in str(caught.value))
    assert names(tmp_path / "new") == ["out.partial"] * kept
    summary = shardstore.convert(
        mixed_dir, tmp_path / "new" / "out", samples_per_shard=5, workers=workers, on_error="skip", **options
    )
    assert kept or not summary.reused  # leaving out a bad file moves all samples after it into other shards
    assert names(tmp_path / "new") == ["out"]


def test_bad_files_are_listed_in_the_order_of_the_source(mixed_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(shardstore.SourceError) as caught:
        shardstore.convert(mixed_dir, tmp_path / "out", samples_per_shard=3, workers=2)
    assert [problem.key for problem in caught.value.problems] == bad_keys(mixed_dir)


def test_each_bad_file_is_told_by_its_fault(mixed_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(shardstore.SourceError) as caught:
        shardstore.convert(mixed_dir, tmp_path / "out", workers=1)
    said = {os.path.basename(problem.key or ""): problem.what for problem in caught.value.problems}
    assert "empty" in said["empty.jpg"]
    assert "LFS" in said["lfs.jpg"]
    assert "not a picture" in said["text.png"]
    assert "Premature end" in said["cut.jpg"]


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize(
    "options", [{"store": "encoded"}, {"size": 24}, {"store": "pixels"}, {"store": "encoded", "shuffle": True}], ids=str
)
@pytest.mark.parametrize("workers", [1, 2])
def test_skip_stores_what_a_folder_without_the_bad_files_gives(
    options: dict[str, Any],
    container: str,
    workers: int,
    mixed_dir: Path,
    good_dir: Path,
    make_store: Callable[..., Path],
    tree: Tree,
) -> None:
    options = {**options, "samples_per_shard": 5}
    skipped = make_store(container, source=mixed_dir, on_error="skip", workers=workers, **options)
    clean = make_store(container, source=good_dir, **options)
    assert shardstore.validate(skipped, level="source", source=mixed_dir, workers=1) == []
    ours, theirs = tree(skipped), tree(clean)
    (rejects,) = (file for name, file in ours.items() if name.endswith("rejects.jsonl"))
    lines = [json.loads(line) for line in rejects.read_text().splitlines()]
    assert sorted(line["key"] for line in lines) == bad_keys(mixed_dir)
    assert all(line["what"] for line in lines)
    if options.get("shuffle"):
        # The seed mixes what the folder holds, bad files among it: another order, but no holes.
        dataset = shardstore.open(skipped)
        keys = sorted(dataset.key(i) or "" for i in range(len(dataset)))
        assert keys == sorted(path.relative_to(good_dir).as_posix() for path in good_dir.rglob("*.*"))
        return
    assert {name for name in ours if not name.endswith("rejects.jsonl")} == set(theirs)
    for name, file in theirs.items():
        if not name.endswith("shardstore.json"):
            assert ours[name].read_bytes() == file.read_bytes(), name
    # The description differs by the list of bad files alone.
    mine, other = shardstore.open(skipped).schema, shardstore.open(clean).schema
    files = dict(mine.files or {})
    assert files.pop("rejects.jsonl")[0] == rejects.stat().st_size
    assert files == other.files
    assert (mine.fields, mine.arrays, mine.classes, mine.fingerprint) == (
        other.fields, other.arrays, other.classes, other.fingerprint,
    )  # fmt: skip


def test_the_summary_tells_what_was_left_out(mixed_dir: Path, tmp_path: Path) -> None:
    summary = shardstore.convert(mixed_dir, tmp_path / "out", on_error="skip", workers=1)
    assert [problem.key for problem in summary.rejects] == bad_keys(mixed_dir)
    assert "left out: 7 bad files, listed in rejects.jsonl" in str(summary)
    assert summary.schema.samples == 25
    assert json.loads(json.dumps(summary.to_dict()))["rejects"][0]["key"] == bad_keys(mixed_dir)[0]


def test_a_good_source_leaves_no_list_of_bad_files(make_store: Callable[..., Path]) -> None:
    assert not (make_store("npy", on_error="skip") / "rejects.jsonl").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_the_search_ends_after_max_errors(workers: int, mixed_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(shardstore.SourceError) as caught:
        shardstore.convert(mixed_dir, tmp_path / "out", max_errors=3, workers=workers, samples_per_shard=5)
    assert len(caught.value.problems) == 3
    assert {problem.key for problem in caught.value.problems} <= set(bad_keys(mixed_dir))
    assert "at least" in str(caught.value)


def test_max_errors_does_not_bound_what_is_skipped(mixed_dir: Path, tmp_path: Path) -> None:
    summary = shardstore.convert(mixed_dir, tmp_path / "out", on_error="skip", max_errors=1, workers=1)
    assert len(summary.rejects) == 7


@pytest.mark.parametrize("on_error", ["stop", "skip"])
@pytest.mark.parametrize("options", [{}, {"size": 24}, {"store": "pixels"}], ids=str)
def test_a_source_without_a_good_file_is_an_error(
    on_error: str, options: dict[str, Any], bad_dir: Path, tmp_path: Path
) -> None:
    shutil.copytree(bad_dir, tmp_path / "source" / "class")
    with pytest.raises(shardstore.SourceError, match="no good file") as caught:
        shardstore.convert(tmp_path / "source", tmp_path / "out", on_error=on_error, workers=1, **options)
    assert len(caught.value.problems) == 7
    assert names(tmp_path) == ["source"]


def test_a_header_check_stores_what_only_decoding_would_refuse(mixed_dir: Path, tmp_path: Path) -> None:
    store = tmp_path / "out"
    summary = shardstore.convert(mixed_dir, store, check="header", on_error="skip", store="encoded", workers=1)
    assert sorted(os.path.basename(p.key or "") for p in summary.rejects) == sorted(set(BAD) - set(ONLY_FULL_CHECK))
    dataset = shardstore.open(store)
    for name in ONLY_FULL_CHECK:
        (key,) = (key for key in bad_keys(mixed_dir) if key.endswith(f"/{name}"))
        with pytest.raises(shardstore.ImageError) as caught:
            dataset[key]
        problem = caught.value.problem
        assert (problem.key, problem.sample, problem.field) == (key, dataset.find(key), "image")
        assert key in str(caught.value)
        assert problem.hint
    assert shardstore.validate(store, level="checksum", workers=1) == []
    found = shardstore.validate(store, level="decode", workers=1)
    assert sorted(os.path.basename(problem.key or "") for problem in found) == sorted(ONLY_FULL_CHECK)
    with pytest.raises(shardstore.ImageError):
        list(shardstore.ShardDataset(store))


class Meddler(Executor):
    """Runs tasks at once; before the first one it does something to the source."""

    def __init__(self, meddle: Callable[[], Any]) -> None:
        self.meddle: Callable[[], Any] | None = meddle

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if self.meddle is not None:
            self.meddle()
            self.meddle = None
        future: Future[Any] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


@pytest.mark.parametrize("change", ["longer", "shorter", "empty", "gone", "a folder"])
def test_a_file_that_changes_during_the_conversion_is_reported(change: str, images_dir: Path, tmp_path: Path) -> None:
    source = shutil.copytree(images_dir, tmp_path / "images")
    victim = source / "dog" / "rgb.png"
    content = victim.read_bytes()

    def meddle() -> None:
        victim.unlink()
        if change == "a folder":
            victim.mkdir()
        elif change != "gone":
            victim.write_bytes({"longer": content + b"\0", "shorter": content[:-1], "empty": b""}[change])

    def mend() -> None:
        shutil.rmtree(victim) if victim.is_dir() else victim.unlink(missing_ok=True)
        victim.write_bytes(content)

    options: dict[str, Any] = {"store": "encoded", "samples_per_shard": 5}
    with pytest.raises(shardstore.SourceError) as caught:
        shardstore.convert(source, tmp_path / "out", executor=Meddler(meddle), **options)
    assert [problem.key for problem in caught.value.problems] == ["dog/rgb.png"]
    if change in ("longer", "shorter", "empty"):
        assert "changed" in caught.value.problems[0].what
    mend()
    summary = shardstore.convert(source, tmp_path / "out", executor=Meddler(meddle), on_error="skip", **options)
    assert [problem.key for problem in summary.rejects] == ["dog/rgb.png"]
    assert len(shardstore.open(tmp_path / "out")) == 23
    assert shardstore.validate(tmp_path / "out", level="decode", workers=1) == []


def test_pixels_that_change_their_size_during_the_conversion_are_reported(
    make_images: Callable[..., Path], tmp_path: Path
) -> None:
    # The first task reads headers; the change comes after the plan is made.
    source = make_images(4, classes=1, sizes=[(20, 20)])
    victim = source / "class0" / "000002.png"

    class Later(Meddler):
        def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            if function.__name__ != "write_shard":
                meddle, self.meddle = self.meddle, None
                try:
                    return super().submit(function, *args, **kwargs)
                finally:
                    self.meddle = meddle
            return super().submit(function, *args, **kwargs)

    def meddle() -> None:
        for width in range(10, 90):  # any other picture with as many bytes
            Image.fromarray(np.zeros((3, width, 3), np.uint8)).save(victim)
            if victim.stat().st_size < size:
                break
        with victim.open("ab") as file:
            file.write(bytes(size - victim.stat().st_size))

    size = victim.stat().st_size
    with pytest.raises(shardstore.SourceError) as caught:
        shardstore.convert(source, tmp_path / "out", store="pixels", executor=Later(meddle))
    assert [problem.key for problem in caught.value.problems] == ["class0/000002.png"]


# -- folders ----------------------------------------------------------------------------------------------------------


def test_what_is_no_picture_is_left_out_and_noted(images_dir: Path, tmp_path: Path) -> None:
    source = shutil.copytree(images_dir, tmp_path / "images")
    (source / "loose.jpg").write_bytes((source / "cat" / "baseline.jpg").read_bytes())
    (source / "cat" / "README.txt").write_text("about cats")
    for length in range(20):
        (source / "dog" / f"short{length}").write_bytes(bytes(range(length)))
    (source / "cat" / ".hidden.jpg").write_bytes(b"")
    (source / ".git").mkdir()
    (source / "__MACOSX").mkdir()
    (source / "cat" / "Thumbs.db").write_bytes(b"")
    (source / "unicorn").mkdir()
    (source / "dog" / "no_ending").write_bytes((source / "dog" / "rgb.png").read_bytes())
    (source / "cat" / "again").symlink_to(source / "cat")
    summary = shardstore.convert(source, tmp_path / "out", workers=1)
    assert summary.schema.classes == ("cat", "dog", "fish", "unicorn")
    dataset = shardstore.open(tmp_path / "out")
    assert len(dataset) == 25
    assert dataset["dog/no_ending"].label == 1
    notes = "\n".join(summary.notes)
    for named in ("loose.jpg", "cat/README.txt", "unicorn", "again", "21 files", "dog/short0"):
        assert named in notes
    for named in (".hidden", ".git", "__MACOSX", "Thumbs"):
        assert named not in notes
    assert all(f"note: {note}" in str(summary) for note in summary.notes)


def test_a_folder_without_classes_has_no_labels(images_dir: Path, tmp_path: Path) -> None:
    source = tmp_path / "flat"
    source.mkdir()
    for path in sorted((images_dir / "fish").iterdir()):
        shutil.copy(path, source)
    summary = shardstore.convert(source, tmp_path / "out", workers=1)
    assert summary.schema.classes is None
    assert [field.name for field in summary.schema.fields] == ["image", "key"]
    assert [sample.key for sample in shardstore.open(tmp_path / "out", fields=["key"])] == names(source)


def test_links_to_files_and_folders_are_followed(images_dir: Path, tmp_path: Path) -> None:
    source = tmp_path / "linked"
    source.mkdir()
    (source / "cat").symlink_to(images_dir / "cat")
    (source / "dog").mkdir()
    (source / "dog" / "a.png").symlink_to(images_dir / "dog" / "rgb.png")
    (source / "dog" / "dangling.png").symlink_to(tmp_path / "nowhere")
    with pytest.raises(shardstore.SourceError) as caught:
        shardstore.convert(source, tmp_path / "out", workers=1)
    assert [problem.key for problem in caught.value.problems] == ["dog/dangling.png"]
    summary = shardstore.convert(source, tmp_path / "out", on_error="skip", workers=1)
    assert summary.schema.samples == 8


@pytest.mark.parametrize("container", CONTAINERS)
def test_any_file_name_is_a_key(container: str, make_images: Callable[..., Path], tmp_path: Path) -> None:
    (picture,) = make_images(1, classes=1).rglob("*.png")
    odd = ["ü.png", "a b.png", "名.png", "new\nline.png", "quote'\".png", "-x.png", "%41.png", "x" * 240 + ".png"]
    raw = [os.fsencode(name) for name in odd] + [b"\xff\xfe.png"]
    for name in raw:
        folder = os.path.join(os.fsencode(tmp_path), b"source", b"class \xe9")
        os.makedirs(folder, exist_ok=True)
        shutil.copy(picture, os.path.join(folder, name))
    store = tmp_path / "out"
    shardstore.convert(tmp_path / "source", store, format=container, workers=1)
    dataset = shardstore.open(store, fields=["key"])
    assert {os.fsencode(sample.key) for sample in dataset} == {b"class \xe9/" + name for name in raw}
    assert [os.fsencode(name) for name in dataset.classes or ()] == [b"class \xe9"]
    assert dataset.find(os.fsdecode(b"class \xe9/\xff\xfe.png")) in range(len(raw))
    assert shardstore.validate(store, level="source", source=tmp_path / "source", workers=1) == []


@pytest.mark.parametrize("kind", ["missing", "file", "empty", "no pictures", "empty classes"])
def test_a_source_without_pictures_is_refused(kind: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    if kind == "file":
        source.write_text("no folder")
    elif kind != "missing":
        source.mkdir()
    if kind == "no pictures":
        (source / "a.txt").write_text("text")
    if kind == "empty classes":
        (source / "cat").mkdir()
    with pytest.raises(shardstore.SourceError) as caught:
        shardstore.convert(source, tmp_path / "out", workers=1)
    assert str(source) in str(caught.value)
    assert "out" not in names(tmp_path)


# -- sequences --------------------------------------------------------------------------------------------------------


def store_of(samples: Any, tmp_path: Path, **options: Any) -> tuple[Path, Any]:
    """A store of these samples, checked, and the summary."""
    summary = shardstore.convert(samples, tmp_path / "out", **options)
    assert shardstore.validate(tmp_path / "out", level="decode", workers=1) == []
    return tmp_path / "out", summary


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_torchvision_data_set(container: str, images_dir: Path, tmp_path: Path) -> None:
    folder = ImageFolder(images_dir)
    store, summary = store_of(folder, tmp_path, format=container, samples_per_shard=5)
    assert summary.schema.classes == ("cat", "dog", "fish")
    assert summary.schema.options["store"] == "pixels"
    dataset = shardstore.open(store, image_type="numpy")
    assert len(dataset) == len(folder) == 23
    for mine, (image, label) in zip(dataset, folder, strict=True):
        np.testing.assert_array_equal(mine.image, np.asarray(image))
        assert mine.label == label
    assert dataset.targets.tolist() == folder.targets


def test_a_torchvision_data_set_brought_to_one_size(
    images_dir: Path, tmp_path: Path, fitted: Callable[..., Any]
) -> None:
    folder = ImageFolder(images_dir)
    store, _ = store_of(folder, tmp_path, size=(20, 30))
    for mine, (image, _) in zip(shardstore.open(store, image_type="numpy"), folder, strict=True):
        np.testing.assert_array_equal(mine.image, fitted(image, (20, 30)))


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("one_size", [True, False])
def test_tuples_of_array_and_label(container: str, codec: str, one_size: bool, tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    shapes = [(12, 10 if one_size else 8 + i, 3) for i in range(11)]
    samples = [(random.integers(0, 256, shape, np.uint8), i % 4) for i, shape in enumerate(shapes)]
    options: dict[str, Any] = {"format": container, "codec": codec, "samples_per_shard": 4}
    if codec == "zstd" and container == "npy":
        with pytest.raises(shardstore.OptionError, match="npy"):
            shardstore.convert(samples, tmp_path / "out", **options)
        return
    store, summary = store_of(samples, tmp_path, **options)
    assert [(f.name, f.kind, f.content) for f in summary.schema.fields] == [
        ("image", "array" if one_size else "ragged", "image"), ("label", "array", "data"),
    ]  # fmt: skip
    for mine, (image, label) in zip(shardstore.open(store, image_type="numpy"), samples, strict=True):
        np.testing.assert_array_equal(mine.image, image)
        assert mine.label == label


def sample_of_all_types(i: int) -> dict[str, Any]:
    random = np.random.default_rng(i)
    return {
        "mask": random.integers(0, 2**16, (4, 5), np.uint16),
        "weight": i / 3,
        "count": -i,
        "good": i % 2 == 0,
        "caption": "名 ü\n" * i,
        "blob": bytes(range(i)),
        "boxes": random.random((i % 3, 4), np.float32),
        "embedding": torch.arange(6, dtype=torch.float64) * i,
        "big_endian": np.array([i, 2], ">i4"),
        "strided": np.arange(24, dtype=np.int16).reshape(4, 6)[::2, ::3] + np.int16(i),
        "half": np.float16(i),
    }


@pytest.mark.parametrize("container", CONTAINERS)
def test_dicts_of_all_types(container: str, tmp_path: Path) -> None:
    samples = [sample_of_all_types(i) for i in range(11)]
    store, summary = store_of(samples, tmp_path, format=container, samples_per_shard=4)
    kinds = {f.name: (f.kind, f.dtype, f.shape, f.content) for f in summary.schema.fields}
    assert kinds == {
        "mask": ("array", "<u2", (4, 5), "data"), "weight": ("array", "<f8", (), "data"),
        "count": ("array", "<i8", (), "data"), "good": ("array", "|b1", (), "data"),
        "caption": ("bytes", "|u1", (-1,), "text"), "blob": ("bytes", "|u1", (-1,), "data"),
        "boxes": ("ragged", "<f4", (-1, 4), "data"), "embedding": ("array", "<f8", (6,), "data"),
        "big_endian": ("array", "<i4", (2,), "data"), "strided": ("array", "<i2", (2, 2), "data"),
        "half": ("array", "<f2", (), "data"),
    }  # fmt: skip
    for mine, given in zip(shardstore.open(store), samples, strict=True):
        assert mine.caption == given["caption"]
        assert mine.blob == given["blob"]
        for name in set(given) - {"caption", "blob"}:
            found, wanted = np.asarray(getattr(mine, name)), np.asarray(given[name])
            assert found.dtype == wanted.dtype.newbyteorder("<"), name
            np.testing.assert_array_equal(found, wanted, err_msg=name)


def test_encoded_pictures_in_a_sequence_stay_encoded(images_dir: Path, tmp_path: Path) -> None:
    files = sorted((images_dir / "dog").iterdir())
    store, summary = store_of([{"image": f.read_bytes(), "name": f.name} for f in files], tmp_path, store="encoded")
    assert summary.schema.field("image").content == "image"
    for mine, file in zip(shardstore.open(store, fields=["image", "name"], image_type="numpy"), files, strict=True):
        np.testing.assert_array_equal(mine.image, np.asarray(Image.open(file).convert("RGB")))
        assert mine.name == file.name


class Pair(NamedTuple):
    """A sample with names of its own."""

    picture: Any
    score: float


def test_named_tuples_keep_their_names(tmp_path: Path) -> None:
    store, _ = store_of([Pair(Image.new("RGB", (5, 4), (i, 2, 3)), i / 2) for i in range(3)], tmp_path)
    dataset = shardstore.open(store)
    assert [field.name for field in dataset.schema.fields] == ["picture", "score"]
    assert [float(sample.score) for sample in dataset] == [0, 0.5, 1]
    assert dataset[2].picture[:, 0, 0].tolist() == [2, 2, 3]


def test_names_that_are_no_identifiers_are_changed_and_noted(tmp_path: Path) -> None:
    given = ["a b", "a-b", "2nd", "_hidden", "", "ok"]
    stored = ["a_b", "a_b_", "field_2nd", "hidden", "field", "ok"]
    store, summary = store_of([dict(zip(given, range(6), strict=True))] * 3, tmp_path)
    assert [int(value) for value in shardstore.open(store, fields=stored)[1]] == list(range(6))
    notes = "\n".join(summary.notes)
    assert all(f"{old!r} is stored as {new!r}" in notes for old, new in zip(given[:5], stored[:5], strict=True))
    assert "'ok'" not in notes


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("name", ["index", "shards", "data", "start", "c", "rejects", "zarr", "class", "image", "key"])
def test_a_field_may_have_any_name(name: str, container: str, tmp_path: Path) -> None:
    for kind, values in {"array": list(range(5)), "bytes": ["x" * i for i in range(5)]}.items():
        samples = [{name: value, "data_2": i} for i, value in enumerate(values)]
        target = tmp_path / kind
        summary = shardstore.convert(samples, target, format=container, samples_per_shard=2)
        stored = [field.name for field in summary.schema.fields]
        assert stored[0] == name or f"{name!r} is stored as {stored[0]!r}" in summary.notes[0]
        found = [tuple(sample) for sample in shardstore.open(target, fields=stored)]
        assert [(v if isinstance(v, str) else int(v), int(i)) for v, i in found] == list(
            zip(values, range(5), strict=True)
        )
        assert shardstore.validate(target, level="decode", workers=1) == []


@pytest.mark.parametrize(
    ("odd", "named"),
    [
        ({"a": 1.5, "b": "x"}, ("a", "float64", "int64")),
        ({"a": np.zeros((1, 1), np.int64), "b": "x"}, ("a", "2 axes", "0 axes")),
        ({"a": np.int32(1), "b": "x"}, ("a", "int32", "int64")),
        ({"a": 1}, ("a, b",)),
        ({"a": 1, "b": "x", "c": 2}, ("a, b",)),
        ({"a": 1, "c": "x"}, ("b", "c")),
        ({"a": None, "b": "x"}, ("NoneType",)),
        ({"a": 1, "b": 7}, ("b",)),
    ],
    ids=str,
)
def test_a_sample_unlike_the_first_is_refused(odd: dict[str, Any], named: tuple[str, ...], tmp_path: Path) -> None:
    samples = [{"a": i, "b": "text"} for i in range(5)]
    samples[3] = odd
    with pytest.raises(shardstore.SourceError) as caught:
        shardstore.convert(samples, tmp_path / "out")
    assert all(name in str(caught.value) for name in named)
    assert caught.value.problem.sample == 3
    assert names(tmp_path) == []


def test_the_order_of_the_keys_of_a_dict_does_not_matter(tmp_path: Path) -> None:
    store, _ = store_of([{"a": 1, "b": 2}, {"b": 2, "a": 1}], tmp_path)
    assert [(int(s.a), int(s.b)) for s in shardstore.open(store)] == [(1, 2), (1, 2)]


@pytest.mark.parametrize("value", [None, object(), 1 + 2j, np.array(["x"]), np.datetime64("2020-01-01"), [1, "a"]])
def test_values_that_no_array_holds_are_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(shardstore.SourceError):
        shardstore.convert([{"a": value}], tmp_path / "out")
    assert names(tmp_path) == []


def test_an_empty_sequence_is_refused(tmp_path: Path) -> None:
    with pytest.raises(shardstore.SourceError, match="empty"):
        shardstore.convert([], tmp_path / "out")


class Unsteady:
    """A sequence that gives other values when read again."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> dict[str, Any]:
        if number >= len(self):
            raise IndexError(number)
        self.reads += 1
        return {"a": np.zeros(self.reads, np.uint8)}


def test_a_sequence_that_changes_between_its_two_readings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(shardstore.SourceError) as caught:
        shardstore.convert(Unsteady(), tmp_path / "out")
    assert "changed" in caught.value.problems[0].what
    assert names(tmp_path) == []


def test_sequences_are_stored_shuffled_like_folders(tmp_path: Path) -> None:
    store, summary = store_of([{"a": i} for i in range(50)], tmp_path, shuffle=True, seed=3)
    found = [int(sample.a) for sample in shardstore.open(store)]
    assert sorted(found) == list(range(50)) != found
    assert summary.schema.options["seed"] == 3


def test_bad_files_among_many_sizes_leave_no_hole(tmp_path: Path) -> None:
    # More files than are looked at to see that sizes differ, so that leaving some out plans again from the first ones.
    folder = tmp_path / "imgs" / "a"
    folder.mkdir(parents=True)
    for i in range(90):
        Image.new("RGB", (8 + i % 4, 8), (i, i, i)).save(folder / f"{i:02d}.png")
    bad = range(0, 90, 3)
    for i in bad:
        (folder / f"{i:02d}.png").write_bytes(b"no picture")
    good = [f"a/{i:02d}.png" for i in range(90) if i not in bad]
    summary = shardstore.convert(tmp_path / "imgs", tmp_path / "out", on_error="skip", samples_per_shard=16, workers=2)
    assert [p.key for p in summary.rejects] == [f"a/{i:02d}.png" for i in bad]
    assert [s.key for s in shardstore.open(tmp_path / "out", fields=["key"])] == good
    assert shardstore.validate(tmp_path / "out", level="decode", workers=1) == []
