"""``--resize-short``: encoded pictures made smaller, against Pillow and torchvision, in every container."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import PIL.Image
import pytest
import zarr
from PIL import Image, ImageCms
from torchvision.transforms import Resize

import shardstore

Make = Callable[..., Path]
Tree = Callable[[Path], dict[str, Path]]

CONTAINERS = ("npy", "zarr", "hdf5")
SHORT = 40
# name: (mode, (width, height), options of Pillow). Those from "small" on have a shorter side of at most 40.
PICTURES: dict[str, tuple[str, tuple[int, int], dict[str, Any]]] = {
    "a/landscape.jpg": ("RGB", (161, 100), {"quality": 95}),
    "a/portrait.jpg": ("RGB", (97, 160), {"quality": 95}),
    "a/progressive.jpg": ("RGB", (120, 90), {"quality": 90, "progressive": True}),
    "a/full_chroma.jpg": ("RGB", (83, 83), {"quality": 95, "subsampling": 0}),
    "a/grey.jpg": ("L", (100, 71), {"quality": 95}),
    "a/cmyk.jpg": ("CMYK", (100, 71), {"quality": 95}),
    "a/just above.jpg": ("RGB", (60, 41), {"quality": 90}),
    "a/strip.jpg": ("RGB", (41, 700), {"quality": 90}),
    "b/rgb.png": ("RGB", (101, 67), {}),
    "b/tall.png": ("RGB", (67, 101), {}),
    "b/rgba.png": ("RGBA", (90, 60), {}),
    "b/grey.png": ("L", (90, 60), {}),
    "b/palette.png": ("P", (90, 60), {}),
    "b/plain.bmp": ("RGB", (64, 50), {}),
    "b/lossless.webp": ("RGB", (64, 50), {"lossless": True}),
    "b/sixteen.png": ("I;16", (80, 50), {}),
    "b/float.tif": ("F", (80, 50), {}),
    "b/thirty_two.tif": ("I", (80, 50), {}),
    "c/small.jpg": ("RGB", (50, 30), {"quality": 30, "progressive": True}),
    "c/exactly.jpg": ("RGB", (100, 40), {"quality": 90}),
    "c/exactly.png": ("RGB", (40, 100), {}),
    "c/small.webp": ("RGB", (20, 30), {}),
    "c/sixteen.png": ("I;16", (39, 50), {}),
}
KEPT = {name for name in PICTURES if name.startswith("c/")}
JPEGS = [name for name in PICTURES if name.endswith(".jpg") and name not in KEPT]
LOSSLESS = [name for name in PICTURES if name not in KEPT and name not in JPEGS]


def draw(seed: int, mode: str, size: tuple[int, int]) -> Image.Image:
    """A picture with smooth colours, a hard edge and fine lines, which resizing without a filter would mangle."""
    width, height = size
    y, x = np.mgrid[0:height, 0:width]
    if mode in ("I;16", "I", "F"):
        values = (x * 800 + y * 37 + (x // 2 % 2) * 9000) % 65536
        factor, dtype = {"I;16": (1, np.uint16), "I": (7, np.int32), "F": (1 / 65536, np.float32)}[mode]
        return Image.fromarray((values * factor).astype(dtype))
    disc = (x - width / 2) ** 2 + (y - height / 2) ** 2 < (min(width, height) / 3) ** 2
    light = 70 + 50 * disc + 60 * ((x + y) // 2 % 2)  # chroma, which JPEG halves, is smooth
    colours = [30 * np.sin(x / 30 + seed), 30 * np.cos(y / 35 - seed), 30 * np.sin((x + y) / 40)]
    return Image.fromarray(np.stack([light + c for c in colours], -1).clip(0, 255).astype(np.uint8)).convert(mode)


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of PICTURES; nobody changes it."""
    root = tmp_path_factory.mktemp("pictures")
    for seed, (name, (mode, size, options)) in enumerate(PICTURES.items()):
        (root / name).parent.mkdir(exist_ok=True)
        draw(seed, mode, size).save(root / name, **options)
    return root


