"""Whether an index agrees with itself: every range, sum and count, from the tables alone.

Run once at commit, and by ``validate``; readers check only the rows that they use.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shardstore.errors import Problem
from shardstore.store.index import Index
from shardstore.store.schema import Array, Table, fingerprint

_HINT = "The index is damaged: convert the source again with --overwrite."


def prove(index: Index) -> list[Problem]:
    """All contradictions in an index whose files could be opened."""
    schema, shards = index.schema, index.shards
    problems: list[Problem] = []

    def sure(condition: Any, what: str, **where: Any) -> None:
        if not np.all(condition):
            problems.append(Problem(what, f"{index.root}/index", hint=_HINT, **where))

    firsts = np.arange(len(shards)) * schema.shard_samples
    sure(shards["first"] == firsts, "the shard table's first samples are wrong")
    sure(shards["count"] == np.minimum(schema.shard_samples, schema.samples - firsts), "shards have wrong counts")
    sure(fingerprint(schema, shards) == schema.fingerprint, "the fingerprint is not that of the content")
    for number, array in enumerate(schema.arrays):
        table, rows = index.table(array.name), shards["rows"][:, number]
        where = {"field": array.name}
        lengths = np.diff(rows, append=len(table))
        grown = rows[:1] == 0 if len(rows) else True
        sure(np.all(grown) and np.all(lengths >= 0), "the shard table's rows are not in order", **where)
        if np.all(grown) and np.all(lengths >= 0):
            sure(table["shard"] == np.repeat(np.arange(len(shards)), lengths), "chunks of wrong shards", **where)
            _prove_chunks(index, array, table, sure)
    _prove_overlaps(index, sure)
    return problems


def _prove_chunks(index: Index, array: Array, table: Table, sure: Any) -> None:
    schema, shards = index.schema, index.shards
    where = {"field": array.name}
    count, first = table["count"].astype(np.int64), table["first"]
    if not (len(table) and np.all(table["shard"] < len(shards))):
        sure(False, "chunks of shards that do not exist", **where)
        return
    sure(first == np.cumsum(count) - count, "chunks do not follow one another", **where)
    sure(count > 0, "a chunk without samples", **where)
    sure(count.sum() == schema.samples, "chunks do not cover all samples", **where)
    sure(first // schema.shard_samples == table["shard"], "a chunk lies outside its shard", **where)
    size = shards["size"][table["shard"], schema.file_number(schema.array(array.name)[0])].clip(0).astype(np.uint64)
    inside = (table["offset"] <= size) & (table["nbytes"] <= size - np.minimum(table["offset"], size))
    sure(inside, "a chunk lies outside its file", **where)
    if not array.name.endswith(".data"):
        sure(count <= array.chunk_items, "a chunk has too many samples", **where)
        if array.codec == "none":
            sure(table["nbytes"] == count * array.item_bytes, "a chunk has a wrong size", **where)


def _prove_overlaps(index: Index, sure: Any) -> None:
    """No two chunks of one file may share a byte."""
    schema = index.schema
    groups: dict[int, list[Table]] = {}
    for number, array in enumerate(schema.arrays):
        groups.setdefault(schema.file_number(number), []).append(index.table(array.name))
    for tables in groups.values():
        shard = np.concatenate([t["shard"] for t in tables])
        start = np.concatenate([t["offset"] for t in tables])
        end = start + np.concatenate([t["nbytes"] for t in tables])
        by_place = np.lexsort((end, start, shard))
        shard, start, end = shard[by_place], start[by_place], end[by_place]
        sure((shard[1:] != shard[:-1]) | (start[1:] >= end[:-1]), "two chunks of a file overlap")
