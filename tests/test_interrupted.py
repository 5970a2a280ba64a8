"""Conversions killed with SIGKILL in the middle: never half a store, and the same command then succeeds."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardstore

# The process kills itself at the n-th time it opens, renames, makes or removes something below the target's folder: a
# moment that can be chosen, and not a race. Where n is 0 it lives, and prints how many such moments there are and which
# of them are renames from or to the target itself.
CHILD = """
import json, os, signal, sys
source, target, moment, options = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
import shardstore
seen, commits = 0, []
def hook(event, args):
    global seen
    if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"):
        if args and isinstance(args[0], (str, bytes)) and os.fsdecode(args[0]).startswith(os.path.dirname(target)):
            seen += 1
            if event == "os.rename" and any(not os.fsdecode(a).startswith(target + ".partial") for a in args[:2]):
                commits.append(seen)
            if seen == moment:
                os.kill(os.getpid(), signal.SIGKILL)
        return
    if event == "ctypes.dlsym" and args[1] in ("renameat2", "renamex_np"):  # before two names are exchanged
        seen += 1
        commits.append(seen)
        if seen == moment:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
shardstore.convert(source, target, workers=1, **options)
print(json.dumps([seen, commits]))
"""
CONTAINERS = {"npy": "out", "zarr": "out.zarr", "hdf5": "out.h5"}
OPTIONS: dict[str, Any] = {"store": "encoded", "samples_per_shard": 7}


def child(source: Path, target: Path, moment: int, **options: Any) -> subprocess.CompletedProcess[str]:
    arguments = [str(source), str(target), str(moment), json.dumps({**OPTIONS, **options})]
    return subprocess.run([sys.executable, "-c", CHILD, *arguments], capture_output=True, text=True, timeout=60)


def contents(files: dict[str, Path]) -> dict[str, bytes]:
    return {name: file.read_bytes() for name, file in files.items()}


def moments(printed: str) -> list[int]:
    """The first, the middle and the last, and those around each rename by which the store comes up."""
    count, commits = json.loads(printed)
    assert commits
    near = {commit + step for commit in commits for step in (-1, 0, 1)}
    return sorted({1, count // 2, count} | {moment for moment in near if moment <= count})


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_killed_conversion_leaves_no_store_and_can_be_run_again(
    container: str, images_dir: Path, tmp_path: Path, tree: Callable[[Path], dict[str, Path]]
) -> None:
    name = CONTAINERS[container]
    (tmp_path / "whole").mkdir()
    whole = child(images_dir, tmp_path / "whole" / name, 0)
    assert whole.returncode == 0, whole.stderr
    expected = contents(tree(tmp_path / "whole" / name))
    unfinished = []
    for moment in moments(whole.stdout):
        target = tmp_path / str(moment) / name
        target.parent.mkdir()
        killed = child(images_dir, target, moment)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        try:
            shardstore.open(target)
        except shardstore.NoStoreError:
            unfinished.append(moment)
            shardstore.convert(images_dir, target, workers=1, **OPTIONS)
            assert [path.name for path in target.parent.glob("*.partial")] == [], moment
        assert contents(tree(target)) == expected, moment
        assert shardstore.validate(target, level="source", source=images_dir, workers=1) == []
    assert len(unfinished) >= 4


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("content", ["other", "same"])
def test_a_killed_overwrite_leaves_one_store_or_none_and_can_be_run_again(
    content: str,
    container: str,
    images_dir: Path,
    tmp_path: Path,
    make_store: Callable[..., Path],
    tree: Callable[[Path], dict[str, Path]],
) -> None:
    name = CONTAINERS[container]

    def old(folder: Path) -> Path:
        made = make_store(container, **({"size": 8, "samples_per_shard": 9} if content == "other" else OPTIONS))
        made.parent.rename(folder)
        return folder / name

    whole = child(images_dir, old(tmp_path / "whole"), 0, overwrite=True)
    assert whole.returncode == 0, whole.stderr
    new, before = contents(tree(tmp_path / "whole" / name)), contents(tree(old(tmp_path / "before")))
    seen = set()
    for moment in moments(whole.stdout):
        target = old(tmp_path / str(moment))
        killed = child(images_dir, target, moment, overwrite=True)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        try:
            seen.add(len(shardstore.open(target).schema.fields[0].shape))
            assert shardstore.validate(target, level="decode", workers=1) == []
        except shardstore.NoStoreError:
            seen.add(0)
        shardstore.convert(images_dir, target, overwrite=True, workers=1, **OPTIONS)
        assert contents(tree(target)) == new, moment
        assert len(list(target.parent.iterdir())) == (2 if container == "hdf5" else 1), moment
    assert seen >= {len(shardstore.open(tmp_path / "before" / name).schema.fields[0].shape)}  # it stays while it can
    assert (before == new) == (content == "same")


@pytest.mark.parametrize("container", CONTAINERS)
def test_an_unfinished_conversion_is_named(container: str, images_dir: Path, tmp_path: Path) -> None:
    target = tmp_path / CONTAINERS[container]
    assert child(images_dir, target, 20).returncode == -signal.SIGKILL
    for entry in (shardstore.open, shardstore.ShardDataset, shardstore.validate):
        with pytest.raises(shardstore.NoStoreError, match="interrupted") as caught:
            entry(target)
        assert "shardstore convert" in str(caught.value)
    with pytest.raises(shardstore.ShardstoreError):
        shardstore.open(tmp_path / f"{target.name}.partial")
    # Another conversion to the same place does not mind what the first one left.
    shardstore.convert(images_dir, target, size=16, samples_per_shard=5, workers=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [target.name, f"{target.name}.shards"] if container == "hdf5" else [target.name]
    )
    assert shardstore.validate(target, level="decode", workers=1) == []


def test_an_exception_in_the_middle_leaves_no_store(images_dir: Path, tmp_path: Path) -> None:
    def progress(done: int, total: int) -> None:
        if done == 14:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shardstore.convert(images_dir, tmp_path / "out", progress=progress, workers=1, **OPTIONS)
    with pytest.raises(shardstore.NoStoreError):
        shardstore.open(tmp_path / "out")
    shardstore.convert(images_dir, tmp_path / "out", workers=1, **OPTIONS)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_worker_processes_end_with_a_killed_conversion(images_dir: Path, tmp_path: Path) -> None:
    # Left alone, they would hold memory for ever, and write into the folder of the conversion that is run again.
    code = """
import os, signal, sys
import shardstore
def progress(done, total):
    if done >= 8:
        os.kill(os.getpid(), signal.SIGKILL)
shardstore.convert(sys.argv[1], sys.argv[2], store="encoded", samples_per_shard=2, workers=2, progress=progress)
"""
    arguments = [sys.executable, "-c", code, str(images_dir), str(tmp_path / "out")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            # The workers have inherited the pipe: its end is their end.
            process.communicate(timeout=20)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    shardstore.convert(images_dir, tmp_path / "out", workers=2, **OPTIONS)
    assert shardstore.validate(tmp_path / "out", level="decode", workers=1) == []
