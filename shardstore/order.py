"""The order of an epoch, as arithmetic: integers in, sample numbers out. Knows no disk, no torch, keeps no state.

**Positions.** Shards of ``shard_samples`` samples each (the last may be short) are permuted by (key, epoch), a short
last one staying last. Concatenated, they give positions ``0 .. samples - 1``.

**Batches.** Positions are cut into batches of ``m``. Contiguous runs of whole batches, about equally long, form
``L`` *lanes*; ``L`` depends on the number of shards alone (:func:`lane_count`). Batch ``q`` of the epoch is batch
``q // L`` of lane ``q % L``. Runs are laid out so that the only short batch is also the last of the epoch.

**Mixing.** Inside a lane, each *window* of consecutive positions is permuted by a keyed permutation, the whole lane
where every sample can be read by itself.

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
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Numbers = np.ndarray[Any, np.dtype[np.int64]]

_MASK = (1 << 64) - 1
_SORT_LIMIT = 1024  # a Feistel network on so few numbers reaches only some of their permutations
_ROUNDS = 8
_SHARDS, _MIX = 1, 2  # what a derived key is for


def derive(*parts: int) -> int:
    """One 64-bit key from several integers; each change of a part gives an unrelated key."""
    state = 0
    for part in parts:
        state = (state + (part & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def permute(numbers: Numbers, n: int, key: int) -> Numbers:
    """Where a pseudorandom permutation of ``0 .. n-1``, chosen by ``key``, sends each of ``numbers``.

    Time and memory depend on ``len(numbers)`` only (and on ``n`` up to 1,024).
    """
    if n <= _SORT_LIMIT:
        return np.argsort(_hash(np.arange(n, dtype=np.uint64), key), kind="stable")[numbers]
    bits = (n - 1).bit_length()
    low = bits // 2
    keys = [derive(key, r) for r in range(_ROUNDS)]
    out = numbers.astype(np.uint64)
    walking = np.arange(len(out))
    while len(walking):
        out[walking] = _feistel(out[walking], low, bits - low, keys)
        walking = walking[out[walking] >= n]
    return out.astype(np.int64)


def _feistel(x: np.ndarray[Any, np.dtype[np.uint64]], low: int, high: int, keys: list[int]) -> Any:
    right, left = x & np.uint64((1 << low) - 1), x >> np.uint64(low)
    for r in range(0, len(keys), 2):
        left = left ^ (_hash(right, keys[r]) >> np.uint64(64 - high))
        right = right ^ (_hash(left, keys[r + 1]) >> np.uint64(64 - low))
    return (left << np.uint64(low)) | right


def _hash(x: np.ndarray[Any, np.dtype[np.uint64]], key: int) -> Any:
    x = x * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)  # array arithmetic wraps without a warning
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
        window: how many consecutive positions are mixed; 0 for all of a lane.
    """

    samples: int
    shard_samples: int
    key: int | None = None
    epoch: int = 0
    window: int = 0

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
        if self.key is None:
            return self.at((start + numbers) % self.samples)
        window = self.window or max(stop - start, 1)
        blocks = numbers // window
        out = np.empty_like(numbers)
        for block in np.unique(blocks):
            here = blocks == block
            first = int(block) * window
            key = derive(self.key, self.epoch, _MIX, start, first)
            size = min(window, stop - start - first)
            out[here] = start + first + permute(numbers[here] - first, size, key)
        return self.at(out % self.samples)

    def batch_count(self, batch_size: int) -> int:
        """Batches of an epoch, a short last one among them."""
        return -(-self.samples // batch_size)

    def batch(self, q: int, batch_size: int) -> Numbers:
        """The sample numbers of batch ``q`` of the epoch."""
        lanes = lane_count(self.shards)
        start, stop = self._lane(q % lanes, lanes, batch_size)
        first = q // lanes * batch_size
        return self.mixed(np.arange(first, min(first + batch_size, stop - start)), start, stop)

    def step_count(self, batch_size: int, share: Share, begin: int = 0) -> int:
        """Steps that a rank makes from batch ``begin`` on, the same for all but where ``tail`` is ``exact``."""
        full, left = divmod(max(self.samples - begin * batch_size, 0), batch_size * share.ranks)
        first, last = share.of(left)
        return full + (last > first and share.tail != "drop")

    def step(self, t: int, batch_size: int, share: Share, begin: int = 0) -> Numbers:
        """The sample numbers that a rank takes at step ``t``, counted from batch ``begin`` of the epoch."""
        q = begin + t * share.ranks
        if (q + share.ranks) * batch_size <= self.samples:
            return self.batch(q + share.rank, batch_size)
        left = np.concatenate([self.batch(i, batch_size) for i in range(q, self.batch_count(batch_size))])
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
