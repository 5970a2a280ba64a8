"""The order of an epoch, as arithmetic: integers in, sample numbers out. Knows no disk, no torch, keeps no state.

**Positions.** Shards of ``shard_samples`` samples each (the last may be short) are permuted by (key, epoch), a short
last one staying last. Concatenated, they give positions ``0 .. samples - 1``.

**Batches.** Positions are cut into batches of ``m``. Contiguous runs of whole batches, about equally long, form
``L`` *lanes*; ``L`` depends on the number of shards alone (:func:`lane_count`). Batch ``q`` of the epoch is batch
``q // L`` of lane ``q % L``. Runs are laid out so that the only short batch is also the last of the epoch.

**Mixing.** Where every sample can be read by itself, all positions of a lane are permuted by a keyed permutation. Where
chunks must be decompressed, the lane's *blocks* (the samples of a chunk) are permuted, and then, in that order, each
*window* of samples: decoding stays within a window, and no batch is the same in the next epoch.

**Ranks and workers.** Rank ``r`` of ``R`` takes batch ``t * R + r`` at step ``t``; its worker ``w`` of ``W`` takes the
steps ``w, w + W, …``, which is how a DataLoader collects them. So the sequence of batches does not depend on ranks or
workers, and where ``R * W`` divides ``L`` each worker reads lanes of its own. Only the samples of a last step that is
not full are dealt out anew, so that all ranks make the same number of steps (:class:`Share`). A pass may begin at any
batch: steps are then counted from there.
Without batches (:meth:`Order.consumer_range`) each worker takes a run of positions of its own: whole shards where one
rank has enough of them.

Keyed permutations need no memory: up to 1,024 numbers are sorted by a hash; above, a Feistel network (Luby and Rackoff,
"How to construct pseudorandom permutations", 1988) with cycle walking (Black and Rogaway, "Ciphers with arbitrary
finite domains", 2002). The hash is the finaliser of SplitMix64 (Steele, Lea and Flood, 2014). None of it comes from
``numpy.random``, whose streams may change.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Numbers = np.ndarray[Any, np.dtype[np.int64]]

Keys = np.ndarray[Any, np.dtype[np.uint64]]

_MASK = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BATCHES_AT_ONCE = 32  # worked out together: a keyed permutation of 2,000 numbers costs three times that of 64
_SORT_LIMIT = 1024  # a Feistel network on so few numbers reaches only some of their permutations
_ROUNDS = 8
_SHARDS, _MIX, _BLOCKS = 1, 2, 3  # what a derived key is for


def derive(*parts: int) -> int:
    """One 64-bit key from several integers; each change of a part gives an unrelated key."""
    return int(_derive_each(*(np.array([part & _MASK], np.uint64) for part in parts))[0])


def _derive_each(*parts: Keys) -> Keys:
    """:func:`derive` for each row of arrays that broadcast."""
    state = np.zeros(1, np.uint64)
    for part in parts:
        state = _finalise(state + part + _GOLDEN)
    return state


def permute(numbers: Numbers, n: int, key: int) -> Numbers:
    """Where a pseudorandom permutation of ``0 .. n-1``, chosen by ``key``, sends each of ``numbers``.

    Time and memory depend on ``len(numbers)`` only (and on ``n`` up to 1,024).
    """
    return _permute_each(numbers, np.zeros(len(numbers), np.int64), np.array([n]), np.array([key], np.uint64))


def _permute_each(numbers: Numbers, group: Numbers, sizes: Numbers, keys: Keys) -> Numbers:
    """:func:`permute` of ``numbers[i]`` with the size and the key of its group, all together."""
    large = sizes > _SORT_LIMIT
    if large.all():
        return _walk(numbers.astype(np.uint64), group, sizes, keys).astype(np.int64)
    out = np.empty(len(numbers), np.int64)
    here = large[group]
    out[here] = _walk(numbers[here].astype(np.uint64), group[here], sizes, keys)
    for g in np.flatnonzero(~large):
        here = group == g
        out[here] = np.argsort(_hash(np.arange(sizes[g], dtype=np.uint64), keys[g]), kind="stable")[numbers[here]]
    return out


def _walk(x: Keys, group: Numbers, sizes: Numbers, keys: Keys) -> Keys:
    """A Feistel network over the power of two above each size, again for what falls outside of it."""
    bits = np.array([(n - 1).bit_length() for n in sizes.tolist()], np.uint64)
    low, high = bits // 2, bits - bits // 2
    rounds = _derive_each(keys, np.arange(_ROUNDS, dtype=np.uint64)[:, None])
    limits, walking = sizes.astype(np.uint64)[group], np.arange(len(x))
    while len(walking):
        here = group[walking]
        x[walking] = _feistel(x[walking], low[here], high[here], rounds[:, here])
        walking = walking[x[walking] >= limits[walking]]
    return x


def _feistel(x: Keys, low: Keys, high: Keys, rounds: Keys) -> Keys:
    right, left = x & ((np.uint64(1) << low) - np.uint64(1)), x >> low
    for r in range(0, _ROUNDS, 2):
        left = left ^ (_hash(right, rounds[r]) >> (np.uint64(64) - high))
        right = right ^ (_hash(left, rounds[r + 1]) >> (np.uint64(64) - low))
    return (left << low) | right


def _hash(x: Keys, key: Keys) -> Keys:
    return _finalise(x * _GOLDEN + key)  # array arithmetic wraps without a warning


def _finalise(x: Keys) -> Keys:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@functools.cache
def lane_count(shards: int) -> int:
    """The number of lanes of a store: a product of twos and threes between a quarter and half of its shards.

    One that divides the shards is best, then one that 4 divides (the usual numbers of workers), then the largest.
    """
    smooth = [2**a * 3**b for a in range(41) for b in range(26)]
    fit = [c for c in smooth if shards <= 4 * c and 2 * c <= shards]
    return max(fit, key=lambda c: (shards % c == 0, c % 4 == 0, c), default=1)


Tail = Literal["repeat", "drop", "exact"]


@dataclass(frozen=True)
class Share:
    """One rank's part of an epoch.

    Attributes:
        rank, ranks: which of how many.
        tail: what becomes of the samples that the ranks cannot share evenly: at most ``ranks - 1`` are repeated; they
            are dropped (with batches: all samples of a step that is not full); or some ranks get fewer, ``exact``.
    """

    rank: int = 0
    ranks: int = 1
    tail: Tail = "repeat"

    def of(self, count: int) -> tuple[int, int]:
        """The run (first, last + 1) of ``count`` samples that is this rank's; from ``count`` on it starts again."""
        if self.tail == "exact":
            return self.rank * count // self.ranks, (self.rank + 1) * count // self.ranks
        each = count // self.ranks if self.tail == "drop" else -(-count // self.ranks)
        return self.rank * each, (self.rank + 1) * each


