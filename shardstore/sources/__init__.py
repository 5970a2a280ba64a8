"""Where samples come from: one module a kind of source, each with a class that offers what :class:`Source` lists.

Sources know keys, columns and bytes; they know no shards, and pixels only where the source itself holds arrays.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shardstore.errors import Problem, SourceError
from shardstore.store.schema import Field

Numbers = np.ndarray[Any, np.dtype[np.int64]]


class Source(Protocol):
    """Samples in a fixed order."""

    @property
    def fields(self) -> tuple[Field, ...]:
        """What each sample consists of, as the source has it."""

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names by class number, or None."""

    @property
    def notes(self) -> list[str]:
        """What was left out or is odd, one sentence each."""

    @property
    def in_process(self) -> bool:
        """Whether the source cannot be sent to worker processes."""

    def __len__(self) -> int: ...

    @property
    def options(self) -> Mapping[str, Any]:
        """The options that shaped the content already, where the source is a store."""

    def take(self, numbers: Numbers) -> Source:
        """The source of only these samples, in this order."""

    def lengths(self, field: str) -> Numbers:
        """For a bytes or ragged field: the bytes or elements of each sample."""

    def read(self, number: int, without: str = "") -> tuple[Any, ...]:
        """The values of one sample, one a field: bytes or arrays; that of the field ``without`` may be anything.

        Raises:
            SourceError: this sample cannot be read.
        """

    def identity(self) -> str:
        """A checksum of what these samples are read from, changed files included, without reading them; empty where it
        cannot be known."""

    def key(self, number: int) -> str:
        """The name of a sample for people: its key, or its number."""


def open_source(source: str | Path | Sequence[Any]) -> Source:
    """The source that a path or a Python sequence of samples is.

    Raises:
        SourceError: it is none that can be converted.
    """
    if not isinstance(source, str | Path):
        from shardstore.sources.sequence import SequenceSource

        return SequenceSource.scan(source)
    path = os.fspath(source)
    if not path:
        raise SourceError("the source is an empty path")
    from shardstore.errors import NoStoreError
    from shardstore.store.index import lacks_description, load

    try:
        index = load(path)
    except NoStoreError as error:
        if os.path.isdir(path) and not lacks_description(path):
            from shardstore.sources.folder import FolderSource

            return FolderSource.scan(path)
        if os.path.exists(path):
            raise SourceError(error.problem) from error
        raise SourceError(Problem("no such file or folder", path)) from None
    from shardstore.sources.store import StoreSource

    return StoreSource.scan(index)
