"""How far the samples of a store can be mixed, and whether that is far enough."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import numpy as np

from shardstore.errors import ShardstoreError
from shardstore.order import Order, lane_count
from shardstore.store.chunks import Numbers, Reader
from shardstore.store.index import Index
from shardstore.store.schema import Field

_ORDER_AT_ONCE = 4096  # sample numbers worked out together: a keyed permutation of few costs as much as of many
_BATCHES_LOOKED_AT = 4  # by the hint about sorted stores
_USUAL_BATCH = 64  # where the DataLoader makes the batches, for the same hint
_MOST_IN_A_BLOCK = 1 << 20  # samples: what says more is no picture
_ENOUGH = 0.6  # of the classes that a batch of mixed samples would show


def window_and_block(reader: Reader, fields: Sequence[Field], batch_size: int | None) -> tuple[int, int]:
    """Window and block of the order: no bounds where each sample can be read alone, else the samples of a chunk, and as
    many of them as ``window_bytes`` holds, of all windows that a worker may have under way at once."""
    schema, blocks, budget = reader.index.schema, [], reader.options.window_bytes
    windows = 1 if batch_size is None else lane_count(schema.shards)
    for field in fields:
        array = schema.array(field.name if field.kind == "array" else f"{field.name}.data")[1]
        if array.codec != "none":
            samples = max(1, min(schema.samples // len(reader.index.table(array.name)), _MOST_IN_A_BLOCK))
            blocks.append((samples, max(1, array.chunk_items * array.item_bytes)))
    if not blocks:
        return 0, 1
    samples, nbytes = max(blocks)
    block = max(n for n in range(1, samples + 1) if schema.shard_samples % n == 0)
    return block * max(1, budget // windows // nbytes), block


def few(order: Order, start: int, stop: int, taken: int, at_once: int) -> Iterator[Numbers]:
    """The samples of a run of positions, after those taken, some at a time."""
    for first in range(taken, stop - start, _ORDER_AT_ONCE):
        numbers = order.mixed(np.arange(first, min(first + _ORDER_AT_ONCE, stop - start)), start, stop)
        for i in range(0, len(numbers), at_once):
            yield numbers[i : i + at_once]


def warn_if_sorted(index: Index, order: Order, batch_size: int | None) -> None:
    """Warn where batches see few classes because the store lies sorted by class."""
    schema, reader = index.schema, Reader(index)  # of its own: workers shall inherit nothing
    classes, m = len(schema.classes or ()), batch_size or _USUAL_BATCH
    if "label" not in schema.array_names or classes < 2 or schema.options.get("shuffle") or schema.samples < 2 * m:
        return
    if batch_size is None:
        batches = [next(few(order, 0, schema.samples, 0, m))]
    else:
        count = schema.samples // m
        looked_at = np.linspace(0, count - 1, min(count, _BATCHES_LOOKED_AT), dtype=int)
        batches = [order.batch(q, m) for q in looked_at.tolist()]
    try:
        seen = float(np.mean([len(np.unique(reader.read("label", numbers))) for numbers in batches]))
    except ShardstoreError:
        return  # reading will say it
    evenly = classes * (1 - (1 - 1 / classes) ** m)
    if seen < _ENOUGH * evenly:
        warnings.warn(
            f"{index.path} is sorted by class: a batch of {m} sees about {seen:.0f} classes, where mixed samples "
            f"would show {evenly:.0f}. Convert it with --shuffle for a shuffle as good as any.",
            stacklevel=3,
        )
