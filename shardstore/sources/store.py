"""Another store: all its fields, in its order, bytes unchanged."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardstore.errors import ShardstoreError, SourceError
from shardstore.options import ReadOptions
from shardstore.sources import Numbers
from shardstore.store.chunks import Reader
from shardstore.store.index import Index
from shardstore.store.schema import Field


@dataclass(frozen=True, eq=False)
class StoreSource:
    """The samples of a store; see :class:`shardstore.sources.Source`."""

    reader: Reader
    numbers: Numbers
    notes: list[str]
    in_process: bool = False

    @classmethod
    def scan(cls, index: Index) -> StoreSource:
        """All samples of a store."""
        always = ReadOptions(verify="always")  # damage must not get a new checksum
        return cls(Reader(index, always), np.arange(index.schema.samples), [])

    @property
    def fields(self) -> tuple[Field, ...]:
        """Those of the store."""
        return self.reader.index.schema.fields

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Those of the store."""
        return self.reader.index.schema.classes

    @property
    def options(self) -> Mapping[str, Any]:
        """Those of the store."""
        return self.reader.index.schema.options

    def __len__(self) -> int:
        return len(self.numbers)

    def take(self, numbers: Numbers) -> StoreSource:
        """These samples, in this order."""
        return replace(self, numbers=self.numbers[numbers])

    def lengths(self, field: str) -> Numbers:
        """Elements of each sample of a bytes or ragged field."""
        return self.reader.lengths(field)[self.numbers]

    def identity(self) -> str:
        """Of the store's content and the samples' numbers."""
        fingerprint = self.reader.index.schema.fingerprint
        return hashlib.sha256(fingerprint.encode() + self.numbers.tobytes()).hexdigest()

    def read(self, number: int, without: str = "") -> tuple[Any, ...]:
        """The values of one sample."""
        sample = self.numbers[number : number + 1]
        try:
            return tuple(b"" if f.name == without else self.reader.read(f.name, sample)[0] for f in self.fields)
        except ShardstoreError as error:
            raise SourceError(error.problem) from error

    def key(self, number: int) -> str:
        """The sample's key in that store."""
        return self.reader.key(int(self.numbers[number])) or f"sample {self.numbers[number]}"
