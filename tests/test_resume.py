"""Epochs that count themselves, and passes that go on from any batch: with other ranks and workers, by either loader.

Made by hand, 100,000 examples of the property that all else rests on::

    python -m pytest -p tests.test_resume tests/test_resume.py --hypothesis-profile deep -k misses_nothing
"""

from __future__ import annotations

import gc
import itertools
import json
import multiprocessing
import pickle
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import context as contexts
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import shardstore
from shardstore import OptionError, ReadOptions, ShardDataset, change_workers
from shardstore.order import Order, Share, Tail, lane_count

Make = Callable[..., Path]
Batches = list[list[Any]]

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata's
]
settings.register_profile("deep", deadline=None, max_examples=100_000)
# Its workers then need no seconds for importing torch.
multiprocessing.set_forkserver_preload(["torch", "torchvision.transforms"])

SAMPLES, SHARD_SAMPLES, BATCH = 47, 6, 3
STEPS = -(-SAMPLES // BATCH)
END = "the end"  # StopIteration was seen


def examples(count: int) -> settings:
    """So many examples, or as many as the profile wants."""
    return settings(max_examples=max(count, settings().max_examples))


# -- each sample once -------------------------------------------------------------------------------------------------


def check_each_once(seen: Iterable[Any], expected: Iterable[Any], repeats: int = 0) -> None:
    """Each of ``expected`` and nothing else was seen, once but for so many repeats."""
    counts = Counter(seen)
    assert counts.keys() == set(expected)
    assert counts.total() - len(counts) <= repeats


def flat(batches: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(batches))


def test_what_comes_once_passes() -> None:
    check_each_once([2, 0, 1], range(3))
    check_each_once([2, 0, 1, 0], range(3), repeats=1)


@pytest.mark.parametrize(
    ("seen", "repeats"),
    [
        ([0, 1, 3], 0),
        ([0, 1, 3], 1),
        ([0, 1, 2, 3, 3], 0),
        ([0, 1, 2, 2, 3, 3], 1),
        ([0, 1, 3, 3], 1),
        ([*range(5)], 1),
    ],
    ids=["lost", "lost, repeats allowed", "doubled", "too many", "one for another", "foreign"],
)
def test_what_is_lost_or_doubled_is_noticed(seen: list[int], repeats: int) -> None:
    with pytest.raises(AssertionError):
        check_each_once(seen, range(4), repeats)


# -- the order, without a disk ----------------------------------------------------------------------------------------

RANKS, WORKERS = st.integers(1, 8), st.integers(0, 12)
TAILS = st.sampled_from(["repeat", "drop", "exact"])
BATCH_SIZES = st.integers(1, 9) | st.integers(1, 40)
STOPS = st.integers(0, 300)


@st.composite
def orders(draw: st.DrawFn) -> Order:
    """Any order of up to 60 shards, of which the last may be short."""
    shard_samples = draw(st.integers(1, 9))
    samples = (draw(st.integers(1, 60)) - 1) * shard_samples + draw(st.integers(1, shard_samples))
    key, epoch = draw(st.none() | st.integers(0, 2**64 - 1)), draw(st.integers(0, 3) | st.just(2**28 - 1))
    block = draw(st.sampled_from([n for n in range(1, shard_samples + 1) if shard_samples % n == 0]))
    return Order(samples, shard_samples, key, epoch, draw(st.just(0) | st.integers(1, 50)), block)


def collected(order: Order, m: int, share: Share, workers: int, begin: int = 0) -> Iterator[list[int]]:
    """What one rank's DataLoader gives: a batch of each worker in turn, until all have ended."""
    steps, consumers = order.step_count(m, share, begin), max(workers, 1)
    turns = deque(order.steps(range(w, steps, consumers), m, share, begin) for w in range(consumers))
    while turns:
        worker = turns.popleft()
        for numbers in itertools.islice(worker, 1):
            yield numbers.tolist()
            turns.append(worker)


@examples(1200)
@given(orders(), BATCH_SIZES, TAILS, st.lists(st.tuples(RANKS, WORKERS, STOPS), min_size=1, max_size=4))
def test_a_pass_in_legs_of_other_ranks_and_workers_misses_nothing(
    order: Order, m: int, tail: Tail, legs: list[tuple[int, int, int]]
) -> None:
    alone = [order.batch(q, m).tolist() for q in range(order.batch_count(m))]
    seen, begin = list[int](), 0
    for number, (ranks, workers, stop) in enumerate(legs, 1):
        shares = [Share(rank, ranks, tail) for rank in range(ranks)]
        counts = [order.step_count(m, share, begin) for share in shares]
        assert max(counts) - min(counts) <= (tail == "exact")
        end = None if number == len(legs) else stop % max(min(counts), 1)
        parts = [list(itertools.islice(collected(order, m, share, workers, begin), end)) for share in shares]
        assert [len(part) for part in parts] == (counts if end is None else [end] * ranks)
        # All steps that are full hold the batches of the sequence, which knows nothing of ranks and workers.
        full = (order.samples - begin * m) // (m * ranks)
        for rank, part in enumerate(parts):
            assert part[:full] == alone[begin + rank :: ranks][: min(full, len(part))]
        if tail == "repeat":
            assert len({tuple(map(len, part)) for part in parts}) == 1
        leg = flat(map(flat, parts))
        seen += leg
        if end is not None:
            begin += end * ranks
    repeats = ranks - 1 if tail == "repeat" else 0
    if tail != "drop":
        check_each_once(leg, flat(alone[begin:]), repeats)
        check_each_once(seen, range(order.samples), repeats)
    else:
        check_each_once(leg, flat(alone[begin : begin + full * ranks]))
        check_each_once(seen, flat(alone[: begin + full * ranks]))
        assert order.samples - len(seen) < m * ranks


@examples(600)
@given(orders(), BATCH_SIZES, TAILS, RANKS, st.lists(st.tuples(WORKERS, STOPS), min_size=1, max_size=3), st.data())
def test_as_many_ranks_go_on_with_the_very_steps_that_were_left(
    order: Order, m: int, tail: Tail, ranks: int, legs: list[tuple[int, int]], data: st.DataObject
) -> None:
    share = Share(data.draw(st.integers(0, ranks - 1)), ranks, tail)
    whole, done = list(collected(order, m, share, 0)), 0
    for workers, stop in legs:
        rest = list(collected(order, m, share, workers, done * ranks))
        assert rest == whole[done:]
        done += stop % (len(rest) + 1)
    assert list(collected(order, m, share, 0, done * ranks)) == whole[done:]


@examples(300)
@given(
    st.sampled_from([n for n in range(2, 61) if n % lane_count(n) == 0]),
    st.integers(1, 4),
    st.integers(1, 6),
    st.none() | st.integers(0, 2**64 - 1),
    st.data(),
)
def test_consumers_that_divide_the_lanes_read_shards_of_their_own_from_any_batch_on(
    shards: int, batches_per_shard: int, m: int, key: int | None, data: st.DataObject
) -> None:
    per_shard, lanes = batches_per_shard * m, lane_count(shards)
    order = Order(shards * per_shard, per_shard, key)
    consumers = data.draw(st.sampled_from([n for n in range(1, lanes + 1) if lanes % n == 0]))
    ranks = data.draw(st.sampled_from([n for n in range(1, consumers + 1) if consumers % n == 0]))
    begin, workers = data.draw(st.integers(0, order.batch_count(m))), consumers // ranks
    full = (order.batch_count(m) - begin) // ranks  # a step that is not full is dealt out anew
    read = []
    for share in (Share(rank, ranks) for rank in range(ranks)):
        steps = list(itertools.islice(collected(order, m, share, workers, begin), full))
        read += [{n // per_shard for n in flat(steps[w::workers])} for w in range(workers)]
    assert sum(map(len, read)) == len(set().union(*read))


# -- a small store ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pictures(make_images: Make) -> Path:
    return make_images(SAMPLES, sizes=((9, 8),))


@pytest.fixture(scope="module")
def store(make_store: Make, pictures: Path) -> Path:
    """47 pictures in 8 shards: 4 lanes, 16 batches of 3, of which the last has 2."""
    return make_store("npy", source=pictures, samples_per_shard=SHARD_SAMPLES, shuffle=True)


@pytest.fixture(scope="module")
def every(store: Path) -> list[str]:
    """All keys."""
    return [str(sample.key) for sample in shardstore.open(store, fields=["key"])]


@pytest.fixture(scope="module")
def epochs(store: Path) -> list[Batches]:
    """The batches of the first epochs: of each by itself, without workers."""
    found = []
    for epoch in range(7):
        fresh = data_set(store)
        fresh.set_epoch(epoch)
        found.append(keys(plain(fresh)))
    assert len({str(batches) for batches in found}) == len(found)
    assert [len(batch) for batch in found[0]] == [BATCH] * (STEPS - 1) + [SAMPLES - (STEPS - 1) * BATCH]
    return found


def data_set(store: Path, **options: Any) -> ShardDataset:
    return ShardDataset(store, **{"fields": ["key"], "batch_size": BATCH, "shuffle": True, "seed": 5, **options})


def rank_of(store: Path, rank: int, ranks: int, **options: Any) -> ShardDataset:
    return data_set(store, options=ReadOptions(rank=rank, world_size=ranks), **options)


def plain(
    data: ShardDataset, workers: int = 0, context: Any = "fork", persistent: bool = False, **options: Any
) -> DataLoader[Any]:
    return DataLoader(
        data,
        batch_size=None,
        num_workers=workers,
        multiprocessing_context=context if workers else None,
        persistent_workers=persistent and workers > 0,
        **options,
    )


def stateful(data: ShardDataset, workers: int = 0, **options: Any) -> Any:
    return StatefulDataLoader(data, num_workers=workers, **{"batch_size": None, **options})


def keys(batches: Iterable[Any]) -> Batches:
    return [batch.key for batch in batches]


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(state))
    return copy


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_has_each_sample_once(epochs: list[Batches], every: list[str], store: Path, workers: int) -> None:
    for batches in epochs:
        check_each_once(flat(batches), every)
    check_each_once(flat(keys(plain(data_set(store), workers))), every)


# -- epochs -----------------------------------------------------------------------------------------------------------

# (workers, context, persistent, passes): a spawned worker takes 2 seconds to import torch.
KINDS = [
    (0, None, False, 5),
    *((w, c, p, 5) for w in (2, 3) for c in ("fork", "forkserver") for p in (False, True)),
    *((w, "spawn", p, 3 if p else 2) for w in (2, 3) for p in (False, True)),
]


@pytest.mark.parametrize(("workers", "context", "persistent", "passes"), KINDS)
def test_each_pass_is_the_next_epoch_also_where_the_user_seeds(
    store: Path, epochs: list[Batches], workers: int, context: str | None, persistent: bool, passes: int
) -> None:
    data = data_set(store)
    loader = plain(data, workers, context, persistent)
    for epoch in range(passes):
        if epoch != 2:  # the first two passes begin with the same random numbers; and one begins with others
            torch.manual_seed(0)
        assert data.epoch == epoch
        assert keys(loader) == epochs[epoch]
    assert data.epoch == passes


@pytest.mark.parametrize(("workers", "context", "persistent"), [k[:3] for k in KINDS if k[0] != 3 and k[1] != "spawn"])
def test_set_epoch_reaches_the_next_pass_and_the_count_goes_on_from_it(
    store: Path, epochs: list[Batches], workers: int, context: str | None, persistent: bool
) -> None:
    data = data_set(store)
    loader = plain(data, workers, context, persistent)
    assert keys(loader) == epochs[0]
    for epoch in (3, 3, 1):  # another one, the same again, one before
        data.set_epoch(epoch)
        assert data.epoch == epoch
        assert keys(loader) == epochs[epoch]
    assert keys(loader) == epochs[2]


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_set_epoch_on_a_fresh_data_set(store: Path, epochs: list[Batches], epoch: int) -> None:
    data = data_set(store)
    data.set_epoch(epoch)
    assert keys(plain(data, 2)) == epochs[epoch]


@pytest.mark.parametrize("epoch", [-1, 2**28])
def test_no_epoch_is_negative_or_huge(store: Path, epoch: int) -> None:
    with pytest.raises(OptionError, match="epoch"):
        data_set(store).set_epoch(epoch)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [0, 2, 3])
def test_a_pass_that_is_broken_off_counts(store: Path, epochs: list[Batches], workers: int, persistent: bool) -> None:
    data = data_set(store)
    loader = plain(data, workers, persistent=persistent)
    for epoch, stop in enumerate((1, 6, STEPS)):
        found = []
        for batch in loader:
            found.append(batch.key)
            if len(found) == stop:
                break
        assert found == epochs[epoch][:stop]
    assert keys(loader) == epochs[3]


def late(worker: int) -> None:
    """Let the last of three workers begin when the first has long given a batch."""
    if worker == 2:
        time.sleep(0.5)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_worker_that_begins_late_is_of_the_same_pass(store: Path, epochs: list[Batches], persistent: bool) -> None:
    loader = plain(data_set(store), 3, persistent=persistent, worker_init_fn=late)
    assert [keys(loader) for _ in range(2)] == epochs[:2]


@pytest.mark.parametrize("persistent", [False, True])
def test_a_worker_that_begins_after_a_pass_was_broken_off_is_of_the_next(
    store: Path, epochs: list[Batches], persistent: bool
) -> None:
    loader = plain(data_set(store), 3, persistent=persistent, worker_init_fn=late)
    assert next(iter(loader)).key == epochs[0][0]
    assert [keys(loader) for _ in range(2)] == epochs[1:3]


@pytest.mark.parametrize("persistent", [False, True])
def test_an_epoch_that_is_set_during_a_pass_does_not_reach_its_late_workers(
    store: Path, epochs: list[Batches], persistent: bool
) -> None:
    data = data_set(store)
    data.load_state_dict(data.state_at(6, epoch=2))
    loader = plain(data, 3, persistent=persistent, worker_init_fn=late)
    running = iter(loader)
    begun = next(running).key
    data.set_epoch(0)
    assert [begun, *keys(running)] == epochs[2][6:]
    assert [keys(loader) for _ in range(2)] == epochs[:2]


def test_a_pass_that_was_broken_off_takes_no_epoch_of_those_that_follow(store: Path, epochs: list[Batches]) -> None:
    data = data_set(store)
    loader = plain(data, 3, persistent=True, worker_init_fn=late)
    assert next(iter(loader)).key == epochs[0][0]
    data.set_epoch(0)
    assert [keys(loader) for _ in range(3)] == epochs[:3]


@pytest.mark.parametrize(
    ("first", "second", "persistent"), [(0, 0, False), (0, 2, True), (2, 2, False), (2, 2, True), (2, 3, True)]
)
def test_two_loaders_over_one_data_set_take_turns(
    store: Path, epochs: list[Batches], first: int, second: int, persistent: bool
) -> None:
    data = data_set(store)
    loaders = [plain(data, workers, persistent=persistent) for workers in (first, second)]
    seen = []
    for _ in range(2):
        mixed = list(zip(*loaders, strict=True))  # a batch of each in turn
        seen += [keys(batches) for batches in zip(*mixed, strict=True)]
        seen += [keys(loader) for loader in loaders]  # and a pass of each in turn
    # Of two passes that begin together, either may be the earlier epoch.
    assert [sorted(seen[i : i + 2]) for i in (0, 4)] == [sorted(epochs[i : i + 2]) for i in (0, 4)]
    assert seen[2:4] == epochs[2:4]
    assert data.epoch == 8


class Crowded(contexts.ForkProcess):
    """A worker before which other processes are started."""

    others = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for _ in range(self.others):
            other = contexts.ForkProcess(target=int)
            other.start()
            other.join()
        super().__init__(*args, **kwargs)


class Crowd(contexts.ForkContext):
    Process = Crowded


@pytest.mark.parametrize(("workers", "persistent"), [(2, False), (2, True), (3, False)])
def test_other_processes_that_start_among_the_workers_disturb_no_pass(
    store: Path, epochs: list[Batches], workers: int, persistent: bool
) -> None:
    loader = plain(data_set(store), workers, Crowd(), persistent)
    assert [keys(loader) for _ in range(3)] == epochs[:3]


def test_persistent_workers_know_a_pass_from_all_earlier_ones(store: Path, epochs: list[Batches]) -> None:
    data = data_set(store, batch_size=SAMPLES)
    loader = plain(data, 2, persistent=True)
    assert keys(loader) != keys(loader)  # epochs 0 and 1
    data.set_epoch(0)
    first = keys(loader)
    for _ in range(130):
        data.set_epoch(0)
        assert keys(loader) == first


# -- going on, with a plain DataLoader --------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "others"), [(0, 0), (0, 2), (2, 0), (2, 3), (3, 2)])
def test_a_pass_goes_on_from_every_step_with_any_workers(
    store: Path, epochs: list[Batches], workers: int, others: int
) -> None:
    data = data_set(store)
    loader = plain(data, workers)
    assert keys(loader) == epochs[0]
    states = [data.state_at(0, epoch=1)]
    for step, _ in enumerate(loader, 1):
        states.append(data.state_at(step))
        assert states[-1] == data.state_at(step, epoch=1)
    assert states.pop() == data.state_at(0, epoch=2)  # the last step's is the start of the next epoch
    assert len(states) == STEPS
    # Into workers that are running, too, and more often than not in the midst of a pass.
    other = data_set(store)
    loader = plain(other, others, persistent=True)
    for step, state in enumerate(states):
        other.load_state_dict(through_json(state))
        assert (other.epoch, other.first_step) == (1, step)
        assert keys(loader) == epochs[1][step:]
        assert (other.epoch, other.first_step) == (2, 0)
        following = iter(loader)
        assert next(following).key == epochs[2][0]
        if step % 5 == 0:
            assert keys(following) == epochs[2][1:]
            assert keys(loader) == epochs[3]
        del following


@pytest.mark.parametrize("context", ["fork", "forkserver"])
@pytest.mark.parametrize("step", [0, 7, STEPS - 1, STEPS])
def test_a_state_serves_one_pass_of_a_new_process(store: Path, epochs: list[Batches], step: int, context: str) -> None:
    other = data_set(store)
    other.load_state_dict(data_set(store).state_at(step, epoch=1))
    loader = plain(other, 2, context)
    passes = [keys(loader) for _ in range(2)]
    assert passes == ([epochs[1][step:], epochs[2]] if step < STEPS else [epochs[2], epochs[3]])


@pytest.mark.parametrize("workers", [0, 2])
def test_states_out_of_passes_that_went_on_themselves(store: Path, epochs: list[Batches], workers: int) -> None:
    state, found = data_set(store).state_at(0, epoch=2), []
    for stop in (3, 4, 9, 15):
        data = data_set(store)
        data.load_state_dict(state)
        start = data.first_step
        assert start == len(found)
        for step, batch in enumerate(plain(data, workers), start + 1):
            found.append(batch.key)
            if step == stop:
                state = through_json(data.state_at(step))
                break
    assert found == epochs[2][:15]
    data.load_state_dict(state)  # into the data set that it is of
    assert [keys(plain(data, workers)) for _ in range(2)] == [epochs[2][15:], epochs[3]]


def test_a_loop_that_counts_its_epochs_and_steps_goes_on(store: Path, epochs: list[Batches]) -> None:
    data = data_set(store)
    data.load_state_dict(data_set(store).state_at(7, epoch=2))
    loader, found = plain(data, 2, persistent=True), []
    for epoch in range(data.epoch, 5):
        data.set_epoch(epoch)
        for step, batch in enumerate(loader, data.first_step):
            assert batch.key == epochs[epoch][step]
            found.append((epoch, step))
    assert found == [(2, s) for s in range(7, STEPS)] + [(e, s) for e in (3, 4) for s in range(STEPS)]


@pytest.mark.parametrize("workers", [0, 2])
def test_another_epoch_undoes_a_state(store: Path, epochs: list[Batches], workers: int) -> None:
    data = data_set(store)
    loader = plain(data, workers, persistent=True)
    state = data.state_at(7, epoch=2)
    data.load_state_dict(state)
    data.set_epoch(4)
    assert (data.epoch, data.first_step) == (4, 0)
    assert keys(loader) == epochs[4]
    data.set_epoch(2)
    assert keys(loader) == epochs[2]
    data.load_state_dict(state)
    assert keys(loader) == epochs[2][7:]
    data.set_epoch(2)  # once more, all of it
    assert keys(loader) == epochs[2]


def go_on(store: Path, ranks: int, state: dict[str, Any], workers: int = 0, **options: Any) -> list[list[Batches]]:
    """Two passes of each rank, the first from the state on."""
    parts = []
    for rank in range(ranks):
        data = rank_of(store, rank, ranks, **options)
        data.load_state_dict(state)
        loader = plain(data, workers)
        parts.append([keys(loader) for _ in range(2)])
        assert len(parts[-1][1]) == len(data)
    return parts


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("others", [1, 2, 3, 8])
def test_a_pass_goes_on_from_every_step_with_any_ranks(
    store: Path, epochs: list[Batches], every: list[str], ranks: int, others: int
) -> None:
    data = [rank_of(store, rank, ranks) for rank in range(ranks)]
    whole = [keys(plain(d)) for d in data]
    following = go_on(store, others, data_set(store).state_at(0, epoch=1))
    for step in range(len(data[0]) + 1):
        state = data[0].state_at(step)
        assert all(d.state_at(step) == state for d in data)
        parts = go_on(store, others, state)
        if step == len(data[0]):
            assert parts == following
            break
        assert [part[1] for part in parts] == [part[0] for part in following]
        rest = [part[0] for part in parts]
        assert len({tuple(map(len, part)) for part in rest}) == 1
        seen = flat(flat(part[:step]) for part in whole) + flat(map(flat, rest))
        check_each_once(seen, every, others - 1)
        full = (SAMPLES - step * ranks * BATCH) // (others * BATCH)
        for rank, part in enumerate(rest):
            assert part[:full] == epochs[0][step * ranks + rank :: others][:full]
        if ranks == others:
            assert rest == [part[step:] for part in whole]


def test_ranks_and_workers_change_together(store: Path, every: list[str]) -> None:
    seen = []
    for rank in range(2):
        data = rank_of(store, rank, 2)
        loader = plain(data, 3)
        seen += flat(batch.key for batch in itertools.islice(loader, 3))
        state = data.state_at(3)
    rest = [part[0] for part in go_on(store, 3, state, workers=2)]
    check_each_once(seen + flat(map(flat, rest)), every, 2)


@pytest.mark.parametrize("step", [0, 1, 4])
def test_what_is_dropped_is_less_than_a_step(store: Path, epochs: list[Batches], step: int) -> None:
    state = rank_of(store, 0, 3, drop_last=True).state_at(step)
    rest = [part[0] for part in go_on(store, 2, state, drop_last=True)]
    full = (SAMPLES - step * 3 * BATCH) // (2 * BATCH)
    assert rest == [epochs[0][step * 3 + rank :: 2][:full] for rank in range(2)]


@examples(150)
@given(
    st.integers(1, 50), st.none() | st.integers(-5, 5), st.lists(st.tuples(RANKS, STOPS), max_size=3), RANKS,
    st.integers(0, 3),
)  # fmt: skip
def test_states_carry_a_run_through_any_numbers_of_ranks(
    store: Path, every: list[str], m: int, seed: int | None, legs: list[tuple[int, int]], ranks: int, epoch: int
) -> None:
    shuffle = {"batch_size": m, "shuffle": seed is not None, "seed": seed or 0}
    state, seen = data_set(store, **shuffle).state_at(0, epoch=epoch), []
    for count, stop in [*legs, (ranks, None)]:
        data = [rank_of(store, rank, count, **shuffle) for rank in range(count)]
        for d in data:
            d.load_state_dict(state)
        first = data[0].first_step
        parts = [keys(d) for d in data]
        # The last step is not among the stops: a state after it is of the next epoch.
        stop = None if stop is None else stop % len(parts[0])
        seen += flat(flat(part[:stop]) for part in parts)
        if stop is not None:
            state = data[-1].state_at(first + stop)
            assert (state["epoch"], state["taken"]) == (epoch, 0)
    check_each_once(seen, every, ranks - 1)
    assert data[0].state_at(first + len(parts[0])) == data_set(store, **shuffle).state_at(0, epoch=epoch + 1)


@pytest.mark.parametrize("seed", [0, -(2**63), 2**64])
def test_a_state_is_a_few_plain_values(store: Path, seed: int) -> None:
    data = data_set(store, seed=seed)
    for state in (data.state_at(STEPS - 1, epoch=2**28 - 1), data.state_at(0)):
        assert len(json.dumps(state)) < 300
        assert through_json(state) == state
        data.load_state_dict(state)
        assert data.state_at(data.first_step, data.epoch) == state


@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"batch_size": 50}, {"seed": -1}])
def test_a_state_goes_on_in_the_same_order_alone(store: Path, options: dict[str, Any]) -> None:
    whole = keys(data_set(store, **options))
    state = data_set(store, **options).state_at(len(whole) // 2)
    other = data_set(store, **options)
    other.load_state_dict(state)
    assert keys(other) == whole[len(whole) // 2 :]


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("step", [-1, 10, STEPS + 1])
def test_a_step_must_be_one_of_the_pass(store: Path, step: int, workers: int) -> None:
    data = data_set(store)
    data.load_state_dict(data.state_at(11))  # a pass of the steps 11 .. 15
    keys(plain(data, workers))
    assert data.state_at(11)["batch"] == 11
    with pytest.raises(OptionError, match=rf"11 \.\. {STEPS}; got {step}"):
        data.state_at(step)
    for step in (-1, STEPS + 1):
        with pytest.raises(OptionError, match=rf"0 \.\. {STEPS}; got {step}"):
            data.state_at(step, epoch=1)


@pytest.mark.parametrize(("step", "epoch"), [(0, -1), (0, 2**28), (2.0, 0)])
def test_a_state_that_could_not_be_loaded_is_not_given(store: Path, step: Any, epoch: int) -> None:
    with pytest.raises(OptionError):
        data_set(store).state_at(step, epoch=epoch)


def test_steps_are_unknown_where_the_loader_makes_the_batches(store: Path) -> None:
    data = data_set(store, batch_size=None)
    next(iter(data))
    with pytest.raises(OptionError, match="batch_size"):
        data.state_at(0)


def test_a_state_of_another_order_is_refused(store: Path, epochs: list[Batches], make_store: Make) -> None:
    state = data_set(store).state_at(4)
    other_store = make_store("npy", samples_per_shard=SHARD_SAMPLES)
    others = {
        "fingerprint": data_set(other_store),
        "seed": data_set(store, seed=6),
        "batch_size": data_set(store, batch_size=BATCH + 1),
        "seed None": data_set(store, shuffle=False),
        "batch_size None": data_set(store, batch_size=None),
    }
    for name, other in others.items():
        with pytest.raises(OptionError, match=name):
            other.load_state_dict(state)
    with pytest.raises(OptionError, match="seed None"):
        data_set(store).load_state_dict(others["seed None"].state_at(4))
    # A refusal leaves the data set as it was; and what the order does not depend on may differ.
    assert keys(others["batch_size None"])
    data = data_set(store, fields=["label", "key"])
    with pytest.raises(OptionError):
        data.load_state_dict(others["seed"].state_at(4))
    assert keys(data) == epochs[0]
    data.load_state_dict(state)
    assert keys(data) == epochs[0][4:]


def test_a_state_of_another_window_is_refused(make_store: Make, pictures: Path) -> None:
    packed = make_store(
        "zarr", source=pictures, samples_per_shard=SHARD_SAMPLES, store="pixels", codec="zstd"
    )  # fmt: skip

    def windowed(window_bytes: int) -> ShardDataset:
        return data_set(packed, fields=["image", "key"], options=ReadOptions(window_bytes=window_bytes))

    state, whole = windowed(2000).state_at(4), keys(windowed(2000))
    assert 0 < state["window"] < windowed(16000).state_at(4)["window"]
    with pytest.raises(OptionError, match="window"):
        windowed(16000).load_state_dict(state)
    data = windowed(2000)
    data.load_state_dict(state)
    assert keys(data) == whole[4:]


def lacking(state: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key != name}


NO_STATES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "nothing": lambda _: {},
    "None": lambda _: None,
    "a list": lambda _: [],
    "a list of pairs": lambda state: list(state.items()),
    "text": json.dumps,
    "numbers for names": lambda _: {0: 1},
    "one more": lambda state: {**state, "more": 0},
    "a nested state": lambda state: {"dataset": state},
    "no fingerprint": lambda state: lacking(state, "fingerprint"),
    "no batch": lambda state: lacking(state, "batch"),
    "a fingerprint of another kind": lambda state: {**state, "fingerprint": 0},
    "text as seed": lambda state: {**state, "seed": "5"},
    "an epoch too high": lambda state: {**state, "epoch": 2**28},
    **{
        f"{name} {value!r}": lambda state, name=name, value=value: {**state, name: value}
        for name in ("batch_size", "window", "epoch", "batch", "taken", "workers", "ranks")
        for value in (-1, "2", 1.5, [2])
    },
    **{f"{name} None": lambda state, name=name: {**state, name: None} for name in ("epoch", "batch", "fingerprint")},
}


@pytest.mark.parametrize("name", NO_STATES)
def test_what_is_no_state_is_refused(store: Path, epochs: list[Batches], name: str) -> None:
    data = data_set(store)
    broken = NO_STATES[name](data.state_at(4))
    with pytest.raises(OptionError):
        data.load_state_dict(broken)
    assert keys(data) == epochs[0]


def test_a_state_of_an_impossible_batch_is_refused(store: Path) -> None:
    data = data_set(store)
    with pytest.raises(OptionError):
        data.load_state_dict({**data.state_at(4), "batch": 2**64})


@pytest.mark.parametrize("batch_size", [None, BATCH])
def test_before_any_pass_of_this_process_there_is_no_place_in_one(store: Path, batch_size: int | None) -> None:
    data = data_set(store, batch_size=batch_size)
    with pytest.raises(OptionError, match="no pass"):
        data.state_dict()
    keys(plain(data, 1) if batch_size else DataLoader(data, batch_size=4, num_workers=1))
    with pytest.raises(OptionError, match="no pass"):  # that was the worker's
        data.state_dict()


def test_the_place_of_a_pass_of_this_process(store: Path, epochs: list[Batches]) -> None:
    data = data_set(store)
    running = iter(data)
    for taken in range(STEPS + 1):
        other = data_set(store)
        other.load_state_dict(through_json(data.state_dict()))
        assert other.first_step == taken
        assert [keys(other) for _ in range(2)] == [epochs[0][taken:], epochs[1]]
        assert next(running, None) is None or taken < STEPS


def test_a_worker_s_place_is_not_one_of_the_trainer(store: Path) -> None:
    loader = stateful(data_set(store), 2)
    for _ in itertools.islice(loader, 5):
        pass
    (state, _) = (w["dataset_state"] for w in loader.state_dict()["_snapshot"]["_worker_snapshots"].values())
    assert (state["taken"], state["workers"]) == (3, 2)
    with pytest.raises(OptionError, match="change_workers"):
        data_set(store).load_state_dict(state)


@pytest.mark.parametrize("step", [0, 5, SAMPLES])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_of_single_samples_serves_one_pass(store: Path, workers: int, step: int) -> None:
    fresh = [data_set(store, batch_size=None) for _ in range(3)]
    for epoch, data in enumerate(fresh):
        data.set_epoch(epoch)
    whole, following, last = (keys(data) for data in fresh)
    running = iter(saved := data_set(store, batch_size=None))
    assert keys(itertools.islice(running, step)) == whole[:step]
    data = data_set(store, batch_size=None)
    data.load_state_dict(saved.state_dict())
    loader = plain(data, workers)
    assert [keys(loader) for _ in range(3)] == [whole[step:], following, last]


# -- going on, with torchdata's StatefulDataLoader --------------------------------------------------------------------


def states_of(loader: Any, stops: Iterable[Any]) -> dict[Any, Any]:
    """The loader's states after so many batches of a pass."""
    states, batches = {}, iter(loader)
    for done in itertools.count():
        if done in stops:
            states[done] = pickle.loads(pickle.dumps(loader.state_dict()))
        if all(stop in states for stop in stops) or next(batches, None) is None:
            break
    if END in stops:
        states[END] = pickle.loads(pickle.dumps(loader.state_dict()))
    assert len(states) == len(list(stops))
    return states


def for_workers(state: Any, workers: int, others: int) -> Any:
    return state if workers == others else change_workers(state, others)


def check_goes_on(loader: Any, state: Any, stop: Any, epochs: list[Batches]) -> None:
    """Loaded, the state of epoch 1 after ``stop`` batches gives the rest, and then all of the next epoch."""
    loader.load_state_dict(state)
    expected = [epochs[2], epochs[3]] if stop == END else [epochs[1][stop:], epochs[2]]
    assert [keys(loader) for _ in range(2)] == expected


@pytest.mark.parametrize("workers", range(5))
def test_a_stateful_pass_goes_on_with_any_workers(store: Path, epochs: list[Batches], workers: int) -> None:
    loader = stateful(data_set(store), workers)
    assert keys(loader) == epochs[0]
    states = states_of(loader, (5, END))
    for others in range(5):
        for stop, state in states.items():
            # With workers that persist, half of the time, to save theirs.
            going = stateful(data_set(store), others, persistent_workers=stop == END and others > 0)
            check_goes_on(going, for_workers(state, workers, others), stop, epochs)


@pytest.mark.parametrize(("workers", "others"), [(0, 0), (0, 3), (2, 2), (3, 2), (4, 0)])
def test_a_stateful_pass_goes_on_from_its_edges(store: Path, epochs: list[Batches], workers: int, others: int) -> None:
    loader = stateful(data_set(store), workers)
    assert keys(loader) == epochs[0]
    for stop, state in states_of(loader, (0, 1, STEPS - 1, STEPS)).items():
        check_goes_on(stateful(data_set(store), others), for_workers(state, workers, others), stop, epochs)


def test_a_stateful_pass_goes_on_from_every_step(store: Path, epochs: list[Batches]) -> None:
    loader = stateful(data_set(store), 3)
    keys(loader)
    for stop, state in states_of(loader, (*range(STEPS + 1), END)).items():
        check_goes_on(stateful(data_set(store)), change_workers(state, 0), stop, epochs)


@pytest.mark.parametrize(("workers", "others"), [(2, 2), (3, 3), (2, 3), (3, 0), (0, 2)])
def test_states_between_snapshots(store: Path, epochs: list[Batches], workers: int, others: int) -> None:
    loader = stateful(data_set(store), workers, snapshot_every_n_steps=3)
    keys(loader)
    for stop, state in states_of(loader, (2, 3, 7, STEPS, END)).items():
        going = stateful(data_set(store), others, snapshot_every_n_steps=3)
        check_goes_on(going, for_workers(state, workers, others), stop, epochs)


@pytest.mark.parametrize("chain", [(2, 2, 2, 2), (2, 3, 0, 1), (0, 0, 4, 2)])
def test_stateful_passes_in_a_row(store: Path, epochs: list[Batches], chain: tuple[int, ...]) -> None:
    state, before, found = None, 0, []
    for workers in chain:
        loader = stateful(data_set(store), workers, snapshot_every_n_steps=2)
        if state is not None:
            loader.load_state_dict(for_workers(state, before, workers))
        batches = iter(loader)
        found += keys(itertools.islice(batches, 3))
        state, before = loader.state_dict(), workers
    found += keys(batches)
    assert found == epochs[0]
    assert keys(loader) == epochs[1]


def test_a_stateful_loader_whose_workers_persist(store: Path, epochs: list[Batches]) -> None:
    loader = stateful(data_set(store), 2, persistent_workers=True)
    states = [states_of(loader, (stop,))[stop] for stop in (4, STEPS)]  # of epochs 0 and 1
    assert keys(loader) == epochs[2]
    for other in (loader, stateful(data_set(store), 2, persistent_workers=True)):
        for epoch, (stop, state) in enumerate(zip((4, STEPS), states, strict=True)):
            other.load_state_dict(state)
            assert [keys(other) for _ in range(2)] == [epochs[epoch][stop:], epochs[epoch + 1]]


def test_a_state_of_either_loader_goes_on_in_the_other(store: Path, epochs: list[Batches]) -> None:
    data = data_set(store)
    data.load_state_dict(data.state_at(4, epoch=1))
    loader = stateful(data, 2)
    state = states_of(loader, (5,))[5]
    data = data_set(store)
    data.load_state_dict(change_workers(state, 0)["dataset_state"])
    assert (data.epoch, data.first_step) == (1, 9)
    assert keys(plain(data, 3)) == epochs[1][9:]


@pytest.mark.parametrize(
    ("ranks", "workers", "others", "other_workers"),
    [(2, 2, 3, 0), (3, 0, 2, 2), (1, 2, 4, 0), (4, 0, 1, 2), (2, 0, 3, 0)],
)
@pytest.mark.parametrize("stop", [0, 2, END])
def test_a_stateful_run_goes_on_with_other_ranks(
    store: Path, epochs: list[Batches], every: list[str], ranks: int, workers: int, others: int, other_workers: int,
    stop: Any,
) -> None:  # fmt: skip
    seen = [keys(rank_of(store, rank, ranks))[: 0 if stop == END else stop] for rank in range(ranks)]
    state = states_of(stateful(rank_of(store, 0, ranks), workers), (stop,))[stop]
    state, rest = change_workers(state, other_workers), []
    for rank in range(others):
        loader = stateful(rank_of(store, rank, others), other_workers)
        loader.load_state_dict(state)
        rest.append(keys(loader))
        following = rank_of(store, rank, others)
        following.set_epoch(1 + (stop == END))
        assert keys(loader) == keys(following)
    assert len({tuple(map(len, part)) for part in rest}) == 1
    check_each_once(flat(map(flat, seen + rest)), every, others - 1)
    if stop != END:
        full = (SAMPLES - stop * ranks * BATCH) // (others * BATCH)
        for rank, part in enumerate(rest):
            assert part[:full] == epochs[0][stop * ranks + rank :: others][:full]


def test_other_ranks_without_change_workers_are_refused(store: Path) -> None:
    state = states_of(stateful(rank_of(store, 0, 2), 1), (3,))[3]
    loader = stateful(rank_of(store, 0, 3), 1)
    loader.load_state_dict(state)
    with pytest.raises(OptionError, match="change_workers") as caught:
        keys(loader)
    # After such an error torchdata waits 5 seconds for each worker to end; in this test and not in another one's.
    del loader, caught
    gc.collect()


# -- StatefulDataLoader, where it makes the batches -------------------------------------------------------------------


def habit(store: Path, workers: int) -> Any:
    return stateful(data_set(store, batch_size=None), workers, batch_size=4)


def habit_epochs(store: Path, workers: int) -> list[Batches]:
    found = []
    for epoch in range(4):
        data = data_set(store, batch_size=None)
        data.set_epoch(epoch)
        found.append(keys(DataLoader(data, batch_size=4, num_workers=workers)))
    return found


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_pass_of_single_samples_goes_on_with_as_many_workers(store: Path, every: list[str], workers: int) -> None:
    epochs = habit_epochs(store, workers)
    for batches in epochs:
        check_each_once(flat(batches), every)
    loader = habit(store, workers)
    assert keys(loader) == epochs[0]
    for stop, state in states_of(loader, (0, 1, 6, len(epochs[1]), END)).items():
        check_goes_on(habit(store, workers), state, stop, epochs)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_of_single_samples_changes_workers_at_its_end_alone(store: Path, workers: int) -> None:
    loader = habit(store, workers)
    keys(loader)
    states = states_of(loader, (0, 6, END))
    for others in (0, 2, 3):
        with pytest.raises(OptionError, match="keep them, or give ShardDataset a batch_size"):
            change_workers(states[6], others)
        for stop in (0, END):  # at its start, nothing is taken
            check_goes_on(habit(store, others), change_workers(states[stop], others), stop, habit_epochs(store, others))


# -- change_workers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_change_workers_leaves_its_argument_alone_and_may_be_repeated(
    store: Path, epochs: list[Batches], workers: int
) -> None:
    loader = stateful(data_set(store), workers)
    keys(loader)
    state = states_of(loader, (5,))[5]
    before = pickle.dumps(state)
    once = change_workers(state, 3)
    assert pickle.dumps(state) == before
    assert change_workers(change_workers(once, 0), 3) == once
    check_goes_on(stateful(data_set(store), 3), once, 5, epochs)


