"""From stored values to what a training loop gets: decoded pictures, transforms, named tuples, batches."""

from __future__ import annotations

import functools
import itertools
import math
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch.utils.data import _utils, get_worker_info

from shardstore.errors import ImageError, OptionError, Problem
from shardstore.loading import ring
from shardstore.loading.memory import Block, Buffers, Recycled
from shardstore.loading.stacking import Stack, cannot_stack
from shardstore.order import derive
from shardstore.pictures import images
from shardstore.store.chunks import Numbers, Reader
from shardstore.store.pieces import Plan
from shardstore.store.schema import Field, Schema
from shardstore.transforms import Random, Transform

_READ_AT_ONCE = range(16, 257)  # samples: more that wait for decoding or their turn would be memory for nothing
_READ_BYTES = 1 << 20  # that are read together, of pixels: small ones in larger numbers

_PLANNED_AT_ONCE = 32  # batches

ImageType = Literal["pil", "tensor", "numpy"]


class Sample:
    """A named tuple: ``image, label = sample``, ``sample.image`` and ``sample["image"]`` all work.

    Each choice of fields is a class of its own (:func:`sample_type`) that can be pickled, collated and pinned.
    """

    __slots__ = ()
    _fields: tuple[str, ...]

    def __getitem__(self, item: Any) -> Any:
        if not isinstance(item, str):
            return tuple.__getitem__(self, item)  # type: ignore[call-overload]
        if item not in self._fields:
            raise KeyError(f"{item!r} is none of {', '.join(self._fields)}")
        return getattr(self, item)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._fields, tuple(self))  # type: ignore[arg-type]


@functools.cache
def sample_type(fields: tuple[str, ...]) -> Any:
    """The named tuple class of samples and batches with these fields."""
    made = type("Sample", (Sample, namedtuple("Sample", fields)), {"__slots__": (), "__module__": __name__})
    ForkingPickler.register(made, _leave)  # for the queues of a DataLoader alone: pickles elsewhere hold the values
    return made


def _rebuild(fields: tuple[str, ...], values: tuple[Any, ...]) -> Any:
    return sample_type(fields)(*values)


def _leave(sample: Any) -> tuple[Any, ...]:
    return _arrive, (sample._fields, ring.leave(sample))


def _arrive(fields: tuple[str, ...], values: Sequence[Any]) -> Any:
    return sample_type(fields)(*ring.arrive(values))


def collate(samples: Iterable[Any], count: int, buffers: Buffers | None = None) -> Any:
    """Stack samples into one of tensors, pictures as channels_last.

    Args:
        samples: with the same fields.
        count: how many will come, at least one.
        buffers: where the batch's memory comes from.

    Raises:
        StackError: tensors of one field have different shapes.
    """
    buffers = buffers or (ring.of_this_worker() if get_worker_info() else Recycled())
    block, made = buffers.block(), Sample
    stacks: list[Stack] = []
    for sample in samples:
        made = type(sample)
        stacks = stacks or [Stack(name, count, block) for name in sample._fields]
        for stack, value in zip(stacks, sample, strict=True):
            stack.add(value, getattr(sample, "key", None))
    buffers.learn(block)
    return made(*(stack.result() for stack in stacks))


# torch's own hook for the collation of one's types: without it the DataLoader would stack the views that make CHW of
# HWC slowly, and answer different sizes with a message that names neither field nor remedy.
_utils.collate.default_collate_fn_map[Sample] = lambda batch, *, collate_fn_map=None: collate(batch, len(batch))


