"""A Python sequence of samples: tuples or dicts of arrays, Pillow images, numbers, text or bytes.

Any object with ``len`` and ``[i]`` will do, a torchvision data set for one. It is read twice (shapes, then values),
in the calling process, and must give the same values both times. Tuples are ``(image, label, field2, …)``; names that
are no identifiers are changed, and noted.
"""

from __future__ import annotations

import dataclasses
import keyword
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardstore.errors import Problem, SourceError
from shardstore.pictures import images
from shardstore.sources import Numbers
from shardstore.store.schema import Content, Field

_TUPLE_NAMES = ("image", "label")


@dataclass(frozen=True, eq=False)
class SequenceSource:
    """The samples of a sequence; see :class:`shardstore.sources.Source`."""

    sequence: Sequence[Any]
    given: tuple[str, ...]  # the fields' names in the samples
    fields: tuple[Field, ...]
    counts: Numbers  # elements of each sample (row) of each field (column)
    classes: tuple[str, ...] | None
    numbers: Numbers
    notes: list[str]
    in_process: bool = True
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def scan(cls, sequence: Sequence[Any]) -> SequenceSource:
        """Read all samples once for their types and shapes.

        Raises:
            SourceError: there are none, or they do not have the same fields and dtypes.
        """
        if not len(sequence):
            raise SourceError("the sequence of samples is empty")
        given = _given_names(sequence[0])
        names, notes = _names(given)
        raw = _values(sequence[0], given, 0)
        first = _arrays(raw, names, 0)
        shapes = [v.shape for v in first]
        counts = np.empty((len(sequence), len(names)), np.int64)
        for i in range(len(sequence)):
            values = _arrays(_values(sequence[i], given, i), names, i)
            _check_alike(i, names, first, values)
            counts[i] = [v.size for v in values]
            shapes = [_common(shape, value.shape) for shape, value in zip(shapes, values, strict=True)]
        classes = getattr(sequence, "classes", None)
        fields = tuple(_field(*parts, classes) for parts in zip(names, raw, first, shapes, strict=True))
        if not any(f.content == "label" for f in fields):
            classes = None
        classes = classes and tuple(map(str, classes))
        return cls(sequence, tuple(given), fields, counts, classes, np.arange(len(sequence)), notes)

    def __len__(self) -> int:
        return len(self.numbers)

    def take(self, numbers: Numbers) -> SequenceSource:
        """These samples, in this order."""
        return replace(self, numbers=self.numbers[numbers])

    def lengths(self, field: str) -> Numbers:
        """Elements of each sample of a field."""
        column = [f.name for f in self.fields].index(field)
        return np.asarray(self.counts[self.numbers, column])

    def identity(self) -> str:
        """Nothing: what a Python object answers may change."""
        return ""

    def read(self, number: int, without: str = "") -> tuple[Any, ...]:
        """The values of one sample."""
        i = int(self.numbers[number])
        values = _arrays(_values(self.sequence[i], self.given, i), [f.name for f in self.fields], i)
        for column, (field, value) in enumerate(zip(self.fields, values, strict=True)):
            if value.size != self.counts[i, column]:
                what = Problem("the sample changed between two readings", field=field.name, sample=i)
                raise SourceError(replace(what, expected=f"{self.counts[i, column]} elements", got=f"{value.size}"))
        return tuple(v.tobytes() if f.kind == "bytes" else v for f, v in zip(self.fields, values, strict=True))

    def key(self, number: int) -> str:
        """The sample's number in the sequence."""
        return f"sample {self.numbers[number]}"


def _common(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """Their shape, -1 where they differ."""
    return tuple(x if x == y else -1 for x, y in zip(a, b, strict=True))


def _given_names(sample: Any) -> list[Any]:
    """The names of a sample's values, as it has them."""
    if isinstance(sample, Mapping):
        return list(sample)
    if hasattr(sample, "_fields"):
        return list(sample._fields)
    count = len(sample) if isinstance(sample, tuple | list) else 1
    return [*_TUPLE_NAMES, *(f"field{i}" for i in range(2, count))][:count]


def _values(sample: Any, given: Sequence[Any], number: int) -> list[Any]:
    """The values of a sample in the order of these names."""
    if isinstance(sample, Mapping):
        found: Any = ", ".join(map(str, sample))
        values = [sample[name] for name in given] if set(sample) == set(given) else []
    else:
        values = list(sample) if isinstance(sample, tuple | list) else [sample]
        found = f"{len(values)} values"
    if len(values) != len(given):
        what = Problem("a sample has other fields than the first", sample=number, expected=", ".join(map(str, given)))
        raise SourceError(replace(what, got=found))
    return values


def _arrays(values: list[Any], names: Sequence[str], number: int) -> list[np.ndarray[Any, Any]]:
    arrays = []
    for name, value in zip(names, values, strict=True):
        try:
            arrays.append(_value(value))
        except SourceError as error:
            raise SourceError(replace(error.problem, field=name, sample=number)) from error
    return arrays


def _names(given: Sequence[Any]) -> tuple[list[str], list[str]]:
    """Identifiers for these names, and a note for each that had to change."""
    names: list[str] = []
    for name in map(str, given):
        new = re.sub(r"\W", "_", unicodedata.normalize("NFKC", name)).lstrip("_") or "field"
        new = new if new.isidentifier() else f"field_{new}"
        new += "_" if keyword.iskeyword(new) else ""
        while new in names:
            new += "_"
        names.append(new)
    notes = [f"field {a!r} is stored as {b!r}" for a, b in zip(given, names, strict=True) if str(a) != b]
    return names, notes


def _value(value: Any) -> np.ndarray[Any, Any]:
    """Any value as an array; text and bytes as one of uint8."""
    if isinstance(value, str):
        value = value.encode("utf-8", "surrogateescape")
    if isinstance(value, bytes | bytearray):
        return np.frombuffer(value, np.uint8)
    if hasattr(value, "convert") and hasattr(value, "getbands"):  # a Pillow image, without importing Pillow
        return images.from_pil(value)
    if hasattr(value, "detach"):  # a torch tensor
        value = value.detach().cpu().numpy()
    array = np.asarray(value)
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise SourceError(f"values of type {type(value).__name__} (dtype {array.dtype}) cannot be stored")
    return np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False)).reshape(array.shape)


def _field(name: str, raw: Any, value: np.ndarray[Any, Any], shape: tuple[int, ...], classes: Any) -> Field:
    if isinstance(raw, str | bytes | bytearray):
        picture = not isinstance(raw, str) and images.looks_like_picture(bytes(raw[:64]))
        return Field(name, "bytes", "|u1", (-1,), "text" if isinstance(raw, str) else "image" if picture else "data")
    content: Content = "data"
    pixels = value.ndim == 3 and value.shape[2] in (1, 3) and value.dtype in (np.uint8, np.uint16)
    if hasattr(raw, "getbands") or (name == "image" and pixels):
        content = "image"
    elif name == "label" and not shape and value.dtype.kind in "iu" and classes is not None:
        content = "label"
    return Field(name, "ragged" if -1 in shape else "array", value.dtype.str, shape, content)


def _check_alike(number: int, names: list[str], first: list[Any], values: list[Any]) -> None:
    for name, a, b in zip(names, first, values, strict=True):
        if a.dtype != b.dtype or a.ndim != b.ndim:
            what = Problem("a sample has another type than the first", field=name, sample=number)
            raise SourceError(replace(what, expected=f"{a.dtype}, {a.ndim} axes", got=f"{b.dtype}, {b.ndim} axes"))
