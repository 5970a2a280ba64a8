"""The order of an epoch: nothing lost or doubled, pinned for ever, and mixed well enough."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardstore.order import Order, Share, derive, lane_count, permute

KEYS = st.integers(0, 2**64 - 1)


@st.composite
def orders(draw: st.DrawFn, max_samples: int = 300) -> Order:
    """Any order of a small store."""
    samples = draw(st.integers(1, max_samples))
    shard_samples = draw(st.integers(1, samples))
    return Order(
        samples,
        shard_samples,
        draw(st.none() | KEYS),
        draw(st.integers(0, 3) | st.just(10**9)),
        draw(st.just(0) | st.integers(1, max_samples)),
        draw(st.sampled_from([n for n in range(1, shard_samples + 1) if shard_samples % n == 0])),
    )


# -- keyed permutations -----------------------------------------------------------------------------------------------


@given(n=st.integers(0, 3000) | st.integers(1020, 1030) | st.sampled_from([2**12 - 1, 2**12, 2**12 + 1]), key=KEYS)
def test_permutation_is_a_bijection(n: int, key: int) -> None:
    assert np.sort(permute(np.arange(n), n, key)).tolist() == list(range(n))


@given(n=st.integers(1025, 2**50), key=KEYS, data=st.data())
def test_large_permutation_stays_in_range_and_keeps_numbers_apart(n: int, key: int, data: st.DataObject) -> None:
    numbers = data.draw(st.lists(st.integers(0, n - 1), unique=True, max_size=50))
    numbers = list({*numbers, *range(200), *range(n - 200, n)})
    out = permute(np.array(numbers, np.int64), n, key)
    assert out.dtype == np.int64
    assert len(set(out.tolist())) == len(numbers)
    assert 0 <= out.min() <= out.max() < n


@given(n=st.integers(1, 3000), key=KEYS, data=st.data())
def test_each_number_is_sent_alone_where_it_is_sent_among_others(n: int, key: int, data: st.DataObject) -> None:
    numbers = np.array(data.draw(st.lists(st.integers(0, n - 1), max_size=20)), np.int64)
    before = numbers.copy()
    everything = permute(np.arange(n), n, key)
    assert permute(numbers, n, key).tolist() == everything[numbers].tolist()
    assert numbers.tolist() == before.tolist()


@pytest.mark.parametrize("n", [12, 1024, 1025, 5000])
def test_permutation_depends_on_the_key(n: int) -> None:
    keys = [*range(100), *(2**63 + k for k in range(100)), *(derive(k) for k in range(100))]
    assert len({permute(np.arange(n), n, key).tobytes() for key in keys}) == len(keys)


@pytest.mark.parametrize("n", [3, 4, 5])
def test_all_permutations_of_few_numbers_are_equally_likely(n: int) -> None:
    every = list(itertools.permutations(range(n)))
    trials = 100 * len(every)
    found = Counter(tuple(permute(np.arange(n), n, derive(k, n)).tolist()) for k in range(trials))
    # Chi-square with len(every) - 1 degrees of freedom: mean d, standard deviation sqrt(2 d); 5 of them is generous.
    free = len(every) - 1
    assert sum((found[p] - 100) ** 2 / 100 for p in every) < free + 5 * (2 * free) ** 0.5


@pytest.mark.parametrize("n", [16, 1024, 1025, 1500, 4096])
def test_numbers_land_everywhere_and_neighbours_part(n: int) -> None:
    trials, bins = 2000, 10
    out = np.array([permute(np.array([0, 1, n - 1]), n, derive(k, n)) for k in range(trials)])
    limit = (bins - 1) + 5 * (2 * (bins - 1)) ** 0.5
    edges = np.linspace(-0.5, n - 0.5, bins + 1)
    width = np.histogram(np.arange(n), edges)[0] / n * trials
    for column in range(3):
        assert ((np.histogram(out[:, column], edges)[0] - width) ** 2 / width).sum() < limit
    apart = (out[:, 1] - out[:, 0]) % n
    width = np.histogram(np.arange(1, n), edges)[0] / (n - 1) * trials
    assert ((np.histogram(apart, edges)[0] - width) ** 2 / width).sum() < limit


def test_the_bound_on_uniformity_notices_a_lazy_shuffle() -> None:
    # The control: a shift by a random amount sends each number everywhere, but keeps neighbours together.
    shifts = np.array([derive(k) % 16 for k in range(2000)])
    out = (np.array([[0, 1]]) + shifts[:, None]) % 16
    counts = np.histogram((out[:, 1] - out[:, 0]) % 16, np.linspace(-0.5, 15.5, 11))[0]
    assert ((counts - 200) ** 2 / 200).sum() > 9 + 5 * 18**0.5


def test_derived_keys_are_those_of_splitmix64() -> None:
    # First outputs for the seeds 0 and 1234567, as published with the generator and at Rosetta Code.
    assert derive(0) == 0xE220A8397B1DCDAF
    assert derive(1234567) == 6457827717110365317


@given(parts=st.lists(st.integers(-(2**70), 2**70), min_size=1, max_size=4), data=st.data())
def test_derived_keys_differ_with_each_part(parts: list[int], data: st.DataObject) -> None:
    where = data.draw(st.integers(0, len(parts) - 1))
    other = [*parts]
    other[where] += data.draw(st.integers(1, 2**32))
    assert 0 <= derive(*parts) < 2**64
    assert derive(*parts) != derive(*other)


# -- batches ----------------------------------------------------------------------------------------------------------


def epoch(order: Order, batch_size: int) -> list[Any]:
    return [order.batch(q, batch_size).tolist() for q in range(order.batch_count(batch_size))]


@given(order=orders(), batch_size=st.integers(1, 350))
def test_batches_hold_each_sample_once_and_only_the_last_is_short(order: Order, batch_size: int) -> None:
    batches = epoch(order, batch_size)
    assert sorted(itertools.chain(*batches)) == list(range(order.samples))
    assert {len(batch) for batch in batches[:-1]} <= {batch_size}
    assert len(batches[-1]) == order.samples - batch_size * (len(batches) - 1)
    assert len(batches) == order.batch_count(batch_size)


@given(samples=st.integers(10**6, 10**12), shard_samples=st.integers(1, 10**6), key=KEYS, data=st.data())
def test_batches_of_huge_stores_are_in_range_and_disjoint(
    samples: int, shard_samples: int, key: int, data: st.DataObject
) -> None:
    # Lanes are found by trial over all products of twos and threes, so the number of shards may be any.
    order = Order(samples, shard_samples, key)
    count = order.batch_count(64)
    qs = data.draw(st.lists(st.integers(0, count - 1), unique=True, max_size=8))
    found = [order.batch(q, 64) for q in {*qs, 0, count - 1}]
    numbers = np.concatenate(found)
    assert 0 <= numbers.min() <= numbers.max() < samples
    assert len(np.unique(numbers)) == len(numbers)


@given(order=orders(), batch_size=st.integers(1, 40))
def test_an_order_is_a_function_of_its_numbers(order: Order, batch_size: int) -> None:
    again = Order(*dataclasses.astuple(order))
    assert epoch(again, batch_size) == epoch(order, batch_size)


def test_epochs_and_keys_differ() -> None:
    runs = [Order(500, 50, key, number, window) for key in (1, 2) for number in range(5) for window in (0, 32)]
    assert len({str(epoch(run, 16)) for run in runs}) == len(runs)


@given(order=orders(), batch_size=st.integers(1, 40))
def test_without_a_key_each_batch_is_a_run_of_the_stored_order(order: Order, batch_size: int) -> None:
    plain = Order(order.samples, order.shard_samples, None, order.epoch, order.window)
    batches = epoch(plain, batch_size)
    for batch in batches:
        assert batch == list(range(batch[0], batch[0] + len(batch)))
    lanes = lane_count(plain.shards)
    for lane in range(lanes):
        starts = [batch[0] for batch in batches[lane::lanes]]
        assert starts == sorted(starts)


@given(order=orders())
def test_shards_stay_whole_and_a_short_one_comes_last(order: Order) -> None:
    numbers = order.at(np.arange(order.samples))
    shards = (numbers // order.shard_samples).tolist()
    runs = [shard for shard, _ in itertools.groupby(shards)]
    assert sorted(runs) == list(range(order.shards))
    if order.samples % order.shard_samples:
        assert runs[-1] == order.shards - 1
    assert (np.diff(numbers)[np.diff(shards) == 0] == 1).all()


@given(order=orders(), times=st.integers(1, 5), data=st.data())
def test_a_window_holds_whole_blocks(order: Order, times: int, data: st.DataObject) -> None:
    order = dataclasses.replace(order, key=order.key or 1, window=times * order.block)
    start = data.draw(st.integers(0, order.samples - 1))
    stop = data.draw(st.integers(start + 1, order.samples))
    mixed = order.mixed(np.arange(stop - start), start, stop)
    assert sorted(mixed.tolist()) == sorted(order.at(np.arange(start, stop)).tolist())
    whole = stop // order.block - -(-start // order.block)  # blocks, by position
    for first in range(0, whole * order.block - order.window + 1, order.window):
        counts = Counter((mixed[first : first + order.window] // order.block).tolist())
        assert list(counts.values()) == [order.block] * times


def test_windows_are_others_in_the_next_epoch() -> None:
    windows = []
    for number in range(2):
        order = Order(4096, 256, derive(3), number, window=16, block=8)
        mixed = order.mixed(np.arange(1024), 512, 1536).reshape(-1, 16)
        shared = [len(np.unique(window // 256)) for window in mixed]
        assert max(shared) == 2  # its two blocks come from anywhere in the run
        windows.append({frozenset(window.tolist()) for window in mixed})
    assert not windows[0] & windows[1]


def test_without_a_window_all_of_a_lane_is_mixed() -> None:
    order = Order(4096, 256, derive(3))
    lanes = lane_count(order.shards)
    for lane in range(lanes):
        batches = [order.batch(q, 64) for q in range(lane, order.batch_count(64), lanes)]
        shards = {frozenset((batch // 256).tolist()) for batch in batches}
        assert len(batches) == 16 * 4 // lanes
        assert shards == {frozenset((np.concatenate(batches) // 256).tolist())}


# -- lanes and consumers ----------------------------------------------------------------------------------------------


def smooth(number: int) -> bool:
    for prime in (2, 3):
        while number % prime == 0:
            number //= prime
    return number == 1


def test_lanes_are_a_product_of_twos_and_threes_between_a_quarter_and_half_of_the_shards() -> None:
    assert lane_count(1) == 1
    for shards in range(2, 2000):
        lanes = lane_count(shards)
        fit = [n for n in range(-(-shards // 4), shards // 2 + 1) if smooth(n)]
        assert lanes in fit
        if any(shards % n == 0 for n in fit):
            assert shards % lanes == 0
        elif any(n % 4 == 0 for n in fit):
            assert lanes % 4 == 0


@given(
    shards=st.sampled_from([n for n in range(1, 200) if n % lane_count(n) == 0]),
    batches_per_shard=st.integers(1, 4),
    batch_size=st.integers(1, 8),
    key=st.none() | KEYS,
    data=st.data(),
)
def test_workers_that_divide_the_lanes_read_shards_of_their_own(
    shards: int, batches_per_shard: int, batch_size: int, key: int | None, data: st.DataObject
) -> None:
    shard_samples = batches_per_shard * batch_size
    order, lanes = Order(shards * shard_samples, shard_samples, key), lane_count(shards)
    workers = data.draw(st.sampled_from([n for n in range(1, lanes + 1) if lanes % n == 0]))
    batches = epoch(order, batch_size)
    read = [{n // shard_samples for batch in batches[w::workers] for n in batch} for w in range(workers)]
    assert sum(map(len, read)) == len(set().union(*read)) == shards


@given(order=orders(), workers=st.integers(1, 400))
def test_consumers_share_out_all_positions(order: Order, workers: int) -> None:
    ranges = [order.consumer_range(worker, workers, Share()) for worker in range(workers)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == order.samples
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
    found = [order.mixed(np.arange(stop - start), start, stop) for start, stop in ranges]
    assert sorted(np.concatenate(found).tolist()) == list(range(order.samples))


@given(order=orders(), workers=st.integers(1, 400))
def test_consumers_get_whole_shards_where_there_are_enough(order: Order, workers: int) -> None:
    ranges = [order.consumer_range(worker, workers, Share()) for worker in range(workers)]
    sizes = [stop - start for start, stop in ranges]
    if order.shards < workers:
        assert max(sizes) - min(sizes) <= 1
        return
    read = [
        set((order.mixed(np.arange(stop - start), start, stop) // order.shard_samples).tolist())
        for start, stop in ranges
    ]
    assert sum(map(len, read)) == order.shards
    assert max(map(len, read)) - min(map(len, read)) <= 1


# -- pinned -----------------------------------------------------------------------------------------------------------


def test_permutations_are_pinned() -> None:
    assert permute(np.arange(10), 10, 1).tolist() == [9, 0, 5, 4, 8, 1, 2, 6, 7, 3]
    assert permute(np.arange(10), 10, 2).tolist() == [9, 5, 6, 1, 3, 7, 8, 2, 4, 0]
    assert permute(np.arange(8), 1025, 1).tolist() == [999, 797, 323, 586, 882, 71, 874, 625]
    numbers = np.array([0, 1, 2, 10**12 - 1])
    assert permute(numbers, 10**12, 1).tolist() == [824454960563, 128050224621, 142178634845, 979122197583]


def test_derived_keys_are_pinned() -> None:
    keys = [derive(-1), derive(1, 2), derive(2, 1), derive(1, 2, 3)]
    assert keys == [16490336266968443936, 13608149317741381227, 16171810823986729605, 7702586659592502839]


@pytest.mark.parametrize(
    ("order", "batch_size", "batches"),
    [
        (
            Order(20, 4),
            3,
            [[9, 10, 11], [0, 1, 2], [12, 13, 14], [3, 4, 5], [15, 16, 17], [6, 7, 8], [18, 19]],
        ),
        (
            Order(20, 4, derive(7)),
            3,
            [[3, 19, 15], [7, 4, 0], [16, 13, 2], [11, 6, 8], [18, 12, 1], [5, 9, 10], [17, 14]],
        ),
        (
            Order(20, 4, derive(7), epoch=1),
            3,
            [[11, 14, 13], [16, 5, 19], [8, 3, 10], [6, 4, 17], [0, 2, 9], [7, 18, 12], [15, 1]],
        ),
        (
            Order(22, 4, derive(7), window=2, block=2),
            4,
            [[6, 7, 8, 9], [3, 2, 14, 15], [16, 17, 21, 20], [11, 10, 4, 5], [13, 12, 0, 1], [19, 18]],
        ),
        (
            Order(26, 6, derive(7), window=4, block=2),
            4,
            [
                [24, 20, 25, 21],
                [9, 16, 8, 17],
                [19, 2, 18, 3],
                [15, 10, 11, 14],
                [0, 1, 22, 23],
                [12, 6, 13, 7],
                [4, 5],
            ],
        ),
    ],
    ids=["stored", "shuffled", "next epoch", "blocks", "two blocks"],
)
def test_batches_are_pinned(order: Order, batch_size: int, batches: list[list[int]]) -> None:
    assert epoch(order, batch_size) == batches


def test_samples_of_consumers_are_pinned() -> None:
    order = Order(22, 4, derive(7))
    ranges = [order.consumer_range(worker, 3, Share()) for worker in range(3)]
    assert [order.mixed(np.arange(stop - start), start, stop).tolist() for start, stop in ranges] == [
        [7, 4, 11, 6, 8, 5, 9, 10],
        [1, 3, 0, 14, 15, 12, 13, 2],
        [18, 16, 21, 19, 17, 20],
    ]


def test_lane_counts_are_pinned() -> None:
    found = [lane_count(shards) for shards in range(1, 25)]
    assert found == [1, 1, 1, 2, 2, 3, 3, 4, 3, 4, 4, 4, 4, 4, 4, 8, 8, 9, 8, 8, 8, 8, 8, 12]
    large = {shards: lane_count(shards) for shards in (48, 96, 100, 240, 997, 1000, 4096, 10**5)}
    assert large == {48: 24, 96: 48, 100: 48, 240: 108, 997: 432, 1000: 432, 4096: 2048, 10**5: 49152}
