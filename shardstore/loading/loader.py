"""``ShardDataset``: a store as a stream, for a plain DataLoader whose workers each read their own files."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from shardstore.errors import OptionError, Problem
from shardstore.loading import mixing, ranks
from shardstore.loading.passes import Passes, check_epoch
from shardstore.loading.position import Position
from shardstore.loading.samples import ImageType, SampleReader, View
from shardstore.loading.skipping import Skipper
from shardstore.options import ReadOptions
from shardstore.order import Order, Share, Tail, derive
from shardstore.pool import ahead
from shardstore.store.chunks import Numbers, Reader
from shardstore.store.index import Index, load


class ShardDataset(IterableDataset[Any]):
    """Every sample of a store once an epoch.

    Two ways to use it::

        DataLoader(ShardDataset(path), batch_size=64, num_workers=4)                     # the habit
        DataLoader(ShardDataset(path, batch_size=64), batch_size=None, num_workers=4)    # whole batches: faster

    Samples and batches are named tuples of the chosen fields: images are uint8 tensors, channels first (batches in
    channels_last memory), labels int64, text a list of strings. In whole-batch use the sequence of batches is the same
    for every number of workers and ranks. The ranks of ``torch.distributed`` share an epoch, in equal numbers of steps.
    Every pass is the next epoch, by itself. ``docs/order.md`` has a recipe for each way of training.

    Args:
        path: the store.
        fields: which fields, in this order; None for image and label.
        batch_size: samples in a batch; None lets the DataLoader make them.
        shuffle: permute shards and mix samples; False keeps the stored order, inside each worker's part, or with
            ``batch_size`` inside each of the store's lanes, whose batches take turns.
        seed: any integer; chooses the shuffled order together with the epoch.
        drop_last: leave out what the ranks cannot share evenly: with ``batch_size`` a last step that is not full, else
            at most one sample fewer than there are ranks. Without it, at most that many samples are repeated.
        transform: called with each image.
        transforms: called with all values of a sample, returns as many.
        image_type: what transforms get: ``pil`` (the default, RGB), ``tensor`` (uint8, CHW) or ``numpy`` (uint8, HWC).
            Without transforms, what samples hold; the default is then ``tensor``.
        threads: with ``batch_size``, threads of this process that read and decode ahead, two batches each; for a
            DataLoader without workers.
        options: see :class:`ReadOptions`.

    Raises:
        NoStoreError: there is no finished store at this path.
        DamagedStoreError: its description is damaged; or, while iterating, its bytes are.
        OptionError: a field that the store does not have, or an impossible batch size; under Hugging Face Accelerate
            with several processes, that ``rank`` and ``world_size`` are not given.
        StackError: while iterating, pictures of different sizes would have to be one batch.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        fields: Sequence[str] | None = None,
        batch_size: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        transform: Callable[[Any], Any] | None = None,
        transforms: Callable[..., Any] | None = None,
        image_type: ImageType | None = None,
        threads: int = 0,
        options: ReadOptions | None = None,
    ) -> None:
        batch_size = None if batch_size is None else _integer("batch_size", batch_size)
        if batch_size is not None and batch_size < 1:
            raise OptionError(f"batch_size must be at least 1; got {batch_size}")
        threads = _integer("threads", threads)
        if threads < 0 or (threads and batch_size is None):
            raise OptionError(f"threads must be 0 or more, and more than 0 only with a batch_size; got {threads}")
        if drop_last and options is not None and options.exact:
            raise OptionError("exact drops nothing, and drop_last does: choose one")
        index = load(path, follow_links=options is not None and options.follow_links)
        self._samples = SampleReader(Reader(index, options), View(fields, transform, transforms, image_type))
        self.batch_size, self.drop_last, self.threads = batch_size, drop_last, threads
        self.shuffle, self.seed = shuffle, _integer("seed", seed)
        self._passes = Passes()
        self._pass: _Pass | None = None  # that began last in this process
        self._loaded: tuple[int, Position] | None = None  # for the next pass of the process of this number
        self._process_group: tuple[int, int] | None = None
        self._dispatched = False
        ranks.refuse_accelerate(self._options)
        if shuffle:
            mixing.warn_if_sorted(self._index, self._order(0), self.batch_size)

    @property
    def path(self) -> str:
        """The store's absolute path."""
        return self._index.path

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names by class number, or None."""
        return self._index.schema.classes

    @property
    def _index(self) -> Index:
        return self._samples.reader.index

    @property
    def _options(self) -> ReadOptions:
        return self._samples.reader.options

    @property
    def epoch(self) -> int:
        """The epoch of the next pass."""
        return self._passes.next_epoch

    @property
    def skipped(self) -> int:
        """Samples that were left out because they could not be read (``ReadOptions(on_error="skip")``), in all passes
        and workers of this process's DataLoaders."""
        return self._passes.skipped

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be of this epoch, from 0, also for persistent workers that run already.

        There is no need to: each pass is the epoch after the last one.

        Raises:
            OptionError: it is negative or above 2**28 - 1.
        """
        self._passes.set(epoch)
        if self._loaded is not None and self._loaded[1].epoch != epoch:
            self._loaded = None

    @property
    def share(self) -> Share:
        """This process's rank, how many there are, and what becomes of the samples they cannot share evenly."""
        options = self._options
        tail: Tail = "exact" if options.exact else "drop" if self.drop_last else "repeat"
        if options.rank is not None and options.world_size is not None:
            return Share(options.rank, options.world_size, tail)
        return Share(*(self._group() or (0, 1)), tail)

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker knows no process group. Where there is none yet, the other process may join one later.
        known = {"_process_group": self._group(), "_dispatched": self._dispatched or ranks.is_dispatched(self._options)}
        return {**self.__dict__, **known, "_pass": None}

    def _group(self) -> tuple[int, int] | None:
        if self._options.rank is not None:
            return None
        ranks.refuse_accelerate(self._options)
        return ranks.process_group() or self._process_group

    def __len__(self) -> int:
        """Steps of this rank in an epoch where ``batch_size`` is given, else samples."""
        if self.batch_size is None:
            first, last = self.share.of(self._index.schema.samples)
            return last - first
        return self._order(0).step_count(self.batch_size, self.share)

    # -- where a pass stands ------------------------------------------------------------------------------------------

    @property
    def first_step(self) -> int:
        """The step that the next pass begins at: 0 but after ``load_state_dict``. For a loop that counts its steps:
        ``for step, batch in enumerate(loader, ds.first_step)``."""
        return -(-self._passes.first_batch(self.epoch) // self.share.ranks)

    def state_at(self, step: int, epoch: int | None = None) -> dict[str, Any]:
        """The state after so many steps, for ``load_state_dict`` with any number of ranks and workers.

        Call it in the training process, in whole-batch use (``batch_size`` given), on one rank or all; with torchdata's
        StatefulDataLoader, ask that for its own state instead.

        Args:
            step: steps done since the epoch's start; after ``load_state_dict``, counted on from ``first_step``.
            epoch: which epoch; None for that of the pass that began last.

        Returns:
            A few plain values, under 300 bytes as JSON. After an epoch's last step it is the start of the next epoch.

        Raises:
            OptionError: the DataLoader makes the batches, or no pass of this epoch has such a step.
        """
        if self.batch_size is None:
            raise OptionError(
                Problem(
                    "where the DataLoader makes the batches, the data set cannot know its steps",
                    hint="Give ShardDataset a batch_size (and DataLoader batch_size=None), or use StatefulDataLoader.",
                )
            )
        epoch, step = _integer("epoch", self._passes.epoch if epoch is None else epoch), _integer("step", step)
        check_epoch(epoch)
        begin, share = self._passes.first_batch(epoch), self.share
        done = step - -(-begin // share.ranks)
        steps = self._order(0).step_count(self.batch_size, share, begin)
        if not 0 <= done <= steps:
            raise OptionError(f"epoch {epoch} has steps {step - done} .. {step - done + steps}; got {step}")
        here = self._position(epoch, begin + done * share.ranks)
        if done == steps:
            here = self._position(epoch + 1, 0)
        return here.to_dict()

    def state_dict(self) -> dict[str, Any]:
        """Where this process's pass stands: torchdata's StatefulDataLoader asks this of each worker.

        Raises:
            OptionError: no pass has begun in this process.
        """
        if self._pass is None:
            raise OptionError(
                Problem(
                    "no pass over this data set has begun in this process, so it has no place in one",
                    hint="In training with a plain DataLoader, use state_at(step).",
                )
            )
        return replace(self._pass.begun, taken=self._pass.taken).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass go on where the state was taken; the one after it is the next epoch, from its start.

        Args:
            state: from ``state_at``, or from ``state_dict`` with the same number of workers.

        Raises:
            OptionError: it is no state, or one of another store, seed, batch size, or (torchdata's) of another number
                of workers; see :func:`shardstore.change_workers`.
        """
        position = Position.from_dict(state)
        position.check_same_order(self._position(0, 0))
        if get_worker_info() is None:
            if position.taken:
                position.check_same_share(1, position.ranks)  # no single worker of several can speak for all
            position = position if self.batch_size is None else position.moved(position.taken)
            self._passes.set(position.epoch, position.batch)
        if self.batch_size is None or get_worker_info():
            self._loaded = os.getpid(), position

    def _position(self, epoch: int, batch: int) -> Position:
        schema, seed = self._index.schema, self.seed if self.shuffle else None
        return Position(schema.fingerprint, seed, self.batch_size, *self._mixing(), epoch, batch)

    def _begin(self, workers: int) -> _Pass:
        """Begin a pass, in this process: at the position loaded for it, or of the next epoch."""
        here, loaded = self._loaded or (0, None)
        self._loaded = None
        # What a trainer has loaded its workers see pass after pass: it is for the one of its epoch.
        if loaded is not None and (here == os.getpid() or loaded.epoch == self.epoch):
            loaded.check_same_share(workers, self.share.ranks)
            self._passes.begin_at(loaded.epoch)
        else:
            loaded = self._position(*self._passes.begin())
        return _Pass(replace(loaded, workers=workers, ranks=self.share.ranks), loaded.taken)

    # -- a pass -------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        dispatched = self._dispatched or ranks.is_dispatched(self._options)
        now = self._pass = self._begin(workers)  # not at the first sample: a pass has its epoch when it is asked for
        if self.batch_size is None:
            items = self._iter_samples(now, worker, workers)
        else:
            items = self._iter_batches(now, worker, workers, self.batch_size)
        return map(ranks.contiguous, items) if dispatched else items

    def _iter_batches(self, now: _Pass, worker: int, workers: int, batch_size: int) -> Iterator[Any]:
        order, share, begin = self._order(now.begun.epoch), self.share, now.begun.batch
        steps = order.step_count(batch_size, share, begin)
        samples, skipper = self._readers(now.begun.epoch)
        whole = order.step_count(batch_size, share) if self._options.on_error == "skip" else 0

        def step(t: int) -> Numbers:  # after the pass's own, those from the epoch's first on
            first, t = (begin, t) if t < steps else (0, t - steps)
            return order.step(t, batch_size, share, first)

        def read(task: tuple[int, tuple[Numbers, Any]]) -> Any:
            t, (numbers, plans) = task
            if not whole:
                return samples.batch(numbers, plans)
            return skipper.batch(numbers, (step(u) for u in range(t + 1, steps + whole)))

        mine = range(worker + now.taken * workers, steps, workers)
        tasks = zip(mine, samples.planned(order.steps(mine, batch_size, share, begin)), strict=True)
        for batch in ahead(read, tasks, self.threads) if self.threads else map(read, tasks):
            now.taken += 1
            yield batch
            del batch  # its memory is the trainer's alone while the next one is read

    def _iter_samples(self, now: _Pass, worker: int, workers: int) -> Iterator[Any]:
        order = self._order(now.begun.epoch)
        start, stop = order.consumer_range(worker, workers, self.share)
        samples, skipper = self._readers(now.begun.epoch)
        pieces = mixing.few(order, start, stop, now.taken, samples.at_once)
        if self._options.on_error == "skip":
            stream = skipper.stream(pieces, mixing.few(order, start, stop, 0, samples.at_once))
        else:
            stream = (s for numbers in pieces for s in samples.samples(numbers))
        for sample in stream:
            now.taken += 1
            yield sample

    def _readers(self, epoch: int) -> tuple[SampleReader, Skipper]:
        """What reads in a pass of this epoch."""
        samples = self._samples.keyed(derive(self.seed, epoch))
        return samples, Skipper(samples, self._passes.count_skipped)

    def _order(self, epoch: int) -> Order:
        schema = self._index.schema
        key = derive(int(schema.fingerprint[:16], 16), self.seed) if self.shuffle else None
        return Order(schema.samples, schema.shard_samples, key, epoch, *self._mixing())

    def _mixing(self) -> tuple[int, int]:
        return mixing.window_and_block(self._samples.reader, self._samples.fields, self.batch_size)


@dataclass
class _Pass:
    """A pass of this process: where it began, and how much of it this process has taken."""

    begun: Position
    taken: int


def _integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError as error:
        raise OptionError(f"{name} must be an integer; got {value!r}") from error
