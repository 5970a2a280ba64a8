"""How long a conversion of JPEG files takes, beside other formats' writers and beside decoding alone.

    python benchmarks/convert.py IMAGES [--copies 18] [--rounds 5] [--folder /tmp/bench] [--only ROW ...]
        [--base ROW ...] [--python ffcv=/path/to/python mds,litdata=/another]

IMAGES is a folder of class folders; it is copied ``--copies`` times. Seconds are of the whole process, its imports
included, and each run is one, all in turn; medians, and ratios round by round. What is not installed is left out (the
extra ``bench`` has all but FFCV and MosaicML's streaming, which want an interpreter of their own: ``--python``).

- webdataset, array_record, mds: one process; datasets (Hugging Face, ``save_to_disk``), litdata, ffcv: one a core
- decode: strict decoding alone, one process a core, nothing written
- header, full: ``convert(..., store="encoded", check=...)`` to npy, one process a core
"""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from common import WORKERS, Column, in_turn, machine, parser_of, result, table
from pictures import files_of, folder_of, original, remove
from writers import WRITERS


def _decode_some(files: list[Path]) -> int:
    from shardstore.pictures import images

    return sum(images.decode(file.read_bytes()).shape[0] for file in files)


def decode(images: Path, out: Path) -> None:
    files = [file for file, _ in files_of(images)]
    with ProcessPoolExecutor(WORKERS) as pool:
        list(pool.map(_decode_some, [files[i : i + 128] for i in range(0, len(files), 128)]))


RUNS = {**WRITERS, "decode": decode}


def clear(out: Path) -> None:
    """Before each run, so that it does not pay for the dirty pages of another."""
    remove(out)
    os.sync()


def main() -> None:
    parser = parser_of(__doc__, rounds=5)
    parser.add_argument("--copies", type=int, default=18)
    given = parser.parse_args()
    images, out = given.folder / f"jpeg-{given.copies}" / "imgs", given.folder / "converted"
    if given.run:
        RUNS[given.run](images, out)
        result()
        return
    images.parent.mkdir(parents=True, exist_ok=True)
    folder_of(given.images, images, given.copies, original)
    results = in_turn(RUNS, given, before=lambda: clear(out))
    remove(out)
    print(f"{len(files_of(images)):,} files; {machine()}; medians of {given.rounds} rounds\n")
    columns = [Column("seconds", "seconds", ".2f", spread=True, ratios=True)]
    print(table(results, columns, given.base or ["webdataset", "decode"]))


if __name__ == "__main__":
    main()