@dataclass(frozen=True)
class View:
    """What a user wants to see of a store.

    Attributes:
        fields: names; None for image and label.
        transform: called with the image.
        transforms: called with all values of a sample, returns as many.
        image_type: what these get: ``pil`` (the default), ``tensor`` (uint8, CHW) or ``numpy`` (uint8, HWC); without
            either, what samples hold (default ``tensor``).
    """

    fields: Sequence[str] | None = None
    transform: Callable[[Any], Any] | None = None
    transforms: Callable[..., Any] | None = None
    image_type: ImageType | None = None

    def choose(self, schema: Schema) -> tuple[Field, ...]:
        """The chosen fields of a store.

        Raises:
            OptionError: a field that it does not have, or an unknown ``image_type``.
        """
        if self.image_type not in (None, *get_args(ImageType)):
            raise OptionError(f"image_type must be one of {', '.join(get_args(ImageType))}; got {self.image_type!r}")
        known = {f.name: f for f in schema.fields}
        if self.fields is None:
            names = [n for n in ("image", "label") if n in known] if "image" in known else list(known)
        else:
            names = [self.fields] if isinstance(self.fields, str) else list(self.fields)
        for name in names:
            if name not in known:
                raise OptionError(f"the store has no field {name!r}; it has {', '.join(known)}")
        if not names:
            raise OptionError("fields must name at least one field")
        return tuple(known[name] for name in names)


