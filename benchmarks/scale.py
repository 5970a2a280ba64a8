"""What opening a store and ordering an epoch cost where there are very many samples. Linux.

    python benchmarks/scale.py [--rounds 9]

The store is simulated: a true ``shardstore.json`` and index of the right sizes, of 10^8 pictures of 224 x 224 in 97,657
shards, without the shards. Each measurement is a process of its own; medians. Private memory is what the process adds
to its own pages, all that an epoch's order keeps included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from common import memory_kb

SAMPLES, SHARD_SAMPLES, CHUNK_SAMPLES = 10**8, 1024, 8


def private_bytes() -> int:
    return memory_kb("self", "Private_") << 10


def simulate(folder: Path) -> Path:
    from PIL import Image

    import shardstore
    from shardstore.store import index, npyfile
    from shardstore.store.schema import CHUNK, shard_dtype, to_json

    source = folder / "imgs" / "a"
    source.mkdir(parents=True)
    for i in range(2):
        Image.new("RGB", (224, 224), (i, 0, 0)).save(source / f"{i}.png")
    shardstore.convert(folder / "imgs", folder / "small", store="pixels")
    small = index.load(folder / "small").schema
    arrays = tuple(replace(a, shard_items=SHARD_SAMPLES, chunk_items=CHUNK_SAMPLES) for a in small.arrays)
    schema = replace(small, samples=SAMPLES, shard_samples=SHARD_SAMPLES, arrays=arrays)
    store = folder / "large"
    (store / "index").mkdir(parents=True)
    files = {}
    dtype = shard_dtype(schema)
    for name, table, rows in [
        ("shards", dtype, schema.shards),
        *((f"{a.name}.chunks", CHUNK, -(-SAMPLES // CHUNK_SAMPLES)) for a in arrays),
    ]:
        header = npyfile.header(table, (rows,))
        path = store / "index" / f"{name}.npy"
        with path.open("wb") as file:
            file.write(header)
            file.truncate(len(header) + rows * table.itemsize)
        files[f"index/{name}.npy"] = (path.stat().st_size, 0)
    (store / index.JSON_NAME).write_bytes(to_json(replace(schema, files=files)))
    return store


def measure_open(store: str) -> dict[str, float]:
    import shardstore.loading.loader  # what any training has imported
    from shardstore.store import index

    before, t = private_bytes(), time.perf_counter()
    opened = index.load(store)
    milliseconds = (time.perf_counter() - t) * 1e3
    dataset = shardstore.loading.loader.ShardDataset(store, batch_size=64)
    rows = len(opened.table("image")) + len(dataset)
    return {"ms": milliseconds, "private MB": (private_bytes() - before) / 1e6, "rows and steps": rows}


def measure_order(shards: int, samples: int) -> dict[str, float]:
    from shardstore.order import Order, Share

    np.argsort(np.arange(10))
    before, t = private_bytes(), time.perf_counter()
    order, share = Order(samples, samples // shards, 7), Share(3, 8)
    steps = order.steps(range(1, order.step_count(64, share), 4), 64, share)
    next(steps)
    first = (time.perf_counter() - t) * 1e3
    t = time.perf_counter()
    for _, _ in zip(range(2000), steps, strict=False):
        pass
    each = (time.perf_counter() - t) / 2000 * 1e3
    return {"first ms": first, "ms a batch": each, "private MB": (private_bytes() - before) / 1e6}


def report(name: str, rounds: int, *arguments: str) -> None:
    command = [sys.executable, __file__, "--measure", name, *arguments]
    runs = [json.loads(subprocess.check_output(command)) for _ in range(rounds)]
    print(f"{name} {' of '.join(arguments) if name == 'order' else ''}")
    for key in runs[0]:
        values = [run[key] for run in runs]
        print(f"  {key}: {statistics.median(values):.4g} ({min(values):.4g}-{max(values):.4g})")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--measure", nargs="+")
    given = parser.parse_args()
    if given.measure:
        name, *arguments = given.measure
        result = measure_open(*arguments) if name == "open" else measure_order(*map(int, arguments))
        print(json.dumps(result))
        return
    with tempfile.TemporaryDirectory() as folder:
        report("open", given.rounds, str(simulate(Path(folder))))
    for shards, samples in ((1_000, 1_281_167), (97_657, 10**8), (10**6, 10**9)):
        report("order", given.rounds, str(shards), str(samples))


if __name__ == "__main__":
    main()