@pytest.mark.parametrize(
    "garbage",
    [
        {}, None, [], "state", 5, {"_snapshot": {}}, {"_iterator_finished": False},
        {"_iterator_finished": True, "dataset_state": None, "_num_yielded": 3},
        {"_iterator_finished": False, "dataset_state": {}, "_num_yielded": 3},
        {"_iterator_finished": False, "_steps_since_snapshot": 0, "_snapshot": {}},
        {"_iterator_finished": False, "_steps_since_snapshot": 0, "_snapshot": {"_worker_snapshots": {}}},
        {"_iterator_finished": False, "_steps_since_snapshot": 0, "_snapshot": {"_worker_snapshots": {"worker_0": {}}}},
        {"_iterator_finished": False, "_steps_since_snapshot": 0, "_snapshot": None},
    ],
)  # fmt: skip
def test_change_workers_refuses_what_is_no_state(garbage: Any) -> None:
    with pytest.raises(OptionError, match="no state"):
        change_workers(garbage, 2)


def test_change_workers_refuses_states_of_other_data_sets_and_of_the_data_set_alone(store: Path) -> None:
    other = StatefulDataLoader(list(range(20)), batch_size=4)
    next(iter(other))
    for state in (other.state_dict(), data_set(store).state_at(3)):
        with pytest.raises(OptionError, match="no state of a StatefulDataLoader"):
            change_workers(state, 2)


def test_change_workers_refuses_negative_numbers(store: Path) -> None:
    state = states_of(stateful(data_set(store)), (2,))[2]
    with pytest.raises(OptionError, match="-1"):
        change_workers(state, -1)
