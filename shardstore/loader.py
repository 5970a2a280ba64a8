"""``ShardDataset``: a store as a stream, for a plain DataLoader whose workers each read their own files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import distributed
from torch.utils.data import IterableDataset, get_worker_info

from shardstore.chunks import Reader, ReadOptions
from shardstore.errors import OptionError
from shardstore.index import Index, load
from shardstore.order import Order, Share, Tail, derive, lane_count
from shardstore.samples import ImageType, SampleReader, View

_ORDER_AT_ONCE = 4096  # sample numbers worked out together: a keyed permutation of few costs as much as of many
_READ_AT_ONCE = 16  # samples whose bytes are read together where the DataLoader makes the batches


class ShardDataset(IterableDataset[Any]):
    """Every sample of a store once an epoch.

    Two ways to use it::

        DataLoader(ShardDataset(path), batch_size=64, num_workers=4)                     # the habit
        DataLoader(ShardDataset(path, batch_size=64), batch_size=None, num_workers=4)    # whole batches: faster

    Samples and batches are named tuples of the chosen fields: images are uint8 tensors, channels first (batches in
    channels_last memory), labels int64, text a list of strings. In whole-batch use the sequence of batches is the same
    for every number of workers and ranks. The ranks of ``torch.distributed`` share an epoch, in equal numbers of steps.

    Args:
        path: the store.
        fields: which fields, in this order; None for image and label.
        batch_size: samples in a batch; None lets the DataLoader make them.
        shuffle: permute shards and mix samples; False keeps the stored order inside each worker's part.
        seed: any integer; chooses the shuffled order together with the epoch.
        drop_last: leave out what the ranks cannot share evenly: with ``batch_size`` a last step that is not full, else
            at most one sample fewer than there are ranks. Without it, at most that many samples are repeated.
        transform: called with each image.
        transforms: called with all values of a sample, returns as many.
        image_type: what transforms get: ``pil`` (the default, RGB), ``tensor`` (uint8, CHW) or ``numpy`` (uint8, HWC).
            Without transforms, what samples hold; the default is then ``tensor``.
        options: see :class:`ReadOptions`.

    Raises:
        NoStoreError: there is no finished store at this path.
        DamagedStoreError: its description is damaged; or, while iterating, its bytes are.
        OptionError: a field that the store does not have, or an impossible batch size.
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
        options: ReadOptions | None = None,
    ) -> None:
        if batch_size is not None and batch_size < 1:
            raise OptionError(f"batch_size must be at least 1; got {batch_size}")
        if drop_last and options is not None and options.exact:
            raise OptionError("exact drops nothing, and drop_last does: choose one")
        index = load(path)
        self._samples = SampleReader(Reader(index, options), View(fields, transform, transforms, image_type))
        self.batch_size, self.drop_last = batch_size, drop_last
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0
        self._process_group: tuple[int, int] | None = None

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

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of this epoch; call it before each pass, as with torch's DistributedSampler."""
        self.epoch = epoch

    @property
    def share(self) -> Share:
        """This process's rank, how many there are, and what becomes of the samples they cannot share evenly."""
        options = self._samples.reader.options
        tail: Tail = "exact" if options.exact else "drop" if self.drop_last else "repeat"
        if options.rank is not None and options.world_size is not None:
            return Share(options.rank, options.world_size, tail)
        rank, ranks = _process_group() or self._process_group or (0, 1)
        return Share(rank, ranks, tail)

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker knows no process group. Where there is none yet, the other process may join one later.
        return {**self.__dict__, "_process_group": _process_group()}

    def __len__(self) -> int:
        """Steps of this rank in an epoch where ``batch_size`` is given, else samples."""
        if self.batch_size is None:
            first, last = self.share.of(self._index.schema.samples)
            return last - first
        return self._order(1).step_count(self.batch_size, self.share)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        if self.batch_size is None:
            return self._iter_samples(worker, workers)
        return self._iter_batches(worker, workers, self.batch_size)

    def _iter_batches(self, worker: int, workers: int, batch_size: int) -> Iterator[Any]:
        order, share = self._order(lane_count(self._index.schema.shards)), self.share
        for t in range(worker, order.step_count(batch_size, share), workers):
            yield self._samples.batch(order.step(t, batch_size, share))

    def _iter_samples(self, worker: int, workers: int) -> Iterator[Any]:
        order = self._order(1)
        start, stop = order.consumer_range(worker, workers, self.share)
        for first in range(0, stop - start, _ORDER_AT_ONCE):
            numbers = order.mixed(np.arange(first, min(first + _ORDER_AT_ONCE, stop - start)), start, stop)
            for i in range(0, len(numbers), _READ_AT_ONCE):
                yield from self._samples.samples(numbers[i : i + _READ_AT_ONCE])

    def _order(self, windows: int) -> Order:
        """This epoch's order, for a worker that may have so many windows under way at once."""
        schema = self._index.schema
        key = derive(int(schema.fingerprint[:16], 16), self.seed) if self.shuffle else None
        return Order(schema.samples, schema.shard_samples, key, self.epoch, self._window(windows))

    def _window(self, windows: int) -> int:
        """Samples that are mixed together: no bound where each can be read alone, else as many decoded chunks as
        ``window_bytes`` holds."""
        schema, sizes = self._index.schema, []
        for field in self._samples.fields:
            array = schema.array(field.name if field.kind == "array" else f"{field.name}.data")[1]
            if array.codec != "none":
                budget = self._samples.reader.options.window_bytes // windows
                chunks = max(1, budget // (array.chunk_items * array.item_bytes))
                sizes.append(max(1, chunks * schema.samples // len(self._index.table(array.name))))
        return min(sizes, default=0)


def _process_group() -> tuple[int, int] | None:
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return None
