"""Which bytes of which files the samples of a batch are: worked out for many batches together, since arithmetic on
arrays costs the same for a hundred samples as for thousands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardstore.store.aio import PIECE

Array = np.ndarray[Any, np.dtype[Any]]
Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Plan:
    """What to read for the uncompressed samples of one field and batch.

    Attributes:
        shards: whose files are read.
        pieces: of dtype :data:`shardstore.store.aio.PIECE`, ``fd`` a place in ``shards``, ``begin`` in bytes of the
            batch; neighbours in a file are one piece. Sorted by file and offset.
        rows: of each piece, its row of the chunk table.
        whole: which pieces are whole chunks.
    """

    shards: list[int]
    pieces: Array
    rows: Numbers
    whole: list[int]


def plans(batches: list[Numbers], rows: Numbers, table: Array, item_bytes: int) -> list[Plan]:
    """One for each batch.

    Args:
        batches: sample numbers.
        rows: of the chunk table, for all of these samples one after the other.
        table: these rows, of dtype :data:`shardstore.store.schema.CHUNK`.
        item_bytes: bytes of a sample.
    """
    samples, sizes = np.concatenate(batches), np.array([len(numbers) for numbers in batches])
    batch, start = np.repeat(np.arange(len(batches)), sizes), np.cumsum(sizes) - sizes
    firsts = np.flatnonzero(_changes(rows) | _changes(samples, step=1) | _changes(batch))
    counts = np.append(firsts[1:], len(samples)) - firsts
    table, batch = table[firsts], batch[firsts]
    offsets = table["offset"].astype(np.int64) + (samples[firsts] - table["first"]) * item_bytes
    order = np.lexsort((offsets, table["shard"], batch))
    shards, batch = table["shard"][order], batch[order]
    new = _changes(shards) | _changes(batch)
    files = np.cumsum(new) - 1
    cuts = np.searchsorted(batch, np.arange(len(batches) + 1))
    pieces = np.empty(len(order), PIECE)
    pieces["fd"] = files - files[cuts[batch]]
    pieces["offset"], pieces["begin"] = offsets[order], (firsts[order] - start[batch]) * item_bytes
    pieces["nbytes"] = counts[order] * item_bytes
    rows, whole = rows[firsts][order], (counts == table["count"])[order]
    made = []
    for a, b in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        made.append(Plan(shards[a:b][new[a:b]].tolist(), pieces[a:b], rows[a:b], np.flatnonzero(whole[a:b]).tolist()))
    return made


def _changes(values: Array, step: int = 0) -> Array:
    """Where a value is not the one before it and ``step``; the first always is."""
    changes = np.ones(len(values), bool)
    np.not_equal(values[1:], values[:-1] + step, out=changes[1:])
    return changes