@pytest.fixture(scope="module", params=CONTAINERS)
def store(request: pytest.FixtureRequest, make_store: Make, pictures: Path) -> Path:
    return make_store(request.param, source=pictures, resize_short=SHORT, samples_per_shard=7)


@pytest.fixture
def source(tmp_path: Path, pictures: Path) -> Path:
    """A copy of the pictures that a test may change."""
    return Path(shutil.copytree(pictures, tmp_path / "imgs"))


def stored(store: Path) -> dict[str, bytes]:
    """The bytes of each picture by its key, in order, as plain tools read them."""
    return {key.decode(): data for key, data in zip(column(store, "key"), column(store, "image"), strict=True)}


def column(store: Path, field: str) -> list[bytes]:
    container = shardstore.open(store).schema.container
    if container == "npy":
        shards = [str(path)[: -len("data.npy")] for path in sorted((store / field).glob("*.data.npy"))]
        return [cut for shard in shards for cut in pieces(lambda part, at=shard: np.load(f"{at}{part}.npy"))]
    if container == "zarr":
        group = zarr.open_group(store, mode="r")[field]
        return pieces(lambda part: group[part][:])
    with h5py.File(store) as file:
        return pieces(lambda part: file[field][part][:])


def pieces(read: Callable[[str], Any]) -> list[bytes]:
    data = read("data")
    return [data[a : a + n].tobytes() for a, n in zip(read("start"), read("length"), strict=True)]


def decoded(data: bytes | Path) -> Image.Image:
    """As ImageFolder loads a picture, values that RGB would clip as they are."""
    image = Image.open(io.BytesIO(data) if isinstance(data, bytes) else data)
    return image if image.mode in ("I;16", "I", "F") else image.convert("RGB")


def difference(a: Image.Image, b: Image.Image) -> float:
    return float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).mean())


def run(*arguments: Any, cwd: Path) -> subprocess.CompletedProcess[str]:
    code = "from shardstore.cli.main import main; main()"
    command = [sys.executable, "-P", "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def contents(files: dict[str, Path]) -> dict[str, bytes]:
    return {name: file.read_bytes() for name, file in files.items()}


# -- what the pictures become -----------------------------------------------------------------------------------------


def test_pictures_become_what_torchvision_resizes(store: Path, pictures: Path) -> None:
    found = stored(store)
    assert list(found) == sorted(PICTURES)
    assert (len(JPEGS), len(LOSSLESS), len(KEPT)) == (8, 10, 5)
    for key in LOSSLESS:
        wanted, got = Resize(SHORT)(decoded(pictures / key)), decoded(found[key])
        assert min(got.size) == SHORT
        assert got.mode == wanted.mode, key
        np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted), err_msg=key)
    for key in JPEGS:
        picture, got = decoded(pictures / key), decoded(found[key])
        wanted = Resize(SHORT)(picture)
        assert got.size == wanted.size, key
        assert difference(got, wanted) < 3, key
        # The same tolerance finds a resize without the filter.
        assert difference(picture.resize(got.size, Image.Resampling.NEAREST), wanted) > 3, key


def test_a_jpeg_is_what_pillow_encodes_at_quality_90(store: Path, pictures: Path) -> None:
    found = stored(store)
    for key in JPEGS:
        out, grey = io.BytesIO(), key == "a/grey.jpg"
        picture = Resize(SHORT)(Image.open(pictures / key).convert("L" if grey else "RGB"))
        picture.save(out, "JPEG", quality=90, subsampling="4:2:0")
        pixels = [np.asarray(decoded(data)) for data in (out.getvalue(), found[key])]
        np.testing.assert_array_equal(*pixels, err_msg=key)


def test_small_pictures_are_the_files_bytes(store: Path, pictures: Path) -> None:
    found = stored(store)
    assert {key for key in PICTURES if found[key] == (pictures / key).read_bytes()} == KEPT


def test_samples_read_as_their_pictures(store: Path) -> None:
    found = list(stored(store).values())
    for number, sample in enumerate(shardstore.open(store, image_type="numpy")):
        np.testing.assert_array_equal(sample.image.squeeze(), np.asarray(decoded(found[number])))


