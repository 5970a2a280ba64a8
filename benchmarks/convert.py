"""How long a conversion takes, beside writing the same files with WebDataset and beside decoding them.

    python benchmarks/convert.py IMAGES [--copies 18] [--rounds 5] [--folder /tmp/bench]

IMAGES is a folder of class folders; it is copied ``--copies`` times. Each run is a process of its own, all in turn, so
that a machine whose speed drifts treats them alike; medians and the ratio to the first row, pair by pair.

- webdataset: ``ShardWriter``, one process, bytes copied into tar shards (needs the extra ``bench``)
- decode: strict decoding alone, one process a core, nothing written
- header, full: ``convert(..., store="encoded", check=...)`` to npy with one worker a core
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

WORKERS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def copy_images(source: Path, target: Path, copies: int) -> None:
    if target.exists():
        return
    for folder in sorted(p for p in source.iterdir() if p.is_dir()):
        (target / folder.name).mkdir(parents=True)
        for file in sorted(folder.iterdir()):
            for copy in range(copies):
                shutil.copyfile(file, target / folder.name / f"{copy:03d}_{file.name}")


def files_of(folder: Path) -> list[tuple[str, int]]:
    classes = sorted(p for p in folder.iterdir() if p.is_dir())
    return [(str(file), label) for label, c in enumerate(classes) for file in sorted(c.iterdir())]


def webdataset(folder: Path, out: Path) -> None:
    import webdataset as wds

    out.mkdir()
    with wds.ShardWriter(str(out / "s-%05d.tar"), maxcount=1000, maxsize=1 << 26, verbose=0) as writer:
        for i, (file, label) in enumerate(files_of(folder)):
            writer.write({"__key__": f"{i:08d}", "jpg": Path(file).read_bytes(), "cls": label})


def decode_some(files: list[str]) -> int:
    from shardstore import images

    return sum(images.decode(Path(file).read_bytes()).shape[0] for file in files)


def decode(folder: Path, out: Path) -> None:
    files = [file for file, _ in files_of(folder)]
    with ProcessPoolExecutor(WORKERS) as pool:
        list(pool.map(decode_some, [files[i : i + 128] for i in range(0, len(files), 128)]))


def shardstore_header(folder: Path, out: Path) -> None:
    import shardstore

    shardstore.convert(folder, out, format="npy", store="encoded", check="header", workers=WORKERS)


def shardstore_full(folder: Path, out: Path) -> None:
    import shardstore

    shardstore.convert(folder, out, format="npy", store="encoded", check="full", workers=WORKERS)


RUNS = {"webdataset": webdataset, "header": shardstore_header, "decode": decode, "full": shardstore_full}


def run(name: str, folder: Path, work: Path) -> float:
    out = work / "out"
    shutil.rmtree(out, ignore_errors=True)
    os.sync()  # one run does not pay for the dirty pages of another
    started = time.perf_counter()
    subprocess.run([sys.executable, __file__, str(folder), "--only", name, "--folder", str(work)], check=True)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path)
    parser.add_argument("--copies", type=int, default=18)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/shardstore-bench"))
    parser.add_argument("--only", choices=RUNS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        RUNS[args.only](args.images, args.folder / "out")
        return
    folder = args.folder / f"images-{args.copies}"
    copy_images(args.images, folder, args.copies)
    times: dict[str, list[float]] = {name: [] for name in RUNS}
    for _ in range(args.rounds):
        for name in RUNS:
            times[name].append(run(name, folder, args.folder))
    print(f"{len(files_of(folder))} files, {WORKERS} workers, medians of {args.rounds} rounds")
    print(f"{'run':12} {'seconds':>8} {'min':>7} {'max':>7}  ratio")
    pairs = {"header": "webdataset", "full": "decode"}
    for name, seconds in times.items():
        ratio = ""
        if name in pairs:
            other = times[pairs[name]]
            ratio = f"{statistics.median(a / b for a, b in zip(seconds, other, strict=True)):.2f} of {pairs[name]}"
        print(f"{name:12} {statistics.median(seconds):8.2f} {min(seconds):7.2f} {max(seconds):7.2f}  {ratio}")


if __name__ == "__main__":
    main()
