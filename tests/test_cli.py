"""The command line as users run it: a real process, its exit code, what it prints where.

Nothing here needs the checkout but ``fixtures/``, so that the same file also tests an installed wheel.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import h5py
import hdf5plugin  # noqa: F401 (the line that `info` shows for zstd in HDF5 says to import it)
import numpy as np
import pytest
import zarr
from PIL import Image

import shardstore
from shardstore.cli.convert import convert as convert_command
from shardstore.cli.main import group
from shardstore.cli.validate import validate as validate_command
from shardstore.converting.options import ConvertOptions, Options
from shardstore.errors import Problem

FINE, PROBLEMS, FAILURE, INTERRUPTED = 0, 1, 2, 130
TARGETS = {"zarr": "out.zarr", "hdf5": "out.h5", "npy": "out"}
# No one's terminal settings may change what these tests see.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES")}

# Names that could be taken for rich markup, emoji codes, options or several arguments, and bytes that are not UTF-8:
# a stray Latin-1 byte, and a surrogate that someone's tool wrote as three bytes.
NAMES = [
    b"[bold]x[0]",
    b"[",
    b":smile: two  spaces ",
    b"quote'\".",
    b"-dash",
    b"back\\slash",
    b"new\nline",
    b"caf\xe9",
    "日本 é".encode(),
    b"\xed\xa0\x80 surrogate",
]


def command() -> list[str]:
    """The console script beside this interpreter, or the function that it would call."""
    script = Path(sys.executable).parent / ("shardstore.exe" if os.name == "nt" else "shardstore")
    if script.exists():
        return [str(script)]
    return [sys.executable, "-P", "-c", "from shardstore.cli.main import main; main()"]


def run(*arguments: Any, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
    """Run ``shardstore ARGUMENTS``: whatever it is given, it never shows a traceback."""
    done = subprocess.run(
        [*command(), *(a if isinstance(a, bytes) else str(a) for a in arguments)],
        cwd=cwd,
        env={**ENVIRONMENT, **(env or {})},
        capture_output=True,
        stdin=subprocess.DEVNULL,
    )
    assert b"Traceback" not in done.stdout + done.stderr, done.stderr.decode("utf-8", "replace")
    return done


def fine(*arguments: Any, cwd: Path, env: dict[str, str] | None = None) -> str:
    """What a command that must succeed prints; it has nothing to say on standard error."""
    done = run(*arguments, cwd=cwd, env=env)
    assert (done.returncode, done.stderr) == (FINE, b"")
    return done.stdout.decode("utf-8", "surrogateescape")


def refused(*arguments: Any, cwd: Path, code: int = FAILURE) -> str:
    """What a command that must fail says, which is all on standard error."""
    done = run(*arguments, cwd=cwd)
    assert (done.returncode, done.stdout) == (code, b"")
    assert done.stderr.strip()
    return done.stderr.decode("utf-8", "surrogateescape")


def files(root: Path) -> dict[bytes, bytes | None]:
    """Every file below a folder with its bytes, and every folder."""
    found: dict[bytes, bytes | None] = {}
    top = os.fsencode(root)
    for folder, folders, names in os.walk(top):
        found.update({os.path.relpath(os.path.join(folder, name), top): None for name in folders})
        for name in names:
            path = os.path.join(folder, name)
            with open(path, "rb") as f:
                found[os.path.relpath(path, top)] = f.read()
    return found


@pytest.fixture(scope="module")
def odd_names(tmp_path_factory: pytest.TempPathFactory, images_dir: Path) -> Path:
    """Each odd name as a class and as its file."""
    root = tmp_path_factory.mktemp("odd") / "source [of] odd names"
    data = (images_dir / "cat/baseline.jpg").read_bytes()
    for i, name in enumerate(NAMES):
        path = Path(os.fsdecode(os.path.join(os.fsencode(root), name, name + b".jpg")))
        path.parent.mkdir(parents=True)
        path.write_bytes(data + bytes([i]))  # bytes after the end of the picture make every file another one
    return root


@pytest.fixture
def broken_dir(tmp_path: Path, images_dir: Path, bad_dir: Path) -> Path:
    """A source with 24 good pictures and 7 bad ones."""
    root = tmp_path / "broken"
    shutil.copytree(images_dir, root)
    shutil.copytree(bad_dir, root / "bad")
    return root


# -- the commands and their options agree with the library ------------------------------------------------------------


def parsed(command: click.Command, *arguments: str) -> dict[str, Any]:
    """The parameters that the command would hand to the library."""
    return dict(command.make_context(str(command.name), list(arguments)).params)


def test_options_of_convert_are_the_fields_of_the_options_classes() -> None:
    names = [field.name for field in dataclasses.fields(ConvertOptions)]
    assert names == list(Options.__annotations__)
    assert sorted(parsed(convert_command, "a", "b")) == sorted([*names, "source", "target", "as_json"])
    assert typing.get_type_hints(Options) == typing.get_type_hints(ConvertOptions)


def test_options_of_convert_have_the_defaults_of_the_library() -> None:
    given = parsed(convert_command, "a", "b")
    for other in ("source", "target", "as_json"):
        del given[other]
    assert ConvertOptions(**given) == ConvertOptions()
    assert given == dataclasses.asdict(ConvertOptions())


def test_choices_of_convert_are_those_of_the_library() -> None:
    hints = typing.get_type_hints(ConvertOptions)
    seen = set()
    for parameter in convert_command.params:
        if isinstance(parameter.type, click.Choice):
            hint = hints[str(parameter.name)]
            literals = [a for h in (hint, *typing.get_args(hint)) for a in typing.get_args(h) if isinstance(a, str)]
            assert sorted(parameter.type.choices) == sorted(set(literals)), parameter.name
            seen.add(parameter.name)
    assert seen == {"format", "store", "fit", "codec", "check", "on_error"}


def test_options_of_validate_are_arguments_of_the_library() -> None:
    arguments = set(inspect.signature(shardstore.validate).parameters) - {"progress"}
    assert set(parsed(validate_command, "a")) == arguments | {"as_json"}


def test_help_names_every_command_and_every_option(tmp_path: Path) -> None:
    top = fine("--help", cwd=tmp_path)
    assert top == fine("-h", cwd=tmp_path)
    assert list(group.commands) == ["convert", "export", "info", "validate"]
    for name, subcommand in group.commands.items():
        assert re.search(rf"^  {name} +\w.*", top, re.MULTILINE)
        text = fine(name, "--help", cwd=tmp_path)
        for parameter in subcommand.params:
            for option in parameter.opts if isinstance(parameter, click.Option) else ():
                assert option in text


def test_version_is_that_of_the_package(tmp_path: Path) -> None:
    from importlib.metadata import version

    assert version("shardstore") in fine("--version", cwd=tmp_path)


# -- convert ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("container", TARGETS)
def test_convert_prints_three_lines(tmp_path: Path, images_dir: Path, container: str) -> None:
    target = tmp_path / TARGETS[container]
    lines = fine("convert", images_dir, TARGETS[container], cwd=tmp_path).splitlines()
    count = r"holds 24 images in 3 classes, \d[\d.]* [kMG]?B in 1 shards?; \d+\.\d s, [\d,]+ images/s"
    assert re.fullmatch(rf"\S*{re.escape(target.name)} {count}", lines[0])
    assert re.fullmatch(r"stored as encoded: pictures have different sizes.*\(--size 224\)", lines[1])
    assert lines[2:] == ["left out: no bad files"]
    assert shardstore.open(target).schema.container == container
    assert shardstore.validate(target, level="source", source=images_dir, workers=1) == []


def test_convert_adds_a_line_for_each_note(tmp_path: Path, images_dir: Path) -> None:
    shutil.copytree(images_dir, tmp_path / "imgs")
    (tmp_path / "imgs/cat/[read] me.txt").write_text("not a picture")
    lines = fine("convert", "imgs", "out", cwd=tmp_path).splitlines()
    assert len(lines) == 4
    assert lines[3].startswith("note: 1 ")
    assert lines[3].endswith("cat/[read] me.txt")


def test_convert_json_is_the_summary(tmp_path: Path, images_dir: Path) -> None:
    found = json.loads(fine("convert", images_dir, "out.zarr", "--json", cwd=tmp_path))
    dataset = shardstore.open(tmp_path / "out.zarr")
    assert tmp_path / found["target"] == tmp_path / "out.zarr"
    assert (found["samples"], found["classes"], found["container"]) == (24, 3, "zarr")
    assert (found["rejects"], found["notes"], found["dry_run"]) == ([], [], False)
    assert found["options"] == dict(dataset.schema.options)
    assert found["fingerprint"] == dataset.schema.fingerprint
    assert found["bytes"] == sum(len(data) for data in files(tmp_path).values() if data is not None)


OPTIONS = {
    "format": (["--format", "zarr"], {"format": "zarr"}),
    "store": (["--store", "pixels"], {"store": "pixels"}),
    "size": (["--size", "16"], {"size": 16}),
    "size of two": (["--size", "16,24", "--fit", "crop"], {"size": (16, 24)}),
    "pad": (["--size", "16", "--fit", "pad"], {"size": 16, "fit": "pad"}),
    "stretch": (["--size", "16", "--fit", "stretch"], {"size": 16, "fit": "stretch"}),
    "resize short": (["--resize-short", "30"], {"resize_short": 30}),
    "codec": (["--format", "hdf5", "--size", "8", "--codec", "zstd"], {"format": "hdf5", "size": 8, "codec": "zstd"}),
    "shard size": (["--store", "pixels", "--shard-size", "0.1MB"], {"store": "pixels", "shard_size": 100_000}),
    "samples per shard": (["--samples-per-shard", "5"], {"samples_per_shard": 5}),
    "chunk size": (["--size", "16", "--chunk-size", "2KiB"], {"size": 16, "chunk_size": 2048}),
    "shuffle": (["--shuffle", "--seed", "-7"], {"shuffle": True, "seed": -7}),
    "check": (["--check", "header"], {"check": "header"}),
    "max pixels": (["--max-pixels", "1000000"], {"max_pixels": 1_000_000}),
    "workers": (["--workers", "2", "--samples-per-shard", "7"], {"workers": 2, "samples_per_shard": 7}),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "options"), OPTIONS.values(), ids=OPTIONS)
def test_an_option_of_convert_does_what_the_library_does(
    tmp_path: Path, images_dir: Path, arguments: list[str], options: dict[str, Any]
) -> None:
    # The same name for both, since the file of an HDF5 store knows it.
    for folder in ("command", "library"):
        (tmp_path / folder).mkdir()
    fine("convert", images_dir, "out", *arguments, cwd=tmp_path / "command")
    shardstore.convert(images_dir, tmp_path / "library/out", **{"workers": 1, **options})
    assert files(tmp_path / "command") == files(tmp_path / "library") != {}


def test_every_option_of_convert_is_run_somewhere_in_this_file() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    options = [o for p in convert_command.params if isinstance(p, click.Option) for o in p.opts]
    assert len(options) == 19
    assert [o for o in options if f'"{o}"' not in text] == []


@pytest.mark.parametrize("size", ["2000000", "2000000B", "2MB", "2 mb", "0.002GB", "2000k", "1953.125KiB"])
def test_sizes_in_bytes_are_read_in_all_usual_ways(size: str) -> None:
    assert parsed(convert_command, "a", "b", "--shard-size", size)["shard_size"] == 2_000_000


def test_convert_takes_a_store_as_its_source(tmp_path: Path, images_dir: Path) -> None:
    fine("convert", images_dir, "a.zarr", cwd=tmp_path)
    fine("convert", "a.zarr", "b.h5", cwd=tmp_path)
    fine("validate", "b.h5", "--source", images_dir, cwd=tmp_path)


def test_a_dry_run_shows_the_plan_and_writes_nothing(tmp_path: Path, images_dir: Path) -> None:
    lines = fine("convert", images_dir, "out.zarr", "--dry-run", cwd=tmp_path).splitlines()
    assert re.fullmatch(r".*out\.zarr would hold 24 images in 3 classes, \d[\d.]* kB in 1 shards?", lines[0])
    assert lines[1].startswith("stored as encoded: ")
    assert files(tmp_path) == {}
    found = json.loads(fine("convert", images_dir, "out.zarr", "--dry-run", "--size", "8", "--json", cwd=tmp_path))
    assert found["dry_run"] is True
    assert found["options"]["store"] == "pixels"
    assert found["bytes"] >= 24 * 8 * 8 * 3
    assert files(tmp_path) == {}


def test_a_dry_run_leaves_what_it_would_replace_as_it_was(tmp_path: Path, images_dir: Path) -> None:
    fine("convert", images_dir, "out.h5", cwd=tmp_path)
    before = files(tmp_path)
    fine("convert", images_dir / "cat", "out.h5", "--overwrite", "--dry-run", cwd=tmp_path)
    assert files(tmp_path) == before


def test_a_dry_run_checks_what_the_real_one_would(tmp_path: Path, images_dir: Path) -> None:
    (tmp_path / "out").mkdir()
    assert "already exists" in refused("convert", images_dir, "out", "--dry-run", cwd=tmp_path)


@pytest.mark.parametrize("target", TARGETS.values())
def test_an_existing_store_is_replaced_only_when_asked(tmp_path: Path, images_dir: Path, target: str) -> None:
    fine("convert", images_dir / "dog", target, cwd=tmp_path)
    before = files(tmp_path)
    assert "--overwrite" in refused("convert", images_dir, target, cwd=tmp_path)
    assert files(tmp_path) == before
    fine("convert", images_dir, target, "--overwrite", cwd=tmp_path)
    assert len(shardstore.open(tmp_path / target)) == 24
    (tmp_path / "new").mkdir()
    fine("convert", images_dir, target, cwd=tmp_path / "new")
    assert files(tmp_path / "new") == {k: v for k, v in files(tmp_path).items() if not k.startswith(b"new")}


def test_overwrite_never_replaces_what_is_no_store(tmp_path: Path, images_dir: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.tex").write_text("years of work")
    assert "no shardstore store" in refused("convert", images_dir, "out", "--overwrite", cwd=tmp_path)
    assert (tmp_path / "out/thesis.tex").read_text() == "years of work"


def test_bad_files_stop_the_conversion_and_are_all_listed(tmp_path: Path, broken_dir: Path, bad_dir: Path) -> None:
    said = refused("convert", broken_dir, "out", cwd=tmp_path, code=PROBLEMS)
    for name in os.listdir(bad_dir):
        assert f"bad/{name}" in said
    assert "7 bad files" in said
    assert "--on-error skip" in said
    assert os.listdir(tmp_path) == ["broken"]


def test_bad_files_are_left_out_when_asked(tmp_path: Path, broken_dir: Path) -> None:
    lines = fine("convert", broken_dir, "out", "--on-error", "skip", cwd=tmp_path).splitlines()
    assert re.match(r"left out: 7 bad files, listed in rejects\.jsonl; the first: .*bad/\S+", lines[2])
    with open(tmp_path / "out/rejects.jsonl", encoding="ascii") as f:
        rejects = [json.loads(line) for line in f]
    assert sorted(r["key"] for r in rejects) == sorted(f"bad/{p.name}" for p in (broken_dir / "bad").iterdir())
    assert all(r["what"] for r in rejects)
    assert len(shardstore.open(tmp_path / "out")) == 24
    fine("convert", broken_dir, "again", "--on-error", "skip", "--json", cwd=tmp_path)
    assert files(tmp_path / "again") == files(tmp_path / "out")


def test_the_search_for_bad_files_ends_at_max_errors(tmp_path: Path, broken_dir: Path) -> None:
    options = ("--max-errors", "2", "--workers", "1")
    said = refused("convert", broken_dir, "out", *options, cwd=tmp_path, code=PROBLEMS)
    assert len(re.findall(r"^  bad/", said, re.MULTILINE)) == 2
    assert "at least 2 bad files" in said


def test_a_source_of_bad_files_only_makes_no_store(tmp_path: Path, bad_dir: Path) -> None:
    said = refused("convert", bad_dir, "out", "--on-error", "skip", cwd=tmp_path, code=PROBLEMS)
    assert "no good file" in said
    assert os.listdir(tmp_path) == []


# -- misuse -----------------------------------------------------------------------------------------------------------

MISUSE_OF_CONVERT = [
    (["--format", "tar"], "tar"),
    (["--store", "raw"], "raw"),
    (["--size", "0"], "size"),
    (["--size", "10,0"], "size"),
    (["--size", "224x224"], "224x224"),
    (["--size", "-5"], "-5"),
    (["--size", "60000"], "large"),
    (["--size", "16", "--store", "encoded"], "size"),
    (["--fit", "squash"], "squash"),
    (["--resize-short", "0"], "0"),
    (["--resize-short", "256,256"], "256,256"),
    (["--resize-short", "32", "--size", "16"], "size=(16, 16)"),
    (["--resize-short", "32", "--size", "16"], "resize_short"),
    (["--resize-short", "32", "--store", "pixels"], "store='pixels'"),
    (["--resize-short", "32", "--store", "pixels"], "resize_short"),
    (["--resize-short", "32", "--codec", "zstd", "--format", "zarr"], "codec"),
    (["--codec", "lz4"], "lz4"),
    (["--codec", "zstd"], "codec"),
    (["--codec", "zstd", "--store", "encoded"], "codec"),
    (["--codec", "zstd", "--store", "pixels"], "npy"),
    (["--shard-size", "many"], "many"),
    (["--shard-size", "0"], "shard_size"),
    (["--shard-size", "-1MB"], "-1MB"),
    (["--shard-size", "5QB"], "5QB"),
    (["--samples-per-shard", "0"], "0"),
    (["--chunk-size", "0.1"], "chunk_size"),
    (["--seed", "x"], "x"),
    (["--check", "none"], "none"),
    (["--on-error", "ignore"], "ignore"),
    (["--max-errors", "0"], "0"),
    (["--workers", "0"], "0"),
    (["--workers", "two"], "two"),
    (["--sise", "8"], "--sise"),
    (["third"], "third"),
]


@pytest.mark.parametrize(("arguments", "named"), MISUSE_OF_CONVERT, ids=[" ".join(m[0]) for m in MISUSE_OF_CONVERT])
def test_convert_refuses_impossible_options(tmp_path: Path, images_dir: Path, arguments: list[str], named: str) -> None:
    assert named in refused("convert", images_dir, "out", *arguments, cwd=tmp_path)
    assert files(tmp_path) == {}


MISUSE = {
    "resize what is pixels": ["convert", "pixels", "out", "--resize-short", "8"],
    "no command": [],
    "unknown command": ["transform"],
    "unknown option": ["--fast"],
    "convert nothing": ["convert"],
    "convert to nothing": ["convert", "{images}"],
    "convert what is not there": ["convert", "missing", "out"],
    "convert a file": ["convert", "file.txt", "out"],
    "convert an empty folder": ["convert", "empty", "out"],
    "convert into its source": ["convert", "empty", "empty/out"],
    "convert below a file": ["convert", "{images}", "file.txt/out"],
    "convert a damaged store": ["convert", "damaged", "out"],
    "info of nothing": ["info"],
    "info of what is not there": ["info", "missing"],
    "info of a file": ["info", "file.txt"],
    "info of a folder": ["info", "{images}"],
    "info of a damaged store": ["info", "damaged"],
    "info, unknown option": ["info", "store", "--xml"],
    "validate nothing": ["validate"],
    "validate what is not there": ["validate", "missing"],
    "validate a file": ["validate", "file.txt"],
    "validate an empty folder": ["validate", "empty"],
    "validate, unknown level": ["validate", "store", "--level", "deep"],
    "validate, level without source": ["validate", "store", "--level", "source"],
    "validate, source at another level": ["validate", "store", "--level", "decode", "--source", "{images}"],
    "validate, missing source": ["validate", "store", "--source", "missing"],
    "validate, source is a file": ["validate", "store", "--source", "file.txt"],
    "validate, workers": ["validate", "store", "--workers", "0"],
    "export nothing": ["export"],
    "export to nothing": ["export", "store"],
    "export what is not there": ["export", "missing", "back"],
    "export a folder": ["export", "{images}", "back"],
    "export a damaged store": ["export", "damaged", "back"],
    "export into what is not empty": ["export", "store", "store"],
    "export into a file": ["export", "store", "file.txt"],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, make_store: Callable[..., Path]) -> Path:
    """A folder with a store and things that are none, which no misuse may change."""
    root = tmp_path_factory.mktemp("place")
    (root / "file.txt").write_text("no store")
    (root / "empty").mkdir()
    shutil.copytree(make_store("npy"), root / "store")
    shutil.copytree(root / "store", root / "damaged")
    shutil.copytree(make_store("npy", size=16), root / "pixels")
    (root / "damaged/shardstore.json").write_text("{}")
    return root


@pytest.mark.parametrize("arguments", MISUSE.values(), ids=MISUSE)
def test_misuse_is_explained_and_changes_nothing(place: Path, images_dir: Path, arguments: list[str]) -> None:
    before = files(place)
    refused(*(a.format(images=images_dir) for a in arguments), cwd=place)
    assert files(place) == before


# -- info -------------------------------------------------------------------------------------------------------------


def test_info_shows_classes_fields_and_layout(tmp_path: Path, make_store: Callable[..., Path]) -> None:
    store = make_store("zarr", samples_per_shard=7)
    text = fine("info", store, cwd=tmp_path)
    assert re.search(r"^samples +24\s*$", text, re.MULTILINE)
    assert re.search("4 shards of .*7 samples", text)
    for name, count in (("cat", 7), ("dog", 7), ("fish", 10)):
        assert re.search(rf"^{name} +{count}\s*$", text, re.MULTILINE)
    for field in ("image +bytes", "label +array +int64", "key +bytes"):
        assert re.search(f"^{field}", text, re.MULTILINE)
    assert shardstore.open(store).schema.fingerprint in text


def test_info_json_says_what_the_library_says(
    tmp_path: Path, make_store: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store("hdf5", size=16)
    monkeypatch.chdir(tmp_path)  # paths below it are shown relative to it
    facts = json.loads(fine("info", store, "--json", cwd=tmp_path))
    assert facts == json.loads(json.dumps(shardstore.open(store).info()))
    assert facts["class_counts"] == {"cat": 7, "dog": 7, "fish": 10}
    assert tmp_path / facts["path"] == store


def test_info_shows_the_first_of_many_classes(tmp_path: Path, make_images: Callable[..., Path]) -> None:
    shardstore.convert(make_images(25, classes=25), tmp_path / "out", workers=1)
    text = fine("info", "out", cwd=tmp_path)
    assert len(re.findall(r"^class\d+ +1\s*$", text, re.MULTILINE)) == 20
    assert "5 more classes" in text
    assert len(json.loads(fine("info", "out", "--json", cwd=tmp_path))["class_counts"]) == 25


PLAIN = [("zarr", {}), ("hdf5", {}), ("npy", {})]
PLAIN += [(container, {"size": (16, 20), "samples_per_shard": 24}) for container in TARGETS]
PLAIN += [(container, {"size": 16, "codec": "zstd", "samples_per_shard": 5}) for container in ("zarr", "hdf5")]


@pytest.mark.parametrize(("container", "options"), PLAIN)
def test_the_line_for_plain_tools_gives_the_data(
    make_store: Callable[..., Path],
    images_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    container: str,
    options: dict[str, Any],
) -> None:
    store = make_store(container, name="a [b] 'c'", **options)
    monkeypatch.chdir(store.parent)
    line = fine("info", store.name, cwd=store.parent).splitlines()[-1]
    assert line.startswith("  ")
    array = np.asarray(eval(line.strip(), {"zarr": zarr, "h5py": h5py, "np": np})[:])
    if options:
        pictures = [sample.image for sample in shardstore.open(store, image_type="numpy")]
        assert np.array_equal(array, np.stack(pictures))
    else:
        first = (images_dir / "cat/baseline.jpg").read_bytes()
        assert shardstore.open(store).key(0) == "cat/baseline.jpg"
        assert array[: len(first)].tobytes() == first


# -- validate ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("container", "level"), [("npy", "structure"), ("zarr", "checksum"), ("hdf5", "decode"), ("zarr", "source")]
)
def test_validate_of_a_good_store(
    tmp_path: Path, make_store: Callable[..., Path], images_dir: Path, container: str, level: str
) -> None:
    store = make_store(container)
    source = ["--source", images_dir] if level == "source" else []
    assert level in fine("validate", store, "--level", level, *source, cwd=tmp_path)
    assert json.loads(fine("validate", store, "--level", level, *source, "--json", cwd=tmp_path)) == []


@pytest.mark.parametrize("workers", ["1", "2"])
def test_validate_of_a_damaged_store(tmp_path: Path, make_store: Callable[..., Path], workers: str) -> None:
    store = make_store("npy", samples_per_shard=7)
    shard = store / "image/00001.data.npy"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    fine("validate", store, "--level", "structure", cwd=tmp_path)
    said = refused("validate", store, "--workers", workers, cwd=tmp_path, code=PROBLEMS)
    assert str(shard) in said
    assert "Restore" in said
    done = run("validate", store, "--workers", workers, "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (PROBLEMS, b"")
    problems = [Problem(**p) for p in json.loads(done.stdout)]
    assert problems == shardstore.validate(store, workers=1)
    assert f"{len(problems)} problem" in said


def test_validate_with_a_source_compares_at_the_source_level(tmp_path: Path, images_dir: Path) -> None:
    shutil.copytree(images_dir, tmp_path / "imgs")
    fine("convert", "imgs", "out.h5", cwd=tmp_path)
    (tmp_path / "imgs/cat/new.jpg").write_bytes((images_dir / "cat/grey.jpg").read_bytes())
    said = refused("validate", "out.h5", "--source", "imgs", cwd=tmp_path, code=PROBLEMS)
    assert "cat/new.jpg" in said


def test_validate_of_a_good_folder(tmp_path: Path, images_dir: Path) -> None:
    fine("validate", images_dir, cwd=tmp_path)
    assert json.loads(fine("validate", images_dir, "--json", cwd=tmp_path)) == []


def test_validate_of_a_folder_lists_exactly_the_bad_files(tmp_path: Path, broken_dir: Path, bad_dir: Path) -> None:
    said = refused("validate", broken_dir, cwd=tmp_path, code=PROBLEMS)
    listed = re.findall(r"^  (\S+?): ", said, re.MULTILINE)
    assert sorted(listed) == sorted(f"{broken_dir}/bad/{name}" for name in os.listdir(bad_dir))
    assert "7 problems" in said
    done = run("validate", broken_dir, "--json", cwd=tmp_path)
    assert done.returncode == PROBLEMS
    assert sorted(p["key"] for p in json.loads(done.stdout)) == sorted(f"bad/{n}" for n in os.listdir(bad_dir))


def test_validate_shows_the_first_of_many_problems(tmp_path: Path, images_dir: Path) -> None:
    for i in range(60):
        path = tmp_path / f"imgs/a/{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    said = refused("validate", "imgs", cwd=tmp_path, code=PROBLEMS)
    assert "10 more" in said
    assert "60 problems" in said
    assert len(json.loads(run("validate", "imgs", "--json", cwd=tmp_path).stdout)) == 60


# -- export -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("container", TARGETS)
def test_export_gives_back_the_same_files(
    tmp_path: Path, make_store: Callable[..., Path], images_dir: Path, container: str
) -> None:
    store = make_store(container, samples_per_shard=5)
    assert "24 files" in fine("export", store, "back", cwd=tmp_path)
    assert files(tmp_path / "back") == files(images_dir)


def test_export_into_an_empty_folder(tmp_path: Path, make_store: Callable[..., Path], images_dir: Path) -> None:
    (tmp_path / "back").mkdir()
    fine("export", make_store("npy", shuffle=True), "back", cwd=tmp_path)
    assert files(tmp_path / "back") == files(images_dir)


def test_export_of_pixels_gives_png_files_with_the_same_values(
    tmp_path: Path, make_images: Callable[..., Path], make_store: Callable[..., Path]
) -> None:
    store = make_store("zarr", source=make_images(6, sizes=((9, 7), (8, 8)), format="bmp"), store="pixels")
    dataset = shardstore.open(store, image_type="numpy")
    fine("export", store, "back", cwd=tmp_path)
    names = sorted(p.relative_to(tmp_path / "back").as_posix() for p in (tmp_path / "back").rglob("*.*"))
    assert names == [f"{os.path.splitext(str(dataset.key(i)))[0]}.png" for i in range(6)]
    for i, name in enumerate(names):
        with Image.open(tmp_path / "back" / name) as image:
            assert np.array_equal(np.asarray(image), dataset[i].image)


def test_export_of_pixels_whose_files_differed_by_their_ending_alone(
    tmp_path: Path, make_store: Callable[..., Path]
) -> None:
    store = make_store("zarr", store="pixels")  # fish/plain.ppm and fish/plain.tiff
    fine("export", store, "back", cwd=tmp_path)
    found = []
    for path in (tmp_path / "back").rglob("*.*"):
        with Image.open(path) as image:
            found.append(np.asarray(image).tobytes())
    assert sorted(found) == sorted(s.image.tobytes() for s in shardstore.open(store, image_type="numpy"))


def test_export_of_a_damaged_picture_is_refused(tmp_path: Path, make_store: Callable[..., Path]) -> None:
    store = make_store("npy")
    shard = store / "image/00000.data.npy"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    said = refused("export", store, "back", cwd=tmp_path)
    assert "fish/" in said
    assert str(shard) in said


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("container", "locale"), [("zarr", "C.UTF-8"), ("hdf5", "C"), ("npy", "C"), ("hdf5", "C.UTF-8")]
)
def test_odd_names_come_through_every_command(tmp_path: Path, odd_names: Path, container: str, locale: str) -> None:
    env = {"LC_ALL": locale}
    target = b"[red]caf\xe9 \xed\xa0\x80 " + TARGETS[container].encode()
    assert "10 images in 10 classes" in fine("convert", odd_names, target, cwd=tmp_path, env=env)
    fine("validate", target, "--source", odd_names, cwd=tmp_path, env=env)
    text = fine("info", target, cwd=tmp_path, env=env)
    for shown in ("[bold]x[0]", ":smile: two  spaces", "-dash", "caf\\xe9", "日本 é", "\\xed\\xa0\\x80 surrogate"):
        assert shown in text
    facts = json.loads(fine("info", target, "--json", cwd=tmp_path, env=env))
    assert sorted(os.fsencode(name) for name in facts["class_counts"]) == sorted(NAMES)
    fine("export", target, b"b\xe9ck", cwd=tmp_path, env=env)
    assert files(Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), b"b\xe9ck")))) == files(odd_names)


@pytest.mark.parametrize("locale", ["C.UTF-8", "C"])
def test_odd_names_of_bad_files_are_shown(tmp_path: Path, locale: str) -> None:
    for name in NAMES:
        path = Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), b"imgs", name, name + b".jpg")))
        path.parent.mkdir(parents=True)
        path.write_bytes(b"no picture")
    (tmp_path / "imgs/good").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "imgs/good/good.png")
    env = {"LC_ALL": locale}
    shown = [
        "[bold]x[0]/[bold]x[0].jpg",
        ":smile: two  spaces ",
        "caf\\xe9/caf\\xe9.jpg",
        "日本 é/日本 é.jpg",
        "-dash/-dash",
    ]
    for arguments in (["convert", "imgs", "out"], ["validate", "imgs"]):
        done = run(*arguments, cwd=tmp_path, env=env)
        assert done.returncode == PROBLEMS
        assert [name for name in shown if name not in done.stderr.decode()] == []
    done = run("validate", "imgs", "--json", cwd=tmp_path, env=env)
    assert sorted(os.fsencode(p["key"]) for p in json.loads(done.stdout)) == sorted(
        n + b"/" + n + b".jpg" for n in NAMES
    )
    text = fine("convert", "imgs", "out", "--on-error", "skip", cwd=tmp_path, env=env)
    assert "left out: 10 bad files" in text
    fine("validate", "out", "--source", "imgs", cwd=tmp_path, env=env)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_an_output_that_cannot_show_a_name_gets_a_substitute(tmp_path: Path, odd_names: Path, encoding: str) -> None:
    env = {"PYTHONIOENCODING": encoding}  # as a pipe on Windows has
    for arguments in (["convert", odd_names, "out"], ["info", "out"], ["info", "out", "--json"], ["validate", "out"]):
        assert fine(*arguments, cwd=tmp_path, env=env)
    fine("export", "out", "back", cwd=tmp_path, env=env)
    assert files(tmp_path / "back") == files(odd_names)
    broken = Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), "bad/日本.jpg".encode())))
    broken.parent.mkdir()
    broken.write_bytes(b"")
    done = run("validate", "bad", cwd=tmp_path, env=env)
    assert done.returncode == PROBLEMS


# -- terminals and interruption ---------------------------------------------------------------------------------------


def on_terminal(*arguments: Any, cwd: Path) -> tuple[int, bytes, bytes]:
    """Run with standard error on a terminal: exit code, standard output, what the terminal showed."""
    master, terminal = pty.openpty()
    try:
        process = subprocess.Popen(
            [*command(), *map(str, arguments)],
            cwd=cwd,
            env={**ENVIRONMENT, "TERM": "xterm"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=terminal,
        )
    finally:
        os.close(terminal)
    shown = read_terminal(master)
    assert process.stdout is not None
    printed = process.stdout.read()
    os.close(master)
    return process.wait(), printed, shown


def read_terminal(master: int, until: bytes | None = None) -> bytes:
    """All that is shown until the program's end, or until some text is."""
    shown = b""
    while until is None or until not in shown:
        try:
            data = os.read(master, 65536)
        except OSError:  # Linux's way to say that no one holds the terminal any more
            break
        if not data:
            break
        shown += data
    return shown


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["convert", "{images}", "out"], b"converting"),
        (["validate", "{store}"], b"checking"),
        (["validate", "{images}"], b"checking"),
        (["export", "{store}", "back"], b"exporting"),
    ],
    ids=["convert", "validate a store", "validate a folder", "export"],
)
def test_the_progress_bar_shows_on_a_terminal_and_nowhere_else(
    tmp_path: Path, make_store: Callable[..., Path], images_dir: Path, arguments: list[str], word: bytes
) -> None:
    places = {"images": images_dir, "store": make_store("zarr")}
    code, printed, shown = on_terminal(*(a.format(**places) for a in arguments), cwd=tmp_path)
    assert code == FINE
    assert word in shown
    assert b"24/24" in shown
    assert b"images/s" in shown
    for path in (tmp_path / "out", tmp_path / "back"):
        shutil.rmtree(path, ignore_errors=True)
    done = run(*(a.format(**places) for a in arguments), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (FINE, b"")
    # The result goes to standard output alike, and the bar never does.
    assert len(done.stdout.splitlines()) == len(printed.splitlines())
    assert word not in printed + done.stdout


@pytest.mark.parametrize("arguments", [["convert", "{images}", "out"], ["validate", "{store}"]])
def test_no_progress_bar_beside_json(
    tmp_path: Path, make_store: Callable[..., Path], images_dir: Path, arguments: list[str]
) -> None:
    places = {"images": images_dir, "store": make_store("zarr")}
    code, printed, shown = on_terminal(*(a.format(**places) for a in arguments), "--json", cwd=tmp_path)
    assert (code, shown) == (FINE, b"")
    json.loads(printed)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_an_interrupted_conversion_says_so_and_starts_again(tmp_path: Path, workers: str) -> None:
    # One quick shard and one of several seconds, so that the signal finds one worker idle and one at work.
    for name, side in (("a", 8), ("b", 1600)):
        (tmp_path / "imgs" / name).mkdir(parents=True)
        noise = np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)
        Image.fromarray(noise).save(tmp_path / "imgs" / name / "0.jpg")
        for i in range(1, 300):
            os.link(tmp_path / "imgs" / name / "0.jpg", tmp_path / "imgs" / name / f"{i}.jpg")
    master, terminal = pty.openpty()
    process = subprocess.Popen(
        [*command(), "convert", "imgs", "out.h5", "--samples-per-shard", "300", "--workers", workers],
        cwd=tmp_path,
        env={**ENVIRONMENT, "TERM": "xterm"},
        stdout=subprocess.PIPE,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    shown = read_terminal(master, until=b"300/600")
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to the workers, too
    shown += read_terminal(master)
    os.close(master)
    assert process.stdout is not None
    assert (process.wait(), process.stdout.read()) == (INTERRUPTED, b"")
    assert b"interrupted" in shown
    assert b"Traceback" not in shown
    assert "interrupted" in refused("info", "out.h5", cwd=tmp_path)
    assert not (tmp_path / "out.h5").exists()
    for i in range(1, 300):
        (tmp_path / f"imgs/b/{i}.jpg").unlink()
    fine("convert", "imgs", "out.h5", cwd=tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["imgs", "out.h5", "out.h5.shards"]
    fine("validate", "out.h5", "--source", "imgs", cwd=tmp_path)
