"""The samples of another source with new pictures, which lie in files of their own."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardstore.sources import Numbers, Source
from shardstore.store.schema import Field


def spool_path(folder: str, part: int) -> str:
    """The file of so many pictures that were made together."""
    return f"{folder}/{part:06d}"


@dataclass(frozen=True, eq=False)
class ResizedSource:
    """A source whose encoded pictures are replaced; see :class:`shardstore.sources.Source`.

    Attributes:
        source: where all else comes from.
        picture: the name of the field of pictures.
        folder: of the files; empty where the lengths are estimates and nothing can be read.
        parts, offsets, sizes: of each picture its file, where it begins there, and its bytes.
    """

    source: Source
    picture: str
    folder: str
    parts: Numbers
    offsets: Numbers
    sizes: Numbers

    @property
    def fields(self) -> tuple[Field, ...]:
        """Those of the source."""
        return self.source.fields

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Those of the source."""
        return self.source.classes

    @property
    def notes(self) -> list[str]:
        """Those of the source."""
        return self.source.notes

    @property
    def in_process(self) -> bool:
        """As the source."""
        return self.source.in_process

    @property
    def options(self) -> Mapping[str, Any]:
        """Those of the source."""
        return self.source.options

    def __len__(self) -> int:
        return len(self.sizes)

    def take(self, numbers: Numbers) -> ResizedSource:
        """These samples, in this order."""
        rows = {name: getattr(self, name)[numbers] for name in ("parts", "offsets", "sizes")}
        return replace(self, source=self.source.take(numbers), **rows)

    def lengths(self, field: str) -> Numbers:
        """Bytes of each new picture; of other fields as the source."""
        return self.sizes if field == self.picture else self.source.lengths(field)

    def identity(self) -> str:
        """As the source, and where the pictures lie."""
        rows = b"".join(getattr(self, name).tobytes() for name in ("parts", "offsets", "sizes"))
        before = self.source.identity()
        return before and hashlib.sha256(before.encode() + rows).hexdigest()

    def read(self, number: int, without: str = "") -> tuple[Any, ...]:
        """The source's values and the new picture."""
        values = self.source.read(number, self.picture)
        with open(spool_path(self.folder, int(self.parts[number])), "rb") as f:
            f.seek(int(self.offsets[number]))
            data = f.read(int(self.sizes[number]))
        return tuple(data if f.name == self.picture else v for f, v in zip(self.fields, values, strict=True))

    def key(self, number: int) -> str:
        """As the source."""
        return self.source.key(number)