class SampleReader:
    """Reads samples and whole batches of the chosen fields."""

    def __init__(self, reader: Reader, view: View) -> None:
        self.reader, self.view = reader, view
        self.fields = view.choose(reader.index.schema)
        self.type = sample_type(tuple(f.name for f in self.fields))
        self._recycled = Recycled()
        self._key: int | None = None
        self._plain = view.transform is None and view.transforms is None
        # Known to be good pictures, by their bytes: a JPEG's decoder may stop early.
        self._checked = reader.options.verify != "never" and reader.index.schema.options.get("check") != "header"
        self._ours = isinstance(view.transform, Transform)
        self.at_once = _read_at_once(self.fields)
        self._image_type = view.image_type or ("tensor" if self._plain else "pil")

    def __reduce__(self) -> tuple[Any, ...]:
        return SampleReader, (self.reader, self.view)

    def keyed(self, key: int) -> SampleReader:
        """The same reader, for transforms of ours whose randomness follows from ``key`` and the sample's number."""
        other = SampleReader(self.reader, self.view)
        other._key, other._recycled = key, self._recycled
        return other

    def samples(self, numbers: Numbers) -> Iterator[Any]:
        """The samples of these numbers: bytes are read a few together, pictures decoded one by one."""
        self._settle_ring()
        for few in np.split(numbers, range(self.at_once, len(numbers), self.at_once)):
            columns = [self.reader.read(field.name, few) for field in self.fields]
            for i, number in enumerate(few.tolist()):
                values = [self._value(f, c[i], number) for f, c in zip(self.fields, columns, strict=True)]
                yield self.type(*(values if self._plain else self._transformed(values, number)))

    def check(self, number: int) -> None:
        """Raise DamagedStoreError or ImageError if this sample cannot be read."""
        for field in self.fields:
            self.reader.check(field.name, number)
            if field.kind == "bytes" and field.content == "image":
                decode = self._transform if self._ours else self._decoded
                decode(field, self.reader.read(field.name, np.array([number]))[0], number)

    def planned(self, batches: Iterable[Numbers]) -> Iterator[tuple[Numbers, list[Plan | None]]]:
        """The same batches, each with a plan for each field, worked out for some together."""
        batches = iter(batches)
        while some := list(itertools.islice(batches, _PLANNED_AT_ONCE)):
            arrays = [f.name if self._plain and f.kind == "array" else None for f in self.fields]
            columns = [self.reader.plan(name, some) if name else [None] * len(some) for name in arrays]
            yield from zip(some, map(list, zip(*columns, strict=True)), strict=True)

    def batch(self, numbers: Numbers, plans: Sequence[Plan | None] | None = None) -> Any:
        """The samples of these numbers as one of stacked tensors; ``plans`` are those of :meth:`planned`."""
        self._settle_ring()
        buffers: Buffers = ring.of_this_worker() if get_worker_info() else self._recycled
        if not self._plain:
            return collate(self.samples(numbers), len(numbers), buffers)
        block = buffers.block()
        plans = plans or [None] * len(self.fields)
        batch = self.type(*(self._column(f, numbers, block, p) for f, p in zip(self.fields, plans, strict=True)))
        buffers.learn(block)
        return batch

    def _settle_ring(self) -> None:
        if not self.reader.options.ring and get_worker_info():
            ring.switch_off()

    def _column(self, field: Field, numbers: Numbers, block: Block, plan: Plan | None) -> Any:
        if field.kind == "array":
            out = block.empty((len(numbers), *field.shape), field.dtype)
            return _channels_first(torch.from_numpy(self.reader.read_array(field.name, numbers, out, plan)), field)
        values = self.reader.read(field.name, numbers)
        if field.content == "text":
            return [_text(v) for v in values]
        if field.kind == "bytes" and field.content != "image":
            return values
        arrays = [self._decoded(field, v, n) for v, n in zip(values, numbers.tolist(), strict=True)]
        for array, number in zip(arrays, numbers.tolist(), strict=True):
            if array.shape != arrays[0].shape:
                raise cannot_stack(field.name, (arrays[0].shape, array.shape), self.reader.key(number))
        out = block.empty((len(arrays), *arrays[0].shape), arrays[0].dtype)
        return _channels_first(torch.from_numpy(np.stack(arrays, out=out)), field)

    def _value(self, field: Field, value: Any, number: int) -> Any:
        if field.content == "image":
            if self._ours:
                return value  # it decodes what it needs
            array = self._decoded(field, value, number)
            if self._image_type == "numpy":
                return array
            return images.to_pil(array) if self._image_type == "pil" else torch.from_numpy(array).permute(2, 0, 1)
        if field.content == "text":
            return _text(value)
        if field.content == "label":
            return int(value)  # as ImageFolder
        if field.kind == "bytes" or field.shape == ():
            return value
        return torch.from_numpy(value)

    def _decoded(self, field: Field, value: Any, number: int) -> Any:
        if field.kind != "bytes":
            return value
        try:
            return images.decode(value, self.reader.options.max_pixels)
        except ImageError as error:
            raise ImageError(self._place(error.problem, field, number)) from error

    def _place(self, problem: Problem, field: Field, number: int) -> Problem:
        index = self.reader.index
        shard = number // index.schema.shard_samples
        where: dict[str, Any] = {"path": index.shard_path(shard, f"{field.name}.data"), "shard": shard}
        hint = problem.hint or "The stored bytes are those of the source: see `shardstore validate --level decode`."
        return replace(problem, **where, field=field.name, sample=number, key=self.reader.key(number), hint=hint)

    def _transformed(self, values: list[Any], number: int) -> Sequence[Any]:
        try:
            if self.view.transform is not None:
                for i, field in enumerate(self.fields):
                    if field.content == "image":
                        values[i] = self._transform(field, values[i], number)
            if self.view.transforms is None:
                return values
            result = self.view.transforms(*values)
        except Exception as error:
            error.add_note(f"in the transform of sample {number}, key {self.reader.key(number)}")
            raise
        result = result if isinstance(result, tuple | list) else (result,)
        if len(result) != len(values):
            names = ", ".join(f.name for f in self.fields)
            raise OptionError(
                f"transforms got {len(values)} values ({names}) and must return as many, not {len(result)}"
            )
        return result

    def _transform(self, field: Field, value: Any, number: int) -> Any:
        transform = self.view.transform
        if not isinstance(transform, Transform):
            return transform(value)  # type: ignore[misc]
        key = derive(self._key, number) if self._key is not None else int(torch.randint(1 << 62, ()).item())
        if field.kind != "bytes":
            return transform.apply(torch.from_numpy(value).permute(2, 0, 1), Random(key))
        try:
            return transform.decode(value, Random(key), self._checked, self.reader.options.max_pixels)
        except ImageError as error:
            raise ImageError(self._place(error.problem, field, number)) from error


def _read_at_once(fields: Sequence[Field]) -> int:
    if any(field.kind != "array" for field in fields):
        return _READ_AT_ONCE.start
    nbytes = sum(np.dtype(f.dtype).itemsize * math.prod(f.shape) for f in fields)
    return max(_READ_AT_ONCE.start, min(_READ_BYTES // max(nbytes, 1), _READ_AT_ONCE.stop - 1))


def _channels_first(batch: torch.Tensor, field: Field) -> torch.Tensor:
    return batch.permute(0, 3, 1, 2) if field.content == "image" else batch


def _text(value: bytes) -> str:
    return value.decode("utf-8", "surrogateescape")
