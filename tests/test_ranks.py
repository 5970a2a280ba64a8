"""Ranks share an epoch: every sample once, equal steps, and the batches that one rank would make."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch.multiprocessing
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed
from torch.utils.data import DataLoader

import shardstore
from shardstore import ReadOptions, ShardDataset
from shardstore.order import Order, Share, Tail

orders = st.builds(
    Order,
    samples=st.integers(1, 400),
    shard_samples=st.integers(1, 40),
    key=st.one_of(st.none(), st.integers(0, 2**64 - 1)),
    epoch=st.integers(0, 5),
    window=st.sampled_from([0, 1, 3, 16]),
)


def steps_of(order: Order, m: int, ranks: int, tail: Tail) -> list[list[list[int]]]:
    shares = [Share(rank, ranks, tail) for rank in range(ranks)]
    return [[order.step(t, m, s).tolist() for t in range(order.step_count(m, s))] for s in shares]


@given(orders, st.integers(1, 70), st.integers(1, 8))
def test_with_repeats_all_ranks_make_equal_steps_and_miss_nothing(order: Order, m: int, ranks: int) -> None:
    parts = steps_of(order, m, ranks, "repeat")
    assert len({len(part) for part in parts}) == 1
    assert len({tuple(map(len, part)) for part in parts}) == 1
    counts = Counter(s for part in parts for step in part for s in step)
    assert set(counts) == set(range(order.samples))
    assert sum(counts.values()) - order.samples <= ranks - 1


@given(orders, st.integers(1, 70), st.integers(1, 8))
def test_dropping_leaves_only_full_steps(order: Order, m: int, ranks: int) -> None:
    parts = steps_of(order, m, ranks, "drop")
    assert {len(part) for part in parts} == {order.samples // (m * ranks)}
    seen = [s for part in parts for step in part for s in step]
    assert len(seen) == len(set(seen)) == order.samples // (m * ranks) * m * ranks
    assert all(len(step) == m for part in parts for step in part)


@given(orders, st.integers(1, 70), st.integers(1, 8))
def test_exact_repeats_and_drops_nothing(order: Order, m: int, ranks: int) -> None:
    parts = steps_of(order, m, ranks, "exact")
    seen = sorted(s for part in parts for step in part for s in step)
    assert seen == list(range(order.samples))
    assert all(step for part in parts for step in part)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(orders, st.integers(1, 70), st.integers(2, 8))
def test_ranks_take_the_batches_that_one_rank_would_make(order: Order, m: int, ranks: int) -> None:
    alone = [order.batch(q, m).tolist() for q in range(order.batch_count(m))]
    parts = steps_of(order, m, ranks, "repeat")
    together = [part[t] for t in range(len(parts[0])) for part in parts]
    full = order.samples // (m * ranks) * ranks
    assert together[:full] == alone[:full]
    assert {s for step in together[full:] for s in step} == {s for batch in alone[full:] for s in batch}


@given(orders, st.integers(1, 8), st.integers(1, 6), st.sampled_from(["repeat", "drop", "exact"]))
def test_single_samples_are_shared_alike(order: Order, ranks: int, workers: int, tail: Tail) -> None:
    counts, sizes = Counter[int](), []
    for rank in range(ranks):
        ranges = [order.consumer_range(w, workers, Share(rank, ranks, tail)) for w in range(workers)]
        sizes.append([stop - start for start, stop in ranges])
        for start, stop in ranges:
            counts.update(order.mixed(np.arange(stop - start), start, stop).tolist())
    seen = sum(counts.values())
    if tail == "exact":
        assert counts == Counter(range(order.samples))
        return
    assert all(size == sizes[0] for size in sizes)
    if tail == "repeat":
        assert set(counts) == set(range(order.samples))
        assert seen - order.samples <= ranks - 1
    else:
        assert max(counts.values(), default=1) == 1
        assert order.samples - seen <= ranks - 1


def test_a_rank_is_given_whole_or_not_at_all() -> None:
    for options in ({"rank": 0}, {"world_size": 2}, {"rank": 2, "world_size": 2}, {"rank": -1, "world_size": 2}):
        with pytest.raises(shardstore.OptionError, match="rank"):
            ReadOptions(**options)


# -- real process groups ----------------------------------------------------------------------------------------------


def epoch_of_a_rank(rank: int, world: int, dataset: ShardDataset, workers: int, context: str, out: str) -> None:
    # The data set was pickled before the group existed, and finds its rank all the same.
    distributed.init_process_group("gloo", init_method=f"file://{out}/meet", rank=rank, world_size=world)
    loader = DataLoader(
        dataset, batch_size=None, num_workers=workers, multiprocessing_context=context if workers else None
    )
    batches = []
    for batch in loader:
        distributed.all_reduce(torch.ones(1))  # hangs, and then fails, unless all ranks make as many steps
        batches.append(batch.key)
    assert len(batches) == len(dataset)
    Path(f"{out}/{rank}.json").write_text(json.dumps(batches))
    distributed.barrier()
    distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("samples", "shard_samples", "world", "workers", "context"),
    [
        (97, 10, 2, 6, "fork"),  # 10 shards over 2 ranks x 6 workers
        (30, 10, 4, 2, "fork"),
        (1, 1, 4, 0, "fork"),
        (7, 2, 3, 2, "spawn"),
        (24, 2, 2, 1, "forkserver"),
    ],
)
def test_process_groups_end_together_and_miss_nothing(
    samples: int, shard_samples: int, world: int, workers: int, context: str, tmp_path: Path,
    make_images: Callable[..., Path],
) -> None:  # fmt: skip
    source = make_images(samples)
    store = tmp_path / "out"
    shardstore.convert(source, store, samples_per_shard=shard_samples, workers=1)
    dataset = ShardDataset(store, fields=["key"], batch_size=3, shuffle=True)
    arguments = (world, dataset, workers, context, str(tmp_path))
    torch.multiprocessing.spawn(epoch_of_a_rank, arguments, nprocs=world)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    counts = Counter(key for batches in ranks for batch in batches for key in batch)
    assert len(counts) == samples
    assert sum(counts.values()) - samples <= world - 1