def segments(jpeg: bytes) -> dict[int, bytes]:
    """The segments of a JPEG up to its scan by marker, and under 0 what follows."""
    found, place = {}, 2
    while True:
        assert jpeg[place] == 0xFF
        marker, length = jpeg[place + 1], int.from_bytes(jpeg[place + 2 : place + 4], "big")
        found[marker] = jpeg[place + 4 : place + 2 + length]
        place += 2 + length
        if marker == 0xDA:
            return {**found, 0: jpeg[place:]}


def test_jpegs_are_baseline_with_halved_chroma_and_a_restart_marker_a_row(store: Path) -> None:
    found = stored(store)
    for key in JPEGS:
        parts, (width, height) = segments(found[key]), decoded(found[key]).size
        assert {marker for marker in parts if 0xC0 <= marker <= 0xCF} == {0xC0, 0xC4}, key  # SOF0, Huffman tables
        sof = parts[0xC0]
        grey = key == "a/grey.jpg"
        assert [sof[7 + 3 * i] for i in range(sof[5])] == ([0x11] if grey else [0x22, 0x11, 0x11]), key
        block = 8 if grey else 16
        assert int.from_bytes(parts[0xDD], "big") == -(-width // block), key
        scan = parts[0]
        restarts = [scan[i + 1] for i in range(len(scan) - 1) if scan[i] == 0xFF and 0xD0 <= scan[i + 1] <= 0xD7]
        assert restarts == [0xD0 + i % 8 for i in range(-(-height // block) - 1)], key
    assert segments(found["c/small.jpg"]).keys() & {0xC0, 0xC2, 0xDD} == {0xC2}  # kept: progressive, no restarts


def test_values_beyond_8_bits_and_grey_keep_their_type(store: Path) -> None:
    found = stored(store)
    kinds = {"b/sixteen.png": ("PNG", "I;16"), "b/float.tif": ("TIFF", "F"), "b/thirty_two.tif": ("TIFF", "I")}
    kinds |= {"b/grey.png": ("PNG", "L"), "a/grey.jpg": ("JPEG", "L"), "a/cmyk.jpg": ("JPEG", "RGB")}
    kinds |= {"b/plain.bmp": ("PNG", "RGB"), "b/lossless.webp": ("PNG", "RGB"), "b/rgba.png": ("PNG", "RGB")}
    for key, kind in kinds.items():
        image = Image.open(io.BytesIO(found[key]))
        assert (image.format, image.mode) == kind, key


@pytest.mark.parametrize("short", [1, 7, 29, 30, 31, 64])
def test_any_size_is_that_of_torchvision(short: int, tmp_path: Path) -> None:
    sizes = [(31, 30), (30, 31), (64, 33), (33, 64), (100, 67), (67, 100), (130, 29), (1, 9)]
    for i, size in enumerate(sizes):
        (tmp_path / "imgs/a").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, (i, 0, 0)).save(tmp_path / f"imgs/a/{i}.png")
    shardstore.convert(tmp_path / "imgs", tmp_path / "out", resize_short=short, workers=1)
    found = [decoded(data).size for data in stored(tmp_path / "out").values()]
    assert found == [Resize(short)(Image.new("1", s)).size if min(s) > short else s for s in sizes]


# -- metadata ---------------------------------------------------------------------------------------------------------


def orientation(value: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112], exif[0x010F] = value, "a camera"
    return exif.tobytes()


def test_orientation_and_colour_profile_stay(tmp_path: Path) -> None:
    (tmp_path / "imgs").mkdir()
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    names = {"rgb.jpg": "RGB", "cmyk.jpg": "CMYK", "rgb.png": "RGB", "rgb.webp": "RGB"}
    for name, mode in names.items():
        draw(0, mode, (90, 60)).save(tmp_path / "imgs" / name, exif=orientation(6), icc_profile=profile)
    fake = bytearray(profile)
    fake[16:20] = b"CMYK"
    draw(0, "CMYK", (90, 60)).save(tmp_path / "imgs/inks.jpg", icc_profile=bytes(fake))
    shardstore.convert(tmp_path / "imgs", tmp_path / "out", resize_short=30, workers=1)
    found = {key: Image.open(io.BytesIO(data)) for key, data in stored(tmp_path / "out").items()}
    for name in names:
        assert found[name].size == (45, 30)  # not turned
        assert found[name].getexif()[0x0112] == 6, name
        assert found[name].getexif()[0x010F] == "a camera", name
        assert found[name].info["icc_profile"] == profile, name
    assert "icc_profile" not in found["inks.jpg"].info
    assert not found["inks.jpg"].getexif()


def test_metadata_that_does_not_fit_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imgs").mkdir()
    out = io.BytesIO()
    draw(0, "RGB", (90, 60)).save(out, "JPEG", quality=95)
    jpeg = out.getvalue()
    segment = b"\xff\xe1" + (60_002).to_bytes(2, "big") + orientation(6).ljust(60_000, b"\0")
    (tmp_path / "imgs/long.jpg").write_bytes(jpeg[:2] + segment * 2 + jpeg[2:])
    assert len(Image.open(tmp_path / "imgs/long.jpg").info["exif"]) > 100_000
    shardstore.convert(tmp_path / "imgs", tmp_path / "out", resize_short=30, workers=1)
    (data,) = stored(tmp_path / "out").values()
    assert decoded(data).size == (45, 30)
    assert "exif" not in Image.open(io.BytesIO(data)).info
    # Nor is a JPEG that is too large for Pillow to open.
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(Image.DecompressionBombError):
        Image.open(tmp_path / "imgs/long.jpg")
    shardstore.convert(tmp_path / "imgs", tmp_path / "again", resize_short=30, workers=1)
    monkeypatch.undo()
    (again,) = stored(tmp_path / "again").values()
    assert again == data


# -- layout -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("container", CONTAINERS)
def test_any_number_of_workers_gives_the_same_bytes(
    container: str, make_images: Make, make_store: Make, tree: Tree
) -> None:
    source = make_images(300, sizes=[(24, 16), (9, 15), (40, 33)], format="jpg")
    options: dict[str, Any] = {"source": source, "resize_short": 12, "samples_per_shard": 64, "shuffle": True}
    one, four = (make_store(container, workers=workers, **options) for workers in (1, 4))
    assert contents(tree(one)) == contents(tree(four))
    assert len(shardstore.open(one)) == 300
    (name,) = {p.name for p in one.parent.iterdir()} - {f"{one.name}.shards"}
    assert name == one.name  # nothing of the way there is left


def test_shards_are_planned_for_the_resized_pictures(make_images: Make, make_store: Make) -> None:
    source = make_images(1600, sizes=[(24, 24)])
    whole, small = (
        shardstore.open(make_store("zarr", source=source, store="encoded", shard_size=400_000, **options)).schema
        for options in ({}, {"resize_short": 4})
    )
    assert (whole.shards, small.shards) == (7, 4)
    total = sum(len(data) for data in stored(make_store("npy", source=source, resize_short=4)).values())
    # Room for the 512 pictures of a shard, and no more than rounding adds.
    assert 1 <= small.array("image.data")[1].shard_items / (total * 512 / 1600) < 1.2


def test_what_grows_is_stored_too(tmp_path: Path) -> None:
    # Files that no length of theirs could announce: a PNG of a few colours has thousands when it is resized.
    (tmp_path / "imgs").mkdir()
    for i in range(5):
        flat = np.random.default_rng(i).integers(0, 2, (400, 400), np.uint8)
        Image.fromarray(flat * 255).convert("1").save(tmp_path / f"imgs/{i}.png")
    for container in CONTAINERS:
        target = tmp_path / container
        shardstore.convert(
            tmp_path / "imgs", target, format=container, resize_short=399, samples_per_shard=2, workers=1
        )
        for key, data in stored(target).items():
            assert len(data) > 3 * (tmp_path / "imgs" / key).stat().st_size
        assert shardstore.validate(target, level="source", source=tmp_path / "imgs", workers=1) == []


# -- what is said and recorded ----------------------------------------------------------------------------------------


def test_the_summary_and_info_tell_what_was_resized(tmp_path: Path, pictures: Path) -> None:
    done = run("convert", pictures, "out", "--resize-short", SHORT, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1] == "stored as encoded: 18 resized to a shorter side of 40, 5 kept"
    assert "resize_short=40" in run("info", "out", cwd=tmp_path).stdout
    assert shardstore.open(tmp_path / "out").schema.options["resize_short"] == SHORT
    shardstore.convert(pictures, tmp_path / "plain", store="encoded", workers=1)
    assert "resize_short" not in shardstore.open(tmp_path / "plain").schema.options


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_dry_run_tells_the_plan_and_writes_nothing(container: str, tmp_path: Path, pictures: Path) -> None:
    options: dict[str, Any] = {"format": container, "resize_short": SHORT, "samples_per_shard": 7, "workers": 1}
    planned = shardstore.convert(pictures, tmp_path / "out", dry_run=True, **options)
    assert list(tmp_path.iterdir()) == []
    assert "stored as encoded: shorter sides above 40 will be resized" in str(planned)
    done = shardstore.convert(pictures, tmp_path / "out", **options)
    # So few pictures are all looked at.
    assert (planned.schema.fields, planned.schema.arrays) == (done.schema.fields, done.schema.arrays)


def test_a_dry_run_of_many_pictures_estimates(make_images: Make, make_store: Make, tmp_path: Path) -> None:
    source = make_images(300, sizes=[(40, 60), (24, 24), (90, 40)])
    (source / "class0/bad.png").write_bytes(b"text")
    planned = shardstore.convert(source, tmp_path / "out", resize_short=20, dry_run=True)
    (source / "class0/bad.png").unlink()
    total = sum(len(data) for data in stored(make_store("npy", source=source, resize_short=20)).values())
    # Labels, keys and rows are some 50 bytes a sample.
    assert 0.95 * total < planned.nbytes < 1.1 * total + 300 * 60


def test_progress_counts_twice(tmp_path: Path, pictures: Path) -> None:
    seen: list[tuple[int, int]] = []
    shardstore.convert(
        pictures,
        tmp_path / "out",
        resize_short=SHORT,
        samples_per_shard=12,
        workers=1,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(0, 23), (23, 23), (0, 23), (12, 23), (23, 23)]


@pytest.mark.parametrize("moment", [1, 3])
def test_an_interrupted_conversion_can_be_run_again(moment: int, tmp_path: Path, pictures: Path, tree: Tree) -> None:
    seen: list[int] = []

    def interrupt(done: int, total: int) -> None:
        seen.append(done)
        if len(seen) == moment + 1:
            raise KeyboardInterrupt

    options: dict[str, Any] = {"resize_short": SHORT, "samples_per_shard": 7, "workers": 1}
    (tmp_path / "whole").mkdir()
    shardstore.convert(pictures, tmp_path / "whole/out", **options)
    with pytest.raises(KeyboardInterrupt):
        shardstore.convert(pictures, tmp_path / "out", progress=interrupt, **options)
    with pytest.raises(shardstore.NoStoreError, match="interrupted"):
        shardstore.open(tmp_path / "out")
    shardstore.convert(pictures, tmp_path / "out", **options)
    assert contents(tree(tmp_path / "out")) == contents(tree(tmp_path / "whole/out"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


# -- validate ---------------------------------------------------------------------------------------------------------


def test_every_level_of_validate_is_content(store: Path, pictures: Path, tmp_path: Path) -> None:
    for level in ("structure", "checksum", "decode"):
        done = run("validate", store, "--level", level, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, ""), level
    done = run("validate", store, "--source", pictures, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_changed_source_is_found(store: Path, source: Path, tmp_path: Path) -> None:
    changed = ["a/landscape.jpg", "b/sixteen.png", "c/exactly.jpg", "b/rgb.png"]
    for key in changed[:3]:
        with Image.open(source / key) as image:
            image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(source / key)
    (source / "b/rgb.png").write_bytes(b"no picture")
    (source / "a/portrait.jpg").unlink()
    done = run("validate", store, "--source", source, "--json", cwd=tmp_path)
    assert done.returncode == 1
    assert sorted(p["key"] for p in json.loads(done.stdout)) == sorted([*changed, "a/portrait.jpg"])


def test_other_metadata_is_a_difference_only_where_files_are_kept(store: Path, source: Path) -> None:
    for key in ("a/landscape.jpg", "c/exactly.jpg", "c/small.jpg"):
        data = (source / key).read_bytes()
        comment = b"\xff\xe1" + (2 + 6 + 8).to_bytes(2, "big") + b"Exif\0\0MM\0*\0\0\0\x08"
        (source / key).write_bytes(data[:2] + comment + data[2:])
    problems = shardstore.validate(store, level="source", source=source, workers=1)
    assert [problem.key for problem in problems] == ["c/exactly.jpg", "c/small.jpg"]


# -- bad files --------------------------------------------------------------------------------------------------------


@pytest.fixture
def broken(source: Path, bad_dir: Path) -> Path:
    """The pictures and the 7 bad files, small, and a large one that is cut."""
    shutil.copytree(bad_dir, source / "bad")
    data = (source / "a/landscape.jpg").read_bytes()
    (source / "a/cut.jpg").write_bytes(data[: len(data) // 2])
    return source


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_files_are_all_listed(workers: int, broken: Path, bad_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(shardstore.SourceError) as caught:
        shardstore.convert(broken, tmp_path / "out", resize_short=SHORT, workers=workers)
    wanted = ["a/cut.jpg", *sorted(f"bad/{path.name}" for path in bad_dir.iterdir())]
    assert [problem.key for problem in caught.value.problems] == wanted
    assert sorted(path.name for path in tmp_path.iterdir()) == ["imgs", "out.partial"]
    assert "out.partial: the same command goes on" in str(caught.value)
    with pytest.raises(shardstore.SourceError, match="at least 8") as caught:  # the first run found them
        shardstore.convert(broken, tmp_path / "out", resize_short=SHORT, workers=workers, max_errors=2)
    assert [problem.key for problem in caught.value.problems] == wanted[:2]
    with pytest.raises(shardstore.SourceError, match="no good file"):
        shardstore.convert(broken / "bad", tmp_path / "out", resize_short=SHORT, workers=workers, on_error="skip")


@pytest.mark.parametrize("container", CONTAINERS)
def test_bad_files_leave_no_hole(container: str, broken: Path, store: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    options: dict[str, Any] = {"format": container, "resize_short": SHORT, "samples_per_shard": 7, "workers": 2}
    summary = shardstore.convert(broken, target, on_error="skip", **options)
    assert len(summary.rejects) == 8
    assert "18 resized to a shorter side of 40, 5 kept" in str(summary)
    assert stored(target) == stored(store)
    assert shardstore.validate(target, level="source", source=broken, workers=1) == []


def test_a_header_check_decodes_what_is_resized_only(source: Path, bad_dir: Path, tmp_path: Path) -> None:
    shutil.copy(bad_dir / "garbled.jpg", source / "c/garbled.jpg")
    width, height = Image.open(source / "c/garbled.jpg").size
    options: dict[str, Any] = {"check": "header", "workers": 1}
    shardstore.convert(source, tmp_path / "kept", resize_short=min(width, height), **options)
    assert stored(tmp_path / "kept")["c/garbled.jpg"] == (bad_dir / "garbled.jpg").read_bytes()
    assert shardstore.open(tmp_path / "kept").schema.options["check"] == "header"
    with pytest.raises(shardstore.SourceError) as caught:
        shardstore.convert(source, tmp_path / "out", resize_short=min(width, height) - 1, **options)
    assert [problem.key for problem in caught.value.problems] == ["c/garbled.jpg"]


# -- other sources ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_store_gives_what_its_folder_gives(container: str, store: Path, pictures: Path, make_store: Make) -> None:
    whole = make_store(container, source=pictures, store="encoded", samples_per_shard=5)
    small = make_store("zarr", source=whole, resize_short=SHORT, samples_per_shard=7)
    assert shardstore.open(small).schema.fingerprint == shardstore.open(store).schema.fingerprint
    assert shardstore.validate(small, level="source", source=pictures, workers=1) == []


def test_a_resized_store_as_a_source(store: Path, pictures: Path, make_store: Make) -> None:
    same = make_store("hdf5", source=store, resize_short=SHORT + 20)
    assert stored(same) == stored(store)
    assert shardstore.open(same).schema.options["resize_short"] == SHORT
    smaller = make_store("npy", source=store, resize_short=20)
    assert shardstore.open(smaller).schema.options["resize_short"] == 20
    assert {min(decoded(data).size) for data in stored(smaller).values()} == {20}
    copy = make_store("npy", source=store, store="encoded")
    pixels = make_store("npy", source=make_store("npy", source=pictures / "a", resize_short=SHORT), size=24)
    for made, folder in ((same, pictures), (copy, pictures), (pixels, pictures / "a")):
        assert shardstore.validate(made, level="source", source=folder, workers=1) == []


def test_only_the_first_picture_of_a_sequences_samples_is_resized(pictures: Path, tmp_path: Path) -> None:
    mask = (pictures / "b/grey.png").read_bytes()
    samples = [{"image": (pictures / key).read_bytes(), "mask": mask} for key in (*JPEGS, *KEPT)]
    shardstore.convert(samples, tmp_path / "out", resize_short=SHORT)
    made = column(tmp_path / "out", "image")
    assert [min(decoded(data).size) for data in made[: len(JPEGS)]] == [SHORT] * len(JPEGS)
    assert made[len(JPEGS) :] == [sample["image"] for sample in samples[len(JPEGS) :]]
    assert set(column(tmp_path / "out", "mask")) == {mask}
    samples[3]["mask"] = mask[: len(mask) // 2]
    with pytest.raises(shardstore.SourceError, match="1 bad file"):
        shardstore.convert(samples, tmp_path / "again", resize_short=SHORT)


@pytest.mark.parametrize("kind", ["sequence", "store"])
def test_pixels_are_no_source(kind: str, pictures: Path, make_store: Make, tmp_path: Path) -> None:
    arrays = [(np.zeros((50, 60, 3), np.uint8), 0)] * 3
    source = arrays if kind == "sequence" else make_store("npy", source=pictures / "a", size=50)
    with pytest.raises(shardstore.OptionError, match="resize_short"):
        shardstore.convert(source, tmp_path / "out", resize_short=SHORT, workers=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [{"size": 32}, {"store": "pixels"}, {"codec": "zstd", "format": "zarr"}, {"resize_short": 0}, {"resize_short": 1.5},
     {"resize_short": -1}, {"resize_short": "40"}],
    ids=str,
)  # fmt: skip
def test_impossible_options_are_refused(options: dict[str, Any], pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(shardstore.OptionError) as caught:
        shardstore.convert(pictures, tmp_path / "out", **{"resize_short": SHORT, "workers": 1, **options})
    named = ["codec"] if "codec" in options else ["resize_short", *options]
    assert [word for word in named if word not in str(caught.value)] == []
    assert list(tmp_path.iterdir()) == []


# -- export -----------------------------------------------------------------------------------------------------------


def test_export_names_pictures_by_what_they_became(store: Path, tmp_path: Path) -> None:
    assert shardstore.export(store, tmp_path / "back") == len(PICTURES)
    renamed = {"b/plain.bmp": "b/plain.png", "b/lossless.webp": "b/lossless.png"}
    for key, data in stored(store).items():
        assert (tmp_path / "back" / renamed.get(key, key)).read_bytes() == data, key


def test_32_bit_pixels_are_exported_exactly(odd_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "imgs").mkdir()
    shutil.copy(odd_dir / "thirty_two_bit.tif", tmp_path / "imgs")
    shardstore.convert(tmp_path / "imgs", tmp_path / "out", store="pixels", workers=1)
    shardstore.export(tmp_path / "out", tmp_path / "back")
    pixels = [np.asarray(Image.open(tmp_path / name / "thirty_two_bit.tif")) for name in ("imgs", "back")]
    np.testing.assert_array_equal(*pixels)