@dataclass(frozen=True)
class Order:
    """One epoch's order of a store.

    Attributes:
        samples: of the store.
        shard_samples: of every shard but perhaps the last.
        key: derived from the store's fingerprint and the seed; None keeps the stored order of shards and samples.
        epoch: from 0.
        window: how many samples are mixed at a time, once the blocks are; 0 for all of a lane, whatever the blocks.
        block: samples that are read together; divides ``shard_samples``.
    """

    samples: int
    shard_samples: int
    key: int | None = None
    epoch: int = 0
    window: int = 0
    block: int = 1

    @property
    def shards(self) -> int:
        """How many shards the store has."""
        return -(-self.samples // self.shard_samples)

    def at(self, positions: Numbers) -> Numbers:
        """The sample numbers at these positions."""
        if self.key is None:
            return positions
        full = self.samples // self.shard_samples
        shard, inside = positions // self.shard_samples, positions % self.shard_samples
        moved = shard < full
        shard[moved] = permute(shard[moved], full, derive(self.key, self.epoch, _SHARDS)) if full else shard[moved]
        return shard * self.shard_samples + inside

    def mixed(self, numbers: Numbers, start: int, stop: int) -> Numbers:
        """The samples that come as the ``numbers``-th of the run of positions ``start .. stop - 1``, mixed."""
        return self._mixed(numbers, np.full(len(numbers), start), np.full(len(numbers), stop))

    def _mixed(self, numbers: Numbers, start: Numbers, stop: Numbers) -> Numbers:
        """:meth:`mixed`, each number in a run of its own."""
        if self.key is None:
            return self.at((start + numbers) % self.samples)
        length = stop - start
        first = numbers - numbers % (self.window or np.maximum(length, 1))
        size = np.minimum(self.window or self.samples, length - first)
        inside = first + self._permuted(_MIX, numbers - first, start, first, size)
        if self.window:
            inside = self._blocks_mixed(inside, start, stop)
        return self.at((start + inside) % self.samples)

    def _blocks_mixed(self, numbers: Numbers, start: Numbers, stop: Numbers) -> Numbers:
        """Whole blocks of a run permuted; what lies before the first and behind the last comes at the end."""
        low, high = -(-start // self.block) * self.block, stop // self.block * self.block
        count = np.maximum(high - low, 0) // self.block
        block, rest = numbers // self.block, numbers - count * self.block
        before = np.where(count > 0, low - start, stop - start)
        out: Numbers = np.where(rest < before, rest, rest + count * self.block)
        whole = np.flatnonzero(block < count)
        moved = self._permuted(_BLOCKS, block[whole], start[whole], start[whole], count[whole])
        out[whole] = (low - start)[whole] + moved * self.block + numbers[whole] % self.block
        return out

    def _permuted(self, use: int, numbers: Numbers, start: Numbers, first: Numbers, size: Numbers) -> Numbers:
        """Each number permuted among ``size`` by a key of (use, start, first)."""
        groups, group = np.unique(np.stack([start, first, size]), axis=1, return_inverse=True)
        parts = [np.array([part & _MASK], np.uint64) for part in (self.key or 0, self.epoch, use)]
        keys = _derive_each(*parts, *groups[:2].astype(np.uint64))
        return _permute_each(numbers, group.reshape(-1), groups[2], keys)

    def batch_count(self, batch_size: int) -> int:
        """Batches of an epoch, a short last one among them."""
        return -(-self.samples // batch_size)

    def batch(self, q: int, batch_size: int) -> Numbers:
        """The sample numbers of batch ``q`` of the epoch."""
        return self._batches([q], batch_size)[0]

    def _batches(self, qs: Sequence[int], batch_size: int) -> list[Numbers]:
        lanes = lane_count(self.shards)
        runs = np.array([self._lane(q % lanes, lanes, batch_size) for q in qs])
        first = np.array([q // lanes * batch_size for q in qs])
        counts = np.minimum(batch_size, runs[:, 1] - runs[:, 0] - first)
        ends = np.cumsum(counts)
        inside = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        start, stop = np.repeat(runs, counts, axis=0).T
        return np.split(self._mixed(inside + np.repeat(first, counts), start, stop), ends[:-1])

    def step_count(self, batch_size: int, share: Share, begin: int = 0) -> int:
        """Steps that a rank makes from batch ``begin`` on, the same for all but where ``tail`` is ``exact``."""
        full, left = divmod(max(self.samples - begin * batch_size, 0), batch_size * share.ranks)
        first, last = share.of(left)
        return full + (last > first and share.tail != "drop")

    def step(self, t: int, batch_size: int, share: Share, begin: int = 0) -> Numbers:
        """The sample numbers that a rank takes at step ``t``, counted from batch ``begin`` of the epoch."""
        return next(self.steps([t], batch_size, share, begin))

    def steps(self, ts: Sequence[int], batch_size: int, share: Share, begin: int = 0) -> Iterator[Numbers]:
        """:meth:`step` of each of ``ts``, which rise; cheaper together."""
        for i in range(0, len(ts), _BATCHES_AT_ONCE):
            qs = [begin + t * share.ranks for t in ts[i : i + _BATCHES_AT_ONCE]]
            full = [q + share.rank for q in qs if (q + share.ranks) * batch_size <= self.samples]
            yield from self._batches(full, batch_size) if full else ()
            yield from (self._last_step(q, batch_size, share) for q in qs[len(full) :])

    def _last_step(self, q: int, batch_size: int, share: Share) -> Numbers:
        """This rank's part of the samples from batch ``q`` on, too few for a whole step."""
        left = np.concatenate(self._batches(range(q, self.batch_count(batch_size)), batch_size))
        first, last = share.of(len(left))
        return left[np.arange(first, last) % len(left)]

    def _lane(self, lane: int, lanes: int, batch_size: int) -> tuple[int, int]:
        """First and last + 1 position of a lane. Lanes below ``longer`` have one batch more and lie behind the others,
        so that the store's last positions, and with them the short batch, are the end of the epoch's last lane."""
        each, longer = divmod(self.batch_count(batch_size), lanes)
        if lane < longer:
            first, count = (lanes - longer) * each + lane * (each + 1), each + 1
        else:
            first, count = (lane - longer) * each, each
        return min(first * batch_size, self.samples), min((first + count) * batch_size, self.samples)

    def consumer_range(self, worker: int, workers: int, share: Share) -> tuple[int, int]:
        """The run of positions (first, last + 1) of one worker of a rank; above ``samples`` they start from 0 again."""
        first, last = share.of(self.samples)
        unit = self.shard_samples if share.ranks == 1 and self.shards >= workers else 1
        units = -(-(last - first) // unit)
        begin, end = worker * units // workers * unit, (worker + 1) * units // workers * unit
        return min(first + begin, last), min(first + end, last)
